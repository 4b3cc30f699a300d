"""Checks every operator against torch on this machine (``gptkernels check``), by the rule of exactness."""

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
    """Return the names of the operators that :func:`gradcheck_ops` checks.

    A name stands for the operator and its ``_backward`` ops.
    """
    return list(dict.fromkeys(case.operator.name for case in CASES))


def gradcheck_ops(
    ops: str | Iterable[str] | None = None,
    *,
    device: str | torch.device | None = None,
    progress: Callable[[list[Result]], None] | None = None,
) -> Report:
    """Check every operator against torch.

    - For two sizes and each supported dtype of float64, float32, bfloat16 and float16, the results and all gradients
      are compared with the formula in float64. The error may be twice torch's largest error, plus one rounding of the
      result. If the error is larger, the call is repeated with up to 39 other sets of numbers, because torch may
      happen to be exact for a few numbers. A second call with the same numbers must give the same bits.
    - :func:`torch.autograd.gradcheck` and :func:`torch.autograd.gradgradcheck` are called in float64, for the operators
      that have a derivative and support float64.
    - :func:`torch.library.opcheck` is called for the operator and its ``_backward`` ops.

    The state of torch's random number generators is restored.

    Args:
        ops: names, such as ``"layernorm"``; None for all of :func:`op_names`.
        device: None or "auto" is CUDA if the CUDA kernels are loaded and torch finds a GPU, otherwise the CPU.
        progress: called with the results of each case after its checks.

    Returns:
        A report with the results of all checks. A check that fails raises no error; ``Report.passed`` is then False.

    Raises:
        ValueError: if there is no such operator or device, or no kernels are loaded for the device.
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
    if device in (None, "auto"):
        device = "cuda" if info()["cuda"] == "in use" else "cpu"
    found = pick_device(str(device))
    if found.type == "cuda" and _library.without_cuda_because:
        raise ValueError(f"device is {str(device)!r}: no CUDA kernels are loaded: {_library.without_cuda_because}")
    return found
