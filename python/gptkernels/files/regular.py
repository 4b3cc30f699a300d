"""Opens only regular files: a FIFO or a socket could block for ever, and a device has no end."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def check_regular(path: str | os.PathLike[str]) -> None:
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise ValueError(f"{os.fspath(path)} is {kind}, must be a regular file")


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a regular file for reading. If reading fails in the context, the OSError names the file."""
    check_regular(path)
    with naming_file(path), open(path, "rb") as file:
        yield file


@contextmanager
def naming_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the file's name to an OSError that has none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        if error.errno is None:  # an error of the safetensors library, which has only a text
            raise OSError(f"{os.fspath(path)}: {error}") from error
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def is_regular(path: str | os.PathLike[str]) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False
