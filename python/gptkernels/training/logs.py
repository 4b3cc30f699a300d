"""What a run leaves to read: llm.c's log, a CSV, and TensorBoard's files when asked."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import IO, NamedTuple

from gptkernels._files import replace_file

CSV_COLUMNS = ("step", "split", "loss", "learning_rate", "gradient_norm", "milliseconds", "tokens_per_second")
_LOG_STEP = re.compile(r"s:(\d+) .*\n")
_CSV_STEP = re.compile(r"(\d+),.*\n")


class TrainingStep(NamedTuple):
    """What is known of a step: the loss (nats per token) before its update, and how the update was made."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    milliseconds: float
    tokens_per_second: float


class TrainingLog:
    """Writes the losses of a run, each line as it comes.

    The log has llm.c's lines, `s:STEP trl:LOSS` for training and `s:STEP tel:LOSS` for validation; the CSV
    has a row for each, of `CSV_COLUMNS`. Losses are in nats per token.

    Args:
        log_file: the log.
        csv_file: the CSV.
        first_step: lines of earlier steps are kept, as of a run that is resumed; later ones are dropped.
        tensorboard: a folder for TensorBoard's files, or None.

    Raises:
        ValueError: TensorBoard is asked for and not installed.
    """

    def __init__(self, log_file: Path, csv_file: Path, first_step: int = 0, tensorboard: Path | None = None) -> None:
        self._board = None if tensorboard is None else _summary_writer(tensorboard, first_step)
        self._log = _continue(log_file, _LOG_STEP, first_step)
        self._csv = _continue(csv_file, _CSV_STEP, first_step, header=",".join(CSV_COLUMNS) + "\n")
        self._rows = csv.writer(self._csv, lineterminator="\n")

    def training(self, record: TrainingStep) -> None:
        """Add a training step."""
        self._log.write(f"s:{record.step} trl:{record.loss:.4f}\n")
        self._rows.writerow((record.step, "train", *record[1:]))
        if self._board:
            for name in ("loss", "learning_rate", "gradient_norm", "tokens_per_second"):
                self._board.add_scalar(f"train/{name}", getattr(record, name), record.step)

    def validation(self, step: int, loss: float) -> None:
        """Add the validation loss (nats per token) after `step` updates."""
        self._log.write(f"s:{step} tel:{loss:.4f}\n")
        self._rows.writerow((step, "val", loss, "", "", "", ""))
        if self._board:
            self._board.add_scalar("val/loss", loss, step)

    def close(self) -> None:
        """Close the files."""
        for file in (self._log, self._csv, self._board):
            if file:
                file.close()


def _continue(path: Path, step: re.Pattern[str], first_step: int, header: str = "") -> IO[str]:
    """Open `path` for appending; of what it holds, the lines of steps before `first_step` are kept."""
    old = path.read_text().splitlines(keepends=True) if first_step and path.exists() else []
    matches = ((line, step.fullmatch(line)) for line in old)
    kept = [line for line, match in matches if match and int(match[1]) < first_step]
    with replace_file(path) as temporary:
        temporary.write_text(header + "".join(kept))
    return open(path, "a", buffering=1, newline="")


def _summary_writer(folder: Path, first_step: int):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("--tensorboard takes the tensorboard package: pip install tensorboard") from error
    return SummaryWriter(str(folder), purge_step=first_step)
