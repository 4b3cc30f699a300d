"""Collectives of torch. Gathers concatenate the first dimension, and reduce-scatters divide it.

A ``start_`` function returns before its result is valid, and ``wait`` makes it valid. Unlike the functions of
``torch.distributed``, these operators can be compiled.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

_collectives = torch.ops._c10d_functional


def start_gather(part: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenate the processes' parts (n, ...) to (R * n, ...) for R processes."""
    return _collectives.all_gather_into_tensor(part.contiguous(), group.size(), group.group_name)  # type: ignore[no-any-return]


def start_reduce_scatter(addend: Tensor, group: ProcessGroup) -> Tensor:
    """Add the processes' addends (R * n, ...), and give each process its part of the sum, (n, ...)."""
    addend = addend.contiguous()
    return _collectives.reduce_scatter_tensor(addend, "sum", group.size(), group.group_name)  # type: ignore[no-any-return]


def wait(result: Tensor) -> Tensor:
    """Make a result valid for later work on the current CUDA stream, or on the CPU, and return it."""
    return _collectives.wait_tensor(result)  # type: ignore[no-any-return]


def gather(part: Tensor, group: ProcessGroup) -> Tensor:
    return wait(start_gather(part, group))


def reduce_scatter(addend: Tensor, group: ProcessGroup) -> Tensor:
    return wait(start_reduce_scatter(addend, group))


def all_reduce(addend: Tensor, group: ProcessGroup) -> Tensor:
    return wait(_collectives.all_reduce(addend, "sum", group.group_name))


def start_all_reduce(addend: Tensor, group: ProcessGroup) -> Tensor:
    """Replace each process's addend, in place, by the sum of all."""
    return _collectives.all_reduce_(addend, "sum", group.group_name)  # type: ignore[no-any-return]


def all_reduce_many(addends: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Add each tensor over the processes, by one all-reduce of all tensors."""
    if not addends:
        return []
    totals = all_reduce(torch.cat([t.flatten() for t in addends]), group).split([t.numel() for t in addends])
    return [total.view_as(t) for total, t in zip(totals, addends, strict=True)]


def refuse_second_derivative(function: str) -> None:
    """Raise an error if the backward is recorded, also if its incoming gradient does not require a gradient."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{function} has no second derivative: call it without create_graph=True")


class Gather(torch.autograd.Function):
    """The processes' parts (n, ...) -> (R * n, ...). The backward adds the processes' gradients, which are partial."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return gather(part, group)

    @staticmethod
    def backward(ctx: Any, dwhole: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(dwhole, ctx.group), None
