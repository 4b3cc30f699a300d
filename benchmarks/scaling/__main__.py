"""``python -m benchmarks.scaling`` prints measured and modelled steps, and modelled layouts for more GPUs.

``--run`` measures the cases of ``benchmarks/scaling/cases.py``, and ``--losses`` trains 50 steps in every layout.
``--model`` draws the model's picture, and ``--pages`` writes the tables of the kept runs into docs/scaling.md.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from benchmarks.harness.machine import describe
from benchmarks.harness.pages import between
from benchmarks.harness.report import markdown
from benchmarks.scaling import cases, losses
from benchmarks.scaling.cases import CASES, MODELS
from benchmarks.scaling.model import SHAPES, SIZES, Machine, best, estimate
from gptkernels.files.writing import replace_file

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PAGE, PICTURE = ROOT / "docs" / "scaling.md", ROOT / "docs" / "images" / "scaling.png"
LOSSES = "the losses"
LARGEST_BATCH = 2**22  # tokens of a step of the modelled layouts
PARTS = ("matmuls", "attention", "memory", "update", "exchange")


def kept_runs():
    return [json.loads(path.read_text()) for path in sorted(FOLDER.glob("h200*.json"))]


def measured(runs) -> str:
    machine, lines = Machine(), []
    of_key = {case.key: case for case in CASES}
    rows = [row for run in runs for row in run["rows"] if "tokens_per_second" in row]
    for row in sorted(rows, key=lambda row: row["gpus"]):
        case = of_key[tuple(row[name] for name in ("case", "model", "precision", "gpus", "batch", "length"))]
        gib = "" if row["gib"] is None else f"{row['gib']:.1f}"
        predicted = difference = ""
        if case.layout is not None:
            ms = 1e3 * estimate(MODELS[case.model], case.layout, case.batch, case.length, machine).seconds
            predicted, difference = f"{ms:.1f}", f"{ms / row['ms'] - 1:+.0%}"
        lines.append(
            [
                case.name, case.model, case.precision, str(case.gpus), f"{case.batch} x {case.length}",
                f"{row['ms']:.1f}", f"{row['tokens_per_second']:,.0f}", gib, predicted, difference,
            ]
        )  # fmt: skip
    header = ["case", "model", "", "GPUs", "batch", "ms", "tokens/s", "GiB", "model, ms", ""]
    return markdown(header, lines, texts=3)


def fastest():
    """Return for each model and number of GPUs: the sequences of a step, their length, the layout and its estimate."""
    found = {}
    for shape in SHAPES:
        for gpus in SIZES:
            length, per_gpu = (1024, 8) if shape.name.startswith("GPT-2") else (8192, 2)
            sequences = min(per_gpu * gpus, LARGEST_BATCH // length)
            found[shape.name, gpus] = sequences, length, best(shape, gpus, sequences, length, Machine())
    return found


def shares(parts):
    return [share / parts.seconds for share in (*parts[:4], sum(parts[4:7]))]


def predicted() -> str:
    lines = []
    for (name, gpus), (sequences, length, layout_and_parts) in fastest().items():
        line = [name, str(gpus), f"{sequences} x {length}"]
        if layout_and_parts is None:
            lines.append([*line, "does not fit", *[""] * (3 + len(PARTS))])
            continue
        layout, parts = layout_and_parts
        line.append(f"dp={layout.dp},tp={layout.tp},cp={layout.cp}, {layout.shard}" + ", recomputed" * layout.recompute)
        tokens = sequences * length / parts.seconds / gpus
        line += [f"{1e3 * parts.seconds:.0f}", f"{tokens:,.0f}", f"{parts.bytes / 2**30:.0f}"]
        lines.append([*line, *(f"{share:.0%}" for share in shares(parts))])
    header = ["model", "GPUs", "batch of all", "layout", "ms", "tokens/s per GPU", "GiB", *PARTS]
    return markdown(header, lines, texts=4)


def section(runs) -> str:
    titles = [f"{run['machine']['device']}, torch {run['machine']['torch']}, {run['machine']['date']}." for run in runs]
    layouts = "The fastest layouts of the model, by layers, sequences and shards:"
    picture = f"![The fastest layouts of the model](images/{PICTURE.name})"
    return "\n\n".join([" ".join(dict.fromkeys(titles)), measured(runs), layouts, picture, predicted()])


def filled() -> str:
    page = between(PAGE.read_text(), section(kept_runs()))
    kept = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("losses*.json"))]
    return between(page, "\n\n".join(map(losses.table, kept)), LOSSES)


def draw(path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from benchmarks.harness.plot import STYLE

    colours = ["#1f4e9c", "#33a27f", "#9a9a9a", "#c9a227", "#ee7733"]
    found = fastest()
    with plt.rc_context(STYLE | {"font.size": 16}):
        figure, panels = plt.subplots(2, len(SHAPES), figsize=(14, 8), sharex=True, sharey="row")
        for (above, below), shape in zip(panels.T, SHAPES, strict=True):
            fits = [(i, *found[shape.name, gpus]) for i, gpus in enumerate(SIZES) if found[shape.name, gpus][2]]
            rates = [sequences * length / pair[1].seconds / SIZES[i] for i, sequences, length, pair in fits]
            above.plot([i for i, *_ in fits], rates, "o-", color=colours[0], linewidth=2.5, markersize=9)
            for (i, *_), rate in zip(fits, rates, strict=True):
                text = f"{rate / 1e3:.3g}k" if rate >= 1e3 else f"{rate:.0f}"
                below_line = i == len(SIZES) - 1  # the line falls to the last point
                offset = {"xytext": (0, -9 if below_line else 9), "va": "top" if below_line else "bottom"}
                above.annotate(text, (i, rate), textcoords="offset points", ha="center", fontsize=14, **offset)
            above.set(title=shape.name, yscale="log", ylim=(100, 2e6))
            bottoms = [0.0] * len(fits)
            for part, (name, colour) in enumerate(zip(PARTS, colours, strict=True)):
                heights = [shares(pair[1])[part] for *_, pair in fits]
                below.bar([i for i, *_ in fits], heights, 0.7, bottoms, color=colour, label=name)
                bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
            for i, gpus in enumerate(SIZES):
                if not found[shape.name, gpus][2]:
                    below.text(i, 0.5, "does not fit", rotation=90, ha="center", va="center", fontsize=14)
            below.set_xticks(range(len(SIZES)), list(map(str, SIZES)))
            below.set_xlim(-0.6, len(SIZES) - 0.4)
        panels[0, 0].set_ylabel("tokens/s per GPU")
        panels[1, 0].set_ylabel("share of the step")
        panels[1, 0].yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
        figure.supxlabel("GPUs", fontsize=16)
        figure.legend(*panels[1, 0].get_legend_handles_labels(), ncols=5, loc="outside upper center", frameon=False)
        figure.savefig(path, dpi=100)
        plt.close(figure)


def save(path: Path, run):
    head = json.dumps({"machine": run["machine"]})[1:-1]
    lists = ((name, ",\n".join(f"  {json.dumps(row)}" for row in run[name])) for name in ("rates", "rows"))
    text = ",\n".join([f" {head}", *(f' "{name}": [\n{lines}\n ]' for name, lines in lists)])
    with replace_file(path) as temporary:
        temporary.write_text(f"{{\n{text}\n}}\n")


def measure(path: Path, gpus: int, names):
    """Measure the cases of a number of GPUs; the rows replace those of the same cases in the file."""
    about = describe(torch.device("cuda"))
    device, torch_version = about["gpu"]["name"], about["versions"]["torch"]
    run = json.loads(path.read_text()) if path.exists() else {"rates": [], "rows": []}
    run["machine"] = {"device": device, "torch": torch_version, "date": about["date"][:10], "commit": about["commit"]}
    known = {"rates", *(case.name for case in CASES if case.gpus == gpus)}
    if unknown := set(names) - known:
        raise SystemExit(f"no case of {gpus} GPUs: {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    if "rates" in names or not names:
        run["rates"] = [r for r in run["rates"] if r["gpus"] != gpus] + cases.rates(gpus)
        save(path, run)
    for case in CASES:
        if case.gpus == gpus and (case.name in names or not names):
            row = cases.run(case)
            run["rows"] = [r for r in run["rows"] if cases.key(r) != case.key] + [row]
            save(path, run)


def main(arguments=None):
    cli = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    cli.add_argument("--run", nargs="*", metavar="CASE", help="measure the cases of --gpus, or those with these names")
    cli.add_argument("--losses", action="store_true", help="train in every layout; without GPUs, a tiny model")
    cli.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="(default: all)")
    cli.add_argument("--json", type=Path, metavar="FILE", help="the file of the results of --run or --losses")
    cli.add_argument("--model", action="store_true", help=f"draw the model's picture, docs/images/{PICTURE.name}")
    cli.add_argument("--pages", action="store_true", help=f"write the kept runs' tables into docs/{PAGE.name}")
    given = cli.parse_args(arguments)
    if (given.losses or given.run is not None) and not given.json:
        cli.error("--run and --losses need --json")
    if given.losses:
        found = losses.run(given.gpus)
        losses.save(given.json, found)
        print(losses.table(found))
    elif given.run is not None:
        measure(given.json, given.gpus, given.run)
        print(measured([json.loads(given.json.read_text())]))
    else:
        print(section(kept_runs()))
    if given.model:
        draw(PICTURE)
    if given.pages:
        PAGE.write_text(filled())
    return 0


if __name__ == "__main__":
    sys.exit(main())
