"""Linear layer and cross-entropy in chunks of rows: loss = cross_entropy(x @ weight^T, targets) without all the logits.

For "mean" and "sum" the incoming gradient dloss is one number, and dx and dweight are proportional to it. The forward
therefore computes them for dloss = 1 from each chunk's logits, and the backward multiplies them by dloss. For "none"
each row has its own dloss, and float16 gradients must be multiplied by the loss scale before they are rounded; for
these the backward computes the logits a second time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gptkernels.rules._jvp import by_formula
from gptkernels.rules._register import (
    accumulate_dtype,
    autocast,
    autograd,
    below_autograd,
    differentiate,
    fake,
    flops,
    ops,
    present,
    vmap,
    without_derivative,
)
from gptkernels.rules._vmap import loop
from gptkernels.rules.linear import linear_flops


def fake_loss(x, weight, targets, vocab_size=-1, ignore_index=-100, reduction="mean", chunk_size=-1):
    """The loss, without data."""
    shape = targets.shape if reduction == "none" else ()
    return x.new_empty(shape, dtype=accumulate_dtype(x.dtype))


def _fake_gradients(x, weight, output_mask):
    return tuple(x.new_empty(t.shape if wanted else (0,)) for t, wanted in zip((x, weight), output_mask, strict=True))


def fake_with_gradients(x, weight, targets, vocab_size, ignore_index, reduction, chunk_size, output_mask):
    """The loss and the gradients, without data."""
    return fake_loss(x, weight, targets, reduction=reduction), *_fake_gradients(x, weight, output_mask)


def _fake_with_logits(x, weight, targets, scale, vocab_size, ignore_index, chunk_size, output_mask):
    loss = fake_loss(x, weight, targets)
    dx, dweight = _fake_gradients(x, weight, output_mask)
    return x.new_empty((*x.shape[:-1], weight.shape[0])), loss, dx, dweight.to(loss.dtype)


def _fake_backward(dloss, x, weight, targets, vocab_size, ignore_index, reduction, chunk_size, output_mask):
    return _fake_gradients(x, weight, output_mask)


class LinearCrossEntropy(torch.autograd.Function):
    """x (..., C), weight (Vp, C), targets (...) -> loss, 0-dim or (...)."""

    @staticmethod
    def forward(ctx, x, weight, targets, *options):
        """Save the inputs, and for "mean" and "sum" the gradients for dloss = 1."""
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
        """Scale the saved gradients; if there are none, or they are differentiated again, compute the logits again."""
        x, weight, targets, *saved = ctx.saved_tensors
        mask = ctx.needs_input_grad[:2]
        if saved and not torch.is_grad_enabled():
            return *scale_saved(dloss, saved, mask), *(None,) * 5
        gradients = ops.linear_cross_entropy_backward.default(dloss, x, weight, targets, *ctx.options, mask)
        return *present(gradients, mask), *(None,) * 5


def scale_saved(dloss, saved, mask) -> tuple[Tensor | None, ...]:
    """The saved gradients for dloss = 1 times dloss; None for one that is not wanted."""
    scale = scale_in_place if is_last_backward(saved) else ops.fused_classifier_backward.default
    return tuple(scale(dloss, gradient) if wanted else None for gradient, wanted in zip(saved, mask, strict=True))


def is_last_backward(saved) -> bool:
    """Whether the saved tensors are not needed again and may be overwritten: the engine keeps no graph."""
    return (
        all(type(t) is Tensor for t in saved)  # no tracing
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._autograd._get_current_graph_task_keep_graph()
    )


def scale_in_place(dloss, gradient) -> Tensor:
    """``gradient * dloss`` in place of ``gradient``. A dloss of 1, as in ``loss.backward()``, costs next to nothing."""
    ops.fused_classifier_backward_.default(dloss, gradient)
    return gradient


def formula(x, weight, targets, vocab_size, ignore_index, reduction, chunk_size) -> Tensor:
    """The loss in torch ops, with all the logits."""
    vocab_size = weight.shape[0] if vocab_size == -1 else vocab_size
    logits = F.linear(x, weight[:vocab_size]).to(accumulate_dtype(x.dtype)).reshape(-1, vocab_size)
    loss = F.cross_entropy(logits, targets.reshape(-1).long(), ignore_index=ignore_index, reduction=reduction)
    return loss.view(targets.shape) if reduction == "none" else loss


def backward_formula(
    dloss, x, weight, targets, vocab_size, ignore_index, reduction, chunk_size, output_mask
) -> tuple[Tensor | None, ...]:
    """dx and dweight in torch ops, with all the logits; None for one that is not wanted."""
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


class LinearCrossEntropyBackward(torch.autograd.Function):
    """dx and dweight as differentiable functions of dloss, x and weight."""

    @staticmethod
    def forward(ctx, dloss, x, weight, targets, *options):
        """The kernels."""
        ctx.save_for_backward(dloss, x, weight, targets)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return below_autograd(ops.linear_cross_entropy_backward.default, dloss, x, weight, targets, *options)

    @staticmethod
    def backward(ctx, *grads):
        """By formula."""
        *inputs, targets = ctx.saved_tensors
        needs, output_mask = ctx.needs_input_grad[:3], ctx.options[-1]
        gradients = differentiate(
            lambda *inputs: backward_formula(*inputs, targets, *ctx.options),
            inputs,
            needs,
            present(grads, output_mask),
        )
        return *gradients, *(None,) * 6


class LinearCrossEntropyWithGradients(torch.autograd.Function):
    """Refuses: its gradients are outputs already."""

    @staticmethod
    def forward(ctx, x, weight, targets, *options):
        """The kernels."""
        return below_autograd(ops.linear_cross_entropy_with_gradients.default, x, weight, targets, *options)

    @staticmethod
    def backward(ctx, *grads):
        """Say which operator has a derivative."""
        raise RuntimeError(
            "gptkernels::linear_cross_entropy_with_gradients is not differentiable: call linear_cross_entropy, or "
            "this under torch.no_grad()"
        )


def forward_flops(x_shape, weight_shape, *args, **kwargs) -> int:
    """The logits."""
    return linear_flops(x_shape, weight_shape)


def with_logits_flops(x_shape, weight_shape, *args, **kwargs) -> int:
    """As ``with_gradients_flops``."""
    return with_gradients_flops(x_shape, weight_shape, args[-1])


def with_gradients_flops(x_shape, weight_shape, *args, **kwargs) -> int:
    """The logits, and as much for each gradient."""
    return linear_flops(x_shape, weight_shape) * (1 + sum(args[-1]))


def _refuse(*_):
    """No tangents: as ``LinearCrossEntropyWithGradients.backward``."""
    LinearCrossEntropyWithGradients.backward(None)


def backward_flops(dloss_shape, x_shape, weight_shape, *args, **kwargs) -> int:
    """The logits once more, and as much for each gradient."""
    return with_gradients_flops(x_shape, weight_shape, *args)


fake("linear_cross_entropy", fake_loss)
fake("linear_cross_entropy_with_gradients", fake_with_gradients)
fake("linear_cross_entropy_with_logits", _fake_with_logits)
fake("linear_cross_entropy_backward", _fake_backward)
autograd("linear_cross_entropy", LinearCrossEntropy, jvp=by_formula(formula))
autograd("linear_cross_entropy_with_gradients", LinearCrossEntropyWithGradients, jvp=_refuse)
without_derivative("linear_cross_entropy_with_logits")
autograd("linear_cross_entropy_backward", LinearCrossEntropyBackward, jvp=by_formula(backward_formula))
for _name in ("linear_cross_entropy", "linear_cross_entropy_with_gradients", "linear_cross_entropy_backward"):
    vmap(_name, loop)
autocast("linear_cross_entropy", cuda="lower", cpu="lower")
flops("linear_cross_entropy", forward_flops)
flops("linear_cross_entropy_with_gradients", with_gradients_flops)
flops("linear_cross_entropy_with_logits", with_logits_flops)
flops("linear_cross_entropy_backward", backward_flops)
