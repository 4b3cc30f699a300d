"""Reads and writes training states whose tensors are in the files of several processes.

torch.distributed.checkpoint writes these files into a folder. The index, a safetensors file beside the folder, has the
remaining values and the CRC-32 of each file. A new index replaces the previous one atomically.
"""

import dataclasses
import io
import json
import math
import os
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from gptkernels.files.regular import naming_file, open_regular
from gptkernels.files.safetensors import CheckedFile, DamagedError, Parts
from gptkernels.files.writing import fsync

METADATA = ".metadata"
_READ_BYTES = 1 << 22
_GLOBALS = {
    "torch": ("Size", "float64", "float32", "bfloat16", "float16", "bool", "int64", "int32", "int16", "int8", "uint8"),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}  # fmt: skip
"""The classes, functions and dtypes that the metadata of torch.distributed.checkpoint may name in its pickle."""


@dataclasses.dataclass(frozen=True)
class SavedTensor:
    """A saved tensor, and the parts of it that this process writes or reads."""

    shape: torch.Size
    parts: Parts

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(begin), part.shape) for begin, part in self.parts.items()]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(part), self.shape),
            )
            for chunk, part in zip(self.__create_chunk_list__(), self.parts.values(), strict=True)
        ]


class SavePlanner(DefaultSavePlanner):
    """Plans the writing of a dict of `SavedTensor`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].parts[index.offset]


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].parts[index.offset]


class _ChecksummedStream(io.BufferedWriter):
    checksum = 0

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        return super().write(data)


class _ChecksummedFiles(FileSystem):
    def __init__(self) -> None:
        self.checksums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with naming_file(path), _ChecksummedStream(io.FileIO(path, mode)) as stream:
            yield stream
        self.checksums[Path(path).name] = f"{stream.checksum:08x}"

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: the folder exists, unless the processes do not share a file system."""


@dataclasses.dataclass(frozen=True)
class _ChecksummedResult(WriteResult):
    checksum: str


class ShardWriter(FileSystemWriter):
    """Writes into an existing folder, with checksums.

    When the files of all processes are on the disk, the first process calls `finish_with` with their checksums by name.
    """

    def __init__(self, folder: Path, finish_with: Callable[[dict[str, str]], None]) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)
        self.fs = self._files = _ChecksummedFiles()
        self._folder = folder
        self._finish_with = finish_with

    def stage(self, state_dict: Any) -> Any:
        return state_dict  # the tensors are copies already

    def storage_meta(self) -> None:
        """Leave the path of the folder out of the metadata."""

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).value()
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [
                _ChecksummedResult(**vars(result), checksum=self._files.checksums[result.storage_data.relative_path])
                for result in results
            ]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        super().finish(metadata, results)
        fsync(self._folder)
        checksums = {result.storage_data.relative_path: result.checksum for of_rank in results for result in of_rank}
        self._finish_with({**checksums, METADATA: self._files.checksums[f"{METADATA}.tmp"]})


class _Reader(FileSystemReader):
    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class ShardedFile(CheckedFile):
    """The open index of a sharded training state. `ranks` is the number of processes that have written it.

    Files are verified before the first tensor is read from them, or by `verify`.
    """

    def __init__(self, path: Path, file: Any, metadata: dict[str, str]) -> None:
        super().__init__(path, file, metadata)
        try:
            shards = json.loads(metadata["shards"])
            self.folder, self.ranks = path.parent / Path(shards["folder"]).name, int(shards["ranks"])
            self._file_checksums = {Path(name).name: str(checksum) for name, checksum in shards["files"].items()}
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: shards in the metadata is missing or damaged: {error!r}") from error
        sizes = {name: self._size(name) for name in self._file_checksums}
        self._verify_file(METADATA)
        self._metadata = _read_metadata(self.folder / METADATA, sizes)
        self._saved = cast(dict[str, TensorStorageMetadata], self._metadata.state_dict_metadata)
        self._in_index = super().names()
        self._is_verified = False

    def files(self) -> list[Path]:
        return [self.path, *(self.folder / name for name in self._file_checksums)]

    def names(self) -> list[str]:
        return [*self._in_index, *self._saved]

    def tensor(self, name: str) -> torch.Tensor:
        if name in self._in_index:
            return super().tensor(name)
        if not self._is_verified:
            self.verify()
            self._is_verified = True
        tensor = torch.empty_like(self.empty(name), device="cpu")
        self.read_parts({name: {(0,) * tensor.dim(): tensor}})
        return tensor

    def empty(self, name: str) -> torch.Tensor:
        if name in self._in_index:
            return super().empty(name)
        saved = self._saved[name]
        return torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        for name in [*self._file_checksums][rank::ranks]:
            self._verify_file(name)

    def _size(self, name: str) -> int:
        try:
            return (self.folder / name).stat().st_size
        except FileNotFoundError:
            raise DamagedError(f"{self.path}: its part {self.folder / name} is missing") from None

    def _verify_file(self, name: str) -> None:
        path, wanted = self.folder / name, self._file_checksums[name]
        with open_regular(path) as file:
            found = _checksum(file)
        if found != wanted:
            raise DamagedError(f"{path} is damaged: its checksum is {found}, was {wanted}")

    def read_parts(self, wanted: Mapping[str, Parts]) -> None:
        tensors = {name: SavedTensor(self.empty(name).shape, parts) for name, parts in wanted.items()}
        reader = _Reader(self.folder, self._metadata)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            try:
                with raising_first_failure():
                    dcp.load(tensors, storage_reader=reader, planner=_LoadPlanner(), no_dist=True)
            except (AssertionError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
                raise ValueError(f"{self.folder} does not have the tensors of its {METADATA}: {error}") from error


def _checksum(file: BinaryIO) -> str:
    checksum = 0
    while data := file.read(_READ_BYTES):
        checksum = zlib.crc32(data, checksum)
    return f"{checksum:08x}"


def _memory_format(kind: Any, name: str) -> Any:
    if getattr(kind, "__name__", "") != "_MEM_FORMAT_ENCODING":
        raise pickle.UnpicklingError(f"it reads {name} of {kind}")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # some releases of Python pickle a member of an enum by it
            return _memory_format
        if name not in _GLOBALS.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _read_metadata(path: Path, sizes: Mapping[str, int]) -> Metadata:
    """Read the metadata without executing other code than the constructors of `_GLOBALS`."""
    try:
        with open_regular(path) as file:
            metadata = _Unpickler(file).load()
        saved = metadata.state_dict_metadata
        if not all(isinstance(tensor, TensorStorageMetadata) for tensor in saved.values()):
            raise ValueError("it has entries other than tensors")
        if unknown := {place.relative_path for place in metadata.storage_data.values()} - sizes.keys():
            raise ValueError(f"it names the file {min(unknown)}")
        claimed = sum(math.prod(map(abs, tensor.size)) * tensor.properties.dtype.itemsize for tensor in saved.values())
        if claimed > (stored := sum(sizes.values())):
            raise ValueError(f"the tensors take {claimed} bytes, the files have {stored}")
    except OSError:
        raise
    except Exception as error:  # a pickle can raise any exception
        raise ValueError(f"{path}: not the metadata of a checkpoint: {error}") from error
    return metadata  # type: ignore[no-any-return]


@contextmanager
def raising_first_failure(names_process: bool = False) -> Iterator[None]:
    """Replace a CheckpointException by the exception of the first process that failed, which an OSError can name."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if names_process and isinstance(cause, OSError) and cause.errno is not None:
            cause = OSError(cause.errno, f"{cause.strerror} in process {rank}", cause.filename)
        raise cause from error
