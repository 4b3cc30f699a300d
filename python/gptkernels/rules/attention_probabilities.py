"""Causal self-attention that also returns the probabilities: softmax(scale * q k^T) v (Vaswani et al., 2017)."""

import math

import torch
from torch import Tensor

from gptkernels.rules._jvp import by_formula
from gptkernels.rules._register import (
    autocast,
    autograd,
    autograd_by_formula,
    below_autograd,
    fake,
    flops,
    like,
    ops,
    vmap,
)
from gptkernels.rules._vmap import batches


def _fake(qkv, num_heads, scale=None):
    b, t, c3 = qkv.shape
    return qkv.new_empty((b, t, c3 // 3)), qkv.new_empty((b, num_heads, t, t))


class AttentionProbabilities(torch.autograd.Function):
    """qkv (B, T, 3C) -> out (B, T, C), probabilities (B, NH, T, T)."""

    @staticmethod
    def forward(ctx, qkv, num_heads, scale):
        out, probabilities = below_autograd(ops.attention_probabilities.default, qkv, num_heads, scale)
        ctx.save_for_backward(qkv, probabilities)
        ctx.num_heads, ctx.scale = num_heads, scale
        ctx.mark_non_differentiable(probabilities)
        ctx.set_materialize_grads(False)  # no zeros of the probabilities' size
        return out, probabilities

    @staticmethod
    def backward(ctx, dout, _dprobabilities):
        if dout is None:
            return None, None, None
        qkv, probabilities = ctx.saved_tensors
        return (
            ops.attention_probabilities_backward.default(dout, qkv, probabilities, ctx.num_heads, ctx.scale),
            None,
            None,
        )


def _probabilities(qkv: Tensor, num_heads: int, scale: float | None) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Compute q, k and v (B, NH, T, HS), the probabilities (B, NH, T, T), and the scale, in torch ops."""
    b, t, c3 = qkv.shape
    size = c3 // 3 // num_heads
    factor = 1 / math.sqrt(size) if scale is None else scale
    q, k, v = qkv.view(b, t, 3, num_heads, size).permute(2, 0, 3, 1, 4)
    future = torch.ones(t, t, dtype=torch.bool, device=qkv.device).triu(1)
    return q, k, v, (q @ k.mT * factor).masked_fill(future, -math.inf).softmax(-1), factor


def formula(qkv: Tensor, num_heads: int, scale: float | None):
    """Compute out in torch ops; the probabilities have no derivative."""
    _, _, v, p, _ = _probabilities(qkv, num_heads, scale)
    return (p @ v).transpose(1, 2).flatten(2), None


def backward_formula(dout, qkv, probabilities, num_heads, scale) -> Tensor:
    """Compute dqkv in torch ops, with the probabilities as a function of qkv."""
    b, t, c3 = qkv.shape
    q, k, v, p, factor = _probabilities(qkv, num_heads, scale)
    dout = dout.view(b, t, num_heads, -1).transpose(1, 2)
    dp = dout @ v.mT
    ds = factor * p * (dp - (dp * p).sum(-1, keepdim=True))
    dqkv = torch.stack((ds @ k, ds.mT @ q, p.mT @ dout))
    return dqkv.permute(1, 3, 0, 2, 4).reshape(b, t, c3)


def attention_probabilities_flops(qkv_shape, num_heads, *args, **kwargs) -> int:
    """Count two matmuls of 2*B*T*T*C flops each. As in torch's count, masked scores are included."""
    b, t, c3 = qkv_shape
    return 2 * 2 * b * t * t * (c3 // 3)


def attention_probabilities_backward_flops(
    dout_shape, qkv_shape, probabilities_shape, num_heads, *args, **kwargs
) -> int:
    """Count four matmuls; the probabilities were saved."""
    return 2 * attention_probabilities_flops(qkv_shape, num_heads)


fake("attention_probabilities", _fake)
fake("attention_probabilities_backward", like(1))
autograd("attention_probabilities", AttentionProbabilities, jvp=by_formula(formula))
autograd_by_formula("attention_probabilities_backward", backward_formula, inputs=2)
vmap("attention_probabilities", batches(0))
vmap("attention_probabilities_backward", batches(0, 1, 2))
autocast("attention_probabilities", cuda="lower", cpu="lower")
flops("attention_probabilities", attention_probabilities_flops)
flops("attention_probabilities_backward", attention_probabilities_backward_flops)
