"""Represents nested values with tensors as JSON and a flat dict of tensors."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from gptkernels._dtensor import place_of
from gptkernels.files.safetensors import CheckedFile, DamagedError

_KEYS = (str, int)
"""The types that a dict's keys may have. True and 1.0 are not allowed, because they equal 1."""


def as_dict(config: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    return dict(config)


def flatten(value: Any, where: str, tensors: dict[str, torch.Tensor], names: dict[Any, str]) -> Any:
    """Convert `value` to JSON values, and store its tensors in `tensors` by their paths in `value`.

    Values that JSON does not have become an object with one key: {"$tensor": name}, {"$tuple": [...]}, and {"$dict":
    [[key, value], ...]} for a dict with a key that is an integer or begins with "$".
    """
    if isinstance(value, torch.Tensor):
        identity: Any = id(value)  # a DTensor has no address
        if place_of(value) is None:
            identity = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if identity not in names or value.numel() == 0:
            if where in tensors:
                raise ValueError(f"{where}: two entries of that name")
            tensors[where], names[identity] = value, where
        return {"$tensor": names[identity]}
    if isinstance(value, Mapping):
        if not all(type(key) in _KEYS for key in value):
            raise ValueError(f"{where}: cannot save keys other than strings and integers")
        items = [(key, flatten(entry, f"{where}/{key}", tensors, names)) for key, entry in value.items()]
        plain = all(isinstance(key, str) and not key.startswith("$") for key, _ in items)
        return dict(items) if plain else {"$dict": items}
    if isinstance(value, list | tuple):
        entries = [flatten(entry, f"{where}/{i}", tensors, names) for i, entry in enumerate(value)]
        return {"$tuple": entries} if isinstance(value, tuple) else entries
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{where}: cannot save a {type(value).__name__}")


def unflatten(tree: Any, get_tensor: Callable[[str], Any]) -> Any:
    if isinstance(tree, list):
        return [unflatten(entry, get_tensor) for entry in tree]
    if not isinstance(tree, dict):
        return tree
    if "$tensor" in tree:
        return get_tensor(tree["$tensor"])
    if "$tuple" in tree:
        return tuple(unflatten(tree["$tuple"], get_tensor))
    items = tree["$dict"] if "$dict" in tree else tree.items()
    if wrong := [key for key, _ in items if type(key) not in _KEYS]:
        raise ValueError(f"a key is {wrong[0]!r}, must be a string or an integer")
    return {key: unflatten(entry, get_tensor) for key, entry in items}


def parse(path: Path, file: CheckedFile, field: str, get_tensor: Callable[[str], Any] | None = None) -> dict[str, Any]:
    get_tensor = functools.cache(get_tensor or file.tensor)  # so tied tensors stay tied
    try:
        value = unflatten(json.loads(file.metadata[field]), get_tensor)
    except DamagedError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
        raise ValueError(f"{path}: {field} in the metadata is missing or damaged: {error!r}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {field} in the metadata is damaged: {type(value).__name__} instead of dict")
    return value
