"""GELU(x) = x * (the normal distribution function at x), or its tanh approximation (Hendrycks and Gimpel, 2016)."""

import math

import torch
from torch import Tensor

from gptkernels.rules import _register as register
from gptkernels.rules._register import accumulate_dtype, below_autograd, like, ops
from gptkernels.rules._vmap import rows


class Gelu(torch.autograd.Function):
    """x (...) -> out (...)."""

    @staticmethod
    def forward(ctx, x, approximate):
        ctx.save_for_backward(x)  # the derivative is cheaper to compute from x than to store and read
        ctx.approximate = approximate
        return below_autograd(ops.gelu.default, x, approximate=approximate)

    @staticmethod
    def backward(ctx, dout):
        (x,) = ctx.saved_tensors
        return ops.gelu_backward.default(dout, x, approximate=ctx.approximate), None


def backward_formula(dout: Tensor, x: Tensor, approximate: str) -> Tensor:
    wide = accumulate_dtype(x.dtype)
    dout, x = dout.to(wide), x.to(wide)
    if approximate == "none":
        density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return dout * (0.5 * torch.erfc(-x * math.sqrt(0.5)) + x * density)
    linear = 2 * math.sqrt(2 / math.pi)
    cubic = 0.044715 * linear
    s = torch.sigmoid(linear * x + cubic * x**3)
    return dout * (s + x * s * (1 - s) * (linear + 3 * cubic * x * x))


def tangent(inputs, tangents, outputs):
    """The tangent is computed by the backward, because the Jacobian is diagonal."""
    x, approximate = inputs
    return ops.gelu_backward.default(tangents[0], x, approximate=approximate)


register.fake("gelu", like(0))
register.fake("gelu_backward", like(1))
register.autograd("gelu", Gelu, jvp=tangent)
register.autograd_by_formula("gelu_backward", backward_formula, inputs=2)
register.vmap("gelu", rows(0, least=0))
register.vmap("gelu_backward", rows(0, 1, least=0))
