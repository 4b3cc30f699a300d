"""Kept runs joined to the table of docs/swap.md and the README."""

import dataclasses
import json
from pathlib import Path

from benchmarks.harness.machine import title
from benchmarks.harness.pages import between
from benchmarks.harness.report import markdown
from benchmarks.swap.variants import Variant

PLACE = "the kept run of swap"
HEADER = ["", "unswapped, ms", "swapped, ms", "faster by", "tokens/s", "GiB", "last loss", "losses apart"]
EXPLAINED = (
    "Unswapped before swapped in the last three columns; `losses apart` is the mean and the largest difference of the "
    "losses of the first {} steps, which with dropout have other masks."
)


def save(path: Path, run) -> None:
    """Write a run with one row per line, completely or not at all."""
    rows = ",\n  ".join(json.dumps(row) for row in run["rows"])
    text = f'{{\n "machine": {json.dumps(run["machine"])},\n "rows": [\n  {rows}\n ]\n}}\n'
    whole = path.with_name(path.name + ".new")
    whole.write_text(text)
    whole.replace(path)


def load(paths):
    """Join files to one run. If several have a variant, the last file's figures are used."""
    runs = [json.loads(path.read_text()) for path in paths]
    rows = {_variant(row): row for run in runs for row in run["rows"]}
    machine = runs[0]["machine"]
    commits = ", ".join(dict.fromkeys(run["machine"]["commit"] for run in runs))
    return {"machine": {**machine, "commit": commits}, "rows": list(rows.values())}


def _variant(row) -> Variant:
    return Variant(**{field.name: row[field.name] for field in dataclasses.fields(Variant)})


def lines(rows) -> list[list[str]]:
    """A line for each swapped variant and its unswapped one; a line for a variant that has no counterpart."""
    found = {_variant(row): row for row in rows}
    made = []
    for variant, row in found.items():
        before = found.get(dataclasses.replace(variant, swapped="no"))
        if variant.swapped != "no":
            made.append(_line(variant, before, row))
        elif not any(dataclasses.replace(other, swapped="no") == variant != other for other in found):
            made.append(_line(variant, row, None))
    return made


def _line(variant, before, after) -> list[str]:
    name = str(variant) + {"no-logits": ", no logits", "detached": ", detached logits"}.get(variant.swapped, "")
    pair = [row for row in (before, after) if row is not None and not row["fault"]]
    both = len(pair) == 2

    def each(text):
        return " -> ".join(text(row) for row in pair)

    def losses(row):
        return f"{row['losses'][-1]:.3f}" if row["losses"] else ""

    apart = [abs(a - b) for a, b in zip(*(row["losses"] for row in pair), strict=False)] if both else []
    return [
        name,
        _milliseconds(before),
        _milliseconds(after),
        f"{before['ms'] / after['ms']:.2f}x" if both else "",
        each(lambda row: f"{variant.batch * variant.length / row['ms']:.0f}k"),
        each(lambda row: f"{row['gib']:.1f}"),
        each(losses) if all(row["losses"] for row in pair) else "",
        f"{sum(apart) / len(apart):.4f}, {max(apart):.4f}" if apart else "",
    ]


def _milliseconds(row) -> str:
    if row is None:
        return ""
    return row["fault"] or f"{row['ms']:.1f}"


def text(run) -> str:
    """The machine, the table, and its explanation."""
    steps = max((len(row.get("losses", ())) for row in run["rows"]), default=0)
    return "\n\n".join(
        [title(run["machine"]) + ".", markdown(HEADER, lines(run["rows"]), texts=1), EXPLAINED.format(steps)]
    )


def filled(root: Path, run) -> dict[Path, str]:
    """The pages' new contents."""
    pages = [root / "README.md", root / "docs" / "swap.md"]
    return {page: between(page.read_text(), text(run), PLACE) for page in pages}
