"""Opening regular files only: a FIFO or a socket would block for ever, and a device has no end."""

from __future__ import annotations

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
    """Refuse to open anything but a regular file, or a link to one.

    Raises:
        ValueError: `path` is a folder, a FIFO, a socket or a device.
        OSError: there is no such file, or it is a dangling link.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise ValueError(f"{os.fspath(path)} is {kind}, must be a regular file")


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a regular file for reading. An OSError raised inside, for example by a failed read, gets the file's name.

    Raises:
        ValueError: `path` is a folder, a FIFO, a socket or a device.
        OSError: the file cannot be read.
    """
    check_regular(path)
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        if error.filename is not None:
            raise
        if error.errno is None:  # an error of the safetensors library, which has only a text
            raise OSError(f"{os.fspath(path)}: {error}") from error
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a regular file, or a link to one."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:  # a dangling link, a loop of links, or removed meanwhile
        return False
