"""A lock on a run's folder, so that no two processes write to it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = ".gptkernels"
"""The locked file. It stays in the folder and marks it as a run of this program."""

# Errors of flock on a file system without locks, such as some network file systems.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder; it is released however the process ends.

    On a file system without locks nothing is locked.

    Raises:
        ValueError: another process has locked it; the message has its process id.
        OSError: the lock's file cannot be written.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        raise ValueError(
            f"{folder} is in use: process {holder or 'of unknown number'} is training there. Wait for its end, or "
            "name another folder with --output"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
