"""Softmax over the last dimension: out = exp(x - max(x)) / sum(exp(x - max(x)))."""

import torch

from gptkernels.rules._jvp import by_formula
from gptkernels.rules._register import accumulate_dtype, autocast, autograd, below_autograd, fake, ops, vmap
from gptkernels.rules._vmap import rows


def _fake(x):
    return x.new_empty(x.shape)


def _fake_backward(dout, out):
    return out.new_empty(out.shape)


class Softmax(torch.autograd.Function):
    """x (..., C) -> out (..., C)."""

    @staticmethod
    def forward(ctx, x):
        """Save the output: the backward needs nothing else."""
        out = below_autograd(ops.softmax.default, x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, dout):
        """dx = out * (dout - sum(dout * out))."""
        (out,) = ctx.saved_tensors
        return ops.softmax_backward.default(dout, out)


class SoftmaxBackward(torch.autograd.Function):
    """dx as a differentiable function of dout and out."""

    @staticmethod
    def forward(ctx, dout, out):
        """The kernel."""
        ctx.save_for_backward(dout, out)
        return below_autograd(ops.softmax_backward.default, dout, out)

    @staticmethod
    def backward(ctx, g):
        """By formula: out * (g - sum(g * out)) for dout, g * (dout - sum(dout * out)) - dout * sum(g * out) for out."""
        dout, out = ctx.saved_tensors
        wide = accumulate_dtype(out.dtype)
        g, dout, p = g.to(wide), dout.to(wide), out.to(wide)
        s, gp = (dout * p).sum(-1, keepdim=True), (g * p).sum(-1, keepdim=True)
        return (p * (g - gp)).to(out.dtype), (g * (dout - s) - dout * gp).to(out.dtype)


def tangent(inputs, tangents, outputs):
    """The Jacobian of a row is symmetric: the backward, of the tangent."""
    return ops.softmax_backward.default(tangents[0], outputs[0])


def backward_formula(dout, out):
    """dx in torch ops."""
    wide = accumulate_dtype(out.dtype)
    dout, p = dout.to(wide), out.to(wide)
    return p * (dout - (dout * p).sum(-1, keepdim=True))


fake("softmax", _fake)
fake("softmax_backward", _fake_backward)
autograd("softmax", Softmax, jvp=tangent)
autograd("softmax_backward", SoftmaxBackward, jvp=by_formula(backward_formula))
vmap("softmax", rows(0))
vmap("softmax_backward", rows(0, 1))
autocast("softmax", cuda="float32")
