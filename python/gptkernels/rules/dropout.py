"""Dropout: x / (1 - p) where a mask of Philox's random bits keeps an element, 0 * x elsewhere. Nothing is stored."""

import torch
from torch import Tensor

from gptkernels.rules._jvp import linear_in
from gptkernels.rules._register import autograd, below_autograd, fake, ops, vmap
from gptkernels.rules._vmap import loop


def _fake(x, p, seed, offset):
    return x.new_empty(x.shape)


def _fake_mask(size, p, seed, offset):
    return seed.new_empty((size,), dtype=torch.bool)


class Dropout(torch.autograd.Function):
    """x (...) -> out (...)."""

    @staticmethod
    def forward(ctx, x, p, seed, offset):
        """Save the numbers that the mask is drawn from."""
        ctx.save_for_backward(seed, offset)
        ctx.p = p
        return below_autograd(ops.dropout.default, x, p, seed, offset)

    @staticmethod
    def backward(ctx, dout):
        """The same function of the gradient."""
        return ops.dropout.default(dout, ctx.p, *ctx.saved_tensors), None, None, None


def drop(x: Tensor, p: float, seed: Tensor | None, offset: Tensor | None) -> Tensor:
    """Dropout as a step of another op's formula; x itself where nothing is dropped."""
    return x if p == 0 else ops.dropout.default(x, p, seed, offset)


fake("dropout", _fake)
fake("dropout_mask", _fake_mask)
autograd("dropout", Dropout, jvp=linear_in(0)(ops.dropout.default))
vmap("dropout", loop)  # an element's place decides whether it is kept: each index has the mask of a call of its own
