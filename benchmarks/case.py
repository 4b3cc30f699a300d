"""What an op's benchmark file yields."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Case:
    """One op at one size.

    Args:
        name: what is timed, e.g. ``"layernorm fwd"``.
        shape: the sizes, as people write them.
        bytes: the fewest bytes that must move: each input read once, each output written once.
        flops: floating-point operations, for what is bound by them.
        ours: runs our kernel.
        peers: what else computes the same, by name.
    """

    name: str
    shape: str
    ours: Callable[[], object]
    peers: dict[str, Callable[[], object]] = field(default_factory=dict)
    bytes: int = 0
    flops: int = 0


def nbytes(*tensors) -> int:
    """Bytes of all these tensors once."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
