"""Dropout: x / (1 - p) for the elements that Philox's random bits keep, 0 * x for the others. No mask is stored."""

import torch
from torch import Tensor

from gptkernels.rules._jvp import linear_in
from gptkernels.rules._register import autograd, below_autograd, fake, like, ops, vmap
from gptkernels.rules._vmap import loop


def _fake_mask(size, p, seed, offset):
    return seed.new_empty((size,), dtype=torch.bool)


class Dropout(torch.autograd.Function):
    """x (...) -> out (...)."""

    @staticmethod
    def forward(ctx, x, p, seed, offset):
        ctx.save_for_backward(seed, offset)
        ctx.p = p
        return below_autograd(ops.dropout.default, x, p, seed, offset)

    @staticmethod
    def backward(ctx, dout):
        return ops.dropout.default(dout, ctx.p, *ctx.saved_tensors), None, None, None


def drop(x: Tensor, p: float, seed: Tensor | None, offset: Tensor | None) -> Tensor:
    """Apply dropout in another op's formula; return x itself if p is 0."""
    return x if p == 0 else ops.dropout.default(x, p, seed, offset)


fake("dropout", like(0))
fake("dropout_mask", _fake_mask)
autograd("dropout", Dropout, jvp=linear_in(0)(ops.dropout.default))
vmap("dropout", loop)  # the mask depends on an element's position, so each index is a separate call
