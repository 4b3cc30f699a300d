"""The Euclidean norm of a list of tensors, for gradient clipping: the square root of the sum of all x^2."""

import torch

from gptkernels.rules import _jvp
from gptkernels.rules import _register as register
from gptkernels.rules._register import _registrations, below_autograd, ops, recorder
from gptkernels.rules._vmap import loop


class GlobalNorm(torch.autograd.Function):
    """Tensors of any shapes and floating dtypes -> 0-dim float32."""

    @staticmethod
    def forward(ctx, *tensors):
        norm = below_autograd(ops.global_norm.default, tensors)
        ctx.save_for_backward(norm, *tensors)
        return norm

    @staticmethod
    def backward(ctx, dnorm):
        """If all x are 0, dx is 0, the same subgradient as torch's."""
        norm, *tensors = ctx.saved_tensors
        # x / norm is at most 1, while dnorm / norm would overflow for a denormal norm.
        divisor = torch.where(norm == 0, 1.0, norm)

        def gradient(t):
            dtype = torch.promote_types(t.dtype, torch.float32)
            return (t.to(dtype) / divisor.to(dtype) * dnorm.to(dtype)).to(t.dtype)

        return tuple(gradient(t) if needed else None for t, needed in zip(tensors, ctx.needs_input_grad, strict=True))


def tangent(tensors, tangents, outputs):
    (norm,) = outputs
    wide = (torch.promote_types(t.dtype, torch.float32) for t in tensors)
    pairs = [(x.to(d), dx.to(d)) for x, dx, d in zip(tensors, tangents, wide, strict=True) if dx is not None]
    total = sum((x * dx).sum() for x, dx in pairs).to(norm.dtype)
    return torch.where(norm == 0, 0.0, total / norm)


_record, _record_forward = recorder(GlobalNorm), recorder(_jvp.with_jvp(GlobalNorm, tangent))


def _autograd(tensors):
    if _jvp.active() and _jvp.any_tangent(tensors):
        return _record_forward(*tensors)
    if not torch.is_grad_enabled():
        return below_autograd(ops.global_norm.default, tensors)
    return _record(*tensors)


def _without_kernel(tensors):
    """Accept empty lists, for which the dispatcher knows no device; refuse devices without a kernel."""
    if tensors:
        raise RuntimeError(f"gptkernels::global_norm: tensors[0] is on {tensors[0].device}, which has no kernel")
    return torch.zeros(())


register.fake("global_norm", lambda tensors: tensors[0].new_empty((), dtype=torch.float32))
_registrations.impl("global_norm", _autograd, "Autograd")
register.vmap("global_norm", loop)
_registrations.impl("global_norm", _without_kernel, "CompositeExplicitAutograd")
