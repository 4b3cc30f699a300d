"""Copies batches to the tensors that a CUDA graph reads."""

from collections.abc import Sequence

import torch
from torch import Tensor

Signature = tuple[tuple[torch.Size, torch.dtype], ...]


def signature(batch: Sequence[Tensor]) -> Signature:
    """Return the shapes and dtypes that a graph captured for this batch requires."""
    return tuple((t.shape, t.dtype) for t in batch)


class Staging:
    """Static tensors on a CUDA device, with buffers for copies into them.

    A batch on the host is copied to pinned memory, and from there, on a separate CUDA stream, to one of two buffers on
    the device, while the device computes the previous step. Only the copy from the buffer into the static tensors waits
    for the previous step.
    """

    def __init__(self, kind: Signature, device: torch.device) -> None:
        self.static = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kind]
        self._stream = torch.cuda.Stream(device)
        self._buffers: list[_Buffer] = []

    def put(self, batch: Sequence[Tensor]) -> None:
        """Copy a batch into the static tensors, after the earlier work of the current CUDA stream."""
        sources = batch if all(t.is_cuda for t in batch) else self._on_device(batch)
        for static, source in zip(self.static, sources, strict=True):
            static.copy_(source, non_blocking=True)
        if sources is not batch:
            self._buffers[-1].free.record()

    def _on_device(self, batch: Sequence[Tensor]) -> list[Tensor]:
        if not self._buffers:
            self._buffers = [_Buffer(self.static) for _ in range(2)]
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        buffer.filled.synchronize()  # the copy from this pinned memory two batches ago, which has usually finished
        for pinned, t in zip(buffer.pinned, batch, strict=True):
            pinned.copy_(t)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(buffer.free)
            for on_device, pinned in zip(buffer.on_device, buffer.pinned, strict=True):
                on_device.copy_(pinned, non_blocking=True)
            buffer.filled.record()
        torch.cuda.current_stream().wait_event(buffer.filled)
        return buffer.on_device


class _Buffer:
    """Pinned memory and device memory for a batch; ``free`` is recorded after the last use on the device."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self.pinned = [torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True) for t in like]
        self.on_device = [torch.empty_like(t) for t in like]
        self.filled, self.free = torch.cuda.Event(), torch.cuda.Event()
        self.free.record()  # earlier work on this CUDA stream may still use the memory of on_device
