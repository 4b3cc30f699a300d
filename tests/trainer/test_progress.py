"""Progress of a command: data is never taken for markup, and a failing output does not end a run."""

import io
import sys

import pytest

from gptkernels.trainer import progress
from gptkernels.trainer.logs import TrainingStep

STEP = TrainingStep(4, 1.25, 1e-3, 0.5, 10.0, 12345.0)
MARKUP = "[a:on:b] [bold]x[/] :smile: [/nothing]"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.mark.parametrize("terminal", [True, False], ids=["bar", "lines"])
def test_a_terminal_has_a_bar_and_other_outputs_have_lines(monkeypatch, terminal):
    """Text is never taken for the bar's markup."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "xterm")
    shown = progress.show_progress(5, 0, True)
    assert isinstance(shown, progress.Bar) == terminal
    shown.say(MARKUP)
    shown.step(STEP)
    shown.close()
    text = sys.stdout.getvalue()
    assert all(part in text for part in ("step", "5/5", "loss 1.25", "12,345 tokens/s", MARKUP))
    assert ("\x1b[" in text) == terminal


class Broken(Terminal):
    """A stream that nothing can be written to."""

    def __init__(self, error=None):
        super().__init__()
        self._error = error or OSError(5, "Input/output error")

    def write(self, text):
        raise self._error

    def flush(self):
        raise self._error


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "No space left"), ValueError("closed file")])
def test_output_that_fails_is_dropped(monkeypatch, error, terminal):
    stream = Broken(error)
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdout", stream)
    shown = progress.show_progress(2, 0, True)
    shown.say("text")
    shown.step(STEP)
    shown.close()


def test_closed_standard_output(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    progress.show_progress(5, 0, True).say("hello")


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


@pytest.mark.parametrize("stream_type", [Terminal, io.StringIO, Broken])
def test_byte_progress(monkeypatch, stream_type):
    stream = stream_type()
    monkeypatch.setattr(sys, "stderr", stream)
    seconds = iter(range(0, 1000, 3))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    shown = progress.ByteProgress()
    for done in (1, 2, 4):
        shown("reading", done * 1_000_000, 4_000_000)
    shown.close()
    lines = stream.getvalue().replace("\r", "\n").split("\n")
    expected = [] if stream_type is Broken else [f"reading: {done}.0 of 4.0 MB" for done in (1, 2, 4)]
    assert [line for line in lines if line.strip()] == expected


def test_short_texts_show_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    shown = progress.ByteProgress()
    shown("reading", 10, 10)
    shown.close()
    assert sys.stderr.getvalue() == ""
