"""Reads and writes safetensors files with checksums, and writes files without checksums for other programs.

The metadata contains the CRC-32 of every tensor, and that of all other entries. These checksums detect damage, not
forgery.

The safetensors library is not used for writing: its temporary files are readable only by the owner and have names that
cannot be recognised after a kill, and a full disk raises no OSError.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gptkernels.files.regular import open_regular
from gptkernels.files.writing import replace_file

FORMAT_VERSION = "2"
_ALIGNMENT = 8
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}

Parts = Mapping[tuple[int, ...], torch.Tensor]
"""Parts of a tensor by the indices of their first elements."""


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], kind: str, fields: Mapping[str, str]
) -> None:
    ordered = _ordered(path, tensors)
    metadata = {"format": "pt", "kind": f"gptkernels.{kind}", "version": FORMAT_VERSION, **fields}
    checksums = dict.fromkeys(ordered, "0" * 8)
    with replace_file(path) as temporary, open(temporary, "wb") as file:
        file.write(_checksummed_header(ordered, metadata, checksums))
        for name, tensor in ordered.items():
            data = _bytes(tensor)
            checksums[name] = _tensor_checksum(tensor, data)
            file.write(data)
        file.seek(0)
        file.write(_checksummed_header(ordered, metadata, checksums))


def write_plain_safetensors(temporary: Path, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    ordered = _ordered(path, tensors)
    with open(temporary, "wb") as file:
        file.write(_header(ordered, {"format": "pt"}))
        for tensor in ordered.values():
            file.write(_bytes(tensor))


def _ordered(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sort by descending element size, so that each tensor is aligned."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{path}: {name} has dtype {tensor.dtype}, which cannot be saved")
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def _checksummed_header(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], checksums: Mapping[str, str]
) -> bytes:
    entries = {**metadata, "checksums": json.dumps(checksums)}
    return _header(tensors, {**entries, "checksum": _metadata_checksum(entries)})


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _tensor_checksum(tensor: torch.Tensor, data: memoryview) -> str:
    kind = f"{_DTYPES.get(tensor.dtype)} {list(tensor.shape)}"
    return f"{zlib.crc32(data, zlib.crc32(kind.encode())):08x}"


def _metadata_checksum(metadata: Mapping[str, str]) -> str:
    entries = sorted(entry for entry in metadata.items() if entry[0] != "checksum")
    return f"{zlib.crc32(json.dumps(entries).encode()):08x}"


class DamagedError(ValueError):
    """The content of a file does not match its checksum."""


class CheckedFile:
    """An open file of `write_safetensors`, whose tensors are verified when they are read."""

    ranks = 1
    """The number of processes that have written the file."""

    def __init__(self, path: Path, file: Any, metadata: dict[str, str]) -> None:
        self.path, self._file, self.metadata = path, file, metadata
        self._checksums = _parse_checksums(metadata)
        if self._checksums.keys() != set(file.keys()):
            raise DamagedError(f"{path}: damaged: the tensors are not those of the checksums in the metadata")

    def files(self) -> list[Path]:
        return [self.path]

    def names(self) -> list[str]:
        return list(self._checksums)

    def tensor(self, name: str) -> torch.Tensor:
        wanted = self._checksums[name]
        tensor = self._file.get_tensor(name)
        if (found := _tensor_checksum(tensor, _bytes(tensor))) != wanted:
            raise DamagedError(f"{self.path}: {name} is damaged: its checksum is {found}, was {wanted}")
        return tensor

    def empty(self, name: str) -> torch.Tensor:
        """Return a tensor without data, on the meta device, with the shape and dtype of a tensor in the file."""
        found = self._file.get_slice(name)
        return torch.empty(found.get_shape(), dtype=_TORCH_DTYPES[found.get_dtype()], device="meta")

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Verify this rank's share of the checksums. All ranks together verify all of them."""
        for name in self.names()[rank::ranks]:
            self.tensor(name)

    def read_parts(self, wanted: Mapping[str, Parts]) -> None:
        """Read parts of tensors without a verification of their checksums."""
        for name, parts in wanted.items():
            for begin, part in parts.items():
                region = tuple(slice(i, i + n) for i, n in zip(begin, part.shape, strict=True))
                part.copy_(self._file.get_slice(name)[region] if region else self._file.get_tensor(name))


def _parse_checksums(metadata: Mapping[str, str]) -> dict[str, str]:
    try:
        checksums = json.loads(metadata["checksums"])
    except (KeyError, ValueError, RecursionError):
        return {}
    return checksums if isinstance(checksums, dict) else {}


@contextmanager
def open_safetensors(path: Path, *kinds: str) -> Iterator[CheckedFile]:
    try:
        with open_regular(path), safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            _check_metadata(path, metadata, kinds)
            if metadata["kind"] == "gptkernels.sharded":
                from gptkernels.files.sharded import ShardedFile  # its import takes a second

                yield ShardedFile(path, file, metadata)
            else:
                yield CheckedFile(path, file, metadata)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file: {error}") from error


def is_own_safetensors(path: Path) -> bool:
    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("kind", "").startswith("gptkernels.")
    except SafetensorError:
        return False


def remove_unnamed_shards(folder: Path) -> None:
    """Remove the folders of shards that no file names, unless a file that may name them is damaged.

    They belong to a checkpoint that was replaced or removed, or whose writing was interrupted. This function must not
    be called while a checkpoint is written.
    """
    if shards := [*folder.glob("checkpoint-*.shards")]:
        try:
            named = {_folder_of_shards(index) for index in folder.glob("checkpoint*.safetensors")}
        except ValueError:
            return
        for unnamed in [path for path in shards if path.name not in named]:
            shutil.rmtree(unnamed)


def _folder_of_shards(index: Path) -> str | None:
    try:
        with safe_open(index, "pt") as file:
            shards = (file.metadata() or {}).get("shards")
        return None if shards is None else str(json.loads(shards)["folder"])
    except (KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise ValueError(f"{index}: not a whole checkpoint: {error}") from error


def _check_metadata(path: Path, metadata: Mapping[str, str], kinds: tuple[str, ...]) -> None:
    if metadata.get("kind") not in [f"gptkernels.{kind}" for kind in kinds]:
        raise ValueError(
            f"{path}: kind is {metadata.get('kind')!r} in the metadata, must be "
            + " or ".join(f"'gptkernels.{kind}'" for kind in kinds)
        )
    if metadata.get("version") != FORMAT_VERSION:
        raise ValueError(f"{path}: version is {metadata.get('version')!r}, known: {FORMAT_VERSION!r}")
    if (found := _metadata_checksum(metadata)) != metadata.get("checksum"):
        raise DamagedError(
            f"{path}: the metadata is damaged: its checksum is {found}, was {metadata.get('checksum', 'left out')}"
        )
