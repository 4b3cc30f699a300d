"""The model of a run. `data_parallel` has its subclasses for several processes."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import distributed

from gptkernels.models import GPT2

Value = TypeVar("Value")


class RunModel:
    """The model of a run in one process, and the base class of those in several processes.

    Attributes:
        module: computes the loss whose backward averages the gradients over the processes.
        no_sync: makes a context in which the backward only adds to this process's gradients, or None.
        is_sharded: whether the processes must call `run` at the same time, and save shards.
        recover: resets the model after an interrupted forward or backward, or None if that needs nothing.
        can_be_captured: whether a CUDA graph can contain a step.
        context_group: the processes that divide the sequences, or None.
    """

    module: torch.nn.Module
    no_sync: Callable[[], AbstractContextManager[object]] | None = None
    recover: Callable[[], object] | None = None
    is_sharded = False
    can_be_captured = True
    context_group: distributed.ProcessGroup | None = None

    def __init__(self, model: GPT2) -> None:
        self.model = self.module = model

    def run(self, function: Callable[[GPT2], Value]) -> Value:
        """Return `function(model)`, which may call parts of the model, and gives it whole sequences."""
        return function(self.model)

    def release(self) -> None:
        """Free what an evaluation has gathered. A CUDA graph of a step assumes that nothing is gathered before it."""


def move(model: GPT2, device: torch.device) -> GPT2:
    """Move a model to a device. The parameters of a model on the meta device get memory, but no values."""
    return model.to_empty(device=device) if model.lm_head.weight.is_meta else model.to(device)
