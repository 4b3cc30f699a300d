"""The learning rate as a function of the step."""

import math
from typing import NamedTuple

WSD_DECAY = 5
"""By default the schedule "wsd" decays in the last fifth of the steps."""


class Schedule(NamedTuple):
    """Linear warm-up to `peak`, and then a decay to `final`, as in llm.c (whose "constant" has no warm-up).

    The rate is `peak / warmup_steps` at the first step, 0, and `peak` at step `warmup_steps`. Then follows, by `kind`:

    - "cosine" or "linear": half a cosine or a line to `final` at step `decay_steps` (None: `total_steps`);
    - "wsd" (warm-up, stable, decay): `peak` until the last `decay_steps` steps (None: a fifth of all), and then
      `1 - sqrt(progress)` (Hägele et al., 2024) to `final` at `total_steps`;
    - "constant": `peak`.
    """

    kind: str
    peak: float
    final: float
    warmup_steps: int
    total_steps: int
    decay_steps: int | None = None

    def rate(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        first, last = self._decay()
        progress = (step - first) / max(1, last - first)
        return self.final + (self.peak - self.final) * _FACTORS[self.kind](min(1.0, max(0.0, progress)))

    def _decay(self) -> tuple[int, int]:
        if self.kind != "wsd":
            return self.warmup_steps, self.total_steps if self.decay_steps is None else self.decay_steps
        length = -(-self.total_steps // WSD_DECAY) if self.decay_steps is None else self.decay_steps
        return max(self.warmup_steps, self.total_steps - length), self.total_steps


_FACTORS = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "wsd": lambda progress: 1 - math.sqrt(progress),
}
