"""Tests that the progress display does not interpret text as markup, and that a failing output does not end a run."""

import io
import sys

import pytest

from gptkernels.trainer import progress
from gptkernels.trainer.logs import TrainingStep

STEP = TrainingStep(4, 1.25, 1e-3, 0.5, 10.0, 12345.0)
MARKUP = "[a:on:b] [bold]x[/] :smile: [/nothing]"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def __init__(self, is_terminal=True, error=None):
        super().__init__()
        self.isatty = lambda: is_terminal
        self._error = error

    def write(self, text):
        if self._error:
            raise self._error
        return super().write(text)

    def flush(self):
        if self._error:
            raise self._error


@pytest.mark.parametrize("terminal", [True, False], ids=["bar", "lines"])
def test_a_terminal_has_a_bar_and_other_outputs_have_lines(monkeypatch, terminal):
    monkeypatch.setattr(sys, "stdout", Terminal(terminal))
    monkeypatch.setenv("TERM", "xterm")
    shown = progress.show_progress(5, 0, True)
    assert isinstance(shown, progress.Bar) == terminal
    shown.say(MARKUP)
    shown.step(STEP)
    shown.close()
    text = sys.stdout.getvalue()
    assert all(part in text for part in ("step", "5/5", "loss 1.25", "12,345 tokens/s", MARKUP))
    assert ("\x1b[" in text) == terminal


@pytest.mark.parametrize(
    "stream",
    [
        None,
        *(
            Terminal(is_terminal, error)
            for is_terminal in (True, False)
            for error in (BrokenPipeError(), OSError(28, "No space left"), ValueError("closed file"))
        ),
    ],
)
def test_output_that_fails_is_dropped(monkeypatch, stream):
    monkeypatch.setattr(sys, "stdout", stream)
    shown = progress.show_progress(2, 0, True)
    shown.say("text")
    shown.step(STEP)
    shown.close()


@pytest.mark.parametrize("terminal", [True, False])
def test_characters_that_the_output_lacks_are_escaped(monkeypatch, terminal):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "ascii", "strict")
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", stream)
    shown = progress.show_progress(5, 0, True)
    shown.say("caf\u00e9 \udcff\u20ac [a:on:b]")
    shown.close()
    stream.flush()
    assert rb"caf\xe9 \udcff\u20ac [a:on:b]" in raw.getvalue()


def test_only_the_main_process_shows_progress(capsys):
    shown = progress.show_progress(5, 0, False)
    shown.say("hello")
    shown.close()
    assert capsys.readouterr().out == ""


def test_control_characters_are_not_printed():
    assert progress.printable("a\tb\n\x1b[2Jé") == "a\tb\n\ufffd[2Jé"


@pytest.mark.parametrize(
    ("stream", "is_shown"),
    [(Terminal(), True), (io.StringIO(), True), (Terminal(error=OSError(5, "Input/output error")), False)],
    ids=["terminal", "file", "failing"],
)
def test_progress_in_bytes_is_shown_in_megabytes(monkeypatch, stream, is_shown):
    monkeypatch.setattr(sys, "stderr", stream)
    seconds = iter(range(0, 1000, 3))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    shown = progress.ByteProgress()
    for done in (1, 2, 4):
        shown("reading", done * 1_000_000, 4_000_000)
    shown.close()
    lines = stream.getvalue().replace("\r", "\n").split("\n")
    expected = [f"reading: {done}.0 of 4.0 MB" for done in (1, 2, 4)] if is_shown else []
    assert [line for line in lines if line.strip()] == expected


def test_progress_of_short_texts_is_not_shown(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    shown = progress.ByteProgress()
    shown("reading", 10, 10)
    shown.close()
    assert sys.stderr.getvalue() == ""
