"""The learning rate of every step."""

from __future__ import annotations

import math


def cosine_schedule(step: int, total_steps: int, warmup_steps: int, peak: float, final_fraction: float = 0.1) -> float:
    """Linear warm-up to `peak`, then half a cosine down to `final_fraction * peak` at `total_steps`.

    `step` counts from 0: the first step has `peak / warmup_steps`, step `warmup_steps` has `peak`, and later
    steps than `total_steps` keep the final rate.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return peak * (final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress)))
