"""Causal softmax: row t of softmax(scale * scores) over the columns 0..t, zeros above the diagonal."""

import torch

from gptkernels.rules._jvp import by_formula
from gptkernels.rules._register import accumulate_dtype, autocast, autograd, below_autograd, fake, ops, vmap
from gptkernels.rules._vmap import rows


def _fake(scores, scale=1.0):
    return scores.new_empty(scores.shape)


def _fake_backward(dout, out, scale=1.0):
    return out.new_empty(out.shape)


class CausalSoftmax(torch.autograd.Function):
    """scores (..., T, T) -> out (..., T, T)."""

    @staticmethod
    def forward(ctx, scores, scale):
        """Save the output: the backward needs nothing else."""
        out = below_autograd(ops.causal_softmax.default, scores, scale)
        ctx.save_for_backward(out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, dout):
        """dscores = scale * out * (dout - sum(dout * out))."""
        (out,) = ctx.saved_tensors
        return ops.causal_softmax_backward.default(dout, out, ctx.scale), None


class CausalSoftmaxBackward(torch.autograd.Function):
    """dscores as a differentiable function of dout and out."""

    @staticmethod
    def forward(ctx, dout, out, scale):
        """The kernel."""
        ctx.save_for_backward(dout, out)
        ctx.scale = scale
        return below_autograd(ops.causal_softmax_backward.default, dout, out, scale)

    @staticmethod
    def backward(ctx, g):
        """By formula, with s = sum(dout * out): ddout = scale * out * (g - sum(g * out)), and for out.

        d/d out of sum(g * scale * out * (dout - s)) is scale * (g * (dout - s) - dout * sum(g * out)). Above the
        diagonal dscores is constant.
        """
        dout, out = ctx.saved_tensors
        wide = accumulate_dtype(out.dtype)
        g, dout, p = (t.tril().to(wide) for t in (g, dout, out))
        s, gp = (dout * p).sum(-1, keepdim=True), (g * p).sum(-1, keepdim=True)
        ddout = ctx.scale * p * (g - gp)
        dp = ctx.scale * (g * (dout - s) - dout * gp)
        return ddout.to(out.dtype), dp.to(out.dtype), None


def tangent(inputs, tangents, outputs):
    """The Jacobian of a row is symmetric: the backward, of the tangent."""
    return ops.causal_softmax_backward.default(tangents[0], outputs[0], inputs[1])


def backward_formula(dout, out, scale):
    """dscores in torch ops."""
    wide = accumulate_dtype(out.dtype)
    dout, p = dout.tril().to(wide), out.tril().to(wide)
    return scale * p * (dout - (dout * p).sum(-1, keepdim=True))


fake("causal_softmax", _fake)
fake("causal_softmax_backward", _fake_backward)
autograd("causal_softmax", CausalSoftmax, jvp=tangent)
autograd("causal_softmax_backward", CausalSoftmaxBackward, jvp=by_formula(backward_formula))
vmap("causal_softmax", rows(0, least=2))
vmap("causal_softmax_backward", rows(0, 1, least=2))
autocast("causal_softmax", cuda="float32")
