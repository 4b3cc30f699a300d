"""Matrices of float8 numbers: quantisation, with a scale from the magnitudes of earlier calls, and products."""

import math

import torch
from torch import Tensor

from gptkernels.rules._register import fake, flops, mutates, vmap, without_derivative
from gptkernels.rules._vmap import loop

CALLS = 16
"""How many earlier calls a scale depends on."""
ALIGNMENT = 16
"""What the features of a float8 product are a multiple of."""


def new_history(device=None) -> Tensor:
    """A history without calls: the first one's scale is that of its own values."""
    return torch.zeros(CALLS + 2, dtype=torch.int32, device=device)


def is_history(tensor: Tensor) -> bool:
    """Whether it could be one: finite magnitudes, and no call under way."""
    if tensor.shape != (CALLS + 2,) or tensor.dtype != torch.int32:
        return False
    calls, under_way = tensor[:CALLS], tensor[CALLS:]
    return bool((calls >= 0).all() and calls.view(torch.float32).isfinite().all() and not under_way.any())


def padded(rows):
    """The rows of a transposed copy: the terms of a product, so a multiple of 16."""
    return (rows + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def transposed_like(x: Tensor, dtype: torch.dtype, wanted: bool) -> Tensor:
    """The transposed copy without data; without elements where it is not wanted."""
    if not wanted:
        return x.new_empty(0, dtype=dtype)
    return x.new_empty((x.shape[-1], padded(math.prod(x.shape[:-1]))), dtype=dtype)


def scale_like(x: Tensor) -> Tensor:
    """A scale without data."""
    return x.new_empty((), dtype=torch.float32)


def _fake_quantize(x, history, dtype, transposed=False):
    return x.new_empty(x.shape, dtype=dtype), transposed_like(x, dtype, transposed), scale_like(x)


def _fake_matmul(a, b, scale_a, scale_b, bias, dtype, fast_accumulation=False):
    return a.new_empty((*a.shape[:-1], b.shape[0]), dtype=dtype)


def matmul_flops(a_shape, b_shape, *args, **kwargs) -> int:
    """A multiplication and an addition for each term."""
    return 2 * math.prod(a_shape) * b_shape[0]


fake("fp8_quantize", _fake_quantize)
mutates("fp8_quantize")
without_derivative("fp8_quantize")
vmap("fp8_quantize", loop)
fake("fp8_matmul", _fake_matmul)
without_derivative("fp8_matmul")
vmap("fp8_matmul", loop)
flops("fp8_matmul", matmul_flops)
