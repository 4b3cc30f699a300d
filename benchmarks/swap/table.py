"""Makes the table of docs/swap.md from a run."""

import dataclasses
import json
from pathlib import Path

from benchmarks.harness.machine import title
from benchmarks.harness.pages import between
from benchmarks.harness.report import markdown
from benchmarks.harness.run import joined_machine
from benchmarks.swap.variants import Variant

PLACE = "the kept run of swap"
HEADER = ["", "unswapped, ms", "swapped, ms", "times as fast", "tokens/s", "GiB", "losses differ by"]
EXPLAINED = (
    "In the columns `tokens/s` and `GiB` the unswapped model's figure is first. The last column has the mean and the "
    "largest difference of the losses of the first {} steps. These differences go in either direction and are "
    "not a measure of accuracy: bfloat16 rounding errors grow in both models while the loss falls fast, and with "
    "dropout the models draw different masks."
)


def load(paths):
    runs = [json.loads(path.read_text()) for path in paths]
    rows = {Variant.of(row): row for run in runs for row in run["rows"]}
    return {"machine": joined_machine(runs), "rows": list(rows.values())}


def lines(rows) -> list[list[str]]:
    found = {Variant.of(row): row for row in rows}
    compared = {dataclasses.replace(variant, swapped="no") for variant in found if variant.swapped != "no"}
    made = []
    for variant, row in found.items():
        if variant.swapped != "no":
            made.append(_line(variant, found.get(dataclasses.replace(variant, swapped="no")), row))
        elif variant not in compared:
            made.append(_line(variant, row, None))
    return made


def _line(variant, before, after) -> list[str]:
    name = str(variant) + {"no-logits": ", no logits", "detached": ", detached logits"}.get(variant.swapped, "")
    pair = [row for row in (before, after) if row is not None and not row["fault"]]
    both = len(pair) == 2

    def each(text):
        return " -> ".join(text(row) for row in pair)

    apart = [abs(a - b) for a, b in zip(*(row["losses"] for row in pair), strict=False)] if both else []
    return [
        name,
        *("" if row is None else row["fault"] or f"{row['ms']:.1f}" for row in (before, after)),
        f"{before['ms'] / after['ms']:.2f}x" if both else "",
        each(lambda row: f"{variant.batch * variant.length / row['ms']:.0f}k"),
        each(lambda row: f"{row['gib']:.1f}"),
        f"{sum(apart) / len(apart):.4f}, {max(apart):.4f}" if apart else "",
    ]


def text(run) -> str:
    steps = max((len(row.get("losses", ())) for row in run["rows"]), default=0)
    return "\n\n".join(
        [title(run["machine"]) + ".", markdown(HEADER, lines(run["rows"]), texts=1), EXPLAINED.format(steps)]
    )


def filled(root: Path, run) -> dict[Path, str]:
    page = root / "docs" / "swap.md"
    return {page: between(page.read_text(), text(run), PLACE)}
