"""A step that was launched, but whose numbers are not yet read."""

import time

import torch
from torch import Tensor


class Mark:
    """A point in time.

    On the CPU it is when the object is made. On CUDA it is when the current CUDA stream has done its earlier work.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._seconds = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._seconds = time.perf_counter()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "Mark") -> float:
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._seconds - earlier._seconds


class PendingStep:
    """A launched step. The copy of `numbers` (those of `Step`, and a request to stop) to the host is done at `end`."""

    def __init__(self, step: int, learning_rate: float, numbers: Tensor) -> None:
        self.step = step
        self.learning_rate = learning_rate
        self._numbers = numbers.to("cpu", non_blocking=True)
        self.end = Mark(numbers.device)

    def read(self) -> list[float]:
        self.end.wait()
        return self._numbers.tolist()
