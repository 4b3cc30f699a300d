"""What is shown while a command runs: data is never markup, and output never ends a run."""

import io
import sys

import pytest

from gptkernels.trainer import progress
from gptkernels.trainer.logs import TrainingStep
from gptkernels.trainer.output import SafeOutput

MARKUP = "[a:on:b] [bold]x[/] :smile: [/nothing]"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def test_a_text_above_the_bar_is_no_markup(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    bar = progress.show_progress(10, 0, True)
    assert isinstance(bar, progress.Bar)
    bar.say(MARKUP)
    bar.step(TrainingStep(3, 1.5, 1e-3, 1.0, 2.0, 100.0))
    bar.close()
    shown = sys.stdout.getvalue()
    assert MARKUP in shown
    assert "loss 1.500" in shown


class Broken(Terminal):
    def write(self, text):
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("terminal", [True, False])
def test_output_that_fails_is_dropped(monkeypatch, terminal):
    stream = Broken()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdout", stream)
    shown = progress.show_progress(2, 0, True)
    shown.say("text")
    shown.step(TrainingStep(1, 1.5, 1e-3, 1.0, 2.0, 100.0))
    shown.close()


def test_lines_escape_what_cannot_be_encoded(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    progress.Lines(3, SafeOutput(sys.stdout)).say("caf\u00e9 \udcff")
    assert raw.getvalue() == b"caf\\xe9 \\udcff\n"


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
