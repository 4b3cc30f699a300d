"""The cases that an op's file yields."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Variant = Callable[[], Any]


def as_tuple(result) -> tuple:
    """Wrap a single output in a tuple."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


@dataclass
class Case:
    """One op at one size.

    Args:
        name: the name, e.g. ``"layernorm fwd"``.
        shape: the sizes, for people to read.
        ours: runs our kernel.
        peers: other implementations, with names from ``peers.PEERS``; run only if selected.
        exact: yields ``(i, part, value)``: output ``i`` must equal the float64 ``value`` at ``[part]``.
        bytes: the fewest bytes that must move: each input read once, each output written once.
        flops: floating-point operations, approximate if they do not bound the op.
        look: selects the tensors to check from a variant's result. There may be fewer than ``exact`` has.
        reset: restores what variants overwrite, before each is checked.
        rounded: the dtype with the precision of the products, if it is less than the outputs'.
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
    """The number of bytes of all these tensors."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
