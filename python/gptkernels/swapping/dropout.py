"""The seeds and offsets of a forward pass's dropouts, from which kernels generate the masks.

One launch draws a seed, and an offset for each of the 3L + 1 dropouts of a model with L layers. The numbers come from
torch's generator for the device, which CUDA graphs, ``torch.compile`` and activation checkpointing support.
"""

from typing import Any

from torch import Tensor

from gptkernels import functional
from gptkernels.block.fused import apply_dropout
from gptkernels.block.node import NONE, Dropout
from gptkernels.swapping.checks import dropout_of


class Draws:
    """Returns the next dropout of a forward pass at each call; one launch draws the numbers of ``dropouts`` of them."""

    def __init__(self, dropouts: int, like: Tensor) -> None:
        self._dropouts, self._like = dropouts, like
        self._numbers: tuple[Tensor, ...] | None = None
        self._taken = 0

    def __call__(self, p: float) -> Dropout:
        if p == 0:
            return NONE
        if self._numbers is None or self._taken == self._dropouts:
            self._numbers, self._taken = functional._draw_numbers(1 + self._dropouts, self._like), 0
        self._taken += 1
        return Dropout(p, self._numbers[0], self._numbers[self._taken])


def drop(x: Tensor, module: Any, draws: Draws) -> Tensor:
    if module is None:
        return x
    p = dropout_of(module)
    if p is None:
        return module(x)  # type: ignore[no-any-return]
    return apply_dropout(x, draws(p))
