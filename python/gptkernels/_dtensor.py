"""DTensors in the optimizer: each process works on the part that it holds, and norms are of all parts.

Nothing here imports ``torch.distributed.tensor``: where there are no DTensors it need not be loaded.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)


class Place(NamedTuple):
    """How a DTensor lies on its mesh of devices. Equal for tensors that are split in the same way."""

    mesh: Any
    placements: tuple[Any, ...]


def place_of(t: Any) -> Place | None:
    """Where a DTensor's parts are; None for any other tensor. A sum that is yet to be made is in each process."""
    if type(t) in PLAIN or not hasattr(t, "placements"):
        return None
    if not any(placement.is_partial() for placement in t.placements):
        return Place(t.device_mesh, t.placements)
    from torch.distributed.tensor import Replicate

    return Place(t.device_mesh, tuple(Replicate() if p.is_partial() else p for p in t.placements))


def local(t: Any, place: Place | None) -> Tensor:
    """This process's part of the tensor as it lies, or is made to lie, in that place; a plain tensor itself."""
    if place is None:
        return t
    if (t.device_mesh, t.placements) != place:
        t = t.redistribute(place.mesh, place.placements)
    return t.to_local()


def held(t: Any) -> Tensor:
    """What this process holds of a DTensor, whatever that is of the whole; a plain tensor itself."""
    return t if place_of(t) is None else t.to_local()


def norm_of_all(norm: Tensor, place: Place | None) -> Tensor:
    """The norm of whole tensors, from the norm of this process's parts of them, 0-dim float32."""
    if place is None or all(placement.is_replicate() for placement in place.placements):
        return norm
    from torch.distributed.tensor import DTensor, Partial, Replicate

    summed = [Replicate() if placement.is_replicate() else Partial("sum") for placement in place.placements]
    square = DTensor.from_local(norm.double().square(), place.mesh, summed, run_check=False)
    return square.full_tensor().sqrt().to(norm.dtype)
