"""Checks of every op against torch on this machine, which ``gptkernels check`` runs; and the rule of exactness.

``gradcheck_ops()`` is to this package what ``torch.autograd.gradcheck`` is to one function.
"""

import time
from collections.abc import Callable, Iterable

import torch

from gptkernels import _library
from gptkernels._device import pick_device
from gptkernels._info import info
from gptkernels.testing.cases import CASES
from gptkernels.testing.checks import check_case
from gptkernels.testing.exactness import assert_as_exact_as_torch
from gptkernels.testing.report import Report, Result

__all__ = ["Report", "Result", "assert_as_exact_as_torch", "gradcheck_ops", "op_names"]


def op_names() -> list[str]:
    """The ops that :func:`gradcheck_ops` checks. An op's ``_backward`` ops are checked with it."""
    return list(dict.fromkeys(case.operator.name for case in CASES))


def gradcheck_ops(
    ops: str | Iterable[str] | None = None,
    *,
    device: str | torch.device | None = None,
    progress: Callable[[list[Result]], None] | None = None,
) -> Report:
    """Check every op against torch.

    In each of float64, float32, bfloat16 and float16, of two sizes: results and all gradients against the formula in
    float64. Our largest error may be twice that of torch's own kernels on the same numbers, plus one rounding of the
    result; and the same call gives the same bits. In float64 :func:`torch.autograd.gradcheck` and
    :func:`torch.autograd.gradgradcheck`. Of the op and its ``_backward`` ops :func:`torch.library.opcheck`, in float32.

    Takes about 20 s on two CPU cores. Nothing is raised where a check fails: see ``Report.passed``. The state of
    torch's random numbers is left as it was.

    Args:
        ops: names, such as ``"layernorm"``; None for all of :func:`op_names`.
        device: where to run; None or "auto" for CUDA where it is in use, else the CPU.
        progress: called with the results of each case when it is checked.

    Returns:
        The results, which ``print`` shows as a table: for a dtype the error as a share of what is allowed.

    Raises:
        ValueError: there is no such op or device, or no kernels are loaded for it.
    """

    names = op_names()
    wanted = names if ops is None else [ops] if isinstance(ops, str) else list(ops)
    for name in wanted:
        if name not in names:
            raise ValueError(f"gradcheck_ops: there is no op {name!r}; there are {', '.join(names)}")
    found = _pick(device)
    report = Report(str(found))
    begin = time.monotonic()
    with torch.random.fork_rng(devices=[found] if found.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(0)
        for case in CASES:
            if case.operator.name not in wanted:
                continue
            results = list(check_case(case, found))
            report.results += results
            if progress is not None:
                progress(results)
    report.seconds = time.monotonic() - begin
    return report


def _pick(device: str | torch.device | None) -> torch.device:
    """The device to run on, for which there are kernels."""
    if device in (None, "auto"):
        device = "cuda" if info()["cuda"] == "in use" else "cpu"
    found = pick_device(str(device))
    if found.type == "cuda" and _library.without_cuda_because:
        raise ValueError(f"device is {str(device)!r}: no CUDA kernels are loaded: {_library.without_cuda_because}")
    return found
