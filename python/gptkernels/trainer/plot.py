"""Plots a run's training and validation losses over the steps."""

import csv
from pathlib import Path

from gptkernels.files.writing import replace_file


def read_losses(csv_file: Path) -> dict[str, tuple[list[int], list[float]]]:
    curves: dict[str, tuple[list[int], list[float]]] = {"train": ([], []), "val": ([], [])}
    with open(csv_file, newline="", encoding="utf-8", errors="replace") as file:
        for row in csv.DictReader(file):
            try:
                step, loss = int(row["step"]), float(row["loss"])
                steps, losses = curves[row["split"]]
            except (KeyError, TypeError, ValueError):
                continue
            steps.append(step)
            losses.append(loss)
    return curves


def plot_losses(csv_file: Path, png_file: Path, unit: str = "nats per token") -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = read_losses(csv_file)
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel=f"cross-entropy ({unit})")
    axes.plot(*curves["train"], color="tab:blue", linewidth=0.8, alpha=0.7, label="training")
    axes.plot(*curves["val"], color="tab:orange", linewidth=1.8, marker="o", markersize=3, label="validation")
    axes.grid(alpha=0.3)
    axes.legend()
    with replace_file(png_file) as temporary:
        FigureCanvasAgg(figure).print_png(str(temporary))
