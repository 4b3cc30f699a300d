"""The residual stream's step and the norm that follows it: sum = x + residual, out = layernorm(sum)."""

import torch

from gptkernels.ops._register import (
    accumulate_dtype,
    autocast,
    autograd,
    below_autograd,
    differentiate,
    fake,
    ops,
    present,
)
from gptkernels.ops.layernorm import backward_formula


def _fake(x, residual, weight, bias, eps=1e-5):
    statistics = x.new_empty(x.shape[:-1], dtype=accumulate_dtype(x.dtype))
    return x.new_empty(x.shape), x.new_empty(x.shape), statistics, torch.empty_like(statistics)


def _fake_backward(dout, dsum, sum, weight, mean, rstd, output_mask):
    shapes = (sum.shape, sum.shape[-1:], sum.shape[-1:])
    return tuple(sum.new_empty(shape if wanted else (0,)) for shape, wanted in zip(shapes, output_mask, strict=True))


class ResidualLayerNorm(torch.autograd.Function):
    """x (..., C), residual (..., C), weight (C), bias (C) -> out (..., C), sum (..., C), mean (...), rstd (...)."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps):
        """Save the sum, which flows on, and the statistics: neither x nor residual."""
        out, sum, mean, rstd = below_autograd(ops.residual_layernorm, x, residual, weight, bias, eps)
        ctx.save_for_backward(sum, weight, mean, rstd)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        return out, sum, mean, rstd

    @staticmethod
    def backward(ctx, dout, dsum, _dmean, _drstd):
        """One kernel for all the gradients that are wanted; x and residual share theirs."""
        sum, weight, mean, rstd = ctx.saved_tensors
        needs_x, needs_residual, *needs_rest, _ = ctx.needs_input_grad
        if dout is None:  # the norm was not used
            return dsum if needs_x else None, dsum if needs_residual else None, None, None, None
        mask = (needs_x or needs_residual, *needs_rest)
        gradients = ops.residual_layernorm_backward(dout, dsum, sum, weight, mean, rstd, mask)
        dx, dweight, dbias = present(gradients, mask)
        return dx if needs_x else None, dx if needs_residual else None, dweight, dbias, None


class ResidualLayerNormBackward(torch.autograd.Function):
    """The gradients of residual_layernorm as differentiable functions of dout, dsum, sum and weight."""

    @staticmethod
    def forward(ctx, dout, dsum, sum, weight, mean, rstd, output_mask):
        """The kernel."""
        ctx.save_for_backward(dout, sum, weight, rstd)
        ctx.output_mask = output_mask
        ctx.set_materialize_grads(False)
        return below_autograd(ops.residual_layernorm_backward, dout, dsum, sum, weight, mean, rstd, output_mask)

    @staticmethod
    def backward(ctx, *grads):
        """By the norm's own formula; dsum is only added to dx, so its gradient is dx's."""
        dout, sum, weight, rstd = ctx.saved_tensors
        needs_dout, needs_dsum, needs_sum, needs_weight = ctx.needs_input_grad[:4]
        grads = present(grads, ctx.output_mask)
        ddout, dsum, dweight, _ = differentiate(
            lambda *inputs: tuple(t.to(sum.dtype) for t in backward_formula(*inputs)),
            (dout, sum, weight, rstd),
            (needs_dout, needs_sum, needs_weight, False),
            grads,
        )
        return ddout, grads[0] if needs_dsum else None, dsum, dweight, None, None, None


fake("residual_layernorm", _fake)
fake("residual_layernorm_backward", _fake_backward)
autograd("residual_layernorm", ResidualLayerNorm)
autograd("residual_layernorm_backward", ResidualLayerNormBackward)
autocast("residual_layernorm", cuda="float32", cpu="promote")
