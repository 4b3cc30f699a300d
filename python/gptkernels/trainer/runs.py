"""Makes, finds and locks the folders of runs, which contain the checkpoint, the logs and the plot."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gptkernels.checkpoint import CHECKPOINT
from gptkernels.data import prepare_standard_library, tokenizer_for_prefix
from gptkernels.files.writing import check_replaceable, remove_unfinished
from gptkernels.trainer.retention import NUMBERED, kept_steps, numbered

RUNS = Path("runs")
TOKENIZER_PREFIX = "checkpoint"
LOG, CSV, PLOT = "main.log", "log.csv", "loss.png"
FILES = (CHECKPOINT, LOG, CSV, PLOT, f"{TOKENIZER_PREFIX}_tokenizer.bin", f"{TOKENIZER_PREFIX}_tokenizer.json")
"""The files of a run in its folder, except checkpoints whose names have their steps."""
STANDARD_LIBRARY = RUNS / "data" / "standard_library"
LOCK_FILE = ".gptkernels"
"""The locked file. It remains in the folder, and marks the folder as a run of this program."""
# flock's errors on a file system without locks, such as some network file systems
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def new_run(folder: str | None, model: str) -> Path:
    """Make and return the folder of a new run: `folder`, or by default runs/MODEL, runs/MODEL-2, ...

    A ValueError says that `folder` already contains a checkpoint, or a file of another program that has the name of a
    run's file.
    """
    if folder is not None:
        path = Path(folder)
        _check_own(path)
        if (path / CHECKPOINT).exists():
            raise ValueError(
                f"--output {folder} holds a run: --resume {folder} continues it, another folder starts anew"
            )
        path.mkdir(parents=True, exist_ok=True)
        return path
    RUNS.mkdir(exist_ok=True)
    number = 1
    while True:
        path = RUNS / (model if number == 1 else f"{model}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1


def _check_own(folder: Path) -> None:
    if (folder / LOCK_FILE).exists() or (folder / CHECKPOINT).exists():
        return
    for name in (*FILES, *(path.name for path in folder.glob(NUMBERED))):
        if os.path.lexists(folder / name):
            raise ValueError(f"--output {folder} holds a {name} that is not of a run: name another folder")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder while the body of the `with` statement runs. If the process is killed, the lock ends.

    If another process has the lock, a ValueError gives that process's id. On a file system without locks, nothing is
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


@contextmanager
def open_run(folder: Path, is_main: bool) -> Iterator[None]:
    if not is_main:
        yield
        return
    with _locked(folder):
        for name in FILES:
            check_replaceable(folder / name)
        remove_unfinished(folder, (*FILES, NUMBERED))
        yield


def log_of_run(log_file: str | None, folder: Path) -> str | None:
    if log_file is None:
        return None
    real, parent = (os.path.realpath(path) for path in (log_file, folder))
    return log_file if os.path.dirname(real) == parent and not is_other_file(log_file, folder) else None


def is_other_file(log_file: str, folder: Path) -> bool:
    others = [folder / name for name in (*FILES, LOCK_FILE) if name != LOG]
    others += [numbered(folder, step) for step in kept_steps(folder)]
    return os.path.realpath(log_file) in map(os.path.realpath, others)


def find_run(folder: str | None) -> Path:
    if folder is None:
        checkpoints = sorted(RUNS.glob(f"*/{CHECKPOINT}"), key=lambda path: path.stat().st_mtime)
        if not checkpoints:
            raise ValueError(f"--resume: no run with a checkpoint in {RUNS}/")
        return checkpoints[-1].parent
    if not (Path(folder) / CHECKPOINT).exists():
        raise ValueError(f"--resume: {folder} holds no {CHECKPOINT}")
    return Path(folder)


def standard_library() -> str:
    try:
        tokenizer_for_prefix(STANDARD_LIBRARY)
    except ValueError:
        prepare_standard_library(STANDARD_LIBRARY)
    return str(STANDARD_LIBRARY)
