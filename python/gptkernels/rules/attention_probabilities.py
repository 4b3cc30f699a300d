"""Causal self-attention that also returns the probabilities: softmax(scale * q k^T) v (Vaswani et al., 2017)."""

import torch
from torch import Tensor

from gptkernels.rules import _register as register
from gptkernels.rules._jvp import by_formula
from gptkernels.rules._register import below_autograd, like, ops
from gptkernels.rules._vmap import batches
from gptkernels.rules.attention import attention_flops, packed_backward_formula, packed_formula


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
        ctx.set_materialize_grads(False)  # avoids zeros of the probabilities' size
        return out, probabilities

    @staticmethod
    def backward(ctx, dout, _dprobabilities):
        if dout is None:
            return None, None, None
        dqkv = ops.attention_probabilities_backward.default(dout, *ctx.saved_tensors, ctx.num_heads, ctx.scale)
        return dqkv, None, None


def backward_formula(dout, qkv, probabilities, num_heads, scale) -> Tensor:
    return packed_backward_formula(dout, qkv, None, None, num_heads, scale)


def backward_flops(dout_shape, qkv_shape, *args, **kwargs) -> int:
    return 2 * attention_flops(qkv_shape)


register.fake("attention_probabilities", _fake)
register.fake("attention_probabilities_backward", like(1))
register.autograd("attention_probabilities", AttentionProbabilities, jvp=by_formula(packed_formula))
register.autograd_by_formula("attention_probabilities_backward", backward_formula, inputs=2)
register.vmap("attention_probabilities", batches(0))
register.vmap("attention_probabilities_backward", batches(0, 1, 2))
register.autocast("attention_probabilities", cuda="lower", cpu="lower")
register.flops("attention_probabilities", attention_flops)
register.flops("attention_probabilities_backward", backward_flops)
