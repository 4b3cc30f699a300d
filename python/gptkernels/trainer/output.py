"""Standard output that cannot end a run: text that cannot be written is escaped or dropped."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO


class SafeOutput(io.TextIOBase):
    """Writes text to a stream, and never raises.

    Characters that the stream's encoding lacks become escapes such as `\\xe9`. Text is dropped if the stream cannot be
    written: a closed pipe, a full disk, or no stream at all.

    Args:
        stream: the stream, such as `sys.stdout`, which is None if the process was started with it closed.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        with suppress(OSError, ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def fileno(self) -> int:
        """Return the stream's file descriptor; OSError if it has none."""
        if self._stream is None:
            raise OSError("no stream")
        return self._stream.fileno()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Write as much as possible; report that everything was written."""
        if self._stream is not None:
            with suppress(OSError, ValueError):  # ValueError: the stream is closed
                self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        """Flush the stream if possible."""
        if self._stream is not None:
            with suppress(OSError, ValueError):
                self._stream.flush()


def prepare_streams() -> None:
    """Open missing standard streams, so that no other file becomes one, and make every character printable.

    Called at the start of a command.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def write_error(text: str) -> None:
    """Write to standard error without `sys.stderr`'s buffer, whose lock an interrupted write or a thread may hold."""
    if sys.__stderr__ is not None:
        with suppress(OSError, ValueError):
            os.write(sys.__stderr__.fileno(), text.encode(errors="backslashreplace"))


def flush_streams() -> None:
    """Flush the standard streams, so that Python's own flush at exit cannot fail and change the exit status.

    Called at the end of a command.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
