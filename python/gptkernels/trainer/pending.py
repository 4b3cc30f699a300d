"""A step that is launched but whose numbers are not read yet."""

from __future__ import annotations

from torch import Tensor

from gptkernels.trainer.clock import Mark


class PendingStep:
    """The numbers of a step, which are being copied from the device; `end` is the time when they arrive.

    They are the loss, the gradient norm, scores if updates may be skipped, and the request to stop.
    """

    def __init__(self, step: int, learning_rate: float, numbers: Tensor) -> None:
        self.step = step
        self.learning_rate = learning_rate
        self._numbers = numbers.to("cpu", non_blocking=True)
        self.end = Mark(numbers.device)

    def read(self) -> list[float]:
        """Wait for the numbers and return them."""
        self.end.wait()
        return self._numbers.tolist()
