"""How long a kernel takes, and how long the host takes to queue it."""

import statistics
import time

import torch


def kernel_seconds(functions, device, repeats):
    """Median seconds of each function, the functions taken in turn so that a drifting machine is fair to all.

    On CUDA: the L2 cache is flushed before each run, and the launches wait behind a device-side delay, so that neither
    warm data nor launch gaps count. On the CPU: wall time, after a warm-up.
    """
    time_once = _cuda_timer() if device.type == "cuda" else _cpu_seconds
    for function in functions:
        for _ in range(3):
            function()
    rounds = [[time_once(function) for function in functions] for _ in range(repeats)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _cpu_seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _cuda_timer():
    flush = torch.empty(4 * torch.cuda.get_device_properties().L2_cache_size, dtype=torch.uint8, device="cuda")

    def seconds(function):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(400_000)  # cycles: long enough for the host to queue all that follows
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e-3

    return seconds


def host_seconds(function, device, calls=2000):
    """Seconds the host takes for one call, best of five runs of many calls."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        best = min(best, (time.perf_counter() - start) / calls)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return best
