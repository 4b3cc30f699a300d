"""GELU: x times the normal distribution function of x, or its tanh approximation (Hendrycks and Gimpel, 2016)."""

import math

import torch
from torch import Tensor

from gptkernels.rules._jvp import by_formula
from gptkernels.rules._register import accumulate_dtype, autograd, below_autograd, differentiate, fake, ops, vmap
from gptkernels.rules._vmap import rows


def _fake(x, *, approximate="tanh"):
    return x.new_empty(x.shape)


def _fake_backward(dout, x, *, approximate="tanh"):
    return x.new_empty(x.shape)


class Gelu(torch.autograd.Function):
    """x (...) -> out (...)."""

    @staticmethod
    def forward(ctx, x, approximate):
        """Save x alone: the derivative is cheaper to compute again than to read."""
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        return below_autograd(ops.gelu.default, x, approximate=approximate)

    @staticmethod
    def backward(ctx, dout):
        """One kernel."""
        (x,) = ctx.saved_tensors
        return ops.gelu_backward.default(dout, x, approximate=ctx.approximate), None


def backward_formula(dout: Tensor, x: Tensor, approximate: str) -> Tensor:
    """``dout`` times the derivative of GELU, in torch ops."""
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
    """The derivative of each element times its tangent, as in the backward."""
    x, approximate = inputs
    return ops.gelu_backward.default(tangents[0], x, approximate=approximate)


class GeluBackward(torch.autograd.Function):
    """dx as a differentiable function of dout and x."""

    @staticmethod
    def forward(ctx, dout, x, approximate):
        """The kernel."""
        ctx.save_for_backward(dout, x)
        ctx.approximate = approximate
        return below_autograd(ops.gelu_backward.default, dout, x, approximate=approximate)

    @staticmethod
    def backward(ctx, ddx):
        """By formula."""
        dout, x = ctx.saved_tensors
        return *differentiate(
            lambda dout, x: (backward_formula(dout, x, ctx.approximate).to(x.dtype),),
            (dout, x),
            ctx.needs_input_grad[:2],
            (ddx,),
        ), None


fake("gelu", _fake)
fake("gelu_backward", _fake_backward)
autograd("gelu", Gelu, jvp=tangent)
autograd("gelu_backward", GeluBackward, jvp=by_formula(backward_formula))
vmap("gelu", rows(0, least=0))
vmap("gelu_backward", rows(0, 1, least=0))
