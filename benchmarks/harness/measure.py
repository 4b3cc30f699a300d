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

OTHERS = ("__main__", "generate", "swap")  # these measure whole models, by commands of their own
OPS = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if m.name not in OTHERS and not m.ispkg)


@dataclass
class Settings:
    """What the command line asks for."""

    device: torch.device
    dtypes: list[torch.dtype]
    peers: list[str]
    sizes: list[tuple[int, ...]] | None = None  # in place of the op's own
    host: bool = False
    repeats: int = 20


def sizes_of(op, settings):
    """The dtypes and sizes to measure an op at; none where the sizes asked for are not of its kind."""
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
    """The op's cases at one size, with the same random numbers every time."""
    torch.manual_seed(0)
    return importlib.import_module(f"benchmarks.{op}").cases(settings.device, dtype, *size)


def measure(op, settings):
    """The op's rows, one after the other."""
    for dtype, size in sizes_of(op, settings):
        for case in cases(op, settings, dtype, size):
            if settings.host and case.name.endswith("bwd"):
                continue  # the peers' is all of autograd, ours would be a bare call
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
    if not settings.host:
        timed["copy"] = roof.copy(case.bytes, settings.device)
    time_all = host_times if settings.host else kernel_times
    times = time_all(timed.values(), settings.device, settings.repeats)
    found = dict(zip(timed, times, strict=True))
    return Row(op, case.name, case.shape, _name(dtype), case.bytes, case.flops, found, faults)


def _fault(case, variant, dtype):
    try:
        wrong = fault(case, variant, dtype)
    except Exception as error:  # a peer that does not take this size must not end the run
        return f"failed: {type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else ''}"
    return wrong and f"WRONG: {wrong}"


def _name(dtype):
    return str(dtype).removeprefix("torch.")
