"""A step that is launched, and whose numbers are not yet read."""

from torch import Tensor

from gptkernels.trainer.clock import Mark


class PendingStep:
    """The numbers of a step, which are being copied from the device until the time `end`.

    The numbers are those that `Step` returns, and a request to stop.
    """

    def __init__(self, step: int, learning_rate: float, numbers: Tensor) -> None:
        self.step = step
        self.learning_rate = learning_rate
        self._numbers = numbers.to("cpu", non_blocking=True)
        self.end = Mark(numbers.device)

    def read(self) -> list[float]:
        self.end.wait()
        return self._numbers.tolist()
