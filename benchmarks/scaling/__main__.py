"""``python -m benchmarks.scaling`` prints measured and modelled steps, and modelled layouts for more GPUs.

``benchmarks/scaling/h200.json`` has the measured rows. Its cases of the trainer, "dp", "fsdp", "tp" and "cp" with 1024
tokens, are ``gptkernels train`` with ``--nproc``, ``--shard params`` and ``--parallel``; the others are those of
``torchrun -m benchmarks.scaling.worker CASE``. ``--pages`` writes the tables into docs/scaling.md.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.pages import between
from benchmarks.harness.report import markdown
from benchmarks.scaling.model import GPT2_124M, GPT2_XL, SHAPES, SIZES, Layout, Machine, best, estimate

ROWS = Path(__file__).with_name("h200.json")
PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
XL_26 = replace(GPT2_XL, channels=1664, heads=26, kv_heads=26, hidden=6656)
MODELS = {"gpt2": GPT2_124M, "gpt2-xl": GPT2_XL, "gpt2-xl with 26 heads": XL_26}
LAYOUTS = {
    "dp": lambda gpus: Layout(dp=gpus),
    "fsdp": lambda gpus: Layout(dp=gpus, shard="params"),
    "tp": lambda gpus: Layout(tp=gpus),
    "cp": lambda gpus: Layout(cp=gpus),
}
PARTS = ("matmuls", "attention", "memory", "update", "exchange")


def measured(rows):
    machine, found = Machine(), []
    for row in rows:
        if "tokens_per_second" not in row:
            continue
        layout = LAYOUTS.get(row["case"], lambda _: None)(row["gpus"])
        same_batch = row["case"].endswith(("tp", "cp"))
        tokens = row["batch"] * row["length"] * (1 if same_batch else row["gpus"])
        milliseconds = 1e3 * tokens / row["tokens_per_second"]
        predicted = difference = ""
        if layout is not None and row["precision"] == "bf16":
            seconds = estimate(MODELS[row["model"]], layout, row["batch"], row["length"], machine).seconds
            predicted, difference = f"{1e3 * seconds:.1f}", f"{1e3 * seconds / milliseconds - 1:+.0%}"
        found.append(
            [
                row["case"], row["model"], row["precision"], str(row["gpus"]), f"{row['batch']} x {row['length']}",
                f"{milliseconds:.1f}", f"{row['tokens_per_second']:,}", f"{row['gib']:.1f}", predicted, difference,
            ]
        )  # fmt: skip
    header = ["case", "model", "", "GPUs", "batch", "ms", "tokens/s", "GiB", "model, ms", ""]
    return markdown(header, found, texts=3)


def predicted():
    machine, found = Machine(), []
    for shape in SHAPES:
        for gpus in SIZES:
            is_gpt2 = shape.name.startswith("GPT-2")
            length, sequences = (1024, 8 * gpus) if is_gpt2 else (8192, 2 * gpus)
            fastest = best(shape, gpus, sequences, length, machine)
            if fastest is None:
                found.append([shape.name, str(gpus), f"{sequences} x {length}", "does not fit", "", "", ""])
                continue
            layout, parts = fastest
            named = f"dp={layout.dp},tp={layout.tp},cp={layout.cp}, {layout.shard}" + ", recomputed" * layout.recompute
            shares = (*parts[:4], sum(parts[4:7]))
            found.append(
                [
                    shape.name, str(gpus), f"{sequences} x {length}", named, f"{1e3 * parts.seconds:.0f}",
                    f"{sequences * length / parts.seconds / gpus:,.0f}", f"{parts.bytes / 2**30:.0f}",
                    *(f"{share / parts.seconds:.0%}" for share in shares),
                ]
            )  # fmt: skip
    header = ["model", "GPUs", "batch of all", "layout", "ms", "tokens/s per GPU", "GiB", *PARTS]
    return markdown(header, [row + [""] * (len(header) - len(row)) for row in found], texts=4)


def main(arguments=None):
    cli = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    cli.add_argument("--pages", action="store_true", help=f"write the tables into docs/{PAGE.name}")
    run = json.loads(ROWS.read_text())
    machine = run["machine"]
    title = f"{machine['device']}, torch {machine['torch']}, {machine['date']}."
    layouts = "The fastest layouts of the model, by layers, sequences and shards:"
    text = "\n\n".join((title, measured(run["rows"]), layouts, predicted()))
    print(text)
    if cli.parse_args(arguments).pages:
        PAGE.write_text(between(PAGE.read_text(), text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
