"""Layers for ``kernels.kernelize``, which replaces the forward of a module by the forward of a layer.

The layers have no constructor and no state, because the forward then uses the module's parameters and attributes.

A layer has the name that transformers (``use_kernel_forward_from_hub``) or torch.nn gives to the module that it may
replace.
"""

import torch
from torch import Tensor

import gptkernels

functional = gptkernels.functional


class LayerNorm(torch.nn.Module):
    """The forward of ``torch.nn.LayerNorm``."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class NewGELU(torch.nn.Module):
    """The tanh GELU, under GPT-2's name."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return functional.gelu(input, "tanh")


class GeluTanh(torch.nn.Module):
    """The tanh GELU."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return functional.gelu(input, "tanh")


class GeLU(torch.nn.Module):
    """The exact GELU."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return functional.gelu(input, "none")


class Linear(torch.nn.Module):
    """The forward of ``torch.nn.Linear``."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight, self.bias)


__all__ = ["GeLU", "GeluTanh", "LayerNorm", "Linear", "NewGELU"]
