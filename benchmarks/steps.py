"""``python -m benchmarks.steps`` plots kept runs of whole training steps: benchmarks/results/steps.png."""

import json
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot as plt

from benchmarks.harness import plot
from benchmarks.harness.plot import COLOURS
from benchmarks.swap import table
from benchmarks.swap.variants import Variant

RESULTS = Path(__file__).parent / "results"
PICTURE = RESULTS / "steps.png"
TITLE = "GPT-2 124M, whole training steps on one H200: thousands of tokens per second"
SWAPPED = [("huggingface", "eager"), ("huggingface", "compiled"), ("nanogpt", "eager"), ("nanogpt", "compiled")]
OURS = {
    "ours-graph": "gptkernels.models.GPT2",
    "ours-fp8-graph": "the same, layers in float8",
    "ours-fp8-logits-graph": "the same, layers and LM head in float8",
}
STYLE = {**plot.STYLE, "axes.grid": False}


class Bar(NamedTuple):
    label: str
    tokens: float  # per second
    baseline: float | None  # tokens per second of the first bar of the group; None in the first bar


def swapped(model, mode, dropout=0.0, batch=32):
    """Return the kept rows of a third-party model, unswapped and swapped."""
    rows = {Variant.of(row): row for row in table.load([RESULTS / "swap.json"])["rows"]}
    return [rows[Variant(model, mode, batch, dropout, which)] for which in ("no", "yes")]


def steps(file="step.json", batch=64):
    """Return the kept rows of one batch size by their variant."""
    rows = json.loads((RESULTS / file).read_text())["steps"]["rows"]
    return {row["variant"]: row for row in rows if row["batch"] == batch}


def groups() -> list[list[Bar]]:
    found = []
    for model, mode in SWAPPED:
        rows = swapped(model, mode)
        name = str(Variant.of(rows[0])).removesuffix(", B=32, dropout 0")
        before, after = (row["batch"] * row["length"] / row["ms"] * 1000 for row in rows)
        found.append([Bar(name, before, None), Bar("the same, swapped", after, before)])
    kept = steps()
    compiled = kept["torch-compile-reduce-overhead"]["tokens_per_second"]
    ours = [Bar(label, kept[variant]["tokens_per_second"], compiled) for variant, label in OURS.items()]
    return [*found, [Bar("GPT-2 in torch, compiled", compiled, None), *ours]]


def bars():
    figure, axes = plt.subplots(figsize=(10, 5.2))
    at, ticks = 0.0, []
    for group in groups():
        for bar in group:
            thousands = bar.tokens / 1000
            axes.barh(at, thousands, 0.85, color=COLOURS["compile" if bar.baseline is None else "ours"])
            times = "" if bar.baseline is None else f"  ({bar.tokens / bar.baseline:.2f}x)"
            axes.text(thousands + 8, at, f"{thousands:.0f}{times}", va="center")
            ticks.append((at, bar.label))
            at += 1
        at += 0.6
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1100)
    axes.set_title(TITLE, loc="right", fontsize=11)
    return figure


if __name__ == "__main__":
    with plt.rc_context(STYLE):
        bars().savefig(PICTURE, dpi=100)
