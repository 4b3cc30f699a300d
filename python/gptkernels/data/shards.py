"""Several token files used as one, given by a pattern such as `fineweb_train_*.bin`."""

import glob
import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .tokens import TokenFile

_WILDCARDS = frozenset("*?[")


class TokenFiles:
    """The tokens of several files, concatenated and memory-mapped; it is sliced like a `TokenFile`.

    ``files`` has a `TokenFile` for each path. A ValueError says that there is no path, or that a file is damaged or of
    another format.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        if not paths:
            raise ValueError("no token files")
        self.files = [TokenFile(path) for path in paths]
        self._starts = [0, *accumulate(map(len, self.files))]
        first, last = self.files[0].path, self.files[-1].path
        self.path = Path(f"{first} ... {last.name}" if len(paths) > 1 else first)

    @property
    def paths(self) -> list[Path]:
        """The paths of the files."""
        return [file.path for file in self.files]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: slice) -> NDArray[np.int64]:
        start, stop, _ = index.indices(len(self))
        first = self._file_of(start)
        if stop <= self._starts[first + 1]:
            return self.files[first][start - self._starts[first] : max(stop, start) - self._starts[first]]
        last = self._file_of(stop - 1)
        parts = [
            self.files[i][max(0, start - self._starts[i]) : stop - self._starts[i]] for i in range(first, last + 1)
        ]
        return np.concatenate(parts)

    def locate(self, position: int) -> tuple[Path, int]:
        """Return the file that contains the token at ``position``, and the token's position in this file."""
        i = self._file_of(position)
        return self.files[i].path, position - self._starts[i]

    def _file_of(self, position: int) -> int:
        return min(bisect_right(self._starts, position), len(self.files)) - 1

    def __repr__(self) -> str:
        return f"TokenFiles({len(self.files)} files from {str(self.files[0].path)!r}, {len(self):,} tokens)"


def is_pattern(name: str) -> bool:
    """Return whether a name contains one of the shell's wildcards."""
    return not _WILDCARDS.isdisjoint(name)


def find_files(pattern: str) -> list[Path]:
    """Return the files that match a pattern, sorted. If there is a file named `pattern`, return only this file.

    A ValueError says that no file was found.
    """
    if os.path.exists(pattern):
        return [Path(pattern)]
    found = sorted(glob.glob(pattern))
    if not found:
        raise ValueError(f"no file {'matches' if is_pattern(pattern) else 'is called'} {pattern}")
    return [Path(path) for path in found]
