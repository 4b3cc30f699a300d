"""Quantisation to float8, with a scale from the amax of earlier calls, and matmuls of float8 matrices."""

import math

import torch
from torch import Tensor

from gptkernels.rules import _register as register
from gptkernels.rules._vmap import loop
from gptkernels.rules.linear import linear_flops

CALLS = 16
"""The number of earlier calls whose amaxes determine a scale."""
ALIGNMENT = 16
"""The numbers of input and output features of a float8 matmul must be multiples of this."""


def new_history(device=None) -> Tensor:
    """Make an amax history without calls, with which the first call computes the scale from the tensor itself."""
    return torch.zeros(CALLS + 2, dtype=torch.int32, device=device)


def is_history(tensor: Tensor) -> bool:
    if tensor.shape != (CALLS + 2,) or tensor.dtype != torch.int32:
        return False
    calls, unfinished = tensor[:CALLS], tensor[CALLS:]
    return bool((calls >= 0).all() and calls.view(torch.float32).isfinite().all() and not unfinished.any())


def padded(rows):
    """Round the number of rows up to a multiple of 16, which a float8 matmul that sums over the rows requires."""
    return (rows + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def transposed_like(x: Tensor, dtype: torch.dtype, wanted: bool) -> Tensor:
    if not wanted:
        return x.new_empty(0, dtype=dtype)
    return x.new_empty((x.shape[-1], padded(math.prod(x.shape[:-1]))), dtype=dtype)


def scale_like(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


def _fake_quantize(x, history, dtype, transposed=False):
    return x.new_empty(x.shape, dtype=dtype), transposed_like(x, dtype, transposed), scale_like(x)


def _fake_matmul(a, b, scale_a, scale_b, bias, dtype, fast_accumulation=False):
    return a.new_empty((*a.shape[:-1], b.shape[0]), dtype=dtype)


register.fake("fp8_quantize", _fake_quantize)
register.mutates("fp8_quantize")
register.without_derivative("fp8_quantize")
register.vmap("fp8_quantize", loop)
register.fake("fp8_matmul", _fake_matmul)
register.without_derivative("fp8_matmul")
register.vmap("fp8_matmul", loop)
register.flops("fp8_matmul", linear_flops)
