"""Detects outliers among the steps' losses and gradient norms by z-scores, as in llm.c's outlier_detector.h."""

import math
from typing import Any

import torch
from torch import Tensor

WINDOW = 128


class OutlierDetector:
    """Computes the z-scores of each step's loss and gradient norm.

    A z-score says by how many standard deviations a value is above the mean of the last 128 values, of which it is the
    newest. It is NaN until there are 128 earlier values. A CUDA graph can capture `scores`, because it does not
    synchronise with the device, and changes the stored values in place.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._window = torch.full((WINDOW, 2), math.nan, dtype=torch.float64, device=device)

    def scores(self, loss_and_norm: Tensor) -> Tensor:
        values = loss_and_norm.double()
        unknown = self._window[0] * 0  # NaN until the window is full
        self._window.copy_(torch.cat([self._window[1:], values.unsqueeze(0)]))
        deviation, mean = torch.std_mean(self._window, dim=0, correction=0)
        return torch.where(deviation == 0, 0.0, (values - mean) / deviation) + unknown

    def state_dict(self) -> dict[str, Tensor]:
        return {"window": self._window}

    def load_state_dict(self, state: Any) -> None:
        window = state.get("window") if isinstance(state, dict) else None
        if not isinstance(window, Tensor) or window.shape != self._window.shape or window.dtype != torch.float64:
            raise ValueError(f"outliers: window must be a float64 tensor of shape {tuple(self._window.shape)}")
        self._window.copy_(window)


class Skipping:
    """The largest z-scores of the loss and of the gradient's norm with which an update is made; 0 means no limit."""

    def __init__(self, max_loss_score: float, max_gradient_score: float, device: torch.device) -> None:
        limits = [limit or math.inf for limit in (max_loss_score, max_gradient_score)]
        self._limits = torch.tensor(limits, dtype=torch.float64, device=device)

    def found(self, scores: Tensor) -> Tensor:
        return (scores > self._limits).any().float()
