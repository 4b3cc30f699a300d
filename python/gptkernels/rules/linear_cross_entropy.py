"""loss = cross_entropy(x @ weight^T, targets) in chunks of rows, so that only one chunk's logits are stored.

The forward computes dx and dweight for dloss = 1, and the backward multiplies them by dloss. In three cases the
backward computes the logits a second time instead: for the reduction "none"; for float16, whose gradients must be
multiplied by the loss scale before they are rounded; and with ``create_graph=True``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gptkernels.rules import _register as register
from gptkernels.rules._jvp import by_formula
from gptkernels.rules._register import accumulate_dtype, below_autograd, empty_gradients, ops, present
from gptkernels.rules._vmap import loop
from gptkernels.rules.linear import linear_flops


def fake_loss(x, weight, targets, vocab_size=-1, ignore_index=-100, reduction="mean", *_):
    shape = targets.shape if reduction == "none" else ()
    return x.new_empty(shape, dtype=accumulate_dtype(x.dtype))


def _fake_gradients(x, weight, output_mask):
    return empty_gradients(x, (x.shape, weight.shape), output_mask)


def fake_with_gradients(x, weight, targets, vocab_size, ignore_index, reduction, *options):
    loss = fake_loss(x, weight, targets, vocab_size, ignore_index, reduction)
    return loss, *_fake_gradients(x, weight, options[-1])


def _fake_with_logits(x, weight, targets, scale, vocab_size, ignore_index, chunk_size, output_mask):
    loss = fake_loss(x, weight, targets)
    dx, dweight = _fake_gradients(x, weight, output_mask)
    return x.new_empty((*x.shape[:-1], weight.shape[0])), loss, dx, dweight.to(loss.dtype)


class LinearCrossEntropy(torch.autograd.Function):
    """x (..., C), weight (Vp, C), targets (...) -> loss, 0-dim or (...)."""

    @staticmethod
    def forward(ctx, x, weight, targets, *options):
        ctx.options = options
        reduction = options[2]
        if reduction == "none" or x.dtype == torch.float16:
            ctx.save_for_backward(x, weight, targets)
            return below_autograd(ops.linear_cross_entropy.default, x, weight, targets, *options)
        loss, *gradients = below_autograd(
            ops.linear_cross_entropy_with_gradients.default, x, weight, targets, *options, ctx.needs_input_grad[:2]
        )
        ctx.save_for_backward(x, weight, targets, *gradients)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        x, weight, targets, *saved = ctx.saved_tensors
        mask = ctx.needs_input_grad[:2]
        if saved and not torch.is_grad_enabled():
            return *scale_saved(dloss, saved, mask), *(None,) * 5
        gradients = ops.linear_cross_entropy_backward.default(dloss, x, weight, targets, *ctx.options, mask)
        return *present(gradients, mask), *(None,) * 5


def scale_saved(dloss, saved, mask) -> tuple[Tensor | None, ...]:
    scale = scale_in_place if is_last_backward(saved) else ops.fused_classifier_backward.default
    return tuple(scale(dloss, gradient) if wanted else None for gradient, wanted in zip(saved, mask, strict=True))


def is_last_backward(saved) -> bool:
    """Return whether the saved tensors may be overwritten.

    They may if autograd does not keep the graph, and the backward is neither traced nor under a transform.
    """
    return (
        all(type(t) is Tensor for t in saved)  # no tracing
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._autograd._get_current_graph_task_keep_graph()
    )


def scale_in_place(dloss, gradient) -> Tensor:
    """The kernel returns at once if dloss is 1, as in ``loss.backward()``."""
    ops.fused_classifier_backward_.default(dloss, gradient)
    return gradient


def formula(x, weight, targets, vocab_size, ignore_index, reduction, chunk_size) -> Tensor:
    vocab_size = weight.shape[0] if vocab_size == -1 else vocab_size
    logits = F.linear(x, weight[:vocab_size]).to(accumulate_dtype(x.dtype)).reshape(-1, vocab_size)
    loss = F.cross_entropy(logits, targets.reshape(-1).long(), ignore_index=ignore_index, reduction=reduction)
    return loss.view(targets.shape) if reduction == "none" else loss


def backward_formula(
    dloss, x, weight, targets, vocab_size, ignore_index, reduction, chunk_size, output_mask
) -> tuple[Tensor | None, ...]:
    wide = accumulate_dtype(x.dtype)
    columns = weight.shape[0]
    vocab_size = columns if vocab_size == -1 else vocab_size
    rows, vocabulary = x.reshape(-1, x.shape[-1]).to(wide), weight[:vocab_size].to(wide)
    targets = targets.reshape(-1).long()
    kept = targets != ignore_index
    onehot = F.one_hot(targets.where(kept, 0), vocab_size)
    dlosses = dloss.reshape(-1) / (kept.sum() if reduction == "mean" else 1)
    dlogits = ((rows @ vocabulary.T).softmax(-1) - onehot) * dlosses.where(kept, 0).unsqueeze(-1)
    dx = (dlogits @ vocabulary).view(x.shape).to(x.dtype)
    dweight = F.pad(dlogits.T @ rows, (0, 0, 0, columns - vocab_size)).to(weight.dtype)
    return present((dx, dweight), output_mask)


class LinearCrossEntropyWithGradients(torch.autograd.Function):
    """Computes the loss and its gradients. A derivative raises an error, because the outputs include gradients."""

    @staticmethod
    def forward(ctx, x, weight, targets, *options):
        return below_autograd(ops.linear_cross_entropy_with_gradients.default, x, weight, targets, *options)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(
            "gptkernels::linear_cross_entropy_with_gradients is not differentiable: call linear_cross_entropy, or "
            "this under torch.no_grad()"
        )


def with_gradients_flops(x_shape, weight_shape, *args, **kwargs) -> int:
    return linear_flops(x_shape, weight_shape) * (1 + sum(args[-1]))


def _refuse(*_):
    LinearCrossEntropyWithGradients.backward(None)


def backward_flops(dloss_shape, x_shape, weight_shape, *args, **kwargs) -> int:
    return with_gradients_flops(x_shape, weight_shape, *args)


register.fake("linear_cross_entropy", fake_loss)
register.fake("linear_cross_entropy_with_gradients", fake_with_gradients)
register.fake("linear_cross_entropy_with_logits", _fake_with_logits)
register.fake("linear_cross_entropy_backward", lambda dloss, x, weight, *args: _fake_gradients(x, weight, args[-1]))
register.autograd("linear_cross_entropy", LinearCrossEntropy, jvp=by_formula(formula))
register.autograd("linear_cross_entropy_with_gradients", LinearCrossEntropyWithGradients, jvp=_refuse)
register.without_derivative("linear_cross_entropy_with_logits")
register.autograd_by_formula("linear_cross_entropy_backward", backward_formula, inputs=3)
for _name in ("linear_cross_entropy", "linear_cross_entropy_with_gradients", "linear_cross_entropy_backward"):
    register.vmap(_name, loop)
register.autocast("linear_cross_entropy", cuda="lower", cpu="lower")
register.flops("linear_cross_entropy", linear_flops)
register.flops("linear_cross_entropy_with_gradients", with_gradients_flops)
register.flops("linear_cross_entropy_with_logits", with_gradients_flops)
register.flops("linear_cross_entropy_backward", backward_flops)
