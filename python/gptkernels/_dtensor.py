"""Supports DTensors: each process initialises and updates its own part, and norms are those of the whole tensors."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)


class Place(NamedTuple):
    """The distribution of a DTensor over its mesh of devices."""

    mesh: Any
    placements: tuple[Any, ...]


def place_of(t: Any) -> Place | None:
    """Return a DTensor's distribution, with Partial placements replaced by Replicate; None for any other tensor."""
    if type(t) in PLAIN or not hasattr(t, "placements"):
        return None
    if not any(placement.is_partial() for placement in t.placements):
        return Place(t.device_mesh, t.placements)
    from torch.distributed.tensor import Replicate

    return Place(t.device_mesh, tuple(Replicate() if p.is_partial() else p for p in t.placements))


def local(t: Any, place: Place | None) -> Tensor:
    """Redistribute a DTensor to ``place`` if necessary, and return this process's part.

    If ``place`` is None, return the tensor itself.
    """
    if place is None:
        return t
    if (t.device_mesh, t.placements) != place:
        t = t.redistribute(place.mesh, place.placements)
    return t.to_local()


def held(t: Any) -> Tensor:
    return t if place_of(t) is None else t.to_local()


def whole(t: Any) -> Tensor:
    """Gather a whole DTensor in each process; return any other tensor itself."""
    return t if place_of(t) is None else t.full_tensor()


def first_indices(t: Any) -> tuple[int, ...]:
    """Return the index in each dimension at which this process's part of a DTensor begins; zeros for other tensors."""
    if place_of(t) is None:
        return (0,) * t.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)[1])


def norm_of_all(norm: Tensor, place: Place | None) -> Tensor:
    """Compute the norm of whole DTensors from the norm of this process's parts."""
    if place is None or all(placement.is_replicate() for placement in place.placements):
        return norm
    from torch.distributed.tensor import DTensor, Partial, Replicate

    summed = [Replicate() if placement.is_replicate() else Partial("sum") for placement in place.placements]
    square = DTensor.from_local(norm.double().square(), place.mesh, summed, run_check=False)
    return square.full_tensor().sqrt().to(norm.dtype)
