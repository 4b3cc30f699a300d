"""From an op's file to rows."""

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

OPS = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if m.name != "__main__" and not m.ispkg)


@dataclass
class Settings:
    """What the command line asks for."""

    device: torch.device
    dtypes: list[torch.dtype]
    peers: list[str]
    sizes: list[tuple[int, ...]] | None = None  # in place of the op's own
    host: bool = False
    repeats: int = 20


def sizes_of(module, dtype, settings):
    """The sizes to measure an op at; none where those asked for are not of its kind."""
    if settings.sizes:
        return [size for size in settings.sizes if len(size) == len(module.TINY)]
    if settings.host:
        return [module.TINY]
    if settings.device.type == "cpu":
        return module.CPU_SIZES
    return module.SIZES.get(str(dtype).removeprefix("torch."), module.SIZES["bfloat16"])


def measure(op, settings):
    """The op's rows, one after the other."""
    module = importlib.import_module(f"benchmarks.{op}")
    for dtype in settings.dtypes:
        for size in sizes_of(module, dtype, settings):
            torch.manual_seed(0)
            for case in module.cases(settings.device, dtype, *size):
                yield measure_case(op, case, dtype, settings)
            gc.collect()  # compiled functions and graphs hold their tensors in cycles


def measure_case(op, case, dtype, settings) -> Row:
    """The times of every variant that is right."""
    variants = {"ours": case.ours} | {p: f for p, f in case.peers.items() if p in settings.peers}
    faults = {}
    for name, variant in variants.items():
        if why := _fault(case, variant, dtype):
            faults[name] = why
    timed = {name: variant for name, variant in variants.items() if name not in faults}
    if settings.host:
        times = host_times(timed.values(), settings.device)
    else:
        timed["copy"] = roof.copy(case.bytes, settings.device)
        times = kernel_times(timed.values(), settings.device, settings.repeats)
    name = str(dtype).removeprefix("torch.")
    found = dict(zip(timed, times, strict=True))
    return Row(op, case.name, case.shape, name, case.bytes, case.flops, found, faults)


def _fault(case, variant, dtype):
    try:
        wrong = fault(case, variant, dtype)
    except Exception as error:  # a peer that does not take this size must not end the run
        return f"failed: {type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else ''}"
    return wrong and f"WRONG: {wrong}"
