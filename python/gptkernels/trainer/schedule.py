"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from typing import NamedTuple

WSD_DECAY = 5
"""The schedule "wsd" decays by default in the last fifth of the steps."""


class Schedule(NamedTuple):
    """Linear warm-up to `peak`, then a decay to `final`. As in llm.c, except that "constant" warms up too.

    Steps count from 0: the first one has `peak / warmup_steps`, step `warmup_steps` has `peak`.

    - "cosine", "linear": half a cosine, or a line, from there to `final` at step `decay_steps` (None: `total_steps`).
    - "wsd" (warm-up, stable, decay): `peak` until the last `decay_steps` (None: a fifth of all), then
      `1 - sqrt(progress)` (Hägele et al., 2024) down to `final` at `total_steps`.
    - "constant": `peak`.
    """

    kind: str
    peak: float
    final: float
    warmup_steps: int
    total_steps: int
    decay_steps: int | None = None

    def rate(self, step: int) -> float:
        """Return the learning rate of a step; after the end of the decay it is `final`."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        first, last = self._decay()
        progress = (step - first) / max(1, last - first)
        return self.final + (self.peak - self.final) * _FACTORS[self.kind](min(1.0, max(0.0, progress)))

    def _decay(self) -> tuple[int, int]:
        """Return the first step of the decay and the step at which it has ended."""
        if self.kind != "wsd":
            return self.warmup_steps, self.total_steps if self.decay_steps is None else self.decay_steps
        length = -(-self.total_steps // WSD_DECAY) if self.decay_steps is None else self.decay_steps
        return max(self.warmup_steps, self.total_steps - length), self.total_steps


_FACTORS = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "wsd": lambda progress: 1 - math.sqrt(progress),
}
