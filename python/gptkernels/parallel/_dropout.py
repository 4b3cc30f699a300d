"""Dropout of the rows of the residual stream that a process has, with the mask of all rows (``docs/dropout.md``)."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gptkernels.block.node import Dropout
from gptkernels.rules import ops


class RowDropout(NamedTuple):
    """A dropout of rows (n, C). They consist of ranges; the rows of a range are consecutive in the whole tensor, too.

    first_indices are the flat indices in the whole tensor of the ranges' first elements. sizes are the ranges' numbers
    of rows, if there are several ranges.
    """

    p: float = 0.0
    seed: Tensor | None = None
    offset: Tensor | None = None
    first_indices: Sequence[int] = (0,)
    sizes: Sequence[int] = ()

    def by_range(self, *tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
        """Yield for each range the rows of each tensor (n, ...), or None for None, and the range's first index."""
        count = len(self.first_indices)
        parts = [(t,) * count if t is None or count == 1 else t.split(self.sizes) for t in tensors]  # type: ignore[arg-type]
        return zip(*parts, self.first_indices, strict=True)


def join(parts: Sequence[Any]) -> Any:
    """Concatenate the rows of all ranges; None if they are None."""
    return parts[0] if parts[0] is None or len(parts) == 1 else torch.cat([*parts])


def place(dropout: Dropout, rows: Tensor, first: int, tokens: int, group: ProcessGroup | None) -> RowDropout:
    """Return the part of a dropout of the whole tensor that belongs to the rows of a process.

    Args:
        dropout: the dropout of the whole tensor.
        rows: (n, C), a part of the rows of B sequences.
        first: the index of its first row among the rows of these sequences.
        tokens: the number of rows of a sequence.
        group: the ranks that divide the sequences, of which this one has ``tokens`` tokens each; None if they are not
            divided.
    """
    if not dropout.p:
        return RowDropout()
    C, end = rows.shape[1], first + rows.shape[0]
    if group is None:
        return RowDropout(*dropout, (first * C,))
    length, last = tokens // 2, 2 * group.size() - 1
    chunks, first_indices, sizes = (group.rank(), last - group.rank()), [], []
    while first < end:
        half, row = divmod(first, length)
        chunk = half // 2 * (last + 1) + chunks[half % 2]  # among the chunks of all sequences
        first_indices.append((chunk * length + row) * C)
        sizes.append(min(length - row, end - first))
        first += sizes[-1]
    return RowDropout(*dropout, first_indices, sizes)


def drop_rows(rows: Tensor, dropout: RowDropout) -> Tensor:
    if not dropout.p:
        return rows
    return join([ops.dropout.default(part, *dropout[:3], first) for part, first in dropout.by_range(rows)])  # type: ignore[no-any-return]
