"""Sums over processes in the order of their ranks. Their bits do not depend on the backend and its algorithms."""

import torch
from torch import Tensor, distributed
from torch.nn.functional import pad


def all_reduce_in_order(values: Tensor, group: distributed.ProcessGroup | None = None) -> None:
    """Replace values, of any shape, by their sum over the processes of a group (None: all processes).

    Each process adds one part of the values of all processes, and sends the sum to the others. As many bytes are
    exchanged as by a ring all-reduce. The memory of two more copies of the values is needed. Each addition is rounded
    to the values' dtype, as in gradient accumulation.
    """
    size = distributed.get_world_size(group)
    padded = pad(values.flatten(), (0, -values.numel() % size))
    parts = torch.empty_like(padded)
    distributed.all_to_all_single(parts, padded, group=group)
    first, *others = parts.chunk(size)
    for part in others:
        first += part
    distributed.all_gather_into_tensor(padded, first, group=group)
    values.copy_(padded[: values.numel()].view_as(values))
