"""Measures training steps of ``make train``'s model on a CPU: the times of our steps, torch's steps and our ops."""

import collections
import math
import statistics
import time

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.report import markdown
from benchmarks.train_step import timeline
from benchmarks.train_step.measure import batches
from benchmarks.train_step.variants import make
from gptkernels.models import GPT2, GPT2Config
from gptkernels.trainer.config import PRESETS

PRECISION = "tf32"  # float32 parameters; on a CPU the matmuls are float32
VARIANTS = "ours", "torch-eager", "torch-compile"
TURN = 5
VOCABULARY = 128


def measured(variants, turns, peak):
    """Measure steps on one thread (process time) and on all threads (wall-clock time).

    ``peak`` is the peak GFLOP/s of one thread, for the lower bounds.
    """
    preset = PRESETS["tiny"]
    sizes = {"n_layer": preset.layers, "n_head": preset.heads, "n_embd": preset.channels}
    config = GPT2Config(block_size=preset.sequence_length, vocab_size=VOCABULARY, **sizes)
    torch.manual_seed(0)
    weights = GPT2(config).state_dict()
    threads = torch.get_num_threads()
    found = {"threads": threads, "tokens": preset.batch_size * preset.sequence_length, "rows": [], "peak": peak}
    try:
        for count, clock in [(1, time.process_time), (threads, time.perf_counter)]:
            torch.set_num_threads(count)
            found["rows"].append(_interleaved(variants, turns, clock, config, weights, preset.batch_size))
        torch.set_num_threads(1)
        found["parts"] = _parts(config, weights, preset.batch_size, turns)
    finally:
        torch.set_num_threads(threads)
    return found


def _interleaved(variants, turns, clock, config, weights, batch):
    torch._dynamo.reset()
    device = torch.device("cpu")
    data = batches(config, batch, config.block_size, (turns + 2) * TURN, device)
    steps = {name: make(name, PRECISION, config, weights, device) for name in variants}
    times, losses = collections.defaultdict(list), {}
    for turn in range(turns + 2):
        for name, step in steps.items():
            for b in data[turn * TURN : (turn + 1) * TURN]:
                start = clock()
                losses[name] = step(*b)
                times[name].append(1e3 * (clock() - start))
    summary = {}
    for name in variants:
        kept = times[name][2 * TURN :]
        quartile, median, _ = statistics.quantiles(kept, n=4, method="inclusive")
        summary[name] = [quartile, median, min(kept), float(losses[name])]
    return summary


def _parts(config, weights, batch, steps):
    device = torch.device("cpu")
    data = batches(config, batch, config.block_size, steps, device)
    step = make("ours", PRECISION, config, weights, device)
    step(*data[0])
    times = collections.defaultdict(list)
    for b in data:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            start = time.process_time()
            step(*b)
            whole = time.process_time() - start
        now = collections.Counter({"a step, with the profiler's own time": 1e3 * whole})
        calls, flops = collections.Counter(), collections.Counter()
        for event in profiler.events():
            if not event.name.startswith("gptkernels::") or timeline.owner(event) is not event:
                continue
            name = event.name.removeprefix("gptkernels::")
            now[name] += event.cpu_time_total / 1e3
            calls[name] += 1
            flops[name] += _flops(name, timeline.shapes_of(event))
        for name, value in now.items():
            times[name].append(value)
    return {name: [calls[name], min(values), flops[name]] for name, values in times.items()}


def _flops(op, shapes):
    if op in ("attention", "attention_backward"):
        return timeline.attention_flops(op, shapes)
    return sum(timeline.matmul_flops(op, what, shapes) for what in timeline.PRODUCTS.get(op, ()))


def tables(found) -> list[str]:
    names = ["1 thread, process time", f"{found['threads']} threads, by the clock"]
    steps = []
    for what, summary in zip(names, found["rows"], strict=True):
        ours = summary.get("ours", [math.nan])[0]
        for name, (quartile, median, least, loss) in summary.items():
            numbers = [f"{x:.1f}" for x in (quartile, median, least)]
            speed = f"{1e3 * found['tokens'] / quartile:.0f}"
            steps.append([what, name, *numbers, speed, f"{quartile / ours:.2f}", f"{loss:.4f}"])
    head = ["", "", "lower quartile, ms", "median", "least", "tokens/s", "time / ours", "loss"]
    parts = []
    for name, (calls, ms, flops) in sorted(found["parts"].items(), key=lambda item: -item[1][1]):
        floor = flops / found["peak"] / 1e6
        rate = [f"{floor:.2f}", f"{ms - floor:.2f}", f"{flops / ms / 1e6:.0f}"] if flops else ["", "", ""]
        parts.append([name, str(calls or ""), f"{ms:.2f}", *rate])
    return [
        markdown(head, steps, texts=2),
        markdown(["op", "calls", "ms", "floor of the matmuls", "excess", "GFLOP/s"], parts, texts=1),
    ]
