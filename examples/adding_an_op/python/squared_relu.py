"""Squared ReLU: max(x, 0)^2 (So et al., 2021)."""

import torch

from gptkernels.rules._jvp import by_formula
from gptkernels.rules._register import autograd, below_autograd, fake, ops, vmap
from gptkernels.rules._vmap import rows


def _fake(x):
    return x.new_empty(x.shape)


def _fake_backward(dout, x):
    return x.new_empty(x.shape)


class SquaredRelu(torch.autograd.Function):
    """Computes out (...) = max(x, 0)^2 from x (...), and its backward."""

    @staticmethod
    def forward(ctx, x):
        """Compute out (...), and save x."""
        ctx.save_for_backward(x)
        return below_autograd(ops.squared_relu.default, x)

    @staticmethod
    def backward(ctx, dout):
        """Compute dx in one kernel."""
        (x,) = ctx.saved_tensors
        return ops.squared_relu_backward.default(dout, x)


class SquaredReluBackward(torch.autograd.Function):
    """Computes dx as a differentiable function of dout and x."""

    @staticmethod
    def forward(ctx, dout, x):
        """Compute dx, and save the inputs."""
        ctx.save_for_backward(dout, x)
        return below_autograd(ops.squared_relu_backward.default, dout, x)

    @staticmethod
    def backward(ctx, ddx):
        """Compute the gradients of dx = 2 dout max(x, 0) with respect to dout and x."""
        dout, x = ctx.saved_tensors
        return ops.squared_relu_backward.default(ddx, x), 2 * ddx * dout * (x > 0)


def tangent(inputs, tangents, outputs):
    """Return the tangent of out: the derivative of each element times its tangent."""
    return ops.squared_relu_backward.default(tangents[0], inputs[0])


fake("squared_relu", _fake)
fake("squared_relu_backward", _fake_backward)
autograd("squared_relu", SquaredRelu, jvp=tangent)
autograd("squared_relu_backward", SquaredReluBackward, jvp=by_formula(lambda dout, x: 2 * dout * x.relu()))
vmap("squared_relu", rows(0, least=0))
vmap("squared_relu_backward", rows(0, 1, least=0))
