"""Parallel compilation of the baselines before a run. Without it a run takes ten times as long."""

import os
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context

import torch

from benchmarks.harness.measure import Settings, cases, sizes_of

COMPILERS = {"compile", "liger", "quack", "flex"}  # They store compiled code on disk, and the run loads it.
MEMORY = 8 << 30  # reserved for each process, enough for the largest case


def warm(ops, settings):
    """Run every compiled baseline of these ops once, in other processes, to fill the compilers' caches."""
    if settings.device.type != "cuda" or settings.host or not COMPILERS & set(settings.peers):
        return
    tasks = [(op, settings, dtype, size) for op in ops for dtype, size in sizes_of(op, settings)]
    workers = min(len(tasks), os.cpu_count() or 1, max(1, torch.cuda.mem_get_info()[0] // MEMORY))
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_one_thread) as pool:
        wait([pool.submit(_run_once, *task) for task in tasks])  # the run reports errors


def _one_thread():
    import torch._inductor.config

    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1


def _run_once(op, settings: Settings, dtype, size):
    for case in cases(op, settings, dtype, size):
        for peer in COMPILERS & set(settings.peers) & set(case.peers):
            try:
                case.peers[peer]()
            except Exception:
                torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
