"""Addition to the residual stream, and layernorm: sum = dropout(x + x_bias) + residual, out = layernorm(sum).

x_bias is the bias of the linear layer that computed x; adding it here takes no further memory traffic. With a float32
residual, x and out may have 16 bits, because matmuls write x and read out; all other tensors are float32.
"""

import torch

from gptkernels.rules import _register as register
from gptkernels.rules import layernorm
from gptkernels.rules._jvp import by_formula
from gptkernels.rules._register import (
    accumulate_dtype,
    below_autograd,
    differentiate,
    empty_gradients,
    ops,
    present,
    save,
    saved,
)
from gptkernels.rules._vmap import loop, rows, rows_and_sums
from gptkernels.rules.dropout import drop
from gptkernels.rules.layernorm import backward_formula


def _fake(x, residual, weight, bias, eps=1e-5, x_bias=None, dropout_p=0.0, seed=None, offset=None, first_index=0):
    statistics = x.new_empty(x.shape[:-1], dtype=accumulate_dtype(x.dtype))
    return x.new_empty(x.shape), residual.new_empty(x.shape), statistics, torch.empty_like(statistics)


def _fake_backward(dout, dsum, sum, weight, mean, rstd, output_mask):
    return empty_gradients(sum, (sum.shape, *(sum.shape[-1:],) * (len(output_mask) - 1)), output_mask)


def _fake_dropout_backward(dout, dsum, sum, weight, mean, rstd, dropout_p, seed, offset, output_mask, first_index=0):
    _, *found, dresidual = _fake_backward(dout, dsum, sum, weight, mean, rstd, output_mask)
    dx = dout.new_empty(sum.shape if output_mask[0] else (0,))
    return dx, *found, sum.new_empty(sum.shape) if output_mask[4] else dresidual


class ResidualLayerNorm(torch.autograd.Function):
    """x and residual (..., C), weight, bias and x_bias (C) -> out and sum (..., C), mean and rstd (...)."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, x_bias, dropout_p, seed, offset, first_index):
        args = x, residual, weight, bias, eps, x_bias, dropout_p, seed, offset, first_index
        out, sum, mean, rstd = below_autograd(ops.residual_layernorm.default, *args)
        ctx.save_for_backward(sum, weight, mean, rstd, seed, offset)
        ctx.dropout_p, ctx.first_index, ctx.x_dtype = dropout_p, first_index, x.dtype
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        return out, sum, mean, rstd

    @staticmethod
    def backward(ctx, dout, dsum, _dmean, _drstd):
        sum, weight, mean, rstd, seed, offset = ctx.saved_tensors
        needs_x, needs_residual, needs_weight, needs_bias, _, needs_x_bias = ctx.needs_input_grad[:6]
        dropout = ctx.dropout_p, seed, offset
        separate = ctx.dropout_p > 0 or ctx.x_dtype != sum.dtype
        if dout is None:
            dweight = dbias = None
            dresidual = dx = dsum
            if dsum is not None and (needs_x or needs_x_bias):
                dx = drop(dsum, *dropout, ctx.first_index)
            dx_bias = _sum_of_rows(dx) if needs_x_bias and dsum is not None else None
            dx = dx if dx is None else dx.to(ctx.x_dtype)
        else:
            inputs = dout, dsum, sum, weight, mean, rstd
            mask = (needs_x or needs_residual, needs_weight, needs_bias, needs_x_bias)
            if separate:
                mask = (needs_x, *mask[1:], needs_residual)
                gradients = ops.residual_layernorm_dropout_backward.default(*inputs, *dropout, mask, ctx.first_index)
            elif needs_x_bias:
                gradients = ops.residual_layernorm_bias_backward.default(*inputs, mask)
            else:
                mask = mask[:3]
                gradients = ops.residual_layernorm_backward.default(*inputs, mask)
            dx, dweight, dbias, dx_bias = (*present(gradients, mask), None)[:4]
            dresidual = present(gradients, mask)[4] if separate else dx
        dx, dresidual = dx if needs_x else None, dresidual if needs_residual else None
        return dx, dresidual, dweight, dbias, None, dx_bias, None, None, None, None


def _sum_of_rows(t):
    return t.sum(tuple(range(t.dim() - 1))) if t.dim() > 1 else t


def formula(x, residual, weight, bias, eps, x_bias, *dropout):
    wide = accumulate_dtype(x.dtype)
    x = x.to(wide) if x_bias is None else x.to(wide) + x_bias.to(wide)
    sum = drop(x, *dropout) + residual.to(wide)
    return layernorm.formula(sum, weight, bias, eps)[0], sum, None, None


_BACKWARD = {
    3: "residual_layernorm_backward",
    4: "residual_layernorm_bias_backward",
    5: "residual_layernorm_dropout_backward",
}


def _split(args):
    """Return output_mask and the arguments of dropout: p, seed, offset and first_index, or nothing."""
    return (args[0], ()) if len(args) == 1 else (args[3], (*args[:3], args[4]))


def masked_backward_formula(dout, dsum, sum, weight, mean, rstd, *args):
    mask, dropout = _split(args)
    dresidual, dweight, dbias = backward_formula(dout, sum, weight, rstd)
    dresidual = dresidual if dsum is None else dresidual + dsum
    dx = drop(dresidual, *dropout) if dropout else dresidual
    return present((dx, dweight, dbias, _sum_of_rows(dx), dresidual)[: len(mask)], mask)


class ResidualLayerNormBackward(torch.autograd.Function):
    """The three backward ops of ``_BACKWARD``, as differentiable functions of dout, dsum, sum and weight."""

    @staticmethod
    def forward(ctx, dout, dsum, sum, weight, mean, rstd, *args):
        ctx.output_mask, dropout = _split(args)
        save(ctx, dout, sum, weight, rstd, *dropout)
        ctx.set_materialize_grads(False)
        op = getattr(ops, _BACKWARD[len(ctx.output_mask)]).default
        return below_autograd(op, dout, dsum, sum, weight, mean, rstd, *args)

    @staticmethod
    def backward(ctx, *grads):
        """dsum is only added to dresidual, so the gradient of dsum equals the whole gradient of dresidual."""
        dout, sum, weight, rstd, *dropout = saved(ctx)
        ddx, ddweight, ddbias, ddx_bias, ddresidual = (*present(grads, ctx.output_mask), None, None)[:5]
        ddx = ddx if ddx is None else ddx.to(sum.dtype)
        if ddx_bias is not None:
            ddx = ddx_bias.expand_as(sum) if ddx is None else ddx + ddx_bias
        if ddx is not None:
            ddx = drop(ddx, *dropout) if dropout else ddx
            ddresidual = ddx if ddresidual is None else ddx + ddresidual
        needs_dout, needs_dsum, needs_sum, needs_weight = ctx.needs_input_grad[:4]
        found_dout, found_sum, found_weight, _ = differentiate(
            lambda *inputs: tuple(t.to(sum.dtype) for t in backward_formula(*inputs)),
            (dout, sum, weight, rstd),
            (needs_dout, needs_sum, needs_weight, False),
            (ddresidual, ddweight, ddbias),
        )
        found_dsum = ddresidual if needs_dsum else None
        return found_dout, found_dsum, found_sum, found_weight, *(None,) * (3 + len(dropout))


def _vmap(op, size, in_dims, args):
    """With dropout, each index is a separate call, because the mask depends on an element's position."""
    return (rows(0, 1) if args[6] == 0 else loop)(op, size, in_dims, args)


def as_torchs_steps(op, cast, x, residual, weight, bias, eps=1e-5, x_bias=None, p=0.0, seed=None, offset=None, first=0):
    """Use the dtypes that torch's separate ops have under CUDA's autocast.

    Autocast leaves an addition and dropout in their operands' dtype, and computes layer_norm in float32. If x and the
    residual have the same 16-bit dtype, the sum has it, too. The fused op cannot return a 16-bit sum and a float32
    norm, so separate ops compute them.
    """
    if torch.promote_types(x.dtype, residual.dtype) in (torch.float32, torch.float64):
        args = (cast(t, torch.float32) for t in (x, residual, weight, bias))
        return op(*args, eps, cast(x_bias, torch.float32), p, seed, offset, first)
    x = x if x_bias is None else x + cast(x_bias, x.dtype)
    sum = drop(x, p, seed, offset, first) + residual
    out, mean, rstd = ops.layernorm.default(*(cast(t, torch.float32) for t in (sum, weight, bias)), eps)
    return out, sum, mean, rstd


register.fake("residual_layernorm", _fake)
register.fake("residual_layernorm_backward", _fake_backward)
register.fake("residual_layernorm_bias_backward", _fake_backward)
register.fake("residual_layernorm_dropout_backward", _fake_dropout_backward)
register.autograd("residual_layernorm", ResidualLayerNorm, jvp=by_formula(formula))
for _outputs, _name in _BACKWARD.items():
    register.autograd(_name, ResidualLayerNormBackward, jvp=by_formula(masked_backward_formula))
    register.vmap(_name, loop if _outputs == 5 else rows_and_sums(0, 1, 2, 4, 5))
register.vmap("residual_layernorm", _vmap)
register.autocast("residual_layernorm", cpu="promote")
register.autocast_by("residual_layernorm", "cuda", as_torchs_steps)
