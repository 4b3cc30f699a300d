"""llm.c's token files: a header of 256 int32 (magic 20240520, version 1, number of tokens), then tokens in uint16.

The older format has no header, and tokens in int32.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gptkernels.files.regular import open_regular
from gptkernels.files.writing import (
    HEADER_BYTES,
    TOKENS_MAGIC,
    describe_magic,
    file_size,
    make_header,
    read_header,
    replace_file,
)

VERSION = 1
MAX_VOCAB_SIZE = 2**16
"""Token files have 16-bit tokens."""
MAX_TOKENS = 2**31 - 1
"""The header counts tokens in an int32."""
_NANOGPT = ". In place of nanoGPT's .bin files, 'gptkernels prepare TEXT -o PREFIX' makes token files from the text"


class TokenFile:
    """The tokens of a file, memory-mapped; `file[start:stop]` is a new int64 array.

    A file without a header is read as the older int32 format if its size is a multiple of 4 and its first 256 values
    are all 0..65535, which text, models, and nanoGPT's raw uint16 files do not satisfy. `DataLoader` checks tokens
    against the vocabulary, because a check here would read the whole file.

    Attributes:
        path: the path of the file.
        dtype: the dtype in which tokens are stored, uint16 or int32.

    Raises:
        ValueError: if the file is not a regular file, or is empty, truncated, of another format or longer than its
            header says; the message names the file and the field.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with open_regular(self.path) as file:
            offset, self.dtype, count = _layout(file, self.path)
        mapped = np.memmap(self.path, self.dtype, mode="r", offset=offset, shape=(count,))
        self._tokens = mapped.view(np.ndarray)  # slicing an ndarray is faster than slicing a memmap

    @property
    def paths(self) -> list[Path]:
        """A list that contains only the path of the file."""
        return [self.path]

    def locate(self, position: int) -> tuple[Path, int]:
        """Return the path and the position; see `TokenFiles.locate`."""
        return self.path, position

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: slice) -> NDArray[np.int64]:
        return self._tokens[index].astype(np.int64)

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, {len(self):,} tokens, {self.dtype})"


def _layout(file: BinaryIO, path: Path) -> tuple[int, np.dtype, int]:
    size = file_size(file)
    if size == 0:
        raise ValueError(f"{path}: the file is empty")
    beginning = file.read(HEADER_BYTES)
    values = np.frombuffer(beginning[: len(beginning) // 4 * 4], "<i4")
    if len(values) == 0 or values[0] != TOKENS_MAGIC:
        _check_headerless(values, size, path)
        return 0, np.dtype("<i4"), size // 4

    file.seek(0)
    count = read_header(file, path, TOKENS_MAGIC, (VERSION,))[2]
    if count <= 0:
        raise ValueError(f"{path}: number of tokens is {count}, must be at least 1")
    wanted = HEADER_BYTES + 2 * count
    if size != wanted:
        fault = "truncated" if size < wanted else "too long"
        raise ValueError(
            f"{path}: {fault}: number of tokens is {count}, which takes {wanted} bytes, the file has {size}"
        )
    return HEADER_BYTES, np.dtype("<u2"), count


def _check_headerless(values: NDArray[np.int32], size: int, path: Path) -> None:
    if size % 4:
        raise ValueError(
            f"{path}: no header, and its size of {size} bytes is not a multiple of 4 (int32 tokens){_NANOGPT}"
        )
    outside = (values < 0) | (values >= MAX_VOCAB_SIZE)
    if outside[0]:
        raise ValueError(
            f"{path}: magic is {describe_magic(int(values[0]))}, not {TOKENS_MAGIC}: neither a token file "
            f"nor header-less int32 tokens (0..{MAX_VOCAB_SIZE - 1}){_NANOGPT}"
        )
    if outside.any():
        position = int(outside.argmax())
        raise ValueError(
            f"{path}: no header, and value {values[position]} at position {position} is no token "
            f"(0..{MAX_VOCAB_SIZE - 1}): not header-less int32 tokens{_NANOGPT}"
        )


def write_tokens(path: str | os.PathLike[str], chunks: Iterable[ArrayLike], vocab_size: int = MAX_VOCAB_SIZE) -> int:
    """Write one-dimensional chunks of integers atomically as a token file; return the number of tokens.

    Raises:
        ValueError: if a token is outside `0..vocab_size-1`, there is no token, or there are more tokens than the header
            can count (2^31 - 1).
    """
    with replace_file(path) as temporary:
        return fill_token_file(temporary, chunks, vocab_size, path)


def fill_token_file(
    temporary: str | os.PathLike[str], chunks: Iterable[ArrayLike], vocab_size: int, path: str | os.PathLike[str]
) -> int:
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size is {vocab_size}: token files hold 16-bit tokens, 1..{MAX_VOCAB_SIZE}")
    count = 0
    with open(temporary, "wb") as file:
        file.write(make_header().data)
        for chunk in chunks:
            tokens = np.asarray(chunk)
            if tokens.size == 0:
                continue
            if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
                raise ValueError(f"{path}: takes 1-d integers, got {tokens.dtype} of shape {tokens.shape}")
            check_vocabulary(tokens, vocab_size, path, count)
            count += len(tokens)
            if count > MAX_TOKENS:
                raise ValueError(f"{path}: more than {MAX_TOKENS} tokens, which the header cannot count")
            file.write(tokens.astype("<u2").data)
        if count == 0:
            raise ValueError(f"{path}: no tokens to write")
        file.seek(0)
        file.write(make_header(TOKENS_MAGIC, VERSION, count).data)
    return count


def check_vocabulary(tokens: NDArray[np.integer], vocab_size: int, path: str | os.PathLike[str], position: int) -> None:
    if (first := find_outside(tokens, vocab_size)) is not None:
        raise ValueError(
            f"{path}: token {tokens[first]} at position {position + first} is outside the vocabulary of {vocab_size}"
        )


def find_outside(tokens: NDArray[np.integer], vocab_size: int) -> int | None:
    if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab_size):
        return int(((tokens < 0) | (tokens >= vocab_size)).argmax())
    return None
