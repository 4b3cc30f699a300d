"""Checkpoints of models and optimizers that are distributed over several processes.

The folder of a run has an index, `checkpoint.safetensors`, and the folder of shards that it names. Every process writes
its shards, and then a new index replaces the previous one atomically. Until then the previous index and its shards are
unchanged. The kinds, names and shapes of the values are those of `gptkernels.checkpoint.save_training_state`.
"""

import contextlib
import dataclasses
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from gptkernels._dtensor import first_indices, held, place_of
from gptkernels.checkpoint import CHECKPOINT, TrainingState, find_non_finite, rng_state
from gptkernels.files.safetensors import (
    CheckedFile,
    Parts,
    open_safetensors,
    remove_unnamed_shards,
    write_safetensors,
)
from gptkernels.files.sharded import (
    SavedTensor,
    SavePlanner,
    ShardWriter,
    raising_first_failure,
)
from gptkernels.files.trees import as_dict, flatten, parse
from gptkernels.files.writing import remove_unfinished
from gptkernels.nn import Linear

Value = TypeVar("Value")


class CheckpointWriter:
    """Writes checkpoints of a run. All processes make one, and call its methods together.

    A process copies its shards to the host, and writes them while training continues. Of a tensor that several
    processes have, one process copies and writes it. Call `wait` before the process group is destroyed.

    Args:
        folder: the folder of the run, which all processes share.
        timeout: the time after which an exchange fails, because a process has ended or needs that long to write; None
            is torch's default.

    Raises:
        ValueError: if torch.distributed is not initialised.
    """

    def __init__(self, folder: str | os.PathLike[str], timeout: timedelta | None = None) -> None:
        if not dist.is_initialized():
            raise ValueError("CheckpointWriter: torch.distributed is not initialised: call init_process_group first")
        self._folder = Path(folder)
        self._group = dist.new_group(
            backend="gloo", timeout=timeout
        )  # the collectives of training do not wait for those of writing
        self._stream: torch.cuda.Stream | None = None
        self._pending: Any = None  # a future

    def save(
        self,
        *,
        config: Any,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        trainer: Mapping[str, Any],
        background: bool = True,
    ) -> None:
        """Write a checkpoint, which replaces the previous one when it is complete.

        First wait for the previous `save`. When this method returns, the model and the optimizer may change.

        Args:
            config: the model's configuration, a mapping or a dataclass.
            model: a module with plain parameters, which are equal on all processes, or with DTensors. Each process
                writes its buffers and the states of its random number generators.
            optimizer: the optimizer of the model's parameters.
            trainer: counters and other values, as for `save_training_state`; those of process 0 are written.
            background: return after the copy to the host. Otherwise return when the checkpoint is complete.

        Raises:
            ValueError: if a value cannot be saved, or the model is a divided Hugging Face model.
            OSError: if a process cannot write. All processes raise this error, which has the number of the process.
        """
        self.wait()
        _check_kind(model)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        trees, tensors, own = _flatten(model, optimizer, rank)
        names = _parameter_names(model, optimizer)
        with self._copying_to_host(tensors):
            staged = {key: _stage(_parameter_of(key, names), t, turn) for turn, (key, t) in enumerate(tensors.items())}
            staged |= {key: _stage("", tensor, rank) for key, tensor in own.items()}
        index: dict[str, Tensor] = {}
        trees["config"] = flatten(as_dict(config), "config", index, {})
        trees["trainer"] = flatten(trainer, "trainer", index, {})
        index = {name: tensor.to("cpu", copy=True) for name, tensor in index.items()}
        shards = self._make_folder(trainer.get("step", 0))

        def commit(checksums: dict[str, str]) -> None:
            fields = trees | {"shards": {"folder": shards.name, "ranks": ranks, "files": checksums}}
            texts = {field: json.dumps(tree) for field, tree in fields.items()}
            write_safetensors(self._folder / CHECKPOINT, index, "sharded", texts)
            remove_unnamed_shards(self._folder)

        self._pending = dcp.async_save(
            staged, storage_writer=ShardWriter(shards, commit), planner=SavePlanner(), process_group=self._group
        )
        if not background:
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint of the last `save` is complete, and raise its error if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with raising_first_failure(names_process=True):
                pending.result()

    @contextlib.contextmanager
    def _copying_to_host(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Make the writer's CUDA stream current, and wait for its work at the end.

        When pinned memory is freed, torch records an event on each CUDA stream that has used it. The thread that writes
        the copies frees them at any time. On a stream that is being captured, the event would invalidate the capture.
        """
        device = next((held(t).device for t in tensors.values() if held(t).is_cuda), None)
        if device is None:
            yield
            return
        if self._stream is None:  # torch has 32 streams of a priority, and graphs are captured on those of priority 0
            self._stream = torch.cuda.Stream(device, priority=-1)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _make_folder(self, step: int) -> Path:
        names = [""] * dist.get_world_size()
        # A gather, because the source of a broadcast would wait for a process that was killed.
        dist.all_gather_object(names, f"checkpoint-{step:08d}-{secrets.token_hex(4)}.shards", group=self._group)
        folder = self._folder / names[0]

        def make() -> None:
            if dist.get_rank() == 0:
                remove_unfinished(self._folder, (CHECKPOINT,))
                remove_unnamed_shards(self._folder)
                folder.mkdir(parents=True)

        _together(make, self._group)
        return folder


def read_checkpoint(folder: str | os.PathLike[str]) -> TrainingState:
    """Read a checkpoint without the data of the model, the optimizer and the random number generators.

    Args:
        folder: the folder of a run. Its checkpoint may be one file or shards.

    Returns:
        The training state. The tensors of its model, optimizer and generators are on the meta device.

    Raises:
        ValueError: if the checkpoint is damaged or of another format; the message names the file.
        OSError: if a file cannot be read.
    """
    with open_safetensors(Path(folder) / CHECKPOINT, "training", "sharded") as file:
        return _read(file)


def load_checkpoint(
    folder: str | os.PathLike[str], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> TrainingState:
    """Load a checkpoint into a model and an optimizer, whose layout may differ from that of the saved ones.

    All processes call this function together. Each process reads its parts of the tensors, and verifies its share of
    the checksums. If a process fails, all processes raise its error.

    Args:
        folder: the folder of a run. Its checkpoint may be one file or shards.
        model: the model, with plain parameters or DTensors. Process r gets the buffers of process r modulo the number
            of processes that have saved them. Amax histories of float8 layers are set to 0 if the checkpoint has none,
            and ignored if the model has none.
        optimizer: the optimizer of its parameters. Its state is replaced, and the options of its groups remain.

    Returns:
        The training state, in which the tensors of the model and the optimizer have no data. Its `rng` is for
        `restore_rng_state`; process r gets that of process r modulo the number of processes that have saved it.

    Raises:
        ValueError: if the checkpoint is damaged or of another format, or does not fit the model or the optimizer; the
            message names the file and the tensor. Nothing is loaded, unless a value is NaN or infinite.
        OSError: if a file cannot be read.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with contextlib.ExitStack() as stack:

        def prepare() -> _Loading:
            _check_kind(model)
            path = Path(folder) / CHECKPOINT
            file = stack.enter_context(open_safetensors(path, "training", "sharded"))
            loading = _Loading(file, model, optimizer, rank)
            file.verify(rank, ranks)
            return loading

        loading = _together(prepare)
        _together(loading.read)
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": loading.optimizer_state, "param_groups": groups})
        return dataclasses.replace(_read(loading.file), rng=loading.rng)


def _check_kind(model: torch.nn.Module) -> None:
    if getattr(getattr(model, "shapes", None), "transposed", False):
        raise ValueError("a checkpoint of a divided Hugging Face model is not supported: use its save_pretrained")


class _Loading:
    """Checks that a file fits a model and an optimizer, and reads it into them."""

    def __init__(self, file: CheckedFile, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        self.file, self._rank = file, rank % file.ranks
        self._names = set(file.names())
        self._parts: dict[str, Parts] = {}
        self._new_histories: list[Tensor] = []
        self._add_model(model)
        self.optimizer_state = self._add_optimizer(model, optimizer)
        self.rng = parse(file.path, file, "rng", self._add_generator)

    def read(self) -> None:
        self.file.read_parts(self._parts)
        for history in self._new_histories:
            history.zero_()
        parts = {(name, begin): part for name, parts in self._parts.items() for begin, part in parts.items()}
        if found := find_non_finite({key: part for key, part in parts.items() if part.is_floating_point()}):
            raise ValueError(f"{self.file.path}: {found[0]} holds NaN or infinity: the run has diverged")

    def _add_model(self, model: torch.nn.Module) -> None:
        path = self.file.path
        saved, wanted = parse(path, self.file, "model", str), model.state_dict(keep_vars=True)
        for kind, names in (("missing", wanted.keys() - saved.keys()), ("unknown", saved.keys() - wanted.keys())):
            if others := [name for name in names if not name.endswith(Linear.HISTORIES)]:
                raise ValueError(f"{path}: {kind} parameter or buffer {min(others)}")
        tied: dict[str, Tensor] = {}
        for name, tensor in wanted.items():
            if name not in saved:
                self._new_histories.append(tensor)
            elif tied.setdefault(saved[name], tensor) is not tensor:
                raise ValueError(f"{path}: {name} is tied to another parameter, but not in the model")
            else:
                self._add(saved[name], name, tensor)

    def _add_optimizer(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Tensor]]:
        path = self.file.path
        saved, groups = parse(path, self.file, "optimizer", str), optimizer.state_dict()["param_groups"]
        if [group["params"] for group in saved["param_groups"]] != [group["params"] for group in groups]:
            raise ValueError(f"{path}: optimizer: the groups' parameters are not those of this model")
        parameters = _parameters(optimizer)
        if saved["state"].keys() not in (set(), set(range(len(parameters)))):
            raise ValueError(f"{path}: optimizer: state must have an entry for each of {len(parameters)} parameters")
        names = _parameter_names(model, optimizer)
        return {
            i: {name: self._add_state(key, names[i], parameters[i]) for name, key in entries.items()}
            for i, entries in saved["state"].items()
        }

    def _add_state(self, key: str, name: str, parameter: Tensor) -> Tensor:
        saved = self._find(key)
        if saved.dim():
            state = torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False)
        else:  # the number of steps
            state = torch.empty_like(saved, device="cpu")
        self._add(key, name, state)
        return state

    def _add_generator(self, key: str) -> Tensor:
        state = torch.empty_like(self._find(self._of_rank(key)), device="cpu")
        self._add(key, "", state)
        return state

    def _add(self, key: str, name: str, tensor: Tensor) -> None:
        key = self._of_rank(key)
        saved, (shape, parts) = self._find(key), _saved_parts(name, tensor)
        if (saved.shape, saved.dtype) != (shape, tensor.dtype):
            raise ValueError(
                f"{self.file.path}: {key} is a {_described(saved.shape, saved.dtype)}, must be a "
                f"{_described(shape, tensor.dtype)}"
            )
        self._parts[key] = parts

    def _of_rank(self, key: str) -> str:
        return key.replace("rank/0/", f"rank/{self._rank}/", 1) if key.startswith("rank/0/") else key

    def _find(self, key: str) -> Tensor:
        if key not in self._names:
            raise ValueError(f"{self.file.path}: {key} is missing")
        return self.file.empty(key)


def _described(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} tensor of shape {tuple(shape)}"


def _read(file: CheckedFile) -> TrainingState:
    get_tensor = {"config": file.tensor, "trainer": file.tensor}
    fields = [field.name for field in dataclasses.fields(TrainingState)]
    return TrainingState(
        **{field: parse(file.path, file, field, get_tensor.get(field, file.empty)) for field in fields}
    )


def _flatten(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Return trees with the names of tensors, the tensors of all processes together, and those of this process.

    The names of the latter begin with rank/RANK/. Trees are used only from process 0.
    """
    tensors: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    state = model.state_dict(keep_vars=True)  # so that a tied parameter is one object
    parameters = {name: value for name, value in state.items() if isinstance(value, torch.nn.Parameter)}
    buffers = {name: value for name, value in state.items() if name not in parameters}
    trees = {
        "model": flatten(parameters, "model", tensors, {}) | flatten(buffers, f"rank/{rank}/model", own, {}),
        "optimizer": flatten(optimizer.state_dict(), "optimizer", tensors, {}),
        "rng": flatten(rng_state(), f"rank/{rank}/rng", own, {}),
    }
    return trees, tensors, own


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters in the order of its state dict."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for parameter in _parameters(optimizer)]


def _parameter_of(key: str, names: list[str]) -> str:
    """Return the name of the parameter to which a tensor of the model or the optimizer belongs, or ""."""
    match key.split("/"):
        case ["model", name]:
            return name
        case ["optimizer", "state", i, _]:
            return names[int(i)]
    return ""


def _saved_parts(name: str, tensor: Any) -> tuple[torch.Size, dict[tuple[int, ...], Tensor]]:
    """Return the shape that a tensor has in a file, and views of this process's parts by their places in the file.

    In a file the matrices have the plain model's shapes. In a tensor-parallel model c_attn's weight is (3, NH, HS, C),
    its bias (3, NH, HS), and c_proj's weight (C, NH, HS).
    """
    shape, local, begin = tensor.shape, held(tensor).detach(), first_indices(tensor)
    parts = {begin: local}
    if name.endswith((".attn.c_attn.weight", ".attn.c_attn.bias")) and len(shape) > 2:
        parts = {
            (((begin[0] + i) * shape[1] + begin[1] + h) * shape[2] + begin[2], *begin[3:]): head
            for i, heads in enumerate(local)
            for h, head in enumerate(heads)
        }
        shape = torch.Size((shape[0] * shape[1] * shape[2], *shape[3:]))
    elif name.endswith(".attn.c_proj.weight") and len(shape) == 3:
        parts = {(begin[0], (begin[1] + h) * shape[2] + begin[2]): head for h, head in enumerate(local.unbind(1))}
        shape = torch.Size((shape[0], shape[1] * shape[2]))
    return shape, {place: part for place, part in parts.items() if part.numel()}


def _stage(name: str, tensor: Tensor, turn: int) -> SavedTensor:
    """Copy this process's parts of a tensor to the host. Of equal parts, a process chosen by `turn` copies one."""
    shape, parts = _saved_parts(name, tensor)
    copies, copy = _copies(tensor)
    if turn % copies != copy:
        return SavedTensor(shape, {})
    return SavedTensor(shape, {begin: _to_host(part) for begin, part in parts.items()})


def _copies(tensor: Tensor) -> tuple[int, int]:
    """Return the number of processes that have the same part of a tensor, and this process's number among them."""
    place = place_of(tensor)
    if place is None:
        return dist.get_world_size(), dist.get_rank()
    copies, copy = 1, 0
    for size, i, placement in zip(place.mesh.shape, place.mesh.get_coordinate(), place.placements, strict=True):
        if placement.is_replicate():
            copies, copy = copies * size, copy * size + i
    return copies, copy


def _to_host(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)


def _together(work: Callable[[], Value], group: dist.ProcessGroup | None = None) -> Value:
    """Call `work`. If it fails in some processes, raise the error of the first of them in all."""
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    failures = [failure]
    if dist.is_initialized():
        failures *= dist.get_world_size(group)
        dist.all_gather_object(failures, failure, group)
    for found in filter(None, failures):
        raise found
    return result
