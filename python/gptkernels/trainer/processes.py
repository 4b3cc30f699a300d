"""The processes that `torchrun` starts: the rank of this process, and averages over all of them.

Without torchrun there is one process, and the functions here do nothing.
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
    """This process among the processes of the run.

    Args:
        device: "auto", or a torch device; "cuda" and "auto" become this process's own GPU.

    Attributes:
        rank: the rank, 0..world_size-1.
        world_size: the number of processes.
        device: the device of this process.

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
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace every gradient by its mean over the processes, with one all-reduce for each dtype."""
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
        """Replace `values` by their mean over the processes."""
        if self.world_size > 1:
            distributed.all_reduce(values)
            values /= self.world_size
        return values

    def from_main(self, value: Value) -> Value:
        """Return the main process's `value` in every process."""
        if self.world_size == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0)
        return values[0]

    def close(self) -> None:
        """Leave the process group."""
        if self.world_size > 1 and distributed.is_initialized():
            distributed.destroy_process_group()


def process_rank() -> int:
    """Return the rank of this process."""
    return int(os.environ.get("RANK", 0))
