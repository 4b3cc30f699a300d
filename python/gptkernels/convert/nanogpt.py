"""Reads and writes nanoGPT's `ckpt.pt`, a dict of model, optimizer, model_args, iter_num, best_val_loss and config."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gptkernels.checkpoint import parameter_shapes
from gptkernels.convert.model import WTE, Model, Progress, checked_model, is_dense
from gptkernels.convert.pickles import read_pickle, write_pickle

COMPILED = "_orig_mod."
"""The prefix of every name in a model compiled by torch.compile."""
_SIZES = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")
_NO_LOSS = 1e9
# The options of nanoGPT's torch.optim.AdamW. Its constructor would import torch._dynamo, which takes seconds.
_ADAMW = {
    "lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False,
    "foreach": None, "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True,
}  # fmt: skip
_HEAD = "lm_head.weight"


def read_nanogpt(path: Path) -> Model:
    """Read a checkpoint.

    The model has the exact GELU, unless the checkpoint's `config` has the entry `activation` that `write_nanogpt` adds.
    """
    checkpoint = read_pickle(path)
    entries = {}
    for name in ("model", "model_args"):
        entry = checkpoint.get(name) if isinstance(checkpoint, dict) else None
        if not isinstance(entry, Mapping) or not all(isinstance(key, str) for key in entry):
            raise ValueError(
                f"{path}: no nanoGPT checkpoint: it has no {name!r} with names (a Hugging Face model is named by its "
                "folder)"
            )
        entries[name] = dict(entry)
    arguments, where = entries["model_args"], str(path)
    if unknown := arguments.keys() - {*_SIZES, "dropout"}:
        raise ValueError(f"{path}: model_args: {min(unknown)[:80]!r} is unknown: no GPT-2 here has it")
    config = {"bias": True, **arguments, "activation": "gelu"}
    own = checkpoint.get("config")
    if isinstance(own, dict) and isinstance(own.get("activation"), str):
        config["activation"] = own["activation"][:80]
    state = {name.removeprefix(COMPILED): tensor for name, tensor in entries["model"].items()}
    if len(state) != len(entries["model"]):
        raise ValueError(f"{path}: model: it has parameters both with and without {COMPILED!r}")
    model = checked_model(state, config, where, (path,), dropout=_dropout(arguments, where))
    return dataclasses.replace(model, **_progress(checkpoint, model))


def _dropout(arguments: Mapping[str, Any], where: str) -> float:
    dropout = arguments.get("dropout", 0.0)
    if type(dropout) not in (int, float) or not 0 <= dropout <= 1:
        shown = dropout if type(dropout) in (int, float) else type(dropout).__name__
        raise ValueError(f"{where}: model_args: dropout is {shown}, must be from 0 to 1")
    return float(dropout)


def _progress(checkpoint: Mapping[str, Any], model: Model) -> dict[str, Any]:
    if "optimizer" not in checkpoint:
        return {}
    step, optimizer = checkpoint.get("iter_num"), checkpoint["optimizer"]
    if type(step) is not int or step < 0 or not isinstance(optimizer, dict) or not has_moments(optimizer, model):
        return {"notes": ("the state of its optimizer is not AdamW's for this model: it is left out",)}
    if not optimizer["state"]:
        return {}
    return {"progress": Progress(step, optimizer, _finite(checkpoint.get("best_val_loss")))}


def _finite(loss: Any) -> float | None:
    """Return a loss as a float, or None for nanoGPT's initial value (1e9) and for what is not a finite number."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        loss = loss.item()
    known = type(loss) in (int, float) and math.isfinite(loss) and loss < _NO_LOSS
    return float(loss) if known else None


def has_moments(optimizer: Any, model: Model) -> bool:
    """Return whether `optimizer` is a state dict of AdamW for a group of the model's matrices and a group of vectors.

    The moments of `wte` may have more rows than the model's `wte`.
    """
    if not isinstance(optimizer, dict):
        return False
    groups, states = optimizer.get("param_groups"), optimizer.get("state")
    parameters = [model.state[name] for name in _optimizer_order(model)]
    matrices = sum(parameter.dim() >= 2 for parameter in parameters)
    wanted = [[*range(matrices)], [*range(matrices, len(parameters))]]
    if not isinstance(groups, list) or not isinstance(states, dict) or len(groups) != len(wanted):
        return False
    if not all(_has_parameters(group, numbers) for group, numbers in zip(groups, wanted, strict=True)):
        return False
    if not states:
        return True
    return states.keys() == set(range(len(parameters))) and all(
        _has_moments(states[i], parameter.shape, more_rows=i == 0) for i, parameter in enumerate(parameters)
    )


def _has_parameters(group: Any, numbers: list[int]) -> bool:
    named = group.get("params") if isinstance(group, dict) else None
    return isinstance(named, list) and all(type(number) is int for number in named) and named == numbers


def _has_moments(state: Any, shape: torch.Size, more_rows: bool) -> bool:
    if not isinstance(state, dict):
        return False
    step = state.get("step")
    if not is_dense(step) or step.numel() != 1:
        return False
    for name in ("exp_avg", "exp_avg_sq"):
        moment = state.get(name)
        if not is_dense(moment) or not moment.is_floating_point() or moment.dim() != len(shape):
            return False
        if moment.shape[1:] != shape[1:] or not (moment.shape == shape or (more_rows and len(moment) > shape[0])):
            return False
    return True


def float32_copies(model: Model) -> dict[str, torch.Tensor]:
    if model.progress is None:
        return {}
    states = model.progress.optimizer["state"]
    copies = {}
    for i, name in enumerate(_optimizer_order(model)):
        copy, parameter = states[i].get("master_param"), model.state[name]
        if is_dense(copy) and copy.dtype == torch.float32 and copy.dim() == parameter.dim():
            copy = copy[: len(parameter)]
            if copy.shape == parameter.shape:
                copies[name] = copy
    return copies


def _module_order(config: Mapping[str, Any]) -> list[str]:
    names = [*parameter_shapes(config)]
    layers = [name for name in names if name.startswith("transformer.h.")]
    rank = {name: i for i, name in enumerate(names)}
    layers.sort(key=lambda name: (int(name.split(".")[2]), rank[name]))
    first, last = names[: names.index(layers[0])], names[names.index(layers[0]) + len(layers) :]
    return first + layers + last


def _optimizer_order(model: Model) -> list[str]:
    names = _module_order(model.config)
    return sorted(names, key=lambda name: model.state[name].dim() < 2)


def write_nanogpt(path: Path, model: Model) -> None:
    state = {name: model.state[name] for name in _module_order(model.config)}
    progress = model.progress
    write_pickle(
        path,
        {
            "model": {**state, _HEAD: state[WTE]},
            "optimizer": _torch_optimizer(model),
            "model_args": {**{name: model.config[name] for name in _SIZES}, "dropout": model.dropout},
            "iter_num": progress.step if progress else 0,
            "best_val_loss": _NO_LOSS if progress is None or progress.best_val_loss is None else progress.best_val_loss,
            "config": {"activation": model.activation},
        },
    )


def _torch_optimizer(model: Model) -> dict[str, Any]:
    names = _optimizer_order(model)
    matrices = sum(model.state[name].dim() >= 2 for name in names)
    groups = [
        {**_ADAMW, "weight_decay": 0.1, "params": [*range(matrices)]},
        {**_ADAMW, "weight_decay": 0.0, "params": [*range(matrices, len(names))]},
    ]
    if model.progress is None:
        return {"state": {}, "param_groups": groups}
    saved = model.progress.optimizer
    for group, old in zip(groups, saved["param_groups"], strict=True):
        group |= {name: old[name] for name in ("lr", "betas", "eps", "weight_decay") if name in old}
    rows = model.config["vocab_size"]
    states = {
        i: {name: _rows(state[name], rows if i == 0 else None) for name in ("step", "exp_avg", "exp_avg_sq")}
        for i, state in saved["state"].items()
    }
    return {"state": states, "param_groups": groups}


def _rows(tensor: torch.Tensor, rows: int | None) -> torch.Tensor:
    return tensor if rows is None or tensor.dim() == 0 else tensor[:rows].clone()
