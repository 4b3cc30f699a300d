"""`gptkernels demo`: compares ops with torch's, trains a small GPT-2, and swaps and times a Hugging Face GPT-2."""

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from gptkernels._device import device_name, pick_device
from gptkernels.swapping import swap
from gptkernels.testing.cases import CASES, ORDINARY
from gptkernels.testing.checks import draw_douts, results
from gptkernels.testing.exactness import error_of, largest
from gptkernels.trainer.config import TrainConfig
from gptkernels.trainer.output import command_line
from gptkernels.trainer.plot import read_losses
from gptkernels.trainer.runs import CSV, new_run
from gptkernels.trainer.train import train

OPS = ("gelu, tanh", "softmax", "layernorm", "attention", "mlp", "linear_cross_entropy")
DTYPES = (torch.float32, torch.bfloat16)
PLOT = "demo.png"
# The Hugging Face model on each device type: layers, heads, channels, vocabulary, batch size, sequence length.
SIZES = {"cpu": (4, 4, 256, 8192, 4, 128), "cuda": (12, 12, 768, 50257, 4, 1024)}
SECONDS = 4.0  # of timing, for each model

Errors = dict[str, tuple[float, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="steps of the training (default: 60)")
    parser.add_argument(
        "--output", metavar="FOLDER", help="folder of the run and of the plot (default: runs/demo, or runs/demo-2, ...)"
    )
    parser.add_argument("--device", default="auto", metavar="NAME", help="cpu, cuda, ... (default: auto)")


def run(steps: int, output: str | None, device: str) -> int:
    where = pick_device(device)
    config = TrainConfig(device=device, steps=steps, learning_rate=1e-3)
    folder = new_run(output, "demo")
    config.output = str(folder)
    print(
        f"1. Ops on {device_name(where)}: largest errors of results and gradients, relative to the formula in float64"
    )
    errors = compare_ops(where)
    print("\n2. A small GPT-2 learns the sources of Python's standard library")
    if signal := train(config).signal:
        return 128 + signal
    print("\n3. A GPT-2 of Hugging Face with random weights: forward and backward, before and after gptkernels.swap")
    times = {}
    try:
        times = time_swap(where)
    except ImportError as error:
        print(f"transformers cannot be imported, so this part is left out: {error}")
    try:
        plot(folder, errors, times)
        print(f"\nplot: {folder / PLOT}")
    except ImportError as error:
        print(f"\nmatplotlib cannot be imported, so there is no plot: {error}")
    print(f"to check every op: {command_line('check')}")
    return 0


def compare_ops(device: torch.device) -> Errors:
    errors = {}
    print(f"{'':32}  gptkernels    torch")
    for case in CASES:
        for dtype in DTYPES if case.name in OPS else ():
            call = case.call(ORDINARY, dtype, device)
            douts = draw_douts(call, torch.Generator().manual_seed(1))
            found = results(call, list(call.args.values()), douts)
            ours = max(error_of(a, exact) / largest(exact) for a, _, exact in found)
            torchs = max(error_of(b, exact) / largest(exact) for _, b, exact in found)
            name = f"{case.name}, {str(dtype).removeprefix('torch.')}"
            errors[name] = ours, torchs
            print(f"{name:32}  {ours:10.1e} {torchs:8.1e}", flush=True)
    return errors


def time_swap(device: torch.device) -> dict[str, float]:
    """Return the milliseconds of forward and backward, unswapped and swapped."""
    from torch.utils.benchmark import Timer  # takes 0.1 s to import, and other commands import this module
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, heads, channels, vocabulary, batch, length = SIZES[device.type]
    options: dict[str, Any] = {
        "n_layer": layers, "n_head": heads, "n_embd": channels, "vocab_size": vocabulary, "n_positions": length,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config(**options))
    model.to(device)
    tokens = torch.randint(vocabulary, (batch, length), device=device)
    autocast = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
    print(f"{layers} layers, {channels} channels, {batch} x {length} tokens")

    def step() -> torch.Tensor:
        model.zero_grad()
        with autocast:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    times = {}
    for name in ("unswapped", "swapped"):
        if name == "swapped":
            print(swap(model).gptkernels_report.line())
        loss = step()  # before the timing, which does not include the first call
        timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
        times[name] = 1e3 * timer.blocked_autorange(min_run_time=SECONDS).median
        print(f"{name}: {times[name]:.1f} ms, loss {loss.item():.6f}", flush=True)
    print(f"swapped, it is {times['unswapped'] / times['swapped']:.2f} times as fast")
    return times


def plot(folder: Path, errors: Errors, times: dict[str, float]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.5), dpi=120, layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(2, 3, 1))
    left.plot(*read_losses(folder / CSV)["train"])
    left.set(title="training of a small GPT-2", xlabel="step", ylabel="loss, nats per byte")
    rows = range(len(errors))
    for i, label in enumerate(("gptkernels", "torch")):
        middle.barh([row + 0.4 * i for row in rows], [pair[i] for pair in errors.values()], 0.4, label=label)
    middle.set(
        title="largest relative error",
        xscale="log",
        xlim=(None, 1),
        yticks=[row + 0.2 for row in rows],
        yticklabels=[*errors],
    )
    middle.invert_yaxis()
    middle.legend()
    right.bar([*times], [*times.values()], color=["tab:orange", "tab:blue"][: len(times)])
    right.set(title="Hugging Face GPT-2", ylabel="forward and backward, ms")
    FigureCanvasAgg(figure).print_png(str(folder / PLOT))
