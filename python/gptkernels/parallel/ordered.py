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
    total = padded.new_empty(padded.numel() // size)
    reduce_scatter_in_order(total, padded, group)
    distributed.all_gather_into_tensor(padded, total, group=group)
    values.copy_(padded[: values.numel()].view_as(values))


def reduce_scatter_in_order(total: Tensor, addends: Tensor, group: distributed.ProcessGroup | None = None) -> None:
    """Write this process's part of the sum of all processes' addends (R * n) to total (n), for R processes."""
    parts = torch.empty_like(addends)
    distributed.all_to_all_single(parts, addends, group=group)
    first, *others = parts.chunk(distributed.get_world_size(group))
    total.copy_(first)
    for part in others:
        total += part
