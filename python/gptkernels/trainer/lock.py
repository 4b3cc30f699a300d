"""A lock on a run's folder, so that only one process writes to it."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = ".gptkernels"
"""The locked file. It remains in the folder, and marks the folder as a run of this program."""

# Errors of flock on a file system without locks, such as some network file systems.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder while the body runs. The lock also ends with the process, in any way.

    If another process has the lock, a ValueError gives its process id. On a file system without locks nothing is
    locked.
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
