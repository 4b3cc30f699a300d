"""Models and training states on disk.

- A model is llm.c's `.bin`, or `.safetensors` with the configuration in its metadata. In memory it is a state dict and
  a configuration, both with nanoGPT's names. Matrices are (out, in). The configuration's entry `activation` is "gelu"
  for the exact GELU, and is absent for "gelu_tanh".
- A training state is one `.safetensors` file that also contains the optimizer, the random number generators and the
  trainer's counters.

Files are written atomically, and read without executing code. A damaged file, or one of another format, raises a
ValueError. Sizes are checked before memory for tensors is allocated.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from gptkernels.files.regular import open_regular
from gptkernels.files.safetensors import open_safetensors, write_safetensors
from gptkernels.files.trees import as_dict, flatten, parse
from gptkernels.files.writing import HEADER_BYTES, MODEL_MAGIC, file_size, make_header, read_header, replace_file

CHECKPOINT = "checkpoint.safetensors"
"""The name of the training state in the folder of its run."""
_SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
_VERSIONS = {torch.float32: 3, torch.bfloat16: 5}
_UNPADDED = 1  # llm.c's version of April 2024: float32, no padding, no padded_vocab_size in the header
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PADDING = 128
_TANH = "gelu_tanh"
_ACTIVATIONS = (_TANH, "gelu")

# The tensors of a layer in llm.c's order; shapes in multiples of C.
_LAYER: list[tuple[str, tuple[int, ...]]] = [
    ("ln_1.weight", (1,)), ("ln_1.bias", (1,)),
    ("attn.c_attn.weight", (3, 1)), ("attn.c_attn.bias", (3,)),
    ("attn.c_proj.weight", (1, 1)), ("attn.c_proj.bias", (1,)),
    ("ln_2.weight", (1,)), ("ln_2.bias", (1,)),
    ("mlp.c_fc.weight", (4, 1)), ("mlp.c_fc.bias", (4,)),
    ("mlp.c_proj.weight", (1, 4)), ("mlp.c_proj.bias", (1,)),
]  # fmt: skip
_WTE, _WPE, _LM_HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"
_CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".fp8_history", ".fp8_dout_history")

StateDict = dict[str, torch.Tensor]
Name = TypeVar("Name")


def parameter_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of GPT-2's parameters in llm.c's order: by kind of parameter, and then by layer.

    `wte` is (V, C). `lm_head` is the same tensor and is not listed.
    """
    T, V, L, _, C = (config[name] for name in _SIZES)
    shapes: dict[str, tuple[int, ...]] = {_WTE: (V, C), _WPE: (T, C)}
    for name, multiples in _LAYER:
        shapes |= {f"transformer.h.{i}.{name}": tuple(m * C for m in multiples) for i in range(L)}
    shapes |= {"transformer.ln_f.weight": (C,), "transformer.ln_f.bias": (C,)}
    if config["bias"]:
        return shapes
    return {name: shape for name, shape in shapes.items() if not name.endswith(".bias")}


def save_model(
    path: str | os.PathLike[str],
    state_dict: Mapping[str, torch.Tensor],
    config: Any,
    dtype: torch.dtype | None = None,
    *,
    padded_vocab_size: int | None = None,
) -> None:
    """Write a GPT-2 model: `.safetensors`, or llm.c's `.bin`.

    Args:
        path: the file; its suffix decides the format.
        state_dict: the parameters, on any device. Neither the padding of `wte` nor `lm_head` is written.
        config: a mapping or a dataclass with block_size, vocab_size, n_layer, n_head, n_embd, and optionally bias and
            activation.
        dtype: the dtype of the file. None keeps the parameters' dtypes in a `.safetensors`; a `.bin` is bfloat16 if all
            parameters are bfloat16, otherwise float32.
        padded_vocab_size: Vp of a `.bin`; the rows V..Vp-1 of its `wte` are 0. None rounds V up to a multiple of 128.

    Raises:
        ValueError: if a parameter is missing, unknown or of a wrong shape, lm_head differs from wte, or the format
            cannot represent the model. A `.bin` always has biases and the tanh GELU.
    """
    path = Path(path)
    config = check_model_config(as_dict(config), str(path))
    if path.suffix == ".safetensors":
        if padded_vocab_size is not None:
            raise ValueError(f"{path}: padded_vocab_size is for .bin; .safetensors are not padded")
        state = check_parameters(state_dict, config, str(path))
        tensors = {name: state[name].to(dtype or state[name].dtype) for name in parameter_shapes(config)}
        write_safetensors(path, tensors, "model", {"config": json.dumps(config)})
        return
    if path.suffix != ".bin":
        raise ValueError(f"{path}: a model is a .bin (llm.c's) or a .safetensors file")
    if dtype not in (None, *_VERSIONS):
        raise ValueError(f"{path}: dtype is {dtype}, .bin takes torch.float32 or torch.bfloat16")
    if not config["bias"]:
        raise ValueError(f"{path}: a .bin cannot say that a model has no biases: save it as .safetensors")
    if "activation" in config:
        raise ValueError(f"{path}: a .bin cannot say that a model has the exact GELU: save it as .safetensors")
    V = config["vocab_size"]
    Vp = -(-V // _PADDING) * _PADDING if padded_vocab_size is None else padded_vocab_size
    if Vp < V:
        raise ValueError(f"{path}: padded_vocab_size is {Vp}, less than vocab_size {V}")
    state = check_parameters(state_dict, config, str(path))
    if dtype is None:
        is_bfloat16 = all(tensor.dtype == torch.bfloat16 for tensor in state.values())
        dtype = torch.bfloat16 if is_bfloat16 else torch.float32
    _save_bin(path, state, config, dtype, Vp)


def load_model(path: str | os.PathLike[str], *, keep_padding: bool = False) -> tuple[dict[str, Any], StateDict]:
    """Read a GPT-2 model: llm.c's `.bin`, a `.safetensors` of `save_model`, or the model of a training state.

    Args:
        path: a `.safetensors`; a file with another suffix is a `.bin`.
        keep_padding: for a `.bin`, keep the Vp rows of `wte`, and add `padded_vocab_size` to the configuration.

    Returns:
        The configuration, for `GPT2Config(**config)`, and the state dict, on the CPU and in the file's dtype.
        `lm_head.weight` is the same tensor as `transformer.wte.weight`.

    Raises:
        ValueError: if the file is damaged or of another format.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        config, state = _load_safetensors(path)
    else:
        config, state = _load_bin(path)
        if keep_padding:
            config["padded_vocab_size"] = len(state[_WTE])
        else:
            state[_WTE] = state[_WTE][: config["vocab_size"]].clone()
    state[_LM_HEAD] = state[_WTE]
    return config, state


def _save_bin(path: Path, state: StateDict, config: dict[str, Any], dtype: torch.dtype, Vp: int) -> None:
    header = make_header(MODEL_MAGIC, _VERSIONS[dtype], *(config[name] for name in _SIZES), Vp)
    with replace_file(path) as temporary, open(temporary, "wb") as file:
        file.write(header.data)
        for name in parameter_shapes(config):
            tensor = state[name].to("cpu", dtype).contiguous()
            file.write(tensor.view(torch.uint8).numpy().data)
            if name == _WTE:
                file.write(bytes((Vp - tensor.shape[0]) * tensor.shape[1] * dtype.itemsize))


def _load_bin(path: Path) -> tuple[dict[str, Any], StateDict]:
    with open_regular(path) as file:
        header = read_header(file, path, MODEL_MAGIC, (_UNPADDED, *_VERSIONS.values()))
        dtype = torch.bfloat16 if header[1] == _VERSIONS[torch.bfloat16] else torch.float32
        config = check_model_config(dict(zip(_SIZES, header[2:7], strict=True)), str(path))
        Vp = config["vocab_size"] if header[1] == _UNPADDED else header[7]
        if Vp < config["vocab_size"]:
            raise ValueError(f"{path}: padded_vocab_size is {Vp}, less than vocab_size {config['vocab_size']}")
        T, _, L, _, C = header[2:7]
        wanted = HEADER_BYTES + dtype.itemsize * C * (Vp + T + L * (12 * C + 13) + 2)
        if (size := file_size(file)) != wanted:
            fault = "truncated" if size < wanted else "too long"
            sizes = ", ".join(f"{name} {config[name]}" for name in _SIZES)
            raise ValueError(
                f"{path}: {fault}: {sizes}, padded_vocab_size {Vp} take {wanted} bytes, the file has {size}"
            )
        shapes = parameter_shapes(config) | {_WTE: (Vp, C)}
        return config, {name: _read_tensor(file, shape, dtype) for name, shape in shapes.items()}


def _read_tensor(file: BinaryIO, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    if file.readinto(tensor.view(torch.uint8).numpy()) != tensor.nbytes:  # type: ignore[attr-defined]
        raise ValueError(f"{file.name}: truncated while it was read")
    return tensor


def _load_safetensors(path: Path) -> tuple[dict[str, Any], StateDict]:
    with open_safetensors(path, "model", "training", "sharded") as file:
        config = check_model_config(parse(path, file, "config"), str(path))
        if file.metadata["kind"] == "gptkernels.model":
            model = {name: file.tensor(name) for name in file.names()}
        else:
            model = parse(path, file, "model")
        return config, check_parameters(model, config, str(path))


def check_model_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check a configuration, and return those of its entries that a file stores.

    The message of a ValueError begins with `where`.
    """
    for name in _SIZES:
        value = config.get(name)
        if type(value) is not int or not 1 <= value < 2**31:
            raise ValueError(f"{where}: {name} is {value!r}, must be an integer in 1..2^31-1")
    if config["n_embd"] % config["n_head"]:
        raise ValueError(f"{where}: n_embd {config['n_embd']} is not divisible by n_head {config['n_head']}")
    if type(bias := config.get("bias", True)) is not bool:
        raise ValueError(f"{where}: bias is {bias!r}, must be true or false")
    if (activation := config.get("activation", _TANH)) not in _ACTIVATIONS:
        raise ValueError(f"{where}: activation is {activation!r}, must be one of {', '.join(_ACTIVATIONS)}")
    shape = {**{name: config[name] for name in _SIZES}, "bias": bias}
    return shape if activation == _TANH else shape | {"activation": activation}


def check_model(state_dict: Mapping[str, torch.Tensor], config: Any, where: str) -> dict[str, Any]:
    """Check that parameters and configuration agree, and return those entries of the latter that a file stores.

    The message of a ValueError begins with `where`.
    """
    config = check_model_config(as_dict(config), where)
    check_parameters(state_dict, config, where)
    return config


def check_parameters(state_dict: Mapping[str, torch.Tensor], config: dict[str, Any], where: str) -> StateDict:
    """Check the parameters against `parameter_shapes`, and return them without lm_head, padding and buffers.

    A ValueError names a parameter that is missing, unknown, of another shape, or not a tensor that a file can store. An
    lm_head that differs from wte is an error, too.
    """
    state = {name: tensor for name, tensor in state_dict.items() if not str(name).endswith(_BUFFERS)}
    for name, tensor in state.items():
        if not isinstance(name, str):
            raise ValueError(f"{where}: unknown parameter {name!r}")
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{where}: {name} is a {type(tensor).__name__}, must be a tensor")
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{where}: {name} is of {tensor.dtype}, must be of a floating-point dtype of torch's")
        state[name] = tensor.detach()
    if config["n_layer"] > len(state):
        raise ValueError(f"{where}: n_layer is {config['n_layer']}, but there are {len(state)} parameters")
    shapes = parameter_shapes(config)
    head = state.pop(_LM_HEAD, None)
    missing, unknown = shapes.keys() - state.keys(), state.keys() - shapes.keys()
    if names := missing or unknown:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ValueError(f"{where}: {'missing' if missing else 'unknown'} parameter {min(names)}{more}")
    wte = state[_WTE]
    if head is not None and not _are_tied(head, wte):
        raise ValueError(f"{where}: {_LM_HEAD} differs from {_WTE}: GPT-2 ties them")
    if wte.ndim == 2:
        state[_WTE] = wte[: config["vocab_size"]]
    for name, shape in shapes.items():
        if state[name].shape != shape:
            raise ValueError(f"{where}: {name} has shape {tuple(state[name].shape)}, must have {shape}")
    return state


def _are_tied(head: torch.Tensor, wte: torch.Tensor) -> bool:
    if head.dtype != wte.dtype or head.shape != wte.shape:
        return False
    return head.data_ptr() == wte.data_ptr() or torch.equal(head, wte)


def find_non_finite(tensors: Mapping[Name, torch.Tensor]) -> Name | None:
    """Return the name of the first tensor with NaN or infinity, or None. Synchronises with each device once."""
    finite: dict[Name, bool] = {}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    for device in {tensor.device for tensor in tensors.values()}:
        here = {name: tensor.detach() for name, tensor in tensors.items() if tensor.device == device}
        extremes = [torch.stack(tensor.aminmax()).double() for tensor in here.values()]  # NaN if one is NaN
        finite |= zip(here, torch.stack(extremes).isfinite().all(1).tolist(), strict=True)
    return next((name for name in tensors if not finite[name]), None)


def from_huggingface(state_dict: Mapping[str, torch.Tensor]) -> StateDict:
    """Convert the state dict of a Hugging Face `GPT2LMHeadModel` or `GPT2Model` to one for `gptkernels.models.GPT2`.

    `Conv1D` matrices (in, out) are transposed to (out, in), buffers of attention are removed, and a missing
    `lm_head.weight` is set to `wte`.

    Raises:
        ValueError: if there is no `wte.weight`.
    """
    prefix = "" if _WTE in state_dict else "transformer."
    state = {prefix + name: _transpose_conv1d(name, tensor) for name, tensor in state_dict.items()}
    state = {name: tensor for name, tensor in state.items() if not name.endswith(_BUFFERS)}
    if _WTE not in state:
        raise ValueError("not the state dict of a Hugging Face GPT-2: it has no wte.weight")
    state.setdefault(_LM_HEAD, state[_WTE])
    return state


def to_huggingface(state_dict: Mapping[str, torch.Tensor]) -> StateDict:
    """Convert a state dict of this package's GPT2 to one for Hugging Face's `GPT2LMHeadModel.load_state_dict`."""
    return {name: _transpose_conv1d(name, tensor) for name, tensor in state_dict.items() if not name.endswith(_BUFFERS)}


def _transpose_conv1d(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous() if name.endswith(_CONV1D) else tensor


@dataclasses.dataclass(frozen=True)
class TrainingState:
    """A training state as `load_training_state` returns it; `rng` is `rng_state()` at the time of saving."""

    config: dict[str, Any]
    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    trainer: dict[str, Any]
    rng: dict[str, Any]


def save_training_state(
    path: str | os.PathLike[str],
    *,
    config: Any,
    model: torch.nn.Module | Mapping[str, torch.Tensor],
    optimizer: Mapping[str, Any],
    trainer: Mapping[str, Any],
) -> None:
    """Write a training state to one file, atomically, with the states of torch's random number generators.

    A run that continues from the file has the same results as a run without a stop. Values may be nested dicts, lists
    and tuples of tensors, numbers, strings and None, which are restored exactly; tied tensors stay tied.

    Args:
        path: a `.safetensors` file, from which `load_model` can read the model.
        config: the model's configuration, a mapping or a dataclass.
        model: the module or its state dict.
        optimizer: the optimizer's state dict, in the format of torch.optim.
        trainer: counters, the data loader's state dict, and other values.

    Raises:
        ValueError: if the path has another suffix, or a value is of another type; the message names the value.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"{path}: a training state is a .safetensors file")
    fields = {
        "config": as_dict(config),
        "model": model.state_dict() if isinstance(model, torch.nn.Module) else model,
        "optimizer": optimizer,
        "trainer": trainer,
        "rng": rng_state(),
    }
    tensors: StateDict = {}
    names: dict[Any, str] = {}
    trees = {field: json.dumps(flatten(value, field, tensors, names)) for field, value in fields.items()}
    write_safetensors(path, tensors, "training", trees)


def load_training_state(path: str | os.PathLike[str]) -> TrainingState:
    """Read a training state to the CPU. `restore_rng_state(state.rng)` then restores the random number generators.

    Raises:
        ValueError: if the file is damaged or of another format; the message names the file and the field.
    """
    path = Path(path)
    fields = [field.name for field in dataclasses.fields(TrainingState)]
    with open_safetensors(path, "training", "sharded") as file:
        return TrainingState(**{field: parse(path, file, field) for field in fields})


def rng_state() -> dict[str, Any]:
    """Return the states of torch's generators for the CPU and, if CUDA is in use, for the current CUDA device."""
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Set torch's generators for the CPU and the current CUDA device to the states of `rng_state()`.

    A state for CUDA is ignored if there is no CUDA device.

    Raises:
        ValueError: if `state` does not contain states of torch's generators.
    """
    try:
        cpu, cuda = state["cpu"], list(state["cuda"])
        torch.set_rng_state(cpu)
        if cuda and torch.cuda.is_available():
            torch.cuda.set_rng_state(cuda[0])
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"rng: not the states of torch's random number generators: {error}") from error
