"""Measurement of an op's cases and of the machine's limits, and compilation of the baselines before a run."""

import gc
import importlib
import os
import pkgutil
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context

import torch

import benchmarks
from benchmarks.harness.exact import fault
from benchmarks.harness.row import Row
from benchmarks.harness.timing import host_times, kernel_times

OTHERS = ("__main__", "generate", "ledger", "steps")  # these files have no cases of an op
OPS = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if m.name not in OTHERS and not m.ispkg)

COMPILERS = {"compile", "liger", "quack", "flex"}  # these store compiled code on disk, and the run loads it
MEMORY = 8 << 30


@dataclass
class Settings:
    device: torch.device
    dtypes: list[torch.dtype]
    peers: list[str]
    sizes: list[tuple[int, ...]] | None = None
    host: bool = False
    repeats: int = 20


def copy(nbytes, device):
    """Make a copy that reads and writes ``nbytes`` bytes in total.

    Each kernel is compared with a copy of its size, because small copies do not reach the rate of large ones. The bytes
    are random, because zeros can be copied faster.
    """
    source = torch.randint(256, (max(1, nbytes // 2),), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def roof(device, repeats) -> list[Row]:
    cuda = device.type == "cuda"
    nbytes, n, dtype = (2 << 30, 8192, torch.bfloat16) if cuda else (2 << 26, 1024, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    copied, multiplied = kernel_times([copy(nbytes, device), lambda: a @ b], device, repeats)
    name = str(dtype).removeprefix("torch.")
    size = f"{nbytes >> 21} MiB"
    return [
        Row("roof", "copy", size, "bytes", nbytes, 0, {"torch": copied}),
        Row("roof", "matmul", f"{n}x{n}x{n}", name, 3 * a.nbytes, 2 * n**3, {"torch": multiplied}),
    ]


def sizes_of(op, settings):
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
    torch.manual_seed(0)
    return importlib.import_module(f"benchmarks.{op}").cases(settings.device, dtype, *size)


def measure(op, settings):
    for dtype, size in sizes_of(op, settings):
        for case in cases(op, settings, dtype, size):
            if settings.host and case.name.endswith("bwd"):
                continue  # the baselines' times would include autograd, but our kernel's time would not
            yield measure_case(op, case, dtype, settings)
        gc.collect()  # compiled functions and graphs keep tensors in reference cycles


def measure_case(op, case, dtype, settings) -> Row:
    variants = {"ours": case.ours} | {p: f for p, f in case.peers.items() if p in settings.peers}
    faults = {name: why for name, variant in variants.items() if (why := _fault(case, variant, dtype))}
    timed = {name: variant for name, variant in variants.items() if name not in faults}
    if not settings.host:
        timed["copy"] = copy(case.bytes, settings.device)
    time_all = host_times if settings.host else kernel_times
    times = time_all(timed.values(), settings.device, settings.repeats)
    found = dict(zip(timed, times, strict=True))
    return Row(op, case.name, case.shape, _name(dtype), case.bytes, case.flops, found, faults)


def _fault(case, variant, dtype):
    try:
        wrong = fault(case, variant, dtype)
    except Exception as error:
        return f"failed: {first_line(error)}"
    return wrong and f"WRONG: {wrong}"


def first_line(error) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def warm(ops, settings):
    """Run every compiled baseline once, in other processes, to fill the compilers' caches."""
    if settings.device.type != "cuda" or settings.host or not COMPILERS & set(settings.peers):
        return
    tasks = [(op, settings, dtype, size) for op in ops for dtype, size in sizes_of(op, settings)]
    workers = min(len(tasks), os.cpu_count() or 1, max(1, torch.cuda.mem_get_info()[0] // MEMORY))
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_one_thread) as pool:
        wait([pool.submit(_run_once, *task) for task in tasks])


def _one_thread():
    import torch._inductor.config

    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1


def _run_once(op, settings, dtype, size):
    for case in cases(op, settings, dtype, size):
        for peer in COMPILERS & set(settings.peers) & set(case.peers):
            try:
                case.peers[peer]()
            except Exception:
                torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
