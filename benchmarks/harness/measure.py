"""Measurement of an op's cases."""

import gc
import importlib
import pkgutil
from dataclasses import dataclass

import torch

import benchmarks
from benchmarks.harness import roof
from benchmarks.harness.row import Row
from benchmarks.harness.timing import host_times, kernel_times
from benchmarks.harness.verify import fault

OTHERS = ("__main__", "generate", "ledger")  # these files are not of an op
OPS = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if m.name not in OTHERS and not m.ispkg)


@dataclass
class Settings:
    """The options of the command line."""

    device: torch.device
    dtypes: list[torch.dtype]
    peers: list[str]
    sizes: list[tuple[int, ...]] | None = None  # instead of the op's own
    host: bool = False
    repeats: int = 20


def sizes_of(op, settings):
    """Yield the dtypes and sizes to measure for an op: of the command line's sizes, those that suit the op."""
    module = importlib.import_module(f"benchmarks.{op}")
    for dtype in settings.dtypes:
        if settings.sizes:
            sizes = [size for size in settings.sizes if len(size) == len(module.TINY)]
        elif settings.host:
            sizes = [module.TINY]
        elif settings.device.type == "cpu":
            sizes = module.CPU_SIZES
        else:
            sizes = module.SIZES.get(_name(dtype), module.SIZES["bfloat16"])
        for size in sizes:
            yield dtype, size


def cases(op, settings, dtype, size):
    """Return the op's cases at one size, with the same random numbers every time."""
    torch.manual_seed(0)
    return importlib.import_module(f"benchmarks.{op}").cases(settings.device, dtype, *size)


def measure(op, settings):
    """Measure an op's cases and yield the rows."""
    for dtype, size in sizes_of(op, settings):
        for case in cases(op, settings, dtype, size):
            if settings.host and case.name.endswith("bwd"):
                continue  # the baselines' times would include autograd, and ours would not
            yield measure_case(op, case, dtype, settings)
        gc.collect()  # compiled functions and graphs keep tensors in reference cycles


def measure_case(op, case, dtype, settings) -> Row:
    """Verify all variants and time those that are right."""
    variants = {"ours": case.ours} | {p: f for p, f in case.peers.items() if p in settings.peers}
    faults = {name: why for name, variant in variants.items() if (why := _fault(case, variant, dtype))}
    timed = {name: variant for name, variant in variants.items() if name not in faults}
    if not settings.host:
        timed["copy"] = roof.copy(case.bytes, settings.device)
    time_all = host_times if settings.host else kernel_times
    times = time_all(timed.values(), settings.device, settings.repeats)
    found = dict(zip(timed, times, strict=True))
    return Row(op, case.name, case.shape, _name(dtype), case.bytes, case.flops, found, faults)


def _fault(case, variant, dtype):
    try:
        wrong = fault(case, variant, dtype)
    except Exception as error:  # a baseline that does not support this size must not end the run
        return f"failed: {first_line(error)}"
    return wrong and f"WRONG: {wrong}"


def first_line(error) -> str:
    """Return the type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _name(dtype):
    return str(dtype).removeprefix("torch.")
