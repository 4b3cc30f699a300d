"""Reads the files that torch.save writes, without running code in them, and writes such files atomically."""

import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gptkernels.files.regular import open_regular
from gptkernels.files.writing import replace_file

_ZIP = b"PK\x03\x04"
_LEGACY = b"\x80\x02"  # torch's format before 1.6


def is_pickle(beginning: bytes) -> bool:
    return beginning.startswith((_ZIP, _LEGACY))


def read_pickle(path: Path) -> Any:
    """Return the content of a file of torch.save, with tensors on the CPU.

    A ValueError says that the file is damaged or compressed, or that reading it could run code.
    """
    with open_regular(path) as file:
        is_zip = file.read(4) == _ZIP
        if is_zip:
            _check_zip(path)
        else:
            _check_legacy(path)
        return _load(path, mmap=is_zip)


def _check_zip(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except Exception as error:
        raise ValueError(f"{path}: truncated or damaged: {_first_line(error)}") from error
    size = os.path.getsize(path)
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or (
        sum(entry.file_size for entry in entries) > size
    ):
        raise ValueError(f"{path}: compressed, or entries that overlap: torch.save writes neither")


def _check_legacy(path: Path) -> None:
    """Raise a ValueError if the file is shorter than the tensors in it.

    The tensors are read as fake tensors, because torch's reader allocates their memory before it reads their bytes.
    """
    from torch._subclasses import FakeTensorMode  # the import takes a second

    with FakeTensorMode():
        content = _load(path, mmap=False)
    tensors = [*_tensors(content)]
    if any(tensor.layout != torch.strided for tensor in tensors):
        raise ValueError(f"{path}: a tensor is no dense tensor")
    storages = [tensor.untyped_storage() for tensor in tensors]
    claimed = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
    if claimed > (size := os.path.getsize(path)):
        raise ValueError(f"{path}: truncated or damaged: {claimed} bytes of tensors, the file has {size}")


def _tensors(content: Any) -> Iterator[torch.Tensor]:
    seen: dict[int, Any] = {}
    left = [content]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen[id(value)] = value
            left.extend(value.values() if isinstance(value, dict) else value)


def _load(path: Path, mmap: bool) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about opcodes before it raises an error
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError:
        raise
    except Exception as error:
        reason = error.__context__ if isinstance(error.__context__, pickle.UnpicklingError) else error
        if found := re.search(r"GLOBAL ([\w.]+)", str(reason)):
            raise ValueError(
                f"{path}: holds {found[1]}, which is no tensor and no plain value: reading it could run code"
            ) from error
        raise ValueError(f"{path}: no whole file of torch.save: {_first_line(reason)}") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


def write_pickle(path: Path, content: Any) -> None:
    with replace_file(path) as temporary, open(temporary, "wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch raises a RuntimeError in place of the file's OSError
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
