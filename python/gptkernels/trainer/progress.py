"""The progress displays of commands. Training shows a bar on a terminal, and lines in a file or a pipe.

Only the main process has a display.
"""

import math
import sys
import time
from typing import IO, cast

from gptkernels.trainer.logs import TrainingStep
from gptkernels.trainer.output import SafeOutput

SECONDS_BETWEEN_LINES = 2.0


def printable(text: str) -> str:
    """Replace unprintable characters except tabs and newlines, because some of them change a terminal's state."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)


class Progress:
    """The base class of displays, which shows nothing."""

    def say(self, text: str) -> None:
        """Print a text."""

    def step(self, record: TrainingStep) -> None:
        """Show a step that is done."""

    def close(self) -> None:
        """Remove the display."""


class Lines(Progress):
    """Prints lines: for the first step, for the last step, and for other steps at most every two seconds."""

    def __init__(self, total_steps: int, output: SafeOutput) -> None:
        self._total = total_steps
        self._output = output
        self._last = -SECONDS_BETWEEN_LINES

    def say(self, text: str) -> None:
        print(text, file=self._output, flush=True)

    def step(self, record: TrainingStep) -> None:
        now, done = time.monotonic(), record.step + 1
        if done < self._total and now - self._last < SECONDS_BETWEEN_LINES:
            return
        self._last = now
        print(
            f"step {done:>{len(str(self._total))}}/{self._total}: loss {record.loss:.4f}{_score(record.loss_z)}, "
            f"norm {record.gradient_norm:.3f}{_score(record.gradient_z)}, lr {record.learning_rate:.2e}, "
            f"{record.milliseconds:.1f} ms, {record.tokens_per_second:,.0f} tokens/s{_use(record, ', ')}",
            file=self._output,
            flush=True,
        )


class Bar(Progress):
    """A progress bar of `rich`. Texts are printed above it."""

    def __init__(self, total_steps: int, first_step: int, output: SafeOutput) -> None:
        from rich import progress
        from rich.console import Console

        self._progress = progress.Progress(
            progress.TextColumn("step {task.completed}/{task.total}", markup=False),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.fields[numbers]}", markup=False),
            progress.TimeRemainingColumn(),
            console=Console(file=cast("IO[str]", output), emoji=False),
            expand=True,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=first_step, numbers="")
        self._progress.start()

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def step(self, record: TrainingStep) -> None:
        rate = f"{record.tokens_per_second:,.0f} tokens/s  {record.milliseconds:.0f} ms/step"
        numbers = f"loss {record.loss:.3f}  {rate}{_use(record, '  ')}"
        self._progress.update(self._task, completed=record.step + 1, numbers=numbers)

    def close(self) -> None:
        self._progress.stop()


def _score(z: float) -> str:
    return "" if math.isnan(z) else f" ({z:+.2f}z)"


def _use(record: TrainingStep, separator: str) -> str:
    mfu = "" if record.mfu is None else f"{separator}{100 * record.mfu:.1f}% MFU"
    return mfu + (f"{separator}{record.memory / 2**30:.2f} GiB" if record.memory else "")


class ByteProgress:
    """Shows on standard error how much text was processed. On a terminal, each line overwrites the previous one.

    The first line is printed after `SECONDS_BETWEEN_LINES`, so that nothing is shown for a short text.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._output = SafeOutput(sys.stderr)
        self._overwrite = self._output.isatty()
        self._shown = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        wait = SECONDS_BETWEEN_LINES / 10 if self._shown and self._overwrite else SECONDS_BETWEEN_LINES
        if now - self._last < wait and not (done >= total and self._shown):
            return
        self._last = now
        self._write(f"{what}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB", end="" if self._overwrite else "\n")

    def close(self) -> None:
        if self._shown and self._overwrite:
            self._write("", end="\r")

    def _write(self, line: str, end: str) -> None:
        blank = " " * (len(self._shown) - len(line))
        print("\r" * self._overwrite + line + blank * self._overwrite, end=end, file=self._output, flush=True)
        self._shown = line


def show_progress(total_steps: int, first_step: int, is_main: bool) -> Progress:
    if not is_main:
        return Progress()
    output = SafeOutput(sys.stdout)
    return Bar(total_steps, first_step, output) if output.isatty() else Lines(total_steps, output)
