"""The output head and the loss of a language model.

Shapes: C channels, V vocabulary, Vp V rounded up to a multiple of 64.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gptkernels import functional
from gptkernels.rules import _jvp as _forward
from gptkernels.rules import ops
from gptkernels.rules._autocast import autocast_dtype, without_autocast
from gptkernels.rules._below_autograd import below
from gptkernels.rules._register import differentiate
from gptkernels.rules.linear_cross_entropy import is_last_backward, scale_in_place
from gptkernels.swapping.layers import products_dtype

CHUNK = -1  # rows whose gradient of the logits exists at a time, in eager training; -1: the operator chooses


def head_and_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    divisor: Any = None,
    return_logits: bool | Literal["detached"] = True,
) -> tuple[Tensor | None, Tensor]:
    """Logits (..., V), a view of padded ones, and their cross-entropy with targets (...).

    Args:
        hidden: (..., C).
        weight: (V, C).
        targets: (...), int64 or int32.
        ignore_index: the target of rows that do not count.
        divisor: what the sum of the losses is divided by; None is the number of targets that count.
        return_logits: as of ``swap``.

    Returns:
        logits or None; loss, 0-dim, float32 (float64 for float64).
    """
    V = weight.shape[0]
    if not return_logits:
        reduction = "mean" if divisor is None else "sum"
        loss = functional.linear_cross_entropy(
            hidden, padded_weight(weight), targets, vocab_size=V, ignore_index=ignore_index, reduction=reduction
        )
        return None, loss if divisor is None else loss / divisor
    args = hidden, weight, targets, ignore_index
    if (low := _dtype_of_one_node(hidden, weight)) is None:
        logits, loss = _by_operators(*args, divisor)
    elif torch.compiler.is_compiling():
        logits, loss = _compiled(*args, _counted(targets, ignore_index) if divisor is None else divisor, low)
    else:
        logits, loss = apply_head_and_loss(*args, divisor, low)
    logits = logits[..., :V]
    return logits.detach() if return_logits == "detached" else logits, loss


def padded_weight(weight: Tensor) -> Tensor:
    """The head's weight (V, C) with V rounded up to a multiple of 64 by rows of zeros, in autocast's dtype.

    Rows of logits then start at multiples of 128 bytes, which matrix products on tensor cores need: GPT-2's 50257
    columns of 16 bits do not.
    """
    weight = weight.to(products_dtype(weight))
    padding = -weight.shape[0] % 64
    return F.pad(weight, (0, 0, 0, padding)) if padding else weight


def _by_operators(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, divisor: Any
) -> tuple[Tensor, Tensor]:
    """Padded logits, and the loss."""
    if divisor is None:
        divisor = _counted(targets, ignore_index)
    padded = padded_weight(weight)
    logits = functional.linear(hidden, padded)
    losses, _ = ops.fused_classifier(
        logits.view(-1, padded.shape[0]), targets.reshape(-1), weight.shape[0], ignore_index
    )
    return logits, losses.sum() / divisor


def _counted(targets: Tensor, ignore_index: int) -> Tensor:
    """How many targets count, 0-dim."""
    return (targets != ignore_index).sum()


# ---- one node of autograd's graph ------------------------------------------------------------------------------------


@torch.compiler.allow_in_graph
def _compiled(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, divisor: Any, low: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``torch.compile`` calls this as it is, with tensors that record the operators of both passes."""
    if _forward.active():  # under a transform of torch.func
        return _by_operators(hidden, weight, targets, ignore_index, divisor)
    return _CompiledHeadAndLoss.apply(hidden, weight, targets, ignore_index, divisor, low)  # type: ignore[no-any-return]


def _dtype_of_one_node(hidden: Tensor, weight: Tensor) -> torch.dtype | None:
    """The products' dtype where head and loss are one node, in training; None where they are operators.

    The node's gradient of the logits is that of the mean loss, which float16 would round to 0, and float64's scale
    would have to be float64.
    """
    if not torch.is_grad_enabled() or (not torch.compiler.is_compiling() and _forward.active()):
        return None
    autocast = autocast_dtype(hidden.device.type)
    low = autocast or hidden.dtype
    dtypes = (torch.float32, low) if autocast else (low,)
    served = low in (torch.float32, torch.bfloat16) and hidden.dtype in dtypes and weight.dtype in dtypes
    return low if served else None


class _HeadAndLoss(torch.autograd.Function):
    """In eager training: the gradients of hidden and weight are computed beside the loss, for a dloss of 1.

    The operator does this in chunks of rows, so that the gradient of the logits never exists as a whole: it would be as
    large as the logits, at the time when most is kept for the backward.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, divisor: Any, low: torch.dtype
    ):
        """hidden (..., C), weight (V, C), targets (...) -> logits (..., Vp), loss."""
        with below():
            x = hidden if hidden.dtype == low else hidden.to(low)
            logits, loss, dx, dweight = ops.linear_cross_entropy_with_logits.default(
                x, _padded(weight, low), targets, None if divisor is None else _scale(divisor, x),
                weight.shape[0], ignore_index, CHUNK, ctx.needs_input_grad[:2],
            )  # fmt: skip
        ctx.save_for_backward(hidden, weight, targets, dx, dweight)
        ctx.ignore_index, ctx.divisor, ctx.low = ignore_index, divisor, low
        ctx.set_materialize_grads(False)
        return logits, loss

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor | None, dloss: Tensor | None):  # type: ignore[no-untyped-def]
        """All gradients that are wanted; dlogits is what else the logits were used for."""
        hidden, weight, targets, dx, dweight = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiably(ctx, hidden, weight, targets, (dlogits, dloss))
        needs = ctx.needs_input_grad[:2]
        dhidden = dvocabulary = None
        with below():
            if dloss is not None:
                dloss = dloss.clone()  # torch warns where cuBLAS's is the first call of autograd's thread
                dhidden = _scaled(dx, dloss, hidden.dtype) if needs[0] else None
                if needs[1]:
                    in_place = dweight.dtype == weight.dtype and is_last_backward((dweight,))
                    scaled = scale_in_place(dloss, dweight) if in_place else _scaled(dweight, dloss, weight.dtype)
                    dvocabulary = scaled[: weight.shape[0]]
            if dlogits is not None:
                x, padded = hidden.to(ctx.low), _padded(weight, ctx.low)
                more, more_weight, _ = ops.linear_backward.default(dlogits.to(ctx.low), x, padded, (*needs, False))
                dhidden = _sum(dhidden, more, hidden.dtype) if needs[0] else None
                dvocabulary = _sum(dvocabulary, more_weight[: weight.shape[0]], weight.dtype) if needs[1] else None
        return dhidden, dvocabulary, None, None, None, None


# Function.apply without its part in Python, which is for torch.func: not here (``_dtype_of_one_node``).
apply_head_and_loss = super(torch.autograd.Function, _HeadAndLoss).apply  # type: ignore[misc]


class _CompiledHeadAndLoss(torch.autograd.Function):
    """Under ``torch.compile``: the classifier's pass writes the gradient of the mean loss, dlogits, which is kept.

    A compiled graph that returns the logits is always given a gradient for them, of zeros if there is none: products of
    it would take longer than its addition to dlogits. Where the logits are not returned, what scales the loss is
    applied to the gradients of hidden and weight, which are smaller than dlogits.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, divisor: Any, low: torch.dtype
    ):
        """As of ``_HeadAndLoss``."""
        with below():
            x, padded = hidden.to(low), _padded(weight, low)
            logits = ops.linear.default(x, padded, None)
            losses, dlogits = ops.fused_classifier.default(
                logits.view(-1, logits.shape[-1]),
                targets.reshape(-1),
                weight.shape[0],
                ignore_index,
                _scale(divisor, x),
            )
            loss = losses.sum() / divisor
        ctx.save_for_backward(hidden, weight, targets, x, padded, dlogits.view(logits.shape))
        ctx.ignore_index, ctx.divisor, ctx.low = ignore_index, divisor, low
        ctx.set_materialize_grads(False)
        return logits, loss

    @staticmethod
    def backward(ctx: Any, dlogits_outside: Tensor | None, dloss: Tensor | None):  # type: ignore[no-untyped-def]
        """All gradients that are wanted."""
        hidden, weight, targets, x, padded, dlogits = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiably(ctx, hidden, weight, targets, (dlogits_outside, dloss))
        needs = ctx.needs_input_grad[:2]
        with below():
            if dlogits_outside is not None:
                own = 0 if dloss is None else dlogits * dloss.view(1)
                dlogits, dloss = (dlogits_outside + own).to(x.dtype), None
            elif dloss is None:
                return (None,) * 6
            dx, dweight, _ = ops.linear_backward.default(dlogits, x, padded, (*needs, False))
            dhidden = _scaled(dx, dloss, hidden.dtype) if needs[0] else None
            dweight = _scaled(dweight[: weight.shape[0]], dloss, weight.dtype) if needs[1] else None
        return dhidden, dweight, None, None, None, None


def _padded(weight: Tensor, low: torch.dtype) -> Tensor:
    """As ``padded_weight``, in this dtype, by one pass over the weight."""
    V, C = weight.shape
    padded = weight.new_empty((V + -V % 64, C), dtype=low)
    padded[:V].copy_(weight)
    padded[V:].zero_()
    return padded


def _scale(divisor: Any, like: Tensor) -> Tensor:
    """What each row's gradient is multiplied by for the gradient of the mean loss: 0-dim float32."""
    if isinstance(divisor, Tensor):
        return (1 / divisor).float()
    return like.new_full((), 1 / divisor, dtype=torch.float32)


def _sum(gradient: Tensor | None, more: Tensor, dtype: torch.dtype) -> Tensor:
    return more.to(dtype) if gradient is None else gradient + more


def _scaled(gradient: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """gradient * scale, in the dtype. A scale of one dimension is not rounded to the gradient's dtype."""
    return (gradient if scale is None else gradient * scale.view(1)).to(dtype)


def _differentiably(
    ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    """The backward as a function that can be differentiated: by the single operators' own autograd."""

    def formula(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        with without_autocast(hidden.device.type):
            return _by_operators(hidden.to(ctx.low), weight.to(ctx.low), targets, ctx.ignore_index, ctx.divisor)

    return *differentiate(formula, (hidden, weight), ctx.needs_input_grad[:2], grads), None, None, None, None
