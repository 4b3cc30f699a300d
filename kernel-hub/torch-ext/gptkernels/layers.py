"""Layers for ``kernels.kernelize``, which replaces the forward of a module by the forward of a layer.

The layers have no constructor and no state, because the forward then uses the module's parameters and attributes.

A layer has the name that transformers (``use_kernel_forward_from_hub``) or torch.nn gives to the module that it may
replace.
"""

import torch
from torch import Tensor

from .elementwise import gelu, layer_norm


class LayerNorm(torch.nn.Module):
    """The forward of ``torch.nn.LayerNorm`` over the last dimension."""

    can_torch_compile = True
    has_backward = True

    normalized_shape: tuple
    weight: Tensor
    bias: Tensor
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        if len(self.normalized_shape) != 1:
            raise ValueError(f"LayerNorm: normalized_shape is {self.normalized_shape}, only one dimension is supported")
        return layer_norm(input, self.weight, self.bias, self.eps)


class NewGELU(torch.nn.Module):
    """The tanh GELU, under GPT-2's name."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input, "tanh")


class GeluTanh(torch.nn.Module):
    """The tanh GELU."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input, "tanh")


class GeLU(torch.nn.Module):
    """The exact GELU."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input, "none")


__all__ = ["GeLU", "GeluTanh", "LayerNorm", "NewGELU"]
