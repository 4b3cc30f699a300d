"""Causal softmax: row t of softmax(scale * scores) over the columns 0..t, zeros above the diagonal."""

import torch

from gptkernels.ops._register import accumulate_dtype, autocast, autograd, below_autograd, fake, ops


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
        return ops.causal_softmax_backward(dout, out, ctx.scale), None


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


fake("causal_softmax", _fake)
fake("causal_softmax_backward", _fake_backward)
autograd("causal_softmax", CausalSoftmax)
autograd("causal_softmax_backward", CausalSoftmaxBackward)
autocast("causal_softmax", cuda="float32")
