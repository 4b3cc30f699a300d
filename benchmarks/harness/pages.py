"""Writes the figures of kept runs into the documentation, between two comments that mark a place."""

from pathlib import Path

from benchmarks.harness.machine import title
from benchmarks.harness.report import by_op, markdown, microseconds, rate, share, tables

KEPT = "the kept run"
BEGIN, END = f"<!-- {KEPT} -->", f"<!-- /{KEPT} -->"
PICTURES = "benchmarks/results"


def fill(root: Path, run):
    for path, text in filled(root, run).items():
        path.write_text(text)


def filled(root: Path, run) -> dict[Path, str]:
    parts = {root / "docs" / "benchmarks.md": overview(run)}
    parts |= {root / "docs" / f"{op}.md": section(op, rows, run) for op, rows in by_op(run["rows"]).items()}
    return {path: between(path.read_text(), part) for path, part in parts.items() if path.exists()}


def between(text, part, place=KEPT):
    before, begin, rest = text.partition(f"<!-- {place} -->")
    _, end, after = rest.partition(f"<!-- /{place} -->")
    return f"{before}{begin}\n{part}\n{end}{after}" if begin and end else text


def section(op, rows, run) -> str:
    head = f"{title(run['machine'])}; [how to read this](benchmarks.md#how-to-read-it), [the whole run](../{PICTURES})."
    return "\n\n".join([head, f"![{op}](../{PICTURES}/{op}.png)", *tables(rows)])


def overview(run) -> str:
    first = {}
    rows = [row for row in run["rows"] if row.op != "roof" and "ours" in row.times]
    for row in rows:
        shown = first.setdefault(row.name, row)
        if row.dtype == "bfloat16" and shown.dtype != "bfloat16":
            first[row.name] = row
    head = ["", "size", "us", "rate", "of a copy", "fastest baseline, its time / ours"]
    return "\n\n".join([title(run["machine"]) + ".", markdown(head, map(_line, first.values()), texts=2)])


def _line(row):
    fastest = f"{row.fastest}, {row.ratio(row.fastest):.2f}" if row.fastest else ""
    ours = microseconds(row.times["ours"].median), rate(row, "ours"), share(row)
    return [row.name, f"{row.shape} {row.dtype}", *ours, fastest]
