"""Plots of a run: bars for each op, and a roofline of all ops."""

import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.harness.machine import title
from benchmarks.harness.report import by_op, columns_of, page

COLOURS = {"ours": "#1f4e9c", "torch": "#ee7733", "compile": "#9a9a9a", "liger": "#33a27f", "quack": "#aa6fc0"}
COLOURS |= {"cudnn": "#76b900", "flex": "#c9a227", "fa3": "#c23b54"}
STYLE: Any = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
STYLE |= {"axes.grid": True, "axes.grid.axis": "y", "grid.color": "#dddddd", "figure.constrained_layout.use": True}


def draw(run, folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        for op, rows in by_op(run["rows"]).items():
            if op != "roof":
                _save(bars(rows), folder / f"{op}.png")
        _save(roofline(run), folder / "roofline.png")
    (folder / "README.md").write_text(page(run))


def _save(figure, path):
    figure.savefig(path, dpi=100)
    plt.close(figure)


def bars(rows):
    # Rows with the same key differ only in an argument that has no effect on the kernel. The last one is drawn.
    rows = {row.key: row for row in rows}.values()
    panels = {name: [row for row in rows if row.name == name] for name in dict.fromkeys(row.name for row in rows)}
    variants = ["ours", *columns_of(rows)]
    labels = {name: _labels(mine) for name, mine in panels.items()}
    heights = [2.5 + 0.2 * max(label.count("\n") + 1 for label in labels[name]) for name in panels]
    size = (14, 0.6 + sum(heights))
    figure, axes = plt.subplots(len(panels), 1, figsize=size, height_ratios=heights, squeeze=False)
    for (name, mine), panel in zip(panels.items(), axes[:, 0], strict=True):
        _group(panel, mine, [v for v in variants if any(v in row.times for row in mine)], labels[name])
        panel.set_title(name, loc="left", fontweight="bold")
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[v], label=v) for v in variants]
    if any(row.unit == "GB/s" for row in rows):
        handles.append(plt.Line2D([], [], color="black", linewidth=1.5, label="a copy of as many bytes"))
    axes[0, 0].legend(handles=handles, ncols=6, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def _labels(rows):
    width = max(11, 120 // len(rows))
    return [f"{textwrap.fill(row.shape, width, break_long_words=False)}\n{row.dtype}" for row in rows]


def _group(axes, rows, variants, labels):
    width = 0.82 / len(variants)
    narrow = len(rows) * len(variants) > 25
    top = 1.12 * max(row.rate(name) for row in rows for name in row.times if name != "copy" or row.unit == "GB/s")
    for i, row in enumerate(rows):
        for j, variant in enumerate(variants):
            if variant in row.times:
                at, rate = i + (j - (len(variants) - 1) / 2) * width, row.rate(variant)
                axes.bar(at, rate, 0.92 * width, color=COLOURS[variant])
                inside = rate > (0.17 if narrow else 0.1) * top
                style = {"fontsize": 8 if narrow else 9, "rotation": 90 if narrow else 0, "ha": "center"}
                style |= {"va": "top", "xytext": (0, -3)} if inside else {"va": "bottom", "xytext": (0, 3)}
                colour, behind = ("white", COLOURS[variant]) if inside else ("black", "white")
                box = {"facecolor": behind, "edgecolor": "none", "pad": 1}
                style |= {"color": colour, "bbox": box}
                axes.annotate(f"{rate:.0f}", (at, rate), textcoords="offset points", **style)
        if "copy" in row.times and row.unit == "GB/s":
            axes.hlines(row.rate("copy"), i - 0.45, i + 0.45, color="black", linewidth=1.5)
    axes.set_xticks(range(len(rows)), labels, fontsize=8 if len(rows) > 12 else 9 if len(rows) > 6 else 10)
    axes.set_xlim(-0.55, max(len(rows), 3) - 0.45)
    axes.set_ylim(0, top)
    axes.set_ylabel(rows[0].unit)


def roofline(run):
    """Plot flops per second against flops per byte, and the rates of memory-bound rows divided by a copy's rate."""
    rows = [row for row in run["rows"] if row.op != "roof" and "ours" in row.times]
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 6), width_ratios=(1, 1.25))
    _roof(left, [row for row in run["rows"] if row.op == "roof"], rows)
    _shares(right, [row for row in rows if row.share])
    handles, ops = left.get_legend_handles_labels()
    figure.legend(handles, ops, ncols=8, fontsize=8, loc="outside lower center", frameon=False)
    figure.suptitle(textwrap.fill(title(run["machine"]), 160), fontsize=9, color="#666666")
    return figure


def _roof(axes, roofs, rows):
    most = max([1e3, *(row.intensity * 2 for row in rows)])
    if {"copy", "matmul"} <= {row.name for row in roofs}:
        copy, matmul = (next(row for row in roofs if row.name == name) for name in ("copy", "matmul"))
        bandwidth = copy.bytes / copy.times["torch"].median
        peak = matmul.flops / matmul.times["torch"].median
        axes.plot([0.2, peak / bandwidth, most], [bandwidth * 0.2, peak, peak], color="black", linewidth=1.5)
        style = {"fontsize": 9, "textcoords": "offset points", "ha": "right"}
        axes.annotate(f"copy {bandwidth / 1e9:.0f} GB/s", (8, bandwidth * 8), xytext=(-4, 4), **style)
        text = f"{matmul.dtype} matmul {peak / 1e12:.3g} TFLOP/s"
        axes.annotate(text, (peak / bandwidth, peak), xytext=(-6, 2), **style)
    for i, op in enumerate(dict.fromkeys(row.op for row in rows)):
        mine = [row for row in rows if row.op == op]
        speeds = [row.flops / row.times["ours"].median for row in mine]
        marker = "osD^vP*X"[i % 8]
        axes.plot([row.intensity for row in mine], speeds, marker, color=plt.cm.tab20(i % 20), markersize=6, label=op)
    axes.set(xscale="log", yscale="log", xlabel="flops per byte", ylabel="flops per second")
    axes.set_title("this package's kernels", loc="left", fontweight="bold")
    axes.grid(axis="both")


def _shares(axes, rows):
    names = list(dict.fromkeys(row.name for row in rows))
    for row in rows:
        i = names.index(row.name)
        if row.fastest:
            share = row.times["copy"].median / row.times[row.fastest].median
            axes.plot(share, i + 0.15, "o", color=COLOURS["torch"], alpha=0.7, markersize=5)
        axes.plot(row.share, i - 0.15, "o", color=COLOURS["ours"], alpha=0.8, markersize=6)
    axes.axvline(1, color="black", linewidth=1.5)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
    axes.set_title("share of a copy's rate", loc="left", fontweight="bold")
    labels = {"ours, each size": COLOURS["ours"], "fastest baseline": COLOURS["torch"]}
    handles = [plt.Line2D([], [], marker="o", linestyle="", color=c, label=label) for label, c in labels.items()]
    axes.legend(handles=handles, ncols=2, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1))
    axes.grid(axis="both")
