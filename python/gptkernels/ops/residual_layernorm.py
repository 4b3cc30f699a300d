"""The residual stream's step and the norm that follows it: sum = x + residual, out = layernorm(sum)."""

import torch

from gptkernels.ops import layernorm
from gptkernels.ops._forward import by_formula
from gptkernels.ops._register import (
    accumulate_dtype,
    autocast,
    autocast_by,
    autograd,
    below_autograd,
    differentiate,
    fake,
    ops,
    present,
    vmap,
)
from gptkernels.ops._vmap import rows, rows_and_sums
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


def formula(x, residual, weight, bias, eps):
    """out and sum in torch ops; the statistics have no derivative of their own."""
    wide = accumulate_dtype(x.dtype)
    sum = x.to(wide) + residual.to(wide)
    return layernorm.formula(sum, weight, bias, eps)[0], sum, None, None


def masked_backward_formula(dout, dsum, sum, weight, mean, rstd, output_mask):
    """All of the backward's outputs; None for those that are not wanted."""
    dx, dweight, dbias = backward_formula(dout, sum, weight, rstd)
    return present((dx if dsum is None else dx + dsum, dweight, dbias), output_mask)


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


def as_torchs_steps(op, cast, x, residual, weight, bias, eps=1e-5):
    """On CUDA autocast leaves an addition in its operands' dtype and makes layer_norm float32.

    A sum in float32 is part of the fused op; a narrower one is added first, as in torch.
    """
    if torch.promote_types(x.dtype, residual.dtype) in (torch.float32, torch.float64):
        return op(*(cast(t, torch.float32) for t in (x, residual, weight, bias)), eps)
    sum = x + residual
    out, mean, rstd = ops.layernorm(*(cast(t, torch.float32) for t in (sum, weight, bias)), eps)
    return out, sum, mean, rstd


fake("residual_layernorm", _fake)
fake("residual_layernorm_backward", _fake_backward)
autograd("residual_layernorm", ResidualLayerNorm, jvp=by_formula(formula))
autograd("residual_layernorm_backward", ResidualLayerNormBackward, jvp=by_formula(masked_backward_formula))
vmap("residual_layernorm", rows(0, 1))
vmap("residual_layernorm_backward", rows_and_sums(0, 1, 2, 4, 5))
autocast("residual_layernorm", cpu="promote")
autocast_by("residual_layernorm", "cuda", as_torchs_steps)
