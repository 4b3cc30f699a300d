"""The random numbers of the dropouts of a forward pass. Masks are generated from them and never stored.

A model of L layers has 3L + 1 dropouts. One launch draws the numbers of all of them: one seed, and an offset for each.
They come from torch's generator for the device, which CUDA graphs, ``torch.compile`` and activation checkpointing
support.
"""

from typing import Any

from torch import Tensor

from gptkernels import functional
from gptkernels.block.fused import apply_dropout
from gptkernels.block.node import NONE, Dropout
from gptkernels.swapping.checks import dropout_of


class Draws:
    """The random numbers of a forward's dropouts, in the order of the calls.

    Args:
        dropouts: how many there are at most; after that many, new numbers are drawn.
        like: a tensor on the device.
    """

    def __init__(self, dropouts: int, like: Tensor) -> None:
        self._dropouts, self._like = dropouts, like
        self._numbers: tuple[Tensor, ...] | None = None  # the seed and the offsets
        self._taken = 0

    def __call__(self, p: float) -> Dropout:
        """Return the next dropout of probability p. If p is 0, no numbers are drawn."""
        if p == 0:
            return NONE
        if self._numbers is None or self._taken == self._dropouts:
            self._numbers, self._taken = functional._draw_numbers(1 + self._dropouts, self._like), 0
        self._taken += 1
        return Dropout(p, self._numbers[0], self._numbers[self._taken])


def drop(x: Tensor, module: Any, draws: Draws) -> Tensor:
    """Apply a dropout layer, or nothing if ``module`` is None."""
    if module is None:
        return x
    p = dropout_of(module)
    if p is None:
        return module(x)  # type: ignore[no-any-return]
    return apply_dropout(x, draws(p))
