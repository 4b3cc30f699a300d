"""Causal softmax: row t is softmax(scale * scores) over the columns 0..t, and 0 in the later columns."""

import torch

from gptkernels.rules import _register as register
from gptkernels.rules import softmax
from gptkernels.rules._register import below_autograd, like, ops
from gptkernels.rules._vmap import rows


class CausalSoftmax(torch.autograd.Function):
    """scores (..., T, T) -> out (..., T, T)."""

    @staticmethod
    def forward(ctx, scores, scale):
        out = below_autograd(ops.causal_softmax.default, scores, scale)
        ctx.save_for_backward(out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, dout):
        (out,) = ctx.saved_tensors
        return ops.causal_softmax_backward.default(dout, out, ctx.scale), None


def tangent(inputs, tangents, outputs):
    """The tangent is computed by the backward, because a row's Jacobian is symmetric."""
    return ops.causal_softmax_backward.default(tangents[0], outputs[0], inputs[1])


def backward_formula(dout, out, scale):
    return scale * softmax.backward_formula(dout.tril(), out.tril())


register.fake("causal_softmax", like(0))
register.fake("causal_softmax_backward", like(1))
register.autograd("causal_softmax", CausalSoftmax, jvp=tangent)
register.autograd_by_formula("causal_softmax_backward", backward_formula, inputs=2)
register.vmap("causal_softmax", rows(0, least=2))
register.vmap("causal_softmax_backward", rows(0, 1, least=2))
register.autocast("causal_softmax", cuda="float32")
