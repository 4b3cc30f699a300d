"""A step that has been launched, and whose numbers have not been read yet."""

from __future__ import annotations

from torch import Tensor

from gptkernels.trainer.clock import Mark


class PendingStep:
    """The loss, gradient norm and request to stop of a step, on their way from the device; `end` is when they come."""

    def __init__(self, step: int, learning_rate: float, numbers: Tensor) -> None:
        self.step = step
        self.learning_rate = learning_rate
        self._numbers = numbers.to("cpu", non_blocking=True)
        self.end = Mark(numbers.device)

    def read(self) -> list[float]:
        """The numbers, once they are there."""
        self.end.wait()
        return self._numbers.tolist()
