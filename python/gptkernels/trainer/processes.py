"""The processes that `torchrun` starts. Without torchrun there is one process, and nothing is exchanged."""

import os
from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, distributed
from torch.nn.functional import pad

from gptkernels._device import pick_device

Value = TypeVar("Value")


class Processes:
    """The rank and device of this process, and the exchange of values with the other processes.

    If `device` is "cuda", or is "auto" and there are GPUs, each process has its own GPU. If `adds_in_order` is true,
    values are added in the order of the ranks, and otherwise in an order that the backend chooses.
    """

    def __init__(self, device: str = "auto", adds_in_order: bool = False) -> None:
        self._adds_in_order = adds_in_order
        self.rank = process_rank()
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.device = pick_device(device, int(os.environ.get("LOCAL_RANK", 0)))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world_size > 1 and not distributed.is_initialized():
            distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    @property
    def is_main(self) -> bool:
        """The main process writes files and prints."""
        return self.rank == 0

    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
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
        if self.world_size > 1:
            if self._adds_in_order:
                self._add_in_order(values)
            else:
                distributed.all_reduce(values)
            values /= self.world_size
        return values

    def _add_in_order(self, values: Tensor) -> None:
        """Replace values by their sum over the processes.

        Each process adds the shards of one part of the values, and sends the sum to the others. As many bytes are
        exchanged as by a ring all-reduce.
        """
        padded = pad(values.flatten(), (0, -values.numel() % self.world_size))
        shards = torch.empty_like(padded)
        distributed.all_to_all_single(shards, padded)
        first, *others = shards.chunk(self.world_size)
        for shard in others:
            first += shard
        distributed.all_gather_into_tensor(padded, first)
        values.copy_(padded[: values.numel()].view_as(values))

    def from_main(self, value: Value) -> Value:
        if self.world_size == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0)
        return values[0]

    def close(self) -> None:
        if self.world_size > 1 and distributed.is_initialized():
            distributed.destroy_process_group()


def process_rank() -> int:
    return int(os.environ.get("RANK", 0))
