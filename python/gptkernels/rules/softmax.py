"""Softmax over the last dimension: out = exp(x - max(x)) / sum(exp(x - max(x)))."""

import torch

from gptkernels.rules import _register as register
from gptkernels.rules._register import accumulate_dtype, below_autograd, like, ops
from gptkernels.rules._vmap import rows


class Softmax(torch.autograd.Function):
    """x (..., C) -> out (..., C)."""

    @staticmethod
    def forward(ctx, x):
        out = below_autograd(ops.softmax.default, x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, dout):
        (out,) = ctx.saved_tensors
        return ops.softmax_backward.default(dout, out)


def tangent(inputs, tangents, outputs):
    """The tangent is computed by the backward, because a row's Jacobian is symmetric."""
    return ops.softmax_backward.default(tangents[0], outputs[0])


def backward_formula(dout, out):
    wide = accumulate_dtype(out.dtype)
    dout, p = dout.to(wide), out.to(wide)
    return p * (dout - (dout * p).sum(-1, keepdim=True))


register.fake("softmax", like(0))
register.fake("softmax_backward", like(1))
register.autograd("softmax", Softmax, jvp=tangent)
register.autograd_by_formula("softmax_backward", backward_formula, inputs=2)
register.vmap("softmax", rows(0))
register.vmap("softmax_backward", rows(0, 1))
register.autocast("softmax", cuda="float32")
