"""Writes the figures of kept runs into the documentation, between two comments that mark a place."""

from pathlib import Path

from benchmarks.harness.machine import title
from benchmarks.harness.report import by_op, markdown, microseconds, rate, tables

KEPT = "the kept run"
BEGIN, END = f"<!-- {KEPT} -->", f"<!-- /{KEPT} -->"
PICTURES = "benchmarks/results"


def fill(root: Path, run):
    """Write the run's figures into the README and the ops' pages.

    Args:
        root: the checkout.
        run: as ``run.load`` returns it.
    """
    for path, text in filled(root, run).items():
        path.write_text(text)


def filled(root: Path, run) -> dict[Path, str]:
    """Return the pages' new contents. A page without a place is unchanged."""
    parts = {root / "README.md": overview(run)}
    parts |= {root / "docs" / f"{op}.md": section(op, rows, run) for op, rows in by_op(run["rows"]).items()}
    return {path: between(path.read_text(), part) for path, part in parts.items() if path.exists()}


def between(text, part, place=KEPT):
    """Replace the text between the two comments that mark a place."""
    before, begin, rest = text.partition(f"<!-- {place} -->")
    _, end, after = rest.partition(f"<!-- /{place} -->")
    return f"{before}{begin}\n{part}\n{end}{after}" if begin and end else text


def section(op, rows, run) -> str:
    """Return the plot and the table of an op."""
    head = f"{title(run['machine'])}; [how to read this](benchmarks.md#how-to-read-it), [the whole run](../{PICTURES})."
    return "\n\n".join([head, f"![{op}](../{PICTURES}/{op}.png)", *tables(rows)])


def overview(run) -> str:
    """Return a table of all cases at their first size, in bfloat16 if possible, with the fastest baseline."""
    first = {}
    rows = [row for row in run["rows"] if row.op != "roof" and "ours" in row.times]
    for row in rows:
        shown = first.setdefault(row.name, row)
        if row.dtype == "bfloat16" and shown.dtype != "bfloat16":
            first[row.name] = row
    head = ["", "size", "us", "rate", "of a copy", "fastest baseline, its time / ours"]
    return "\n\n".join([title(run["machine"]) + ".", markdown(head, map(_line, first.values()), texts=2)])


def _line(row):
    share = f"{row.share:.0%}" if row.share and row.unit == "GB/s" else ""
    best = min((p for p in row.peers if p in row.times), key=lambda p: row.times[p].median, default=None)
    fastest = f"{best}, {row.speedup_over(best):.2f}" if best else ""
    size = f"{row.shape} {row.dtype}"
    return [row.name, size, microseconds(row.times["ours"].median), rate(row, "ours"), share, fastest]
