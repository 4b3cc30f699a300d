"""Reads and writes a model in any of the formats of `Form`."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gptkernels.checkpoint import (
    StateDict,
    check_model_config,
    check_parameters,
    load_model,
    load_training_state,
    save_model,
)
from gptkernels.convert.forms import Form, find
from gptkernels.convert.huggingface import read_huggingface, write_huggingface
from gptkernels.convert.model import WTE, Model, Progress, checked_model
from gptkernels.convert.nanogpt import has_moments, read_nanogpt, write_nanogpt
from gptkernels.files.safetensors import open_safetensors

_LM_HEAD = "lm_head.weight"


def load(path: str | os.PathLike[str]) -> tuple[dict[str, Any], StateDict]:
    """Read a model in any of the formats of `Form`.

    Args:
        path: a Hugging Face folder, a nanoGPT checkpoint, a `.bin` of llm.c, a `.safetensors` of this package, or the
            folder of a run or of nanoGPT.

    Returns:
        The configuration and the state dict, as `gptkernels.checkpoint.load_model` returns them.

    Raises:
        ValueError: if the format is unknown, or the file is damaged or describes a model that this GPT-2 cannot
            represent; the message names the file and the field.
        OSError: if a file cannot be read.
    """
    model = read(*find(path))
    return model.config, {**model.state, _LM_HEAD: model.state[WTE]}


def read(form: Form, path: Path, *, with_progress: bool = False) -> Model:
    if form is Form.HUGGING_FACE:
        return read_huggingface(path)
    if form is Form.NANOGPT:
        return read_nanogpt(path)
    config, state = load_model(path)
    if form is Form.LLMC:
        return checked_model(state, config, str(path), (path,))
    with open_safetensors(path, "model", "training", "sharded") as file:
        model = checked_model(state, config, str(path), tuple(file.files()))
        is_model = file.metadata["kind"] == "gptkernels.model"
    return _with_progress(model, path) if with_progress and not is_model else model


def _with_progress(model: Model, path: Path) -> Model:
    saved = load_training_state(path)
    model = dataclasses.replace(model, dropout=_dropout(saved.config))
    step = saved.trainer.get("step")
    if type(step) is not int or step < 0 or not has_moments(saved.optimizer, model):
        notes = ("the state of its optimizer is not AdamW's for this model: it is left out",)
        return dataclasses.replace(model, notes=notes)
    if not saved.optimizer["state"]:
        return model
    return dataclasses.replace(model, progress=Progress(step, saved.optimizer))


def _dropout(config: dict[str, Any]) -> float:
    dropout = config.get("dropout", 0.0)
    return float(dropout) if type(dropout) in (int, float) and 0 <= dropout <= 1 else 0.0


def write(form: Form, path: Path, model: Model, padded_vocab_size: int | None = None) -> None:
    if form is Form.HUGGING_FACE:
        write_huggingface(path, model)
    elif form is Form.NANOGPT:
        write_nanogpt(path, model)
    else:
        save_model(path, model.state, model.config, padded_vocab_size=padded_vocab_size)


def of_state_dict(state: Mapping[str, Tensor], config: Mapping[str, Any], where: str) -> Model:
    sizes = check_model_config(config, where)
    return Model(sizes, check_parameters(state, sizes, where), (), config["dropout"])
