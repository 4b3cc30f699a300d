"""Functions that several file formats use: atomic writing, and llm.c's headers of 256 integers."""

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES = 256 * 4

MODEL_MAGIC = 20240326
TOKENIZER_MAGIC = 20240328
TOKENS_MAGIC = 20240520
QUESTIONS_MAGIC = 20240522

_KINDS = {
    MODEL_MAGIC: "a model",
    TOKENIZER_MAGIC: "a tokenizer",
    TOKENS_MAGIC: "a token file",
    QUESTIONS_MAGIC: "a file of questions",
    20240801: "a token file of 32-bit tokens",
}


def check_replaceable(path: str | os.PathLike[str]) -> None:
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        kind = "a symbolic link" if os.path.islink(path) else "not a regular file"
        raise ValueError(f"{path}: {kind}, which is not replaced: name another file")


@contextmanager
def replace_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write a file atomically: yield a temporary path, which is renamed to `path` when the file is on the disk.

    If the body raises, `path` is unchanged. A killed process may leave a hidden file `.NAME.PID.tmp`, which
    `remove_unfinished` removes. The message of an OSError names `path`.
    """
    path = Path(path)
    check_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        open(temporary, "xb").close()  # the mode x never follows a link
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(temporary)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def remove_unfinished(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        for temporary in folder.glob(f".{name}.*.tmp"):
            temporary.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def describe_magic(magic: int) -> str:
    return f"{magic}, which is {_KINDS[magic]} of llm.c" if magic in _KINDS else str(magic)


def read_header(file: BinaryIO, path: str | os.PathLike[str], magic: int, versions: Sequence[int]) -> list[int]:
    raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES:
        raise ValueError(f"{path}: header is truncated: {len(raw)} bytes of {HEADER_BYTES}")
    header = np.frombuffer(raw, "<i4").tolist()
    if header[0] != magic:
        raise ValueError(f"{path}: magic is {describe_magic(header[0])}, not {magic}: not {_KINDS[magic]}")
    if header[1] not in versions:
        known = " or ".join(map(str, versions))
        raise ValueError(f"{path}: version is {header[1]}, known for {_KINDS[magic]}: {known}")
    return header


def make_header(*fields: int) -> NDArray[np.int32]:
    header = np.zeros(256, "<i4")
    header[: len(fields)] = fields
    return header
