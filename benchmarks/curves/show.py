"""Tables and a plot of training curves."""

import statistics

from benchmarks.curves.train import CONTROL, VARIANTS
from benchmarks.harness.machine import title
from benchmarks.harness.report import markdown

AVERAGED = 50  # steps; the losses of single batches vary more than the curves differ
HEADER = ["", "seed", "steps", "ms a step", "last loss", f"mean of the last {AVERAGED}", "validation"]
COMPARED = ["above {} at most", "at the end", "in validation"]
COLOURS = dict(zip(VARIANTS, ["#1f4e9c", "#8a8a8a", "#ee7733", "#33a27f", "#aa6fc0"], strict=True))


def smoothed(losses):
    return [statistics.fmean(losses[i : i + AVERAGED]) for i in range(len(losses) - AVERAGED + 1)]


def differences(curve, other):
    return [a / b - 1 for a, b in zip(smoothed(curve["losses"]), smoothed(other["losses"]), strict=False)]


def first_of_seed(curve, curves):
    return next(other for other in curves if other["settings"]["seed"] == curve["settings"]["seed"])


def tables(curves) -> list[str]:
    header = [*HEADER, *(text.format(VARIANTS[curves[0]["variant"]]) for text in COMPARED)]
    lines = [_line(curve, first_of_seed(curve, curves)) for curve in curves]
    return [_machine(curves), markdown(header, lines, texts=1), *_over_seeds(curves)]


def _machine(curves):
    s = curves[0]["settings"]
    shape = f"{s['layers']} layers of {s['width']} channels, vocabulary {s['vocabulary']}, T={s['length']}"
    what = f"{shape}, B={s['batch']}, learning rate {s['learning_rate']:g} ({s['schedule']})"
    return f"{title(curves[0]['machine'])}. {what}, {s['warm_up']} steps of warm-up."


def _line(curve, first):
    losses = curve["losses"]
    cells = [VARIANTS[curve["variant"]], str(curve["settings"]["seed"]), str(len(losses))]
    if not losses:
        return [*cells, *[""] * 7]
    cells += [f"{1e3 * curve['seconds'] / len(losses):.1f}", f"{losses[-1]:.4f}", f"{_end(curve):.4f}"]
    cells.append("" if curve["validation"] is None else f"{curve['validation']:.4f}")
    return [*cells, *("" if x is None else f"{x:+.2%}" for x in _beside(curve, first))]


def _beside(curve, first):
    found = differences(curve, first)
    if curve is first or not found:
        return [None] * 3
    known = None not in (curve["validation"], first["validation"])
    return [max(found, key=abs), found[-1], curve["validation"] / first["validation"] - 1 if known else None]


def _over_seeds(curves) -> list[str]:
    """Compare variants with the first one, and with the mean of the first one and CONTROL, as this mean varies less."""
    ends = {curve["variant"]: _ends(curves, curve["variant"]) for curve in curves}
    firsts, controls = ends.pop(curves[0]["variant"]), ends.get(CONTROL, {})
    lines = []
    for variant, own in ends.items():
        seeds = [seed for seed in own if seed in firsts]
        if len(seeds) < 2:
            continue
        above = _mean_and_error([own[seed] / firsts[seed] - 1 for seed in seeds])
        line = f"At the end, {VARIANTS[variant]}, mean of {len(seeds)} seeds: {above}"
        if variant != CONTROL and all(seed in controls for seed in seeds):
            above = _mean_and_error([2 * own[seed] / (firsts[seed] + controls[seed]) - 1 for seed in seeds])
            line += f"; above the mean of the first curve and the control {above}"
        lines.append(line + ".")
    return lines


def _ends(curves, variant):
    return {
        curve["settings"]["seed"]: _end(curve)
        for curve in curves
        if curve["variant"] == variant and len(curve["losses"]) == curve["settings"]["steps"] >= AVERAGED
    }


def _end(curve):
    return statistics.fmean(curve["losses"][-AVERAGED:])


def _mean_and_error(shares):
    return f"{statistics.fmean(shares):+.2%}, standard error {statistics.stdev(shares) / len(shares) ** 0.5:.2%}"


def draw(curves, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = {"figsize": (9, 6.5), "height_ratios": (2.2, 1), "layout": "constrained"}
    figure, (above, below) = plt.subplots(2, 1, sharex=True, **size)
    faint, named = 0.35 / len({curve["settings"]["seed"] for curve in curves}), set()
    for curve in curves:
        losses, means, colour = curve["losses"], smoothed(curve["losses"]), COLOURS[curve["variant"]]
        first = first_of_seed(curve, curves)
        above.plot(losses, color=colour, linewidth=0.5, alpha=faint)
        label = None if curve["variant"] in named else VARIANTS[curve["variant"]]
        named.add(curve["variant"])
        above.plot(_middles(means), means, color=colour, linewidth=1.5, label=label)
        if curve is not first:
            found = differences(curve, first)
            below.plot(_middles(found), [100 * x for x in found], color=colour, linewidth=1.2)
    above.set(ylabel="loss (nats per token)", yscale="log")
    above.legend()
    for set_formatter in (above.yaxis.set_major_formatter, above.yaxis.set_minor_formatter):
        set_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    below.axhspan(-0.5, 0.5, color="#eeeeee")
    below.axhline(0, color=COLOURS[curves[0]["variant"]], linewidth=1.5)
    below.set(ylabel=f"% above {VARIANTS[curves[0]['variant']]}\n(means of {AVERAGED} steps)", xlabel="step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _middles(means):
    return range(AVERAGED // 2, AVERAGED // 2 + len(means))
