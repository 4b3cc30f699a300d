"""Layer normalisation: out = (x - mean) * rstd * weight + bias over the last dimension (Ba et al., 2016)."""

import torch
from torch import Tensor

from gptkernels.rules import _register as register
from gptkernels.rules._jvp import by_formula
from gptkernels.rules._register import accumulate_dtype, below_autograd, empty_gradients, ops, present
from gptkernels.rules._vmap import rows, rows_and_sums


def _fake(x, weight, bias, eps=1e-5):
    statistics = x.new_empty(x.shape[:-1], dtype=accumulate_dtype(x.dtype))
    return x.new_empty(x.shape), statistics, torch.empty_like(statistics)


def _fake_backward(dout, x, weight, mean, rstd, output_mask):
    return empty_gradients(x, (x.shape, x.shape[-1:], x.shape[-1:]), output_mask)


class LayerNorm(torch.autograd.Function):
    """x (..., C), weight (C), bias (C) -> out (..., C), mean (...), rstd (...)."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        out, mean, rstd = below_autograd(ops.layernorm.default, x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)  # avoids zeros for the statistics' gradients
        return out, mean, rstd

    @staticmethod
    def backward(ctx, dout, _dmean, _drstd):
        if dout is None:
            return None, None, None, None
        x, weight, mean, rstd = ctx.saved_tensors
        mask = ctx.needs_input_grad[:3]
        return *present(ops.layernorm_backward.default(dout, x, weight, mean, rstd, mask), mask), None


def formula(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float):
    """Compute layernorm without torch's layer_norm.

    The second forward-mode derivative of torch's layer_norm treats the statistics as constants.
    """
    wide = accumulate_dtype(x.dtype)
    x = x.to(wide)
    centred = x - x.mean(-1, keepdim=True)
    out = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    out = out if weight is None else out * weight.to(wide)
    return out if bias is None else out + bias.to(wide), None, None


def backward_formula(dout: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> tuple[Tensor, ...]:
    """Treat the mean and 1 / sqrt(variance + eps) as functions of x; ``rstd`` only serves to compute eps."""
    wide = rstd.dtype
    x, dout, rstd = x.to(wide), dout.to(wide), rstd.unsqueeze(-1)
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    eps = rstd.pow(-2) - variance.detach()
    rstd = (variance + eps).rsqrt()
    norm = centred * rstd
    g = dout if weight is None else dout * weight.to(wide)
    dx = rstd * (g - g.mean(-1, keepdim=True) - norm * (g * norm).mean(-1, keepdim=True))
    rows = tuple(range(x.dim() - 1))
    return dx, (dout * norm).sum(rows) if rows else dout * norm, dout.sum(rows) if rows else dout


def masked_backward_formula(dout, x, weight, mean, rstd, output_mask):
    return present(backward_formula(dout, x, weight, rstd), output_mask)


register.fake("layernorm", _fake)
register.fake("layernorm_backward", _fake_backward)
register.autograd("layernorm", LayerNorm, jvp=by_formula(formula))
register.autograd_by_formula("layernorm_backward", masked_backward_formula, inputs=3)
register.vmap("layernorm", rows(0))
register.vmap("layernorm_backward", rows_and_sums(0, 1, 3, 4))
register.autocast("layernorm", cuda="float32", cpu="promote")
