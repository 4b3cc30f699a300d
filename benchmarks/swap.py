"""``python -m benchmarks.swap``: training steps of other people's GPT-2, unswapped beside swapped.

A step is what people run: bfloat16 autocast, T=1024, torch's fused AdamW, gradient clipping. Each variant is measured
in a process of its own, so that none finds another's memory or compiled code. ``compiled-graphs`` is ``torch.compile``
with ``mode="reduce-overhead"``: Inductor's CUDA graphs.
"""

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # nanoGPT's and llm.c's models

MODES = {"eager": None, "compiled": "default", "compiled-graphs": "reduce-overhead"}  # torch.compile's
LOGITS = {"no-logits": False, "detached": "detached"}
SIZES = {"gpt2": (12, 12, 768), "tiny": (2, 2, 64)}  # layers, heads, channels


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is measured."""

    model: str
    batch: int
    dropout: float
    mode: str
    swapped: bool
    logits: bool | str = True  # swap's return_logits
    size: str = "gpt2"
    length: int = 1024

    def __str__(self):
        return f"{self.model}, {self.mode}, B={self.batch}, dropout {self.dropout:g}"


def made(variant, device):
    """The model, and its loss as a function of tokens (B, T + 1)."""
    layers, heads, channels = SIZES[variant.size]
    torch.manual_seed(0)
    if variant.model == "huggingface":
        from transformers import GPT2Config, GPT2LMHeadModel

        p = variant.dropout
        config = GPT2Config(
            n_layer=layers, n_head=heads, n_embd=channels, n_positions=variant.length,
            resid_pdrop=p, embd_pdrop=p, attn_pdrop=p, use_cache=False,
        )  # fmt: skip
        model = GPT2LMHeadModel(config).to(device)
        return model, lambda model, tokens: model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss
    import published

    kind = {"nanogpt": published.GPT, "llmc": published.LlmcGPT}[variant.model]
    vocabulary = 50304 if variant.model == "nanogpt" else 50257
    config = published.Config(variant.length, vocabulary, layers, heads, channels, variant.dropout)
    return kind(config).to(device), lambda model, tokens: model(tokens[:, :-1], tokens[:, 1:].contiguous())[1]


def batches(variant, device):
    """Tokens that can be learnt a little: each is often the one before it plus a constant."""
    generator = torch.Generator().manual_seed(0)
    while True:
        jumps = torch.randint(50257, (variant.batch, variant.length + 1), generator=generator)
        rare = torch.rand(jumps.shape, generator=generator) < 0.1
        yield torch.where(rare, jumps, 17).cumsum(1).remainder(50257).to(device)


def prepared(variant, device):
    """As ``made``, swapped as the variant says; and what is called for the model's outputs."""
    model, loss_of = made(variant, device)
    if variant.swapped:
        import gptkernels

        gptkernels.swap(model, return_logits=variant.logits)
    mode = MODES[variant.mode]
    return model, loss_of, torch.compile(model, mode=mode) if mode else model


def measure(variant, device, seconds, losses, wait=lambda: None):
    """Milliseconds a step, peak memory and the first losses; ``wait`` is called before the steps that are timed."""
    model, loss_of, call = prepared(variant, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    data = batches(variant, device)
    fixed = next(data)

    def step(tokens):
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(call, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone()  # the next replay of a graph overwrites it

    began = time.perf_counter()
    first = [step(next(data)) for _ in range(max(losses, 3))]
    first = [loss.item() for loss in first]
    started = time.perf_counter() - began
    wait()
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    while sum(times) < seconds or len(times) < 3:
        synchronize()
        began = time.perf_counter()
        for _ in range(4):
            step(fixed)
        synchronize()
        times.append((time.perf_counter() - began) / 4)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {
        **dataclasses.asdict(variant),
        "ms": 1e3 * sorted(times)[len(times) // 2],
        "peak_gib": peak / 2**30,
        "losses": first[:losses],
        "seconds_to_start": started,
    }


def profile(variant, device):
    """A table of where a step's time goes."""
    model, loss_of, call = prepared(variant, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
    tokens = next(batches(variant, device))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for i in range(4):
        context = torch.profiler.profile(activities=activities) if i == 3 else None
        if context:
            context.__enter__()
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(call, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    context.__exit__(None, None, None)
    kernels = [e for e in context.key_averages() if e.self_device_time_total > 0 and e.device_type.name == "CUDA"]
    kernels = [e for e in kernels if not e.key.startswith("Optimizer.")]  # a range of several kernels
    total, launches = sum(e.self_device_time_total for e in kernels), sum(e.count for e in kernels)
    how = "swapped" if variant.swapped else "unswapped"
    print(f"# {variant}, {how}: {total / 1e3:.1f} ms of kernels in {launches} launches")
    for e in sorted(kernels, key=lambda e: -e.self_device_time_total)[:28]:
        print(f"{e.self_device_time_total / 1e3:9.2f} ms {e.count:5d}  {e.key[:110]}")


def table(rows):
    """Markdown: a line for each pair of unswapped and swapped."""
    print("| | unswapped | swapped | faster by | GiB | loss at the last step, and how far apart |")
    print("|---|---|---|---|---|---|")
    pairs = {}
    for row in rows:
        variant = Variant(**{f.name: row[f.name] for f in dataclasses.fields(Variant)})
        key = str(dataclasses.replace(variant, swapped=False, logits=True))
        pairs.setdefault(key, []).append((variant, row))
    for key, found in pairs.items():
        before = next((row for variant, row in found if not variant.swapped), None)
        for variant, row in found:
            if not variant.swapped:
                continue

            def rate(row, variant=variant):
                return f"{row['ms']:.1f} ms, {variant.batch * variant.length / row['ms']:.0f}k tokens/s"

            cells = [key + {True: "", False: ", no logits"}.get(variant.logits, ", detached logits")]
            cells += [rate(before) if before else "", rate(row), f"{before['ms'] / row['ms']:.2f}x" if before else ""]
            cells.append(f"{before['peak_gib'] if before else 0:.1f} -> {row['peak_gib']:.1f}")
            apart = [abs(a - b) for a, b in zip(before["losses"], row["losses"], strict=True)] if before else [0]
            cells.append(f"{row['losses'][-1]:.3f}, {max(apart):.4f}" if row["losses"] else "")
            print("| " + " | ".join(cells) + " |")


def until_told():
    """Say that the first steps are done, and wait for the turn."""
    print("ready", flush=True)
    sys.stdin.readline()


def measured_at_once(variants, options):
    """Figures of variants, each in a process of its own: all make their first steps at once, the timed ones in turn."""
    rows = []
    with contextlib.ExitStack() as stack:
        started = []
        for variant in variants:
            command = [sys.executable, "-m", "benchmarks.swap", "--one", json.dumps(dataclasses.asdict(variant))]
            command += ["--wait", "--seconds", str(options.seconds), "--losses", str(options.losses)]
            errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True)
            started.append((variant, process, errors))
        for _, process, _ in started:
            for line in process.stdout:
                if line == "ready\n":
                    break
        for variant, process, errors in started:
            lines = process.communicate("\n" if process.poll() is None else None)[0].splitlines()
            if process.returncode or not lines:
                errors.seek(0)
                print(f"{variant}: failed\n{errors.read()[-2000:]}", file=sys.stderr)
                continue
            rows.append(json.loads(lines[-1]))
            shown = {k: v for k, v in rows[-1].items() if k != "losses"}
            print(json.dumps(shown), file=sys.stderr, flush=True)
    return rows


def main(arguments):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swap", description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="huggingface,nanogpt", help="of huggingface, nanogpt, llmc")
    parser.add_argument("--batch", default="32,4")
    parser.add_argument("--dropout", default="0,0.1")
    parser.add_argument("--modes", default="eager,compiled", help="of eager, compiled, compiled-graphs")
    parser.add_argument("--swapped", default="no,yes,no-logits", help="of no, yes, no-logits, detached")
    parser.add_argument("--size", default="gpt2", choices=SIZES)
    parser.add_argument("--length", type=int, default=1024, help="T")
    parser.add_argument("--seconds", type=float, default=2, help="of timed steps for each variant")
    parser.add_argument("--losses", type=int, default=50, help="how many steps' losses are compared")
    parser.add_argument("--json", type=Path, help="keep the figures here")
    parser.add_argument("--together", action="store_true", help="all variants in this process")
    parser.add_argument("--at-once", action="store_true", help="compile all variants at once, then time each in turn")
    parser.add_argument("--profile", action="store_true", help="show each variant's kernels instead (CUDA)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    if options.one:
        wait = until_told if options.wait else lambda: None
        print(json.dumps(measure(Variant(**json.loads(options.one)), device, options.seconds, options.losses, wait)))
        return
    combinations = itertools.product(
        options.models.split(","), options.modes.split(","), options.batch.split(","), options.dropout.split(",")
    )
    variants = [
        Variant(
            model, int(batch), float(dropout), mode, swapped != "no", LOGITS.get(swapped, True), options.size,
            options.length,
        )
        for model, mode, batch, dropout in combinations
        for swapped in options.swapped.split(",")
    ]  # fmt: skip
    rows = []
    if options.at_once:
        rows = measured_at_once(variants, options)
        variants = []
    for variant in variants:
        if options.profile:
            profile(variant, device)
        elif options.together:
            rows.append(measure(variant, device, options.seconds, options.losses))
            torch._dynamo.reset()
        else:
            rows += measured_at_once([variant], options)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if rows:
        table(rows)
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
