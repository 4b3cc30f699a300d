"""Dropout: x / (1 - p) for an element that Philox's random bits keep, otherwise 0 * x. No mask is stored."""

import torch
from torch import Tensor

from gptkernels.rules import _register as register
from gptkernels.rules._jvp import linear_in
from gptkernels.rules._register import below_autograd, like, ops
from gptkernels.rules._vmap import loop


class Dropout(torch.autograd.Function):
    """x (...) -> out (...)."""

    @staticmethod
    def forward(ctx, x, p, seed, offset, first_index):
        ctx.save_for_backward(seed, offset)
        ctx.p, ctx.first_index = p, first_index
        return below_autograd(ops.dropout.default, x, p, seed, offset, first_index)

    @staticmethod
    def backward(ctx, dout):
        return ops.dropout.default(dout, ctx.p, *ctx.saved_tensors, ctx.first_index), None, None, None, None


def drop(x: Tensor, p: float, seed: Tensor | None, offset: Tensor | None, first_index: int = 0) -> Tensor:
    return x if p == 0 else ops.dropout.default(x, p, seed, offset, first_index)


register.fake("dropout", like(0))
register.fake("dropout_mask", lambda size, p, seed, offset, first_index=0: seed.new_empty((size,), dtype=torch.bool))
register.autograd("dropout", Dropout, jvp=linear_in(0)(ops.dropout.default))
register.vmap("dropout", loop)  # the mask depends on an element's position
