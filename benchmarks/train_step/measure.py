"""Timing of one variant's steps."""

import gc
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

import torch

from benchmarks.harness.measure import first_line
from benchmarks.train_step import variants
from gptkernels.models import GPT2

# FLOP/s of dense 16-bit matmuls, from the data sheets. TF32 has half of this rate.
PEAK = {"H200": 989.4e12, "H100": 989.4e12, "A100": 312e12, "B200": 2250e12}


@dataclass
class Row:
    variant: str
    precision: str
    batch: int
    milliseconds: float = 0.0
    spread: float = 0.0  # the interquartile range in milliseconds
    tokens_per_second: float = 0.0
    mfu: float | None = None
    gib: float = 0.0
    losses: tuple[float, ...] = ()
    fault: str = ""


def batches(config, batch, length, count, device):
    """A model can learn to predict the tokens, so that wrong gradients are visible in the losses."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(count, batch, length + 1, generator=generator)
    tokens = (config.vocab_size * uniform**4).long().to(device)  # small tokens are far more frequent
    return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in tokens]


def measure(variant, precision, config, weights, batch, device, *, warm_up, steps) -> Row:
    row = Row(variant, precision, batch)
    length = config.block_size
    data = batches(config, batch, length, warm_up + steps, device)
    torch.manual_seed(0)
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        step = variants.make(variant, precision, config, weights, device)
        losses = [step(*b) for b in data[:warm_up]]
        marks = [_mark(device)]
        for b in data[warm_up:]:
            losses.append(step(*b))
            marks.append(_mark(device))
        times = [_seconds(a, b) for a, b in pairwise(marks)]
    except Exception as error:
        row.fault = first_line(error)
        return row
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    seconds = sum(times) / len(times)
    row.milliseconds, row.spread = 1e3 * seconds, 1e3 * (high - low)
    row.tokens_per_second = batch * length / seconds
    row.mfu = _mfu(row, config, device)
    row.gib = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    row.losses = tuple(torch.stack([loss.float() for loss in losses]).tolist())
    return row


def _mark(device):
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(a, b):
    if isinstance(a, float):
        return b - a
    b.synchronize()
    return a.elapsed_time(b) / 1e3


def _mfu(row, config, device):
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = next((value for key, value in PEAK.items() if key in name), None)
    if peak is None:
        return None
    with torch.device("meta"):
        flops = GPT2(config).flops_per_token(config.block_size) * row.tokens_per_second
    return flops / (peak / 2 if row.precision == "tf32" else peak)
