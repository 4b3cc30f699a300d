"""Plots of a run: bars for each op, and a roofline of all ops."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.harness.machine import title
from benchmarks.harness.report import by_op, columns_of, page

COLOURS = {
    "ours": "#1f4e9c",
    "torch": "#ee7733",
    "compile": "#9a9a9a",
    "liger": "#33a27f",
    "quack": "#aa6fc0",
    "cudnn": "#76b900",
    "flex": "#c9a227",
    "fa3": "#c23b54",
}
STYLE: Any = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "figure.constrained_layout.use": True,
}


def draw(run, folder: Path):
    """Draw a plot for each op and the roofline, and write a page of tables with them."""
    folder.mkdir(parents=True, exist_ok=True)
    ops = {op: rows for op, rows in by_op(run["rows"]).items() if op != "roof"}
    with plt.rc_context(STYLE):
        for op, rows in ops.items():
            _save(bars(rows), folder / f"{op}.png")
        _save(roofline(run), folder / "roofline.png")
    (folder / "README.md").write_text(page(run))


def _save(figure, path):
    figure.savefig(path, dpi=100)
    plt.close(figure)


def bars(rows):
    """A panel for each name of an op, with a group of bars for each size."""
    names = list(dict.fromkeys(row.name for row in rows))
    figure, panels = plt.subplots(len(names), 1, figsize=(14, 0.6 + 2.9 * len(names)), squeeze=False)
    variants = ["ours", *columns_of(rows)]
    for name, axes in zip(names, panels[:, 0], strict=True):
        _group(axes, [row for row in rows if row.name == name], variants)
        axes.set_title(name, loc="left", fontweight="bold")
    panels[0, 0].legend(*_legend(rows, variants), ncols=6, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def _group(axes, rows, variants):
    width = 0.82 / len(variants)
    for i, row in enumerate(rows):
        for j, variant in enumerate(variants):
            if variant in row.times:
                at = i + (j - (len(variants) - 1) / 2) * width
                axes.bar(at, row.rate(variant), 0.92 * width, color=COLOURS[variant])
                style = {"fontsize": 8, "rotation": 90} if len(rows) * len(variants) > 30 else {"fontsize": 9}
                style |= {"xytext": (0, -2), "textcoords": "offset points", "ha": "center", "va": "top"}
                axes.annotate(f"{row.rate(variant):.0f}", (at, row.rate(variant)), color="white", **style)
        if "copy" in row.times and row.unit == "GB/s":
            axes.hlines(row.rate("copy"), i - 0.45, i + 0.45, color="black", linewidth=1.5)
    axes.set_xticks(
        range(len(rows)), [f"{row.shape}\n{row.dtype}" for row in rows], fontsize=9 if len(rows) > 6 else 10
    )
    axes.set_xlim(-0.55, max(len(rows), 3) - 0.45)
    axes.set_ylabel(rows[0].unit)
    axes.margins(y=0.12)


def _legend(rows, variants):
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[variant]) for variant in variants]
    line = plt.Line2D([], [], color="black", linewidth=1.5)
    return [*handles, line], [*variants, "a copy of as many bytes"]


def roofline(run):
    """Left: flops per second over flops per byte. Right: for memory-bound cases, the fraction of a copy's rate."""
    rows = [row for row in run["rows"] if row.op != "roof" and "ours" in row.times]
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 6), width_ratios=(1, 1.25))
    _roof(left, [row for row in run["rows"] if row.op == "roof"], rows)
    _shares(right, [row for row in rows if row.share and row.unit == "GB/s"])
    figure.suptitle(title(run["machine"]), fontsize=9, color="#666666")
    return figure


def _roof(axes, roofs, rows):
    copy, matmul = (next((r for r in roofs if r.name == name), None) for name in ("copy", "matmul"))
    most = max([1e3, *(row.intensity * 2 for row in rows)])
    if copy and matmul:
        bandwidth = copy.bytes / copy.times["torch"].median
        peak = matmul.flops / matmul.times["torch"].median
        xs = [0.2, peak / bandwidth, most]
        axes.plot(xs, [bandwidth * 0.2, peak, peak], color="black", linewidth=1.5)
        axes.annotate(f"copy {bandwidth / 1e9:.0f} GB/s", (0.8, bandwidth * 1.3), ha="right", fontsize=9)
        axes.annotate(f"{matmul.dtype} matmul {peak / 1e12:.3g} TFLOP/s", (most, peak * 1.1), ha="right", fontsize=9)
    ops = list(dict.fromkeys(row.op for row in rows))
    for i, op in enumerate(ops):
        mine = [row for row in rows if row.op == op]
        speeds = [row.flops / row.times["ours"].median for row in mine]
        marker = "osD^vP*X"[i % 8]
        axes.plot([row.intensity for row in mine], speeds, marker, color=plt.cm.tab20(i % 20), markersize=6, label=op)
    axes.set(xscale="log", yscale="log", xlabel="flops a byte", ylabel="flops a second")
    axes.set_title("ours under the roof", loc="left", fontweight="bold")
    axes.grid(axis="both")
    axes.legend(fontsize=8, frameon=False, loc="lower right")


def _shares(axes, rows):
    names = list(dict.fromkeys(row.name for row in rows))
    for i, name in enumerate(names):
        for row in (row for row in rows if row.name == name):
            best = min((row.times[p].median for p in row.peers if p in row.times), default=None)
            if best:
                axes.plot(
                    row.times["copy"].median / best, i + 0.15, "o", color=COLOURS["torch"], alpha=0.7, markersize=5
                )
            axes.plot(row.share, i - 0.15, "o", color=COLOURS["ours"], alpha=0.8, markersize=6)
    axes.axvline(1, color="black", linewidth=1.5)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
    axes.set_title("share of a copy's rate", loc="left", fontweight="bold")
    handles = [plt.Line2D([], [], marker="o", linestyle="", color=COLOURS[c]) for c in ("ours", "torch")]
    axes.legend(
        handles, ["ours, each size", "best peer"], ncols=2, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1)
    )
    axes.grid(axis="both")
