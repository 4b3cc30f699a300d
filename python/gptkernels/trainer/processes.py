"""The processes that `torchrun` starts. Without torchrun there is one process, and nothing is exchanged."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from gptkernels._device import pick_device
from gptkernels.parallel import Layout, all_reduce_in_order, make_mesh

Value = TypeVar("Value")

DISCONNECTED = 5
"""The exit status of a process that cannot exchange values with the others."""


class Processes:
    """The rank and device of this process, and the exchange of values with the other processes.

    If `device` is "cuda", or is "auto" and there are GPUs, each process has its own GPU. If `adds_in_order` is true,
    values are added in the order of the ranks, and otherwise in an order that the backend chooses. An exchange fails
    only after more than `watchdog` minutes. Several processes on GPUs work on a CUDA stream of their own until `close`.

    Attributes:
        mesh: the processes as the dimensions of `layout`, or None if there is one process.
        data_mesh: the processes whose gradients are averaged, as a mesh of one dimension, or None.
        timeout: the time after which an exchange fails.
        batch_rank, batches: the number of this process's batch, and the number of batches that the processes
            compute at the same time. The processes of a layer or a sequence have the same batch.

    Raises:
        ValueError: if `layout` is not a layout of these processes.
    """

    mesh: DeviceMesh | None = None
    data_mesh: DeviceMesh | None = None
    batch_rank = 0

    def __init__(
        self, device: str = "auto", adds_in_order: bool = False, layout: str | None = None, watchdog: float = 0.0
    ) -> None:
        self._adds_in_order = adds_in_order
        self.rank = process_rank()
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.timeout = _timeout(watchdog)
        sizes = Layout.parse(layout, self.world_size)
        self.device = pick_device(device, int(os.environ.get("LOCAL_RANK", 0)))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._opened = self.world_size > 1 and not distributed.is_initialized()
        if self._opened:
            with connection("the processes cannot meet"):
                backend = "nccl" if self.device.type == "cuda" else "gloo"
                distributed.init_process_group(backend, timeout=self.timeout)
        self.batches = sizes.dp
        if self.world_size > 1:
            self.mesh = make_mesh(sizes, self.device.type)
            self.batch_rank = self.mesh.get_local_rank("dp")
            self.data_mesh = self.mesh["dp", "cp"]._flatten("data") if sizes.cp > 1 else self.mesh["dp"]
            for group in (*self.mesh.get_all_groups(), self.data_mesh.get_group()):
                distributed_c10d._set_pg_timeout(self.timeout, group)
        self._given_stream: torch.cuda.Stream | None = None
        if self.mesh is not None and self.device.type == "cuda":
            # A CUDA graph cannot contain work of the default stream, and DDP works on the stream on which it is made.
            self._given_stream = torch.cuda.current_stream()
            stream = torch.cuda.Stream()
            stream.wait_stream(self._given_stream)
            torch.cuda.set_stream(stream)

    @property
    def is_main(self) -> bool:
        """The main process writes files and prints."""
        return self.rank == 0

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all processes, in the order of their ranks."""
        values = [value] * self.world_size
        if self.world_size > 1:
            distributed.all_gather_object(values, value)
        return values

    def check_equal(self, values: Mapping[str, object]) -> None:
        """Raise a ValueError, in all processes, if a process has another value than process 0."""
        found = self.gather(dict(values))
        for rank, theirs in enumerate(found):
            for name, value in found[0].items():
                if theirs[name] != value:
                    raise ValueError(
                        f"{name} is {theirs[name]} in process {rank}, but {value} in process 0; it must be the same in "
                        "all processes"
                    )

    def average(self, values: Tensor) -> Tensor:
        if self.world_size > 1:
            if self._adds_in_order:
                assert self.mesh is not None
                assert self.data_mesh is not None
                all_reduce_in_order(values, self.data_mesh.get_group())
                if self.mesh["tp"].size() > 1:
                    # The values are equal, except that only one process may have received a signal.
                    distributed.all_reduce(values, group=self.mesh["tp"].get_group())
            else:
                distributed.all_reduce(values)
            values /= self.world_size
        return values

    def largest(self, value: int) -> int:
        if self.world_size == 1:
            return value
        largest = torch.tensor(value, device=self.device)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        return int(largest.item())

    def from_main(self, value: Value) -> Value:
        if self.world_size == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0)
        return values[0]

    def close(self, failed: bool = False) -> None:
        """Leave the process group. If this process has failed, do not wait for the others, as NCCL otherwise does."""
        if self._given_stream is not None:
            self._given_stream.wait_stream(torch.cuda.current_stream())
            torch.cuda.set_stream(self._given_stream)
        if self._opened and distributed.is_initialized():
            leave = distributed_c10d._abort_process_group if failed else distributed.destroy_process_group
            leave()

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)


@contextmanager
def connection(failure: str = "the exchange with other processes failed") -> Iterator[None]:
    """Raise torch's errors about connections as a ConnectionError that begins with `failure`."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        reason = re.sub(r"^\[[^]]*\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
        raise ConnectionError(f"{failure}, maybe because another process has ended: {reason}") from error


def _timeout(watchdog: float) -> timedelta:
    """Return a time for exchanges that ends after the watchdog's minutes, whose message is better. 0 is 30 days."""
    return timedelta(minutes=watchdog + 2) if watchdog else timedelta(days=30)


def process_rank() -> int:
    return int(os.environ.get("RANK", 0))


def process_name() -> str:
    """Return "process 1 of 2", or an empty string if there is only one process."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    return f"process {process_rank()} of {size}" if size > 1 else ""
