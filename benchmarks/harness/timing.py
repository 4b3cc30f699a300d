"""Measurement of kernels' times, and of the host's time to launch kernels."""

import ctypes
import statistics
import time
from typing import NamedTuple

import torch


class Time(NamedTuple):
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds):
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
        return cls(median, low, high)


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def kernel_times(functions, device, repeats):
    """Time each function, on CUDA by events and on the CPU by the wall clock.

    The functions alternate, so that clock drift affects all of them. On CUDA the L2 cache is flushed before each run,
    and the launches are queued behind a delay kernel, so that launch gaps are not included.
    """
    for function in functions:
        for _ in range(3):
            function()
    return _in_turn(functions, _cuda_timer() if device.type == "cuda" else _cpu_seconds, repeats)


def _in_turn(functions, time_once, repeats):
    rounds = [[time_once(function) for function in functions] for _ in range(repeats)]
    return [Time.of(seconds) for seconds in zip(*rounds, strict=True)]


def _cpu_seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _cuda_timer(cycles=1_000_000, most_cycles=16_000_000):
    flush = torch.zeros(torch.cuda.get_device_properties().L2_cache_size, dtype=torch.int32, device="cuda")
    forget_persisting = ctypes.CDLL("libcuda.so.1").cuCtxResetPersistingL2Cache

    def seconds(function):
        nonlocal cycles
        while True:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # Cache lines with the policy evict_last, which torch.compile's reductions use, survive the flush below, so
            # that the next kernel would find up to a tenth of its input in the cache.
            if error := forget_persisting():
                raise RuntimeError(f"cuCtxResetPersistingL2Cache: CUDA error {error}")
            flush.sum()  # reads four times the size of the cache, so that no write-back remains when the clock starts
            torch.cuda._sleep(cycles)
            begin.record()
            function()
            end.record()
            late = begin.query()  # the delay ended before the host had queued all launches
            torch.cuda.synchronize()
            if not late or cycles >= most_cycles:
                return begin.elapsed_time(end) * 1e-3
            cycles *= 2

    return seconds


def host_times(functions, device, repeats):
    def seconds(function, calls=200):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        taken = time.perf_counter() - start
        synchronize(device)
        return taken / calls

    _in_turn(functions, seconds, 1)
    return _in_turn(functions, seconds, repeats)
