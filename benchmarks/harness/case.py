"""The cases that an op's file yields."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Variant = Callable[[], Any]


def as_tuple(result) -> tuple:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


@dataclass
class Case:
    """One op at one size.

    Args:
        exact: yields ``(i, part, value)``: ``[part]`` of output ``i`` must be close to the float64 ``value``.
        bytes: the fewest bytes: each input is read once, and each output written once.
        flops: approximate if the op is memory-bound.
        peers: the baselines, by their names in ``peers.PEERS``.
        look: returns the outputs to verify from a variant's result; outputs may be missing at the end.
        reset: restores the tensors that variants overwrite, before each verification.
        rounded: the dtype whose precision the matmuls have, if the outputs have a higher precision.
    """

    name: str
    shape: str
    ours: Variant
    exact: Callable[[], Iterable[tuple[int, Any, Tensor]]]
    bytes: int
    flops: int
    peers: dict[str, Variant] = field(default_factory=dict)
    look: Callable[[Any], tuple] = as_tuple
    reset: Callable[[], None] = lambda: None
    rounded: torch.dtype | None = None


def nbytes(*tensors) -> int:
    return sum(t.nbytes for t in tensors if t is not None)
