"""Linear layer: out = x @ weight^T + bias over the last dimension."""

import math

import torch
from torch import Tensor

from gptkernels.rules import _register as register
from gptkernels.rules._register import below_autograd, ops, present
from gptkernels.rules._vmap import rows, rows_and_sums


def _fake(x, weight, bias=None):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_backward(dout, x, weight, output_mask):
    dx, dweight, dbias = output_mask
    return (
        x.new_empty(x.shape if dx else (0,)),
        fake_weight_gradient(weight) if dweight else x.new_empty(0),
        x.new_empty(weight.shape[:1] if dbias else (0,)),
    )


def fake_weight_gradient(weight: Tensor) -> Tensor:
    """The gradient has the weight's layout: contiguous rows or columns."""
    if weight.stride(1) != 1 and weight.stride(0) == 1 and weight.stride(1) >= max(weight.shape[0], 1):
        return weight.new_empty((weight.shape[1], weight.shape[0])).t()
    return weight.new_empty(weight.shape)


class Linear(torch.autograd.Function):
    """x (..., K), weight (M, K), bias (M) -> out (..., M)."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return below_autograd(ops.linear.default, x, weight, bias)

    @staticmethod
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        mask = ctx.needs_input_grad
        return present(ops.linear_backward.default(dout, x, weight, mask), mask)


def backward_formula(dout: Tensor, x: Tensor, weight: Tensor, output_mask) -> tuple[Tensor | None, ...]:
    rows, dout_rows = x.reshape(-1, x.shape[-1]), dout.reshape(-1, dout.shape[-1])
    dx, dweight = ops.linear.default(dout, weight.T), ops.linear.default(dout_rows.T, rows.T)
    return present((dx, dweight, dout_rows.sum(0)), output_mask)


def tangent(inputs, tangents, outputs):
    (x, weight, _), (dx, dweight, dbias) = inputs, tangents
    parts = [ops.linear.default(dx, weight)] if dx is not None else []
    parts += [ops.linear.default(x, dweight)] if dweight is not None else []
    parts += [dbias.expand_as(outputs[0])] if dbias is not None else []
    return sum(parts[1:], parts[0])


def linear_flops(x_shape, weight_shape, *args, **kwargs) -> int:
    return 2 * math.prod(x_shape) * weight_shape[0]


def linear_backward_flops(dout_shape, x_shape, weight_shape, output_mask, **kwargs) -> int:
    return linear_flops(x_shape, weight_shape) * (output_mask[0] + output_mask[1])


def linear_dweight_flops(dout_shape, x_shape, *args, **kwargs) -> int:
    return 2 * math.prod(x_shape) * dout_shape[-1]


register.fake("linear", _fake)
register.fake("linear_backward", _fake_backward)
register.autograd("linear", Linear, jvp=tangent)
register.autograd_by_formula("linear_backward", backward_formula, inputs=3)
register.vmap("linear", rows(0))
register.vmap("linear_backward", rows_and_sums(0, 1))
register.autocast("linear", cuda="lower", cpu="lower")
register.flops("linear", linear_flops)
register.flops("linear_backward", linear_backward_flops)
register.fake("linear_dweight_", lambda *_: None)
register.without_derivative("linear_dweight_")
register.flops("linear_dweight_", linear_dweight_flops)
