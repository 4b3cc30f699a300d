"""linear_cross_entropy with float8 matmuls for the gradients and, with fp8_logits, for the logits in training.

The gradient of a logit, softmax - onehot, is multiplied by 2^15 and rounded to e5m2; weight and x are rounded to e4m3.
Float16 gradients are stored in float32 until the backward multiplies them by the loss scale.
"""

import torch

from gptkernels.rules import _register as register
from gptkernels.rules._register import below_autograd, ops
from gptkernels.rules._vmap import loop
from gptkernels.rules.fp8_linear import refuse_second_derivatives, refuse_tangents
from gptkernels.rules.linear import linear_flops
from gptkernels.rules.linear_cross_entropy import fake_loss, fake_with_gradients, scale_saved, with_gradients_flops


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


def _fake_with_gradients(x, *args):
    loss, *gradients = fake_with_gradients(x, *args)
    return loss, *(g.float() if x.dtype == torch.float16 else g for g in gradients)


register.fake("fp8_linear_cross_entropy", fake_loss)
register.fake("fp8_linear_cross_entropy_with_gradients", _fake_with_gradients)
register.autograd("fp8_linear_cross_entropy", FP8LinearCrossEntropy, jvp=refuse_tangents)
register.without_derivative("fp8_linear_cross_entropy_with_gradients")
register.vmap("fp8_linear_cross_entropy", loop)
register.vmap("fp8_linear_cross_entropy_with_gradients", loop)
register.autocast("fp8_linear_cross_entropy", cuda="lower", cpu="lower")
register.flops("fp8_linear_cross_entropy", linear_flops)
register.flops("fp8_linear_cross_entropy_with_gradients", with_gradients_flops)
