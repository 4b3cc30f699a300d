"""A fixture of all tests of the trainer."""

import pytest


@pytest.fixture(autouse=True)
def _no_plot(monkeypatch):
    """Runs write an empty plot, because drawing it takes most of a small run's time."""
    monkeypatch.setattr("gptkernels.trainer.train.plot_losses", lambda csv_file, png_file, *_: png_file.touch())
