"""Checks a checkpoint before a run is resumed from it, because another program may have made or changed the file.

The sizes in the options and the configuration must be those of the file's tensors.
"""

import math
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptkernels import nn
from gptkernels._dtensor import held
from gptkernels.checkpoint import TrainingState, check_model, find_non_finite
from gptkernels.rules.fp8 import is_history
from gptkernels.trainer.config import TrainConfig

_BELOW = 2**62
_SIZES = {"layers": "n_layer", "heads": "n_head", "channels": "n_embd", "bias": "bias", "activation": "activation"}
_MODEL_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("block_size", "vocab_size", "padded_vocab_size", "n_layer", "n_head", "n_embd"), (int,)),
    **dict.fromkeys(("bias", "fp8", "fp8_head", "fp8_logits"), (bool,)),
    "activation": (str,),
    "dropout": (int, float),
}
_INTEGER = "an integer with a magnitude below 2^62"
_DESCRIPTIONS: dict[tuple[type, ...], str] = {
    (int,): _INTEGER,
    (bool,): "True or False",
    (str,): "a string",
    (int, float): f"{_INTEGER} or a finite float",
}


def saved_options(saved: TrainingState, path: Path) -> TrainConfig:
    """Check a checkpoint's options, model, counters and random generators, and return the options.

    The values of tensors on the meta device are not checked.
    """
    options = _check_options(saved.trainer.get("options"), path)
    _check_model(saved, options, path)
    _check_counters(saved.trainer, options, path)
    _check_generators(saved.rng, path)
    if name := find_non_finite(dict(_named_tensors("model", saved.model)) | dict(_named_tensors("", saved.optimizer))):
        raise ValueError(f"{path}: {name} holds NaN or infinity: the run has diverged")
    return options


@contextmanager
def naming(path: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error


def _check_options(options: Any, path: Path) -> TrainConfig:
    where = f"{path}: options: not those of this trainer"
    if not isinstance(options, dict):
        raise ValueError(f"{where}: missing")
    types = typing.get_type_hints(TrainConfig)
    for name, value in options.items():
        if name not in types:
            raise ValueError(f"{where}: {name!r} is unknown")
        wanted = typing.get_args(types[name]) or (types[name],)
        if not _has_type(value, (*wanted, int) if float in wanted else wanted):
            raise ValueError(f"{where}: {name} is {_shown(value)}, must be {types[name]}")
    try:
        return TrainConfig(**options)
    except ValueError as error:
        raise ValueError(f"{path}: options: {error}") from error


def _has_type(value: Any, wanted: tuple[type, ...]) -> bool:
    if type(value) not in wanted:
        return False
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is not int or abs(value) < _BELOW


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _check_model(saved: TrainingState, options: TrainConfig, path: Path) -> None:
    config = saved.config
    for name, wanted in _MODEL_TYPES.items():
        if name in config and not _has_type(config[name], wanted):
            raise ValueError(f"{path}: config: {name} is {_shown(config[name])}, must be {_DESCRIPTIONS[wanted]}")
    if unknown := config.keys() - _MODEL_TYPES.keys():
        raise ValueError(f"{path}: config: {min(map(repr, unknown))} is unknown")
    sizes = {"activation": "gelu_tanh", **check_model(saved.model, config, str(path))}
    for option, name in _SIZES.items():
        if getattr(options, option) != sizes[name]:
            raise ValueError(
                f"{path}: options: {option} is {getattr(options, option)}, but the model has {name} {sizes[name]}"
            )
    for name, tensor in saved.model.items():
        if name.endswith(nn.Linear.HISTORIES):
            continue
        if tensor.dtype != (torch.bfloat16 if options.dtype == "bfloat16" else torch.float32):
            raise ValueError(f"{path}: {name} is of {tensor.dtype}, but the options say {options.dtype}")
        if name.endswith("wte.weight") and len(tensor) != config.get("padded_vocab_size", len(tensor)):
            raise ValueError(
                f"{path}: {name} has {len(tensor)} rows, but padded_vocab_size is {config['padded_vocab_size']}"
            )


def _check_counters(trainer: Mapping[str, Any], options: TrainConfig, path: Path) -> None:
    step, data = trainer.get("step"), trainer.get("data")
    if type(step) is not int or not 0 <= step < _BELOW:
        raise ValueError(f"{path}: step is {_shown(step)}, must be an integer in 0..2^62-1")
    if not isinstance(data, dict):
        raise ValueError(f"{path}: data is {_shown(data)}, must say where the data loader stands")
    expected = {
        "seed": options.seed,
        "shuffle": True,
        "sequence_length": options.sequence_length,
        "random_offsets": options.sampling == "random-offset",
    }
    for name, wanted in expected.items():
        if name in data and (type(data[name]) is not type(wanted) or data[name] != wanted):
            raise ValueError(f"{path}: data: {name} is {_shown(data[name])}, but the options say {wanted}")
    if not isinstance(trainer.get("fingerprint"), str):
        raise ValueError(f"{path}: fingerprint is {_shown(trainer.get('fingerprint'))}, must be that of the data")


def _check_generators(rng: Mapping[str, Any], path: Path) -> None:
    cpu, cuda = rng.get("cpu"), rng.get("cuda")
    if not isinstance(cuda, list) or not all(isinstance(state, Tensor) for state in [cpu, *cuda]):
        raise ValueError(f"{path}: rng: must have the states of torch's generators, cpu and cuda")
    if any(state.dtype != torch.uint8 or state.dim() != 1 for state in [cpu, *cuda]):
        raise ValueError(f"{path}: rng: the state of a generator must be bytes")


def check_optimizer(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, step: int, path: Path) -> None:
    wanted = optimizer.state_dict()["param_groups"]
    groups, states = saved.get("param_groups"), saved.get("state")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ValueError(f"{path}: optimizer: param_groups must be a list of groups")
    if [group.get("params") for group in groups] != [group["params"] for group in wanted]:
        raise ValueError(f"{path}: optimizer: the groups' parameters are not those of this model")
    parameters = [
        (parameter, group["master_weights"]) for group in optimizer.param_groups for parameter in group["params"]
    ]
    if not isinstance(states, dict) or states.keys() != (set(range(len(parameters))) if step else set()):
        raise ValueError(f"{path}: optimizer: state must have an entry for each of {len(parameters)} parameters")
    for i, state in states.items():
        _check_parameter_state(state, *parameters[i], f"{path}: optimizer: state {i}")


def _check_parameter_state(state: Any, parameter: Tensor, has_masters: bool, where: str) -> None:
    dtype = torch.float32 if has_masters else parameter.dtype
    wanted = {"step": (torch.Size(), torch.float32)} | dict.fromkeys(
        ("exp_avg", "exp_avg_sq"), (parameter.shape, dtype)
    )
    if has_masters and parameter.dtype == torch.bfloat16:
        wanted["master_param"] = (parameter.shape, dtype)
    if not isinstance(state, dict) or state.keys() != wanted.keys():
        raise ValueError(f"{where} must have {', '.join(wanted)}")
    for name, (shape, dtype) in wanted.items():
        tensor = state[name]
        if len(shape) > 2 and isinstance(tensor, Tensor):  # a tensor-parallel model has more dimensions than the file
            shape = tensor.shape if tensor.numel() == shape.numel() else shape
        if not isinstance(tensor, Tensor) or tensor.shape != shape or tensor.dtype != dtype:
            described = str(dtype).removeprefix("torch.")
            raise ValueError(f"{where}: {name} must be a {described} tensor of shape {tuple(shape)}")


def check_values(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Check the values that a checkpoint has given this process's parts of a model and an optimizer."""
    for name, buffer in model.named_buffers():
        if name.endswith(nn.Linear.HISTORIES) and not is_history(buffer):
            raise ValueError(f"{path}: {name} is no history of magnitudes")
    for i, state in optimizer.state_dict()["state"].items():
        if state["step"] < 1:
            raise ValueError(f"{path}: optimizer: state {i}: step is {state['step'].item()}, must be at least 1")
        if (held(state["exp_avg_sq"]) < 0).any():
            raise ValueError(f"{path}: optimizer: state {i}: exp_avg_sq is negative somewhere")


def _named_tensors(where: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and not value.is_meta:
            yield where, value
        return
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, entry in entries:
        yield from _named_tensors(f"{where}/{name}", entry)
