"""Addition to the residual stream, and layernorm: sum = dropout(x + x_bias) + residual, out = layernorm(sum).

x_bias is the bias of the linear layer that computed x. Adding it here, and summing its gradient here, reads and writes
no further memory. With a float32 residual x may have 16 bits. Then x and ``out``, which matmuls write and read, have 16
bits, and everything else, including the residual stream, is float32.
"""

import torch

from gptkernels.rules import layernorm
from gptkernels.rules._jvp import by_formula
from gptkernels.rules._register import (
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
from gptkernels.rules._vmap import loop, rows, rows_and_sums
from gptkernels.rules.dropout import drop
from gptkernels.rules.layernorm import backward_formula


def _fake(x, residual, weight, bias, eps=1e-5, x_bias=None, dropout_p=0.0, seed=None, offset=None):
    statistics = x.new_empty(x.shape[:-1], dtype=accumulate_dtype(x.dtype))
    return x.new_empty(x.shape), residual.new_empty(x.shape), statistics, torch.empty_like(statistics)


def _fake_backward(dout, dsum, sum, weight, mean, rstd, output_mask):
    shapes = (sum.shape, *(sum.shape[-1:],) * (len(output_mask) - 1))
    return tuple(sum.new_empty(shape if wanted else (0,)) for shape, wanted in zip(shapes, output_mask, strict=True))


def _fake_dropout_backward(dout, dsum, sum, weight, mean, rstd, dropout_p, seed, offset, output_mask):
    _, *found, dresidual = _fake_backward(dout, dsum, sum, weight, mean, rstd, output_mask)
    dx = dout.new_empty(sum.shape if output_mask[0] else (0,))
    return dx, *found, sum.new_empty(sum.shape) if output_mask[4] else dresidual


class ResidualLayerNorm(torch.autograd.Function):
    """x and residual (..., C), weight, bias and x_bias (C) -> out and sum (..., C), mean and rstd (...)."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, x_bias, dropout_p, seed, offset):
        out, sum, mean, rstd = below_autograd(
            *(ops.residual_layernorm.default, x, residual, weight, bias, eps, x_bias), *(dropout_p, seed, offset)
        )
        ctx.save_for_backward(sum, weight, mean, rstd, seed, offset)
        ctx.dropout_p, ctx.x_dtype = dropout_p, x.dtype
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        return out, sum, mean, rstd

    @staticmethod
    def backward(ctx, dout, dsum, _dmean, _drstd):
        """Compute all needed gradients in one kernel. Without dropout and casts, residual's gradient is x's."""
        sum, weight, mean, rstd, seed, offset = ctx.saved_tensors
        needs_x, needs_residual, needs_weight, needs_bias, _, needs_x_bias = ctx.needs_input_grad[:6]
        dropout = ctx.dropout_p, seed, offset
        separate = ctx.dropout_p > 0 or ctx.x_dtype != sum.dtype
        if dout is None:  # the norm was not used
            dweight = dbias = None
            dresidual = dx = dsum
            if dsum is not None and (needs_x or needs_x_bias):
                dx = drop(dsum, *dropout)
            dx_bias = _sum_of_rows(dx) if needs_x_bias and dsum is not None else None
            dx = dx if dx is None else dx.to(ctx.x_dtype)
        else:
            inputs = dout, dsum, sum, weight, mean, rstd
            mask = (needs_x or needs_residual, needs_weight, needs_bias, needs_x_bias)
            if separate:
                mask = (needs_x, *mask[1:], needs_residual)
                gradients = ops.residual_layernorm_dropout_backward.default(*inputs, *dropout, mask)
            elif needs_x_bias:
                gradients = ops.residual_layernorm_bias_backward.default(*inputs, mask)
            else:
                mask = mask[:3]
                gradients = ops.residual_layernorm_backward.default(*inputs, mask)
            dx, dweight, dbias, dx_bias = (*present(gradients, mask), None)[:4]
            dresidual = present(gradients, mask)[4] if separate else dx
        dx, dresidual = dx if needs_x else None, dresidual if needs_residual else None
        return dx, dresidual, dweight, dbias, None, dx_bias, None, None, None


def _sum_of_rows(t):
    """Sum over all dimensions except the last: (..., C) -> (C)."""
    return t.sum(tuple(range(t.dim() - 1))) if t.dim() > 1 else t


def formula(x, residual, weight, bias, eps, x_bias, dropout_p, seed, offset):
    """Compute out and sum in torch ops; the statistics have no derivative."""
    wide = accumulate_dtype(x.dtype)
    x = x.to(wide) if x_bias is None else x.to(wide) + x_bias.to(wide)
    sum = drop(x, dropout_p, seed, offset) + residual.to(wide)
    return layernorm.formula(sum, weight, bias, eps)[0], sum, None, None


def masked_backward_formula(dout, dsum, sum, weight, mean, rstd, output_mask):
    """Return all of the backward's outputs; None for those that are not needed."""
    dx, dweight, dbias = backward_formula(dout, sum, weight, rstd)
    dx = dx if dsum is None else dx + dsum
    return present((dx, dweight, dbias, _sum_of_rows(dx))[: len(output_mask)], output_mask)


def dropout_backward_formula(dout, dsum, sum, weight, mean, rstd, dropout_p, seed, offset, output_mask):
    """Return all of the backward's outputs; None for those that are not needed."""
    dresidual, dweight, dbias = backward_formula(dout, sum, weight, rstd)
    dresidual = dresidual if dsum is None else dresidual + dsum
    dx = drop(dresidual, dropout_p, seed, offset)
    return present((dx, dweight, dbias, _sum_of_rows(dx), dresidual), output_mask)


class ResidualLayerNormBackward(torch.autograd.Function):
    """The gradients of residual_layernorm as differentiable functions of dout, dsum, sum and weight."""

    @staticmethod
    def forward(ctx, dout, dsum, sum, weight, mean, rstd, output_mask):
        ctx.save_for_backward(dout, sum, weight, rstd)
        ctx.output_mask = output_mask
        ctx.set_materialize_grads(False)
        op = getattr(ops, _BACKWARD[len(output_mask)]).default
        return below_autograd(op, dout, dsum, sum, weight, mean, rstd, output_mask)

    @staticmethod
    def backward(ctx, *grads):
        """Differentiate the norm's formula. dsum is only added to dx, so its gradient is dx's; dx_bias sums dx."""
        ddx, *rest = present(grads, ctx.output_mask)
        if len(rest) > 2 and (ddx_bias := rest.pop()) is not None:
            ddx = _with_sums(ddx, ddx_bias, ctx.saved_tensors[1])
        return *_second_derivatives(ctx.saved_tensors, ctx.needs_input_grad, (ddx, *rest)), None, None, None


class ResidualLayerNormDropoutBackward(torch.autograd.Function):
    """ResidualLayerNormBackward with dropout: dx is the dropout of dresidual, in dout's dtype; dx_bias is its sums."""

    @staticmethod
    def forward(ctx, dout, dsum, sum, weight, mean, rstd, dropout_p, seed, offset, output_mask):
        ctx.save_for_backward(dout, sum, weight, rstd, seed, offset)
        ctx.dropout_p, ctx.output_mask = dropout_p, output_mask
        ctx.set_materialize_grads(False)
        args = dout, dsum, sum, weight, mean, rstd, dropout_p, seed, offset, output_mask
        return below_autograd(ops.residual_layernorm_dropout_backward.default, *args)

    @staticmethod
    def backward(ctx, *grads):
        """Apply dropout, which is its own derivative, and continue as without it."""
        *saved, seed, offset = ctx.saved_tensors
        ddx, ddweight, ddbias, ddx_bias, ddresidual = present(grads, ctx.output_mask)
        ddx = ddx if ddx is None else ddx.to(saved[1].dtype)
        if ddx_bias is not None:
            ddx = _with_sums(ddx, ddx_bias, saved[1])
        if ddx is not None:
            ddx = drop(ddx, ctx.dropout_p, seed, offset)
            ddresidual = ddx if ddresidual is None else ddx + ddresidual
        found = _second_derivatives(saved, ctx.needs_input_grad, (ddresidual, ddweight, ddbias))
        return *found, None, None, None, None, None, None


def _with_sums(ddx, ddx_bias, sum):
    """Add the gradient of dx_bias, the sums of dx over the rows, to the gradient of dx."""
    return ddx_bias.expand_as(sum) if ddx is None else ddx + ddx_bias


def _second_derivatives(saved, needs, grads):
    """Compute the gradients of dout, dsum, sum and weight from those of dresidual, dweight and dbias."""
    dout, sum, weight, rstd = saved
    needs_dout, needs_dsum, needs_sum, needs_weight = needs[:4]
    ddout, dsum, dweight, _ = differentiate(
        lambda *inputs: tuple(t.to(sum.dtype) for t in backward_formula(*inputs)),
        (dout, sum, weight, rstd),
        (needs_dout, needs_sum, needs_weight, False),
        grads,
    )
    return ddout, grads[0] if needs_dsum else None, dsum, dweight


_BACKWARD = {3: "residual_layernorm_backward", 4: "residual_layernorm_bias_backward"}


def _vmap(op, size, in_dims, args):
    """Map over rows. With dropout the mask depends on an element's position, so that each index is a separate call."""
    return (rows(0, 1) if args[6] == 0 else loop)(op, size, in_dims, args)


def as_torchs_steps(op, cast, x, residual, weight, bias, eps=1e-5, x_bias=None, dropout_p=0.0, seed=None, offset=None):
    """Cast as torch's separate ops do under CUDA's autocast.

    Autocast leaves an addition and dropout in their operands' dtype, and computes layer_norm in float32. The fused op
    computes a sum in float32 or float64. A narrower sum is computed before the norm, by separate ops.
    """
    if torch.promote_types(x.dtype, residual.dtype) in (torch.float32, torch.float64):
        args = (cast(t, torch.float32) for t in (x, residual, weight, bias))
        return op(*args, eps, cast(x_bias, torch.float32), dropout_p, seed, offset)
    x = x if x_bias is None else x + cast(x_bias, x.dtype)
    sum = drop(x, dropout_p, seed, offset) + residual
    out, mean, rstd = ops.layernorm.default(*(cast(t, torch.float32) for t in (sum, weight, bias)), eps)
    return out, sum, mean, rstd


fake("residual_layernorm", _fake)
fake("residual_layernorm_backward", _fake_backward)
fake("residual_layernorm_bias_backward", _fake_backward)
fake("residual_layernorm_dropout_backward", _fake_dropout_backward)
autograd("residual_layernorm", ResidualLayerNorm, jvp=by_formula(formula))
for _name in _BACKWARD.values():
    autograd(_name, ResidualLayerNormBackward, jvp=by_formula(masked_backward_formula))
    vmap(_name, rows_and_sums(0, 1, 2, 4, 5))
_name = "residual_layernorm_dropout_backward"
autograd(_name, ResidualLayerNormDropoutBackward, jvp=by_formula(dropout_backward_formula))
vmap(_name, loop)
vmap("residual_layernorm", _vmap)
autocast("residual_layernorm", cpu="promote")
autocast_by("residual_layernorm", "cuda", as_torchs_steps)
