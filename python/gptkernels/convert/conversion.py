"""Converts a model to another format: `gptkernels convert A B`."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gptkernels.convert.files import read, write
from gptkernels.convert.forms import Form, find, form_to_write
from gptkernels.convert.huggingface import CONFIG, WEIGHTS
from gptkernels.convert.model import WTE, Model, with_zero_biases
from gptkernels.convert.nanogpt import float32_copies

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_LLMC_DTYPES = (torch.float32, torch.bfloat16)
_PADDED, _GPT2_VOCABULARY = 50304, 50257


class Converted(NamedTuple):
    """The result of `convert`.

    Attributes:
        source, target: the formats that were read and written.
        config: the model's sizes.
        dtype: the smallest dtype that represents every written parameter exactly.
        notes: sentences about what the target does not store, and about differences in use.
    """

    source: Form
    target: Form
    config: dict[str, Any]
    dtype: torch.dtype
    notes: tuple[str, ...]


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    vocab_size: int | None = None,
    padded_vocab_size: int | None = None,
    activation: str | None = None,
    bias: bool = False,
    overwrite: bool = False,
) -> Converted:
    """Write the model at `source` as `target`, each parameter with the same value unless `dtype` rounds it.

    Args:
        source: a Hugging Face folder, a nanoGPT checkpoint, a `.bin` of llm.c, a `.safetensors` of this package (a
            model or a training state), or the folder of a run or of nanoGPT.
        target: a `.bin` in llm.c's format, a `.pt` in nanoGPT's, a `.safetensors` in this package's, or, without a
            suffix, a Hugging Face folder.
        dtype: "float32", "bfloat16", "float16" or "float64". For a run with bfloat16 parameters, "float32" writes the
            optimizer's float32 copies. None keeps the dtypes; for a `.bin`, which has one dtype, None chooses float32
            or bfloat16, the smaller one that is exact.
        vocab_size: keep this many rows of the embedding, if the others are padding that the source does not mark.
        padded_vocab_size: Vp of a `.bin`; None rounds V up to a multiple of 128.
        activation: the model's GELU, "gelu_tanh" or "gelu"; None is the source's.
        bias: add biases of 0 to a model without biases, which does not change its results.
        overwrite: replace existing files at `target`, but never the files of the source.

    Raises:
        ValueError: if the source is of an unknown format, damaged, or not a GPT-2 that this package and the target can
            represent; the target exists or is the source; or an option is out of its range.
        OSError: if a file cannot be read or written.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype is {dtype!r}, must be one of {', '.join(DTYPES)}")
    source_form, path = find(source)
    form, output = form_to_write(target), Path(target)
    outputs = [output / CONFIG, output / WEIGHTS] if form is Form.HUGGING_FACE else [output]
    if padded_vocab_size is not None and form is not Form.LLMC:
        raise ValueError(f"--padded-vocab-size is for llm.c's .bin, {target} is {form.value} form")
    if not overwrite and (there := [file for file in outputs if os.path.lexists(file)]):
        raise ValueError(f"{there[0]} exists: --overwrite replaces it")
    model = read(source_form, path, with_progress=form is Form.NANOGPT or dtype == "float32")
    _check_distinct(model.files, outputs)
    model = _adjusted(model, vocab_size, activation, bias)
    _check_holds(form, target, model)
    wanted = DTYPES[dtype] if dtype else _exact_dtype(form, target, model)
    if wanted is not None:
        model = _cast(model, wanted, target, form)
    notes = (*model.notes, *_notes(source_form, form, model))
    write(form, output, model, padded_vocab_size)
    return Converted(source_form, form, model.config, model.dtype, notes)


def _check_distinct(inputs: Sequence[Path], outputs: Sequence[Path]) -> None:
    for output in outputs:
        for file in inputs:
            if output.exists() and os.path.samefile(output, file):
                raise ValueError(f"{output} is what is read: the target must be another file")


def _adjusted(model: Model, vocab_size: int | None, activation: str | None, bias: bool) -> Model:
    config, state, progress = dict(model.config), dict(model.state), model.progress
    if vocab_size is not None:
        if not 1 <= vocab_size <= config["vocab_size"]:
            raise ValueError(f"--vocab-size is {vocab_size}, must be from 1 to the model's {config['vocab_size']}")
        config["vocab_size"] = vocab_size
        state[WTE] = state[WTE][:vocab_size]
    if activation is not None:
        config.pop("activation", None)
        if activation == "gelu":
            config["activation"] = activation
        elif activation != "gelu_tanh":
            raise ValueError(f"--activation is {activation!r}, must be gelu_tanh or gelu")
    if bias and not config["bias"]:
        config["bias"], progress, state = True, None, with_zero_biases(state)
    return dataclasses.replace(model, config=config, state=state, progress=progress)


def _cast(model: Model, dtype: torch.dtype, target: str | os.PathLike[str], form: Form) -> Model:
    if form is Form.LLMC and dtype not in _LLMC_DTYPES:
        raise ValueError(f"{target}: a .bin has float32 or bfloat16, --dtype is {_name(dtype)}")
    exact = float32_copies(model) if dtype == torch.float32 else {}
    state = {name: exact.get(name, tensor).to(dtype) for name, tensor in model.state.items()}
    for name, tensor in state.items():
        if tensor is not model.state[name] and not torch.equal(tensor.isinf(), model.state[name].isinf()):
            raise ValueError(f"{target}: {name} has values beyond {_name(dtype)}'s largest")
    return dataclasses.replace(model, state=state)


def _check_holds(form: Form, target: str | os.PathLike[str], model: Model) -> None:
    if form is not Form.LLMC:
        return
    if not model.config["bias"]:
        raise ValueError(
            f"{target}: llm.c's GPT-2 has biases, this model has none: --bias gives it biases of 0, which compute the "
            "same"
        )
    if model.activation != "gelu_tanh":
        raise ValueError(
            f"{target}: llm.c's GPT-2 has the tanh GELU, this model the exact one: --activation gelu_tanh writes it "
            "with the tanh GELU, and its logits then differ a little"
        )


def _exact_dtype(form: Form, target: str | os.PathLike[str], model: Model) -> torch.dtype | None:
    if form is not Form.LLMC or model.dtype in _LLMC_DTYPES:
        return model.dtype if form is Form.LLMC else None
    if model.dtype == torch.float16:
        return torch.float32
    raise ValueError(f"{target}: a .bin has float32 or bfloat16, the model {_name(model.dtype)}: --dtype rounds it")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _notes(source: Form, target: Form, model: Model) -> list[str]:
    notes = []
    if target is Form.NANOGPT and model.activation != "gelu":
        notes.append(
            "nanoGPT's model.py has the exact GELU, this model the tanh one: logits differ a little unless "
            "nn.GELU() there becomes nn.GELU(approximate='tanh')"
        )
    if target is Form.NANOGPT and model.progress is None:
        notes.append("the optimizer's state is that before the first step")
    if target is not Form.NANOGPT and model.progress is not None:
        notes.append(f"the optimizer's state, after {model.progress.step} steps, is left out")
    if target is Form.HUGGING_FACE and not model.config["bias"]:
        notes.append("Hugging Face's GPT-2 has biases: they are written as 0, which computes the same")
    if source is Form.NANOGPT and model.config["vocab_size"] == _PADDED:
        notes.append(
            f"if {_PADDED} is GPT-2's vocabulary of {_GPT2_VOCABULARY} with padding, --vocab-size {_GPT2_VOCABULARY} "
            "takes the padding off"
        )
    return notes
