"""The model of a run, and its loss in the precision of the options."""

import os
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, distributed

from gptkernels._device import device_memory
from gptkernels.checkpoint import TrainingState
from gptkernels.convert import load
from gptkernels.convert.forms import find
from gptkernels.models import GPT2, GPT2Config
from gptkernels.trainer.config import PRESETS, TrainConfig
from gptkernels.trainer.processes import Processes

CHANNELS_KEPT = 10
"""The channels of a token, divided by C, that a layer keeps at least for the backward pass: two residuals (2), qkv (3),
attention's output (1) and the GELU's input (4)."""
LAYER_BYTES = 30_000
"""The memory of the Python objects of a layer."""


def model_file(path: str | os.PathLike[str]) -> Path:
    return find(path)[1]


def build_model(
    config: TrainConfig, vocab_size: int, saved: TrainingState | None = None, processes: Processes | None = None
) -> GPT2:
    """Build the model of `--init-from` or a new model, on the CPU and in the options' dtype.

    The model of a `saved` state is on the meta device, without values. A ValueError says that `processes`, if given,
    have too little memory to train the model.
    """
    sizes: dict[str, Any] = {
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_embd": config.channels,
        "bias": config.bias,
        "activation": config.activation,
    }
    weights = None
    if saved is not None:
        sizes = saved.config
    elif config.init_from is not None:
        wanted = sizes
        found, weights = load(config.init_from)
        sizes = {"activation": "gelu_tanh", **found}
        _check_same_size(config.init_from, sizes, wanted)
    else:
        positions = PRESETS[config.model].positions or config.sequence_length
        sizes |= {"block_size": positions, "vocab_size": vocab_size}
    if processes is not None:
        _check_memory(config, sizes, processes)
    _check_fits(sizes, config.sequence_length, vocab_size)
    options = {name: getattr(config, name) for name in ("dropout", "fp8", "fp8_head", "fp8_logits")}
    model = GPT2(GPT2Config(**sizes | options), None if saved is weights is None else "meta")
    model.transformer.recompute_blocks = config.recompute == "blocks"
    for block in model.transformer.h:
        cast(Any, block).mlp.recompute_gelu = config.recompute == "gelu"
    if weights is not None:
        model.to_empty(device="cpu").load_state_dict(weights)
    return model.to(torch.bfloat16 if config.dtype == "bfloat16" else torch.float32)


def _check_memory(config: TrainConfig, sizes: dict[str, Any], processes: Processes) -> None:
    """Compare a lower bound of the memory that a process needs with the memory of its device."""
    L, C = sizes["n_layer"], sizes["n_embd"]
    parameters = L * (12 * C * C + 13 * C) + (sizes["vocab_size"] + sizes["block_size"] + 2) * C
    in_layout = processes.world_size // processes.batches  # tp times cp
    parts = processes.world_size if config.shard != "none" else in_layout
    model = parameters * (16 if config.master_weights else 8) / parts + LAYER_BYTES * L
    kept = L * C * (1 if config.recompute == "blocks" else CHANNELS_KEPT)
    item = 4 if config.dtype == "float32" and not config.fp8 else 2
    activations = config.batch_tokens * kept * item / in_layout
    memory = device_memory(processes.device)
    owner = processes.device if processes.device.type == "cuda" else "this machine"
    if model + activations > memory:
        raise ValueError(
            f"--layers {L} and --channels {C} are {parameters:,} parameters, which take {model / 1e9:,.1f} GB in "
            f"training; --batch-size {config.batch_size} times --sequence-length {config.sequence_length} tokens take "
            f"at least {activations / 1e9:,.1f} GB; {owner} has {memory / 1e9:,.1f} GB of memory"
        )


def _check_same_size(path: str, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    sizes = [" ".join(f"{name} {sizes[name]}" for name in wanted) for sizes in (found, wanted)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"--init-from {path} has {sizes[0]}, the options say {sizes[1]}: --model, --layers, --heads, "
            "--channels, --bias and --activation must agree with it"
        )


def _check_fits(sizes: dict[str, Any], sequence_length: int, vocab_size: int) -> None:
    if sequence_length > sizes["block_size"]:
        raise ValueError(f"--sequence-length is {sequence_length}, the model has {sizes['block_size']} positions")
    if vocab_size > sizes["vocab_size"]:
        raise ValueError(f"the data has {vocab_size} different tokens, the model {sizes['vocab_size']}")


class BatchLoss:
    """Computes the loss of a batch in the precision of the options; with `--compile` the model is compiled.

    If `context_group` is given, its processes have the same batch, and each computes its part of the sequences.
    """

    def __init__(
        self, model: torch.nn.Module, config: TrainConfig, context_group: distributed.ProcessGroup | None = None
    ) -> None:
        self._call = torch.compile(model) if config.compile else model
        self._autocasts = config.dtype == "autocast"
        self._context_group = context_group

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss in nats per token, 0-dim float32, of tokens and targets, (B, T) each."""
        if self._context_group is not None:
            from gptkernels.parallel import split_sequence  # imports DTensor, which takes long

            tokens, targets = (split_sequence(t, self._context_group) for t in (tokens, targets))
        with self.precision(tokens.device):
            return self._call(tokens, targets, return_logits=False)[1]

    def precision(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled=self._autocasts)
