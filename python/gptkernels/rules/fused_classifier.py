"""Softmax, cross-entropy and its gradient in one pass: losses = -log p[target], dlogits = p - onehot(target).

``dlogits`` is a differentiable output: its Jacobian is H = diag(p) - p p^T. Since p = dlogits + onehot, all higher
derivatives follow from the saved dlogits without the logits.
"""

import torch
from torch import Tensor

from gptkernels.rules import _jvp
from gptkernels.rules import _register as register
from gptkernels.rules._jvp import linear_in
from gptkernels.rules._register import _registrations, accumulate_dtype, below_autograd, like, ops, recorder
from gptkernels.rules._vmap import leading


def _fake_losses(logits, targets, vocab_size=-1, ignore_index=-100, dlosses=None):
    return logits.new_empty(logits.shape[:-1], dtype=accumulate_dtype(logits.dtype))


def _fake(logits, targets, vocab_size=-1, ignore_index=-100, dlosses=None):
    return _fake_losses(logits, targets), logits.new_empty(logits.shape)


def hessian_product(dlogits: Tensor, targets: Tensor, ignore_index: int, v: Tensor) -> Tensor:
    """Compute (diag(p) - p p^T) v for each row, with p = dlogits + onehot(target); 0 on ignored rows."""
    wide = accumulate_dtype(dlogits.dtype)
    kept = (targets != ignore_index).unsqueeze(-1)
    columns = targets.long().unsqueeze(-1).where(kept, 0)
    p = dlogits.to(wide) + torch.zeros_like(dlogits, dtype=wide).scatter(-1, columns, kept.to(wide))
    v = v.to(wide)
    return (p * (v - (p * v).sum(-1, keepdim=True))).to(dlogits.dtype)


def refuse_scaled() -> None:
    raise RuntimeError(
        "gptkernels::fused_classifier: a call with dlosses is not differentiable, since its dlogits already is "
        "the gradient, scaled; leave dlosses out, or call it under torch.no_grad()"
    )


class FusedClassifier(torch.autograd.Function):
    """logits (..., Vp), targets (...) -> losses (...), dlogits (..., Vp), both differentiable in the logits."""

    @staticmethod
    def forward(ctx, logits, targets, vocab_size, ignore_index, dlosses):
        losses, dlogits = below_autograd(
            ops.fused_classifier.default, logits, targets, vocab_size, ignore_index, dlosses
        )
        FusedClassifier.remember(ctx, dlogits, targets, ignore_index, dlosses)
        return losses, dlogits

    @staticmethod
    def remember(ctx, dlogits, targets, ignore_index, dlosses):
        ctx.save_for_backward(dlogits, targets)
        ctx.ignore_index = ignore_index
        ctx.scaled = dlosses is not None
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dlosses, ddlogits):
        """Return dlogits * dlosses, plus the Jacobian times ddlogits, the incoming gradient of the output dlogits."""
        if ctx.scaled:
            refuse_scaled()
        dlogits, targets = ctx.saved_tensors
        found = None
        if dlosses is not None:
            found = ops.fused_classifier_backward.default(dlosses, dlogits)
        if ddlogits is not None:
            product = hessian_product(dlogits, targets, ctx.ignore_index, ddlogits)
            found = product if found is None else found + product
        return found, None, None, None, None


class FusedClassifierInPlace(FusedClassifier):
    """Replaces the logits by dlogits in place. Autograd then treats the logits as dlogits."""

    @staticmethod
    def forward(ctx, logits, targets, vocab_size, ignore_index, dlosses):
        losses = below_autograd(ops.fused_classifier_.default, logits, targets, vocab_size, ignore_index, dlosses)
        dlogits = logits.detach()  # an alias, which shares the version of the logits
        FusedClassifier.remember(ctx, dlogits, targets, ignore_index, dlosses)
        return losses, dlogits


_record_in_place = recorder(FusedClassifierInPlace)


def _in_place(logits, targets, vocab_size=-1, ignore_index=-100, dlosses=None):
    """Give the logits the autograd history of dlogits.

    With a second output, ``mark_dirty`` does not support views. ``copy_`` does, and copies nothing here, because logits
    and dlogits are the same memory. The version is preserved, so that saved tensors stay valid.
    """
    args = (targets, vocab_size, ignore_index, dlosses)
    if _jvp.active():
        return _in_place_by_copy(logits, *args)
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return below_autograd(ops.fused_classifier_.default, logits, *args)
    refuse_leaf(logits)
    losses, dlogits = _record_in_place(logits, *args)
    with torch.autograd._unsafe_preserve_version_counter(logits):
        logits.copy_(dlogits)
    return losses


def _in_place_by_copy(logits, *args):
    """``copy_`` supports tangents, mapped dimensions and transforms."""
    losses, dlogits = ops.fused_classifier.default(logits.clone(), *args)
    logits.copy_(dlogits)
    return losses


def refuse_leaf(logits):
    view = logits._is_view() and not logits.is_leaf and logits._base.is_leaf and logits._base.requires_grad
    if logits.is_leaf or view:
        raise RuntimeError(
            f"gptkernels::fused_classifier_: a {'view of a ' if view else ''}leaf Variable that requires grad is "
            "being used in an in-place operation."
        )


class FusedClassifierBackward(torch.autograd.Function):
    """dlosses (...) or 0-dim, dlogits (..., Vp) -> dlogits * dlosses[..., None]."""

    @staticmethod
    def forward(ctx, dlosses, dlogits):
        ctx.save_for_backward(dlosses, dlogits)
        return below_autograd(ops.fused_classifier_backward.default, dlosses, dlogits)

    @staticmethod
    def backward(ctx, dscaled):
        dlosses, dlogits = ctx.saved_tensors
        ddlosses = ddlogits = None
        if ctx.needs_input_grad[0]:
            ddlosses = (dscaled.to(dlosses.dtype) * dlogits.to(dlosses.dtype)).sum(-1)
            ddlosses = ddlosses if dlosses.dim() else ddlosses.sum()
        if ctx.needs_input_grad[1]:
            ddlogits = ops.fused_classifier_backward.default(dlosses, dscaled)
        return ddlosses, ddlogits


def tangent(inputs, tangents, outputs):
    """If v is the tangent of a row's logits, the loss has the tangent sum(dlogits * v), and dlogits the tangent H v."""
    _, targets, _, ignore_index, dlosses = inputs
    if dlosses is not None:
        refuse_scaled()
    losses, dlogits = outputs
    v = tangents[0]
    return (v.to(losses.dtype) * dlogits.to(losses.dtype)).sum(-1), hessian_product(dlogits, targets, ignore_index, v)


def vmap_rule(op, size, in_dims, args):
    """Move the mapped dimension to the front. If dlosses is 0-dim for each index, expand it to the rows."""
    mapped = [leading(a, d, size) for a, d in zip(args, in_dims, strict=True)]
    rows = max(t.dim() for t in mapped if isinstance(t, Tensor)) - 1
    shape = next(t for t in mapped if isinstance(t, Tensor) and t.dim() > rows).shape[:-1]
    mapped = [
        t.view(-1, *(1,) * (rows - 1)).expand(shape) if isinstance(t, Tensor) and t.dim() == 1 < rows else t
        for t in mapped
    ]
    outputs = op(*mapped)
    return outputs, 0 if isinstance(outputs, Tensor) else (0, 0)


# There is no autocast rule: the losses are float32 (float64 for float64), as autocast requires of cross_entropy.
register.fake("fused_classifier", _fake)
register.fake("fused_classifier_", _fake_losses)
register.fake("fused_classifier_backward", like(1))
register.autograd("fused_classifier", FusedClassifier, jvp=tangent)
_registrations.impl("fused_classifier_", _in_place, "Autograd")
_backward_tangent = linear_in(0, 1)(ops.fused_classifier_backward)
register.autograd("fused_classifier_backward", FusedClassifierBackward, jvp=_backward_tangent)
register.vmap("fused_classifier", vmap_rule)
_registrations.impl("fused_classifier_", _in_place_by_copy, "FuncTorchBatched")
register.vmap("fused_classifier_backward", vmap_rule)
register.mutates("fused_classifier_")
register.fake("fused_classifier_backward_", lambda dlosses, dlogits: None)
register.mutates("fused_classifier_backward_")
register.without_derivative("fused_classifier_backward_")
