"""Tables for the terminal and in Markdown."""

from rich.console import Console
from rich.table import Table

from benchmarks.harness.machine import title

PAD = {"justify": "right", "no_wrap": True}


def show(rows):
    console = Console(width=190)
    table = Table(box=None, header_style="dim")
    for i, column in enumerate(header(rows)):
        table.add_column(column, **({"no_wrap": True} if i < 3 else PAD))
    for row in rows:
        table.add_row(*cells(row, columns_of(rows), "[bold]{}[/bold]"))
    console.print(table)
    for line in faults(rows):
        console.print(f"[red]{line}[/red]", highlight=False)


def columns_of(rows):
    return list(dict.fromkeys(peer for row in rows for peer in row.peers))


def header(rows):
    return ["", "size", "dtype", "us", "+-", "rate", "of copy", *columns_of(rows), "ahead of ours"]


def cells(row, peers, strong):
    texts = [row.name, row.shape, row.dtype]
    if "ours" in row.times:
        median, low, high = row.times["ours"]
        texts += [microseconds(median), f"{(high - low) / median:.0%}"]
        texts += [rate(row, "ours") if "copy" in row.times else "", share(row)]
    elif row.op == "roof":
        texts += ["", "", rate(row, "torch"), ""]
    else:
        texts += [row.faults["ours"].split(":")[0], "", "", ""]
    for peer in peers:
        if peer in row.times:
            ratio = row.ratio(peer)
            text = microseconds(row.times[peer].median) + (f" ({ratio:.2f}x)" if ratio else "")
            texts.append(strong.format(text) if peer in row.ahead and row.op != "roof" else text)
        else:
            texts.append(row.faults[peer].split(":")[0] if peer in row.faults else "")
    return [*texts, ", ".join(row.ahead) if row.op != "roof" else ""]


def share(row):
    return f"{row.share:.0%}" if row.share else ""


def rate(row, variant):
    return f"{number(row.rate(variant))} {row.unit}"


def microseconds(seconds):
    return number(seconds * 1e6)


def number(value):
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def faults(rows):
    return [f"{row.name} {row.shape} {row.dtype}, {name}: {why}" for row in rows for name, why in row.faults.items()]


def table(rows) -> str:
    return markdown(header(rows), [cells(row, columns_of(rows), "**{}**") for row in rows], texts=3)


def tables(rows) -> list[str]:
    lines = "\n".join(f"- {line}" for line in faults(rows))
    return [table(rows), lines] if lines else [table(rows)]


def markdown(head, lines, texts) -> str:
    rule = ["---" if i < texts else "---:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *lines])


def page(run) -> str:
    parts = ["# Results", title(run["machine"]) + "; [how to read this](../../docs/benchmarks.md)."]
    parts.append("![Roofline of all ops](roofline.png)")
    for op, rows in by_op(run["rows"]).items():
        parts += [f"## {op}", *([f"![{op}]({op}.png)"] if op != "roof" else []), *tables(rows)]
    return "\n\n".join(parts) + "\n"


def by_op(rows):
    found = {}
    for row in rows:
        found.setdefault(row.op, []).append(row)
    return found
