"""Curves side by side: a table, and a picture."""

import statistics

from benchmarks.curves.train import VARIANTS
from benchmarks.harness.machine import title
from benchmarks.harness.report import markdown

AVERAGED = 50  # steps: losses of single batches differ more than the curves do
HEADER = ["", "steps", "ms a step", "last loss", f"mean of the last {AVERAGED}", "validation"]
COLOURS = ["#1f4e9c", "#ee7733", "#33a27f", "#aa6fc0"]


def smoothed(losses):
    """The means of every AVERAGED losses that follow each other."""
    return [statistics.fmean(losses[i : i + AVERAGED]) for i in range(len(losses) - AVERAGED + 1)]


def differences(curve, other):
    """How much the smoothed losses of one are above the other's, as a share of these."""
    return [a / b - 1 for a, b in zip(smoothed(curve["losses"]), smoothed(other["losses"]), strict=False)]


def tables(curves) -> list[str]:
    """The machine, a line a curve, and how far each is from the first."""
    shown = [_machine(curves), markdown(HEADER, [_line(curve) for curve in curves], texts=1)]
    shown += [_beside(curve, curves[0]) for curve in curves[1:] if differences(curve, curves[0])]
    return shown


def _machine(curves):
    s = curves[0]["settings"]
    shape = f"{s['layers']} layers of {s['width']} channels, vocabulary {s['vocabulary']}, T={s['length']}"
    what = f"{shape}, B={s['batch']}, seed {s['seed']}, learning rate {s['learning_rate']:g} ({s['schedule']})"
    return f"{title(curves[0]['machine'])}. {what}, {s['warm_up']} steps of warm-up."


def _line(curve):
    losses = curve["losses"]
    cells = [VARIANTS[curve["variant"]], str(len(losses))]
    if not losses:
        return [*cells, *[""] * 4]
    cells.append(f"{1e3 * curve['seconds'] / len(losses):.1f}")
    cells += [f"{losses[-1]:.4f}", f"{statistics.fmean(losses[-AVERAGED:]):.4f}"]
    return [*cells, "" if curve["validation"] is None else f"{curve['validation']:.4f}"]


def _beside(curve, first):
    found = differences(curve, first)
    at = max(range(len(found)), key=lambda i: abs(found[i]))
    names = VARIANTS[curve["variant"]], VARIANTS[first["variant"]]
    line = f"Means of {AVERAGED} steps of {names[0]} beside {names[1]}: {found[at]:+.2%} where they differ most (from "
    line += f"step {at}), {found[-1]:+.2%} at the end"
    if None not in (curve["validation"], first["validation"]):
        line += f"; validation {curve['validation'] / first['validation'] - 1:+.2%}"
    return line + "."


def draw(curves, path):
    """Losses above, single and smoothed; below how far the smoothed ones are from the first curve's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 6.5), height_ratios=(2.2, 1), sharex=True, layout="constrained"
    )
    for curve, colour in zip(curves, COLOURS, strict=False):
        losses, means = curve["losses"], smoothed(curve["losses"])
        above.plot(losses, color=colour, linewidth=0.5, alpha=0.35)
        above.plot(_middles(means), means, color=colour, linewidth=1.8, label=VARIANTS[curve["variant"]])
        if curve is not curves[0]:
            found = differences(curve, curves[0])
            below.plot(_middles(found), [100 * x for x in found], color=colour, linewidth=1.5)
    above.set(ylabel="loss, nats a token", yscale="log")
    above.legend(frameon=False)
    above.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    above.yaxis.set_minor_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    below.axhspan(-0.5, 0.5, color="#eeeeee")
    below.axhline(0, color=COLOURS[0], linewidth=1.5)
    below.set(ylabel=f"means of {AVERAGED},\n% above {curves[0]['variant']}", xlabel="step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _middles(means):
    """The steps in the middle of those that each mean is of."""
    return range(AVERAGED // 2, AVERAGED // 2 + len(means))
