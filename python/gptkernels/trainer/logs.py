"""The logs of a run: a log in llm.c's format, a CSV file, and optionally TensorBoard's files."""

import csv
import math
import os
import re
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import IO, NamedTuple

from gptkernels.files.regular import check_regular

FIRST_COLUMNS = ("step", "split", "loss", "learning_rate", "gradient_norm", "milliseconds", "tokens_per_second")
"""The columns of earlier versions. Files with these columns are continued with them."""
CSV_COLUMNS = (*FIRST_COLUMNS, "loss_z", "gradient_z", "mfu", "memory", "accuracy")
_MAX_LINE = 4096


class TrainingStep(NamedTuple):
    """The metrics of a training step.

    `loss` is in nats per token, and was computed before the update. `loss_z` and `gradient_z` are the z-scores of
    `OutlierDetector`. `mfu`, the model flops utilisation, is a fraction, or None if the device's peak rate is unknown.
    `memory` is the peak memory in bytes.
    """

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    milliseconds: float
    tokens_per_second: float
    loss_z: float = math.nan
    gradient_z: float = math.nan
    mfu: float | None = None
    memory: int = 0


class _Form(NamedTuple):
    """The format that an existing file must have, so that a run may append to it."""

    headers: tuple[bytes, ...]
    line: re.Pattern[bytes]  # its first group is the step
    unfinished: re.Pattern[bytes]  # a last line that a killed process left
    others: bool

    def is_known(self, line: bytes) -> bool:
        return self.others or bool(self.line.fullmatch(line) or self.unfinished.fullmatch(line))


_LOG = _Form(
    (),
    re.compile(rb"s:(\d+) (?:t[re]l|eval):\S+\n"),
    re.compile(rb"s(:(\d+( (t([re](l(:\S*)?)?)?|e(v(a(l(:\S*)?)?)?)?)?)?)?)?"),
    others=False,
)
_CSV = _Form(
    tuple(",".join(columns).encode() + b"\n" for columns in (CSV_COLUMNS, FIRST_COLUMNS)),
    re.compile(rb"(\d+),(?:train|val|eval),.*\n"),
    re.compile(rb".*"),
    others=True,
)


class TrainingLog:
    """The files to which a run writes its losses, in nats per token.

    The log has llm.c's lines: `s:STEP trl:LOSS` for training, `s:STEP tel:LOSS` for validation, and `s:STEP
    eval:ACCURACY` for questions.

    Lines of `first_step` and later steps are removed from the ends of existing files, because the run wrote these lines
    after its last checkpoint. With `keep_log` the log keeps such lines, because they may be of other runs. An
    unfinished last line is always removed.
    """

    def __init__(
        self,
        log_file: Path,
        csv_file: Path,
        first_step: int = 0,
        tensorboard: Path | None = None,
        *,
        keep_log: bool = False,
    ) -> None:
        self._board = None if tensorboard is None else _summary_writer(tensorboard, first_step)
        self._log = _continue(log_file, _LOG, None if keep_log else first_step)
        self._csv = _continue(csv_file, _CSV, first_step)
        self._rows = csv.DictWriter(self._csv, _columns(csv_file), "", "ignore", lineterminator="\n")

    def training(self, record: TrainingStep) -> None:
        self._log.write(f"s:{record.step} trl:{record.loss:.4f}\n")
        row = {"split": "train", **record._asdict()}
        self._rows.writerow({name: "" if value != value else value for name, value in row.items()})
        if self._board:
            for name in ("loss", "learning_rate", "gradient_norm", "tokens_per_second"):
                self._board.add_scalar(f"train/{name}", getattr(record, name), record.step)

    def validation(self, step: int, loss: float) -> None:
        self._log.write(f"s:{step} tel:{loss:.4f}\n")
        self._rows.writerow({"step": step, "split": "val", "loss": loss})
        if self._board:
            self._board.add_scalar("val/loss", loss, step)

    def evaluation(self, step: int, accuracy: float) -> None:
        self._log.write(f"s:{step} eval:{accuracy:.4f}\n")
        self._rows.writerow({"step": step, "split": "eval", "accuracy": accuracy})
        if self._board:
            self._board.add_scalar("eval/accuracy", accuracy, step)

    def close(self) -> None:
        for file in (self._log, self._csv, self._board):
            if file:
                with suppress(OSError):  # an earlier error reported that a line could not be written
                    file.close()


def check_log(path: Path) -> None:
    _check_form(path, _LOG)


def _check_form(path: Path, form: _Form) -> None:
    if not os.path.lexists(path):
        return
    try:
        check_regular(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: a symbolic link to nothing") from None
    with open(path, "rb") as file:
        if form.headers:
            first = file.readline(_MAX_LINE)
            if not any(header.startswith(first) for header in form.headers):
                raise ValueError(f"{path}: its first line is not that of this program's CSV, so it is not written to")
        number = 1 + bool(form.headers)
        while line := file.readline(_MAX_LINE):
            if not form.is_known(line):
                raise ValueError(f"{path}: line {number} is not that of a log, so the file is not written to")
            number += 1


def _continue(path: Path, form: _Form, first_step: int | None) -> IO[str]:
    _check_form(path, form)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        file.seek(0)
        lines = file.readlines()
        is_begun = not form.headers or (lines and lines[0] in form.headers)
        kept = _kept_lines(lines if is_begun else [form.headers[0]], form, first_step)
        if kept != lines:
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(kept, lines, strict=False)))
            file.truncate(sum(map(len, lines[:same])))
            file.writelines(kept[same:])
    return open(path, "a", buffering=1, newline="", encoding="utf-8")


def _columns(csv_file: Path) -> list[str]:
    with open(csv_file, "rb") as file:
        return file.readline().decode().rstrip("\n").split(",")


def _kept_lines(lines: list[bytes], form: _Form, first_step: int | None) -> list[bytes]:
    if lines and not lines[-1].endswith(b"\n"):
        lines = lines[:-1]
    if first_step is None:
        return lines
    steps = [int(match[1]) if (match := form.line.fullmatch(line)) else None for line in lines]
    end = max((i + 1 for i, step in enumerate(steps) if step is not None and step < first_step), default=0)
    return lines[:end] + [line for line, step in zip(lines[end:], steps[end:], strict=True) if step is None]


def _summary_writer(folder: Path, first_step: int):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("--tensorboard takes the tensorboard package: pip install tensorboard") from error
    return SummaryWriter(str(folder), purge_step=first_step)
