"""What an op's file yields."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Variant = Callable[[], Any]


def as_tuple(result) -> tuple:
    """One output or several, as several."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


@dataclass
class Case:
    """One op at one size.

    Args:
        name: what is timed, e.g. ``"layernorm fwd"``.
        shape: the sizes, as people write them.
        ours: runs our kernel.
        peers: what else computes the same, under the names of ``peers.PEERS``; run only when asked for.
        exact: yields ``(i, part, value)``: what output ``i`` must hold at ``[part]``, in float64.
        bytes: the fewest that must move: each input read once, each output written once.
        flops: floating-point operations, roughly where they are not what bounds the op.
        look: the tensors to check, from what a variant returns. A variant may return fewer than ``exact`` knows.
        reset: puts back what variants write in place, before each is checked.
        rounded: the dtype to whose precision products are rounded, where that is less than the outputs'.
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
    """Bytes of all these tensors once."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
