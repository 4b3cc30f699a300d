"""The time of every step, as the device saw it."""

from __future__ import annotations

import time

import torch


class Mark:
    """A moment: on the CPU, when it is made; on CUDA, when the device has done all that was launched before it."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._seconds = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._seconds = time.perf_counter()

    def wait(self) -> None:
        """Wait until the moment has come."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds between two moments that have come."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._seconds - earlier._seconds
