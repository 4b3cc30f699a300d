"""Linear layer: out = x @ weight^T + bias over the last dimension."""

import math

import torch
from torch import Tensor

from gptkernels.rules._jvp import by_formula
from gptkernels.rules._register import (
    autocast,
    autograd,
    below_autograd,
    differentiate,
    fake,
    flops,
    ops,
    present,
    vmap,
)
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
    """A weight's gradient without data: in the weight's layout, rows or columns together."""
    if weight.stride(1) != 1 and weight.stride(0) == 1 and weight.stride(1) >= max(weight.shape[0], 1):
        return weight.new_empty((weight.shape[1], weight.shape[0])).t()
    return weight.new_empty(weight.shape)


class Linear(torch.autograd.Function):
    """x (..., K), weight (M, K), bias (M) -> out (..., M)."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        """Save x and weight."""
        ctx.save_for_backward(x, weight)
        return below_autograd(ops.linear.default, x, weight, bias)

    @staticmethod
    def backward(ctx, dout):
        """Two products, the bias gradient beside the second."""
        x, weight = ctx.saved_tensors
        mask = ctx.needs_input_grad
        return present(ops.linear_backward.default(dout, x, weight, mask), mask)


def backward_formula(dout: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """dx, dweight and dbias in differentiable ops."""
    rows, dout_rows = x.reshape(-1, x.shape[-1]), dout.reshape(-1, dout.shape[-1])
    return ops.linear.default(dout, weight.T), ops.linear.default(dout_rows.T, rows.T), dout_rows.sum(0)


def tangent(inputs, tangents, outputs):
    """The product rule."""
    (x, weight, _), (dx, dweight, dbias) = inputs, tangents
    parts = [ops.linear.default(dx, weight)] if dx is not None else []
    parts += [ops.linear.default(x, dweight)] if dweight is not None else []
    parts += [dbias.expand_as(outputs[0])] if dbias is not None else []
    return sum(parts[1:], parts[0])


def masked_backward_formula(dout, x, weight, output_mask):
    """All of the backward's outputs; None for those that are not wanted."""
    return present(backward_formula(dout, x, weight), output_mask)


class LinearBackward(torch.autograd.Function):
    """The gradients of linear as differentiable functions of dout, x and weight."""

    @staticmethod
    def forward(ctx, dout, x, weight, output_mask):
        """The kernels."""
        ctx.save_for_backward(dout, x, weight)
        ctx.output_mask = output_mask
        ctx.set_materialize_grads(False)
        return below_autograd(ops.linear_backward.default, dout, x, weight, output_mask)

    @staticmethod
    def backward(ctx, *grads):
        """By formula."""
        needs = ctx.needs_input_grad[:3]
        return *differentiate(backward_formula, ctx.saved_tensors, needs, present(grads, ctx.output_mask)), None


def linear_flops(x_shape, weight_shape, *args, **kwargs) -> int:
    """A multiplication and an addition for each of the N*M*K terms."""
    return 2 * math.prod(x_shape) * weight_shape[0]


def linear_backward_flops(dout_shape, x_shape, weight_shape, output_mask, **kwargs) -> int:
    """As many as the forward for each of dx and dweight."""
    return linear_flops(x_shape, weight_shape) * (output_mask[0] + output_mask[1])


fake("linear", _fake)
fake("linear_backward", _fake_backward)
autograd("linear", Linear, jvp=tangent)
autograd("linear_backward", LinearBackward, jvp=by_formula(masked_backward_formula))
vmap("linear", rows(0))
vmap("linear_backward", rows_and_sums(0, 1))
autocast("linear", cuda="lower", cpu="lower")
flops("linear", linear_flops)
flops("linear_backward", linear_backward_flops)
