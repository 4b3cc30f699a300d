"""The processes that `torchrun` starts: who this one is, and averages over all of them.

Without torchrun there is one process and everything here does nothing.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, distributed

from gptkernels._device import pick_device

Value = TypeVar("Value")


class Processes:
    """This process among those of the run.

    Args:
        device: "auto", or a torch device; "cuda" and "auto" become this process's own GPU.

    Attributes:
        rank: 0..world_size-1.
        world_size: how many processes there are.
        device: where this one computes.

    Raises:
        ValueError: there is no such device.
    """

    def __init__(self, device: str = "auto") -> None:
        self.rank = process_rank()
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.device = pick_device(device, int(os.environ.get("LOCAL_RANK", 0)))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world_size > 1 and not distributed.is_initialized():
            distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return self.rank == 0

    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace every gradient by its mean over the processes: one all-reduce for each dtype."""
        if self.world_size == 1:
            return
        buckets: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            if parameter.grad is not None:
                buckets[parameter.grad.dtype].append(parameter.grad)
        for gradients in buckets.values():
            flat = self.average(torch.cat([gradient.flatten() for gradient in gradients]))
            pieces = flat.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(
                gradients, [piece.view_as(grad) for piece, grad in zip(pieces, gradients, strict=True)]
            )

    def average(self, values: Tensor) -> Tensor:
        """The mean of `values` over the processes, in place."""
        if self.world_size > 1:
            distributed.all_reduce(values)
            values /= self.world_size
        return values

    def from_main(self, value: Value) -> Value:
        """What the main process has as `value`, in every process."""
        if self.world_size == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0)
        return values[0]

    def close(self) -> None:
        """Leave the group."""
        if self.world_size > 1 and distributed.is_initialized():
            distributed.destroy_process_group()


def process_rank() -> int:
    """The number of this process in its run."""
    return int(os.environ.get("RANK", 0))
