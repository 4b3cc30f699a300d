"""Forwards that ``kernelize`` puts in place of a module's own: without a constructor and without state.

Each is named as transformers names the layer it may replace (``use_kernel_forward_from_hub``), or as torch.nn does.
"""

import torch
from torch import Tensor

import gptkernels

functional = gptkernels.functional


class LayerNorm(torch.nn.Module):
    """``torch.nn.LayerNorm``."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class NewGELU(torch.nn.Module):
    """GELU by tanh, as GPT-2's."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return functional.gelu(input, "tanh")


class GeluTanh(torch.nn.Module):
    """GELU by tanh."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return functional.gelu(input, "tanh")


class GeLU(torch.nn.Module):
    """Exact GELU."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return functional.gelu(input, "none")


class Linear(torch.nn.Module):
    """``torch.nn.Linear``."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight, self.bias)


__all__ = ["GeLU", "GeluTanh", "LayerNorm", "Linear", "NewGELU"]
