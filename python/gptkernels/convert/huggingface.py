"""Reads and writes Hugging Face's GPT-2, a folder with `config.json` and the weights."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gptkernels.checkpoint import from_huggingface, to_huggingface
from gptkernels.convert.model import Model, checked_model, with_zero_biases
from gptkernels.convert.pickles import read_pickle
from gptkernels.files.regular import open_regular
from gptkernels.files.safetensors import write_plain_safetensors
from gptkernels.files.writing import file_size, replace_file

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PICKLE = "pytorch_model.bin"
INDEX = ".index.json"
_LARGEST_JSON = 64 << 20

_SIZES = {
    "n_positions": "block_size",
    "vocab_size": "vocab_size",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
}
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
# The only values that this GPT-2 supports. They are also Hugging Face's defaults for missing entries.
_FIXED = {
    "model_type": "gpt2",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "tie_word_embeddings": True,
}
_ABSENT = ("quantization_config", "pruned_heads")
_END_OF_TEXT = 50256
_GPT2_VOCABULARY = 50257


def is_huggingface(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def read_huggingface(folder: Path) -> Model:
    path = folder / CONFIG
    theirs = _read_json(path)
    config = _config(theirs, path)
    tensors, files = _read_weights(folder)
    for name, tensor in tensors.items():
        if name.endswith("weight") and ".c_" in name and tensor.dim() != 2:
            raise ValueError(f"{folder}: {name[:80]} has shape {tuple(tensor.shape)}, must have two dimensions")
    state = from_huggingface(tensors)
    if not config["bias"]:  # another program may have trained the biases since they were written as 0
        config["bias"] = any(bool(tensor.any()) for name, tensor in state.items() if name.endswith(".bias"))
    if not config["bias"]:
        state = {name: tensor for name, tensor in state.items() if not name.endswith(".bias")}
    dropouts = {theirs.get(name, 0.1) for name in _DROPOUTS}
    dropout = dropouts.pop() if len(dropouts) == 1 else None
    notes = () if dropout is not None else (f"{', '.join(_DROPOUTS)} differ: dropout is taken as 0",)
    return checked_model(state, config, str(folder), (path, *files), dropout=float(dropout or 0), notes=notes)


def _read_json(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        if (size := file_size(file)) > _LARGEST_JSON:
            raise ValueError(f"{path}: {size} bytes, which is too large to be what its name says")
        data = file.read()
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {type(value).__name__} instead of an object")
    return value


def _config(theirs: Mapping[str, Any], path: Path) -> dict[str, Any]:
    for name, wanted in _FIXED.items():
        value = theirs.get(name, wanted)
        if type(value) not in (bool, int, float, str) or value != wanted:
            raise ValueError(f"{path}: {name} is {_shown(value)}, a GPT-2 here has {wanted!r}")
    for name in _ABSENT:
        if theirs.get(name):
            raise ValueError(f"{path}: {name} is set, a GPT-2 here has none")
    activation = theirs.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ValueError(f"{path}: activation_function is {_shown(activation)}, a GPT-2 here has one of {known}")
    config = {ours: theirs.get(name) for name, ours in _SIZES.items()}
    if missing := [name for name in _SIZES if name not in theirs]:
        raise ValueError(f"{path}: {missing[0]} is missing")
    inner, width = theirs.get("n_inner"), config["n_embd"]
    if inner is not None and (type(width) is not int or inner != 4 * width):
        raise ValueError(f"{path}: n_inner is {_shown(inner)}, a GPT-2 here has 4 n_embd")
    for name in _DROPOUTS:
        value = theirs.get(name, 0.1)
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise ValueError(f"{path}: {name} is {_shown(value)}, must be from 0 to 1")
    return {**config, "bias": theirs.get("bias") is not False, "activation": _ACTIVATIONS[activation]}


def _shown(value: Any) -> str:
    return repr(value)[:80] if isinstance(value, bool | int | float | str | None) else f"a {type(value).__name__}"


def _read_weights(folder: Path) -> tuple[dict[str, torch.Tensor], list[Path]]:
    for name in (WEIGHTS, WEIGHTS + INDEX, PICKLE, PICKLE + INDEX):
        path = folder / name
        if not path.exists():
            continue
        read = _read_safetensors if WEIGHTS in name else _read_state_dict
        if not name.endswith(INDEX):
            return read(path), [path]
        tensors: dict[str, torch.Tensor] = {}
        shards = _shards(path)
        for shard, names in shards.items():
            found = read(folder / shard)
            if missing := names - found.keys():
                raise ValueError(f"{folder / shard}: {min(missing)[:80]!r} is missing, which {path.name} says is there")
            tensors |= {name: found[name] for name in names}
        return tensors, [path, *(folder / shard for shard in shards)]
    raise ValueError(f"{folder}: has {CONFIG}, but no {WEIGHTS} or {PICKLE}, whole or in shards")


def _shards(index: Path) -> dict[str, set[str]]:
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index}: weight_map is missing: it says in which file each tensor is")
    shards: dict[str, set[str]] = {}
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise ValueError(f"{index}: weight_map: {_shown(file)} is no name of a file in this folder")
        shards.setdefault(file, set()).add(name)
    return shards


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with open_regular(path), safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is not a dict
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file: {error}") from error


def _read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    state = read_pickle(path)
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in state.items()
    ):
        raise ValueError(f"{path}: no state dict: it holds more than names and tensors")
    return dict(state)


def write_huggingface(folder: Path, model: Model) -> None:
    """Write `config.json` and `model.safetensors`, each atomically, and replace existing ones.

    Hugging Face's GPT-2 always has biases: for a model without biases, biases of 0 are written, which
    `read_huggingface` removes because of `"bias": false`.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, must be a folder")
    weights = folder / WEIGHTS
    tensors = to_huggingface(model.state if model.config["bias"] else with_zero_biases(model.state))
    with _removed_if_empty(folder), replace_file(folder / CONFIG) as config, replace_file(weights) as temporary:
        write_plain_safetensors(temporary, weights, tensors)
        config.write_text(json.dumps(_their_config(model), indent=2, sort_keys=True) + "\n")


@contextmanager
def _removed_if_empty(folder: Path) -> Iterator[None]:
    existed = folder.exists()
    try:
        yield
    except BaseException:
        if not existed and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        raise


def _their_config(model: Model) -> dict[str, Any]:
    config = model.config
    end_of_text = _END_OF_TEXT if config["vocab_size"] >= _GPT2_VOCABULARY else None
    return {
        **_FIXED,
        **{name: config[ours] for name, ours in _SIZES.items()},
        **dict.fromkeys(_DROPOUTS, model.dropout),
        **({} if config["bias"] else {"bias": False}),
        "activation_function": "gelu_new" if model.activation == "gelu_tanh" else "gelu",
        "architectures": ["GPT2LMHeadModel"],
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "initializer_range": 0.02,
        "n_ctx": config["block_size"],
        "n_inner": None,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
        "use_cache": True,
    }
