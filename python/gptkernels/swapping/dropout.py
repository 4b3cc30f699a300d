"""What the dropouts of a forward pass drop. Their masks are drawn from numbers; none is stored.

A model has 3L + 1 dropouts, L layers. The numbers of all of them are drawn by one launch: one seed, and an offset each.
They come from torch's generator of the device, so that they are right under CUDA graphs, ``torch.compile`` and
activation checkpointing, which all know it.
"""

from typing import Any

from torch import Tensor

from gptkernels import functional
from gptkernels.block.node import NONE, Dropout
from gptkernels.rules import ops
from gptkernels.swapping.checks import dropout_of


class Draws:
    """The numbers of a forward's dropouts, in the order in which they are asked for.

    Args:
        dropouts: how many there are at most.
        like: a tensor on the device.
    """

    def __init__(self, dropouts: int, like: Tensor) -> None:
        self._dropouts, self._like = dropouts, like
        self._numbers: tuple[Tensor, ...] | None = None  # the seed and the offsets
        self._taken = 0

    def __call__(self, p: float) -> Dropout:
        """The next one. Nothing is drawn for a p of 0."""
        if p == 0:
            return NONE
        if self._numbers is None or self._taken == self._dropouts:
            self._numbers, self._taken = functional._draw_numbers(1 + self._dropouts, self._like), 0
        self._taken += 1
        return Dropout(p, self._numbers[0], self._numbers[self._taken])


def drop(x: Tensor, module: Any, draws: Draws) -> Tensor:
    """A dropout layer; None is none."""
    if module is None:
        return x
    p = dropout_of(module)
    if p is None:
        return module(x)  # type: ignore[no-any-return]
    return apply(x, draws(p))


def apply(x: Tensor, dropout: Dropout) -> Tensor:
    """x with elements dropped."""
    return x if dropout.p == 0 else ops.dropout(x, *dropout)  # type: ignore[no-any-return]
