"""linear_cross_entropy with float8 matmuls for its gradients and, with fp8_logits, for the logits in training.

The gradient of a logit, softmax - onehot, is multiplied by 2^15 and rounded to e5m2; the weight and x are rounded to
e4m3. Float16 gradients are stored in float32 until the backward multiplies them by the loss scale.
"""

import torch

from gptkernels.rules._register import (
    autocast,
    autograd,
    below_autograd,
    fake,
    flops,
    ops,
    vmap,
    without_derivative,
)
from gptkernels.rules._vmap import loop
from gptkernels.rules.fp8_linear import refuse_second_derivatives, refuse_tangents
from gptkernels.rules.linear_cross_entropy import (
    fake_loss,
    fake_with_gradients,
    forward_flops,
    scale_saved,
    with_gradients_flops,
)


class FP8LinearCrossEntropy(torch.autograd.Function):
    """x (..., C), weight (Vp, C), targets (...) -> loss, 0-dim."""

    @staticmethod
    def forward(ctx, x, weight, targets, *options):
        loss, *gradients = below_autograd(
            ops.fp8_linear_cross_entropy_with_gradients.default, x, weight, targets, *options, ctx.needs_input_grad[:2]
        )
        ctx.save_for_backward(*gradients)
        ctx.dtype = x.dtype
        return loss

    @staticmethod
    def backward(ctx, dloss):
        refuse_second_derivatives()
        scaled = scale_saved(dloss, ctx.saved_tensors, ctx.needs_input_grad[:2])
        return *(None if g is None else g.to(ctx.dtype) for g in scaled), *(None,) * 6


def _fake(x, weight, targets, vocab_size=-1, ignore_index=-100, reduction="mean", chunk_size=-1, fp8_logits=False):
    return fake_loss(x, weight, targets, vocab_size, ignore_index, reduction, chunk_size)


def _fake_with_gradients(x, weight, targets, vocab_size, ignore_index, reduction, chunk_size, fp8_logits, output_mask):
    loss, *gradients = fake_with_gradients(
        x, weight, targets, vocab_size, ignore_index, reduction, chunk_size, output_mask
    )
    return loss, *(g.float() if x.dtype == torch.float16 else g for g in gradients)


fake("fp8_linear_cross_entropy", _fake)
fake("fp8_linear_cross_entropy_with_gradients", _fake_with_gradients)
autograd("fp8_linear_cross_entropy", FP8LinearCrossEntropy, jvp=refuse_tangents)
without_derivative("fp8_linear_cross_entropy_with_gradients")
vmap("fp8_linear_cross_entropy", loop)
vmap("fp8_linear_cross_entropy_with_gradients", loop)
autocast("fp8_linear_cross_entropy", cuda="lower", cpu="lower")
flops("fp8_linear_cross_entropy", forward_flops)
flops("fp8_linear_cross_entropy_with_gradients", with_gradients_flops)
