"""The residual stream's step and the norm that follows it: sum = x + x_bias + residual, out = layernorm(sum).

x_bias is the bias of the linear layer that has made x: added here, and its gradient summed here, it costs nothing.
"""

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


def _fake(x, residual, weight, bias, eps=1e-5, x_bias=None):
    statistics = x.new_empty(x.shape[:-1], dtype=accumulate_dtype(x.dtype))
    return x.new_empty(x.shape), x.new_empty(x.shape), statistics, torch.empty_like(statistics)


def _fake_backward(dout, dsum, sum, weight, mean, rstd, output_mask):
    shapes = (sum.shape, *(sum.shape[-1:],) * (len(output_mask) - 1))
    return tuple(sum.new_empty(shape if wanted else (0,)) for shape, wanted in zip(shapes, output_mask, strict=True))


class ResidualLayerNorm(torch.autograd.Function):
    """x and residual (..., C), weight, bias and x_bias (C) -> out and sum (..., C), mean and rstd (...)."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, x_bias):
        """Save the sum, which flows on, and the statistics: neither x nor residual."""
        out, sum, mean, rstd = below_autograd(ops.residual_layernorm.default, x, residual, weight, bias, eps, x_bias)
        ctx.save_for_backward(sum, weight, mean, rstd)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        return out, sum, mean, rstd

    @staticmethod
    def backward(ctx, dout, dsum, _dmean, _drstd):
        """One kernel for all the gradients that are wanted; x and residual share theirs."""
        sum, weight, mean, rstd = ctx.saved_tensors
        needs_x, needs_residual, needs_weight, needs_bias, _, needs_x_bias = ctx.needs_input_grad
        if dout is None:  # the norm was not used
            dx, dweight, dbias = dsum, None, None
            dx_bias = _sum_of_rows(dsum) if needs_x_bias and dsum is not None else None
        else:
            mask = (needs_x or needs_residual, needs_weight, needs_bias)
            inputs = dout, dsum, sum, weight, mean, rstd
            if needs_x_bias:
                mask = (*mask, True)
                gradients = ops.residual_layernorm_bias_backward.default(*inputs, mask)
            else:
                gradients = ops.residual_layernorm_backward.default(*inputs, mask)
            dx, dweight, dbias, dx_bias = (*present(gradients, mask), None)[:4]
        return dx if needs_x else None, dx if needs_residual else None, dweight, dbias, None, dx_bias


def _sum_of_rows(t):
    """(..., C) -> (C)."""
    return t.sum(tuple(range(t.dim() - 1))) if t.dim() > 1 else t


def formula(x, residual, weight, bias, eps, x_bias):
    """out and sum in torch ops; the statistics have no derivative of their own."""
    wide = accumulate_dtype(x.dtype)
    sum = x.to(wide) + residual.to(wide)
    if x_bias is not None:
        sum = sum + x_bias.to(wide)
    return layernorm.formula(sum, weight, bias, eps)[0], sum, None, None


def masked_backward_formula(dout, dsum, sum, weight, mean, rstd, output_mask):
    """All of the backward's outputs; None for those that are not wanted."""
    dx, dweight, dbias = backward_formula(dout, sum, weight, rstd)
    dx = dx if dsum is None else dx + dsum
    return present((dx, dweight, dbias, _sum_of_rows(dx))[: len(output_mask)], output_mask)


class ResidualLayerNormBackward(torch.autograd.Function):
    """The gradients of residual_layernorm as differentiable functions of dout, dsum, sum and weight."""

    @staticmethod
    def forward(ctx, dout, dsum, sum, weight, mean, rstd, output_mask):
        """The kernel."""
        ctx.save_for_backward(dout, sum, weight, rstd)
        ctx.output_mask = output_mask
        ctx.set_materialize_grads(False)
        op = getattr(ops, _BACKWARD[len(output_mask)]).default
        return below_autograd(op, dout, dsum, sum, weight, mean, rstd, output_mask)

    @staticmethod
    def backward(ctx, *grads):
        """By the norm's own formula; dsum is only added to dx, so its gradient is dx's, and dx_bias is dx's sums."""
        dout, sum, weight, rstd = ctx.saved_tensors
        needs_dout, needs_dsum, needs_sum, needs_weight = ctx.needs_input_grad[:4]
        ddx, *rest = present(grads, ctx.output_mask)
        if len(rest) > 2 and (ddx_bias := rest.pop()) is not None:
            ddx = ddx_bias.expand_as(sum) if ddx is None else ddx + ddx_bias
        grads = (ddx, *rest[:2])
        ddout, dsum, dweight, _ = differentiate(
            lambda *inputs: tuple(t.to(sum.dtype) for t in backward_formula(*inputs)),
            (dout, sum, weight, rstd),
            (needs_dout, needs_sum, needs_weight, False),
            grads,
        )
        return ddout, grads[0] if needs_dsum else None, dsum, dweight, None, None, None


_BACKWARD = {3: "residual_layernorm_backward", 4: "residual_layernorm_bias_backward"}


def as_torchs_steps(op, cast, x, residual, weight, bias, eps=1e-5, x_bias=None):
    """On CUDA autocast leaves an addition in its operands' dtype and makes layer_norm float32.

    A sum in float32 is part of the fused op; a narrower one is added first, as in torch.
    """
    if torch.promote_types(x.dtype, residual.dtype) in (torch.float32, torch.float64):
        return op(*(cast(t, torch.float32) for t in (x, residual, weight, bias)), eps, cast(x_bias, torch.float32))
    sum = (x if x_bias is None else x + cast(x_bias, x.dtype)) + residual
    out, mean, rstd = ops.layernorm.default(*(cast(t, torch.float32) for t in (sum, weight, bias)), eps)
    return out, sum, mean, rstd


fake("residual_layernorm", _fake)
fake("residual_layernorm_backward", _fake_backward)
fake("residual_layernorm_bias_backward", _fake_backward)
autograd("residual_layernorm", ResidualLayerNorm, jvp=by_formula(formula))
for _name in _BACKWARD.values():
    autograd(_name, ResidualLayerNormBackward, jvp=by_formula(masked_backward_formula))
    vmap(_name, rows_and_sums(0, 1, 2, 4, 5))
vmap("residual_layernorm", rows(0, 1))
autocast("residual_layernorm", cpu="promote")
autocast_by("residual_layernorm", "cuda", as_torchs_steps)
