"""Timing of a variant's steps, in its own process, so that variants share no memory."""

import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time

import torch

from benchmarks.harness.timing import synchronize
from benchmarks.swap.variants import Trainer, batches

STEPS = 4


def measure(variant, device, seconds, losses, wait=lambda: None):
    trainer = Trainer(variant, device)
    data = batches(variant, device)
    fixed = next(data)
    began = time.perf_counter()
    first = torch.stack([trainer.step(next(data)) for _ in range(max(losses, 3))]).tolist()
    started = time.perf_counter() - began
    wait()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    while sum(times) * STEPS < seconds or len(times) < 3:
        synchronize(device)
        began = time.perf_counter()
        for _ in range(STEPS):
            trainer.step(fixed)
        synchronize(device)
        times.append((time.perf_counter() - began) / STEPS)
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {
        **dataclasses.asdict(variant),
        "ms": 1e3 * median,
        "spread": 1e3 * (high - low),
        "gib": peak / 2**30,
        "losses": first[:losses],
        "seconds_to_start": started,
        "fault": "",
    }


def measure_in_processes(variants, options):
    """``options.at_once`` variants compile in parallel, and run their timed steps one after the other."""
    for i in range(0, len(variants), options.at_once):
        yield from _together(variants[i : i + options.at_once], options)


def _together(variants, options):
    with contextlib.ExitStack() as stack:
        started = []
        for variant in variants:
            command = [sys.executable, "-m", "benchmarks.swap", "--one", json.dumps(dataclasses.asdict(variant))]
            command += ["--seconds", str(options.seconds), "--losses", str(options.losses)]
            errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            process = subprocess.Popen(command, **pipes, text=True)
            stack.callback(process.kill)
            started.append((variant, process, errors))
        for _, process, _ in started:
            next((line for line in process.stdout if line == "ready\n"), None)
        for variant, process, errors in started:
            lines = process.communicate("\n" if process.poll() is None else None)[0].splitlines()
            if process.returncode == 0 and lines:
                yield json.loads(lines[-1])
                continue
            errors.seek(0)
            output = errors.read().strip()
            print(f"{variant}, swapped: {variant.swapped}: failed\n{output[-2000:]}", file=sys.stderr, flush=True)
            fault = output.splitlines()[-1] if output else f"exit status {process.returncode}"
            yield {**dataclasses.asdict(variant), "fault": fault[:200]}


def until_told():
    print("ready", flush=True)
    sys.stdin.readline()


def profile(variant, device):
    trainer, tokens = Trainer(variant, device), next(batches(variant, device))
    for _ in range(3):
        trainer.step(tokens)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        trainer.step(tokens)
        torch.cuda.synchronize()
    kernels = [e for e in found.key_averages() if e.self_device_time_total > 0 and e.device_type.name == "CUDA"]
    kernels = [e for e in kernels if not e.key.startswith("Optimizer.")]
    total, launches = sum(e.self_device_time_total for e in kernels), sum(e.count for e in kernels)
    print(f"# {variant}, swapped: {variant.swapped}: {total / 1e3:.1f} ms of kernels in {launches} launches")
    for e in sorted(kernels, key=lambda e: -e.self_device_time_total)[:28]:
        print(f"{e.self_device_time_total / 1e3:9.2f} ms {e.count:5d}  {e.key[:110]}", flush=True)
