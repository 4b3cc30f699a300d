"""A GPT-2 in memory, which the readers of all formats return and the writers accept."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch

from gptkernels.checkpoint import StateDict, check_model_config, check_parameters

WTE = "transformer.wte.weight"


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a training run. As in nanoGPT, the optimizer's state dict has matrices before vectors."""

    step: int
    optimizer: dict[str, Any]
    best_val_loss: float | None = None


@dataclasses.dataclass(frozen=True)
class Model:
    """A GPT-2 in memory.

    Attributes:
        config: block_size, vocab_size, n_layer, n_head, n_embd, bias, and activation unless it is "gelu_tanh".
        state: the parameters of `gptkernels.checkpoint.parameter_shapes`, with V rows in `wte` and without `lm_head`.
        files: the files from which the model was read.
        notes: sentences about what was not read.
    """

    config: dict[str, Any]
    state: StateDict
    files: tuple[Path, ...]
    dropout: float = 0.0
    progress: Progress | None = None
    notes: tuple[str, ...] = ()

    @property
    def activation(self) -> str:
        return self.config.get("activation", "gelu_tanh")

    @property
    def dtype(self) -> torch.dtype:
        return common_dtype(self.state.values())


def common_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """Return the smallest dtype that represents the values of all these tensors exactly."""
    return functools.reduce(torch.promote_types, {tensor.dtype for tensor in tensors})


def checked_model(
    state: Mapping[str, torch.Tensor], config: Mapping[str, Any], where: str, files: tuple[Path, ...], **more: Any
) -> Model:
    for name, tensor in state.items():
        if not is_dense(tensor):
            raise ValueError(f"{where}: {name[:80]!r} is no dense tensor")
    sizes = check_model_config(config, where)
    parameters = {name: tensor.resolve_neg() for name, tensor in check_parameters(state, sizes, where).items()}
    claimed = sum(tensor.nbytes for tensor in parameters.values())
    if claimed > (stored := sum(file.stat().st_size for file in files)):
        raise ValueError(f"{where}: the parameters take {claimed} bytes, the files have {stored}")
    return Model(sizes, parameters, files, **more)


def is_dense(value: Any) -> TypeGuard[torch.Tensor]:
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_nested
    )


def with_zero_biases(state: StateDict) -> StateDict:
    tensors = dict(state)
    for name, weight in state.items():
        if ".c_" in name or ".ln_" in name:
            tensors[name.removesuffix("weight") + "bias"] = weight.new_zeros(weight.shape[0])
    return tensors
