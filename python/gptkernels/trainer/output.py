"""Standard output that raises no errors: text that cannot be written is escaped or lost."""

import io
import os
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO


def command_line(*arguments: object) -> str:
    """Return a line to type: `gptkernels` if the shell finds it, and otherwise as the user started this process."""
    if shutil.which("gptkernels") == str(Path(sys.executable).with_name("gptkernels")):
        start = ["gptkernels"]
    elif os.path.basename(sys.argv[0]) == "gptkernels":
        start = [sys.argv[0]]
    else:
        start = [sys.orig_argv[0], "-m", "gptkernels"]
    return shlex.join([*start, *map(str, arguments)])


class SafeOutput(io.TextIOBase):
    """A stream that writes to another stream without raising errors.

    Characters that the stream's encoding lacks become escapes such as `\\xe9`. Text is lost if the stream is a closed
    pipe or a file on a full disk. It is also lost if the stream is None; `sys.stdout` is None if standard output was
    closed when the process started.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        with suppress(OSError, ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("no stream")
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._stream is not None:
            with suppress(OSError, ValueError):
                self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            with suppress(OSError, ValueError):
                self._stream.flush()


def prepare_streams() -> None:
    """Open closed standard streams as /dev/null, and make standard output escape what its encoding lacks.

    Otherwise the next file that is opened would get the descriptor of a closed standard stream.
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
    """Write to standard error past `sys.stderr`, whose buffer an interrupted write or another thread may lock."""
    if sys.__stderr__ is not None:
        with suppress(OSError, ValueError):
            os.write(sys.__stderr__.fileno(), text.encode(errors="backslashreplace"))


def flush_streams() -> None:
    """Flush standard output and error. A stream that cannot be flushed becomes /dev/null.

    Otherwise Python's own flush at exit would fail, too, and change the exit status.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
