"""The output head and the loss of a language model.

Shapes: C channels, V vocabulary, Vp V rounded up to a multiple of 64.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptkernels import functional
from gptkernels.ops import _forward, ops
from gptkernels.ops._below import Below
from gptkernels.ops._register import differentiate
from gptkernels.swapping.layers import products_dtype


def head_and_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    divisor: Any = None,
    return_logits: bool = True,
) -> tuple[Tensor | None, Tensor]:
    """Logits (..., V), a view of padded ones, and their cross-entropy with targets (...).

    Args:
        hidden: (..., C).
        weight: (V, C).
        targets: (...), int64 or int32.
        ignore_index: the target of rows that do not count.
        divisor: what the sum of the losses is divided by; None is the number of targets that count.
        return_logits: False computes them in chunks, so that they never exist as a whole, and returns None.

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
    if divisor is None:
        divisor = (targets != ignore_index).sum()
    if (low := _dtype_of_one_node(hidden, weight)) is None:
        logits, loss = _by_operators(hidden, weight, targets, ignore_index, divisor)
    else:
        logits, loss = _one_node(hidden, weight, targets, ignore_index, divisor, low)
    return logits[..., :V], loss


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
    padded = padded_weight(weight)
    logits = functional.linear(hidden, padded)
    losses, _ = ops.fused_classifier(
        logits.view(-1, padded.shape[0]), targets.reshape(-1), weight.shape[0], ignore_index
    )
    return logits, losses.sum() / divisor


# ---- one node of autograd's graph ------------------------------------------------------------------------------------


@torch.compiler.allow_in_graph
def _one_node(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, divisor: Any, low: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As ``_by_operators``. ``torch.compile`` calls it as it is, and records the operators of both passes."""
    if _forward.active():  # under a transform of torch.func
        return _by_operators(hidden, weight, targets, ignore_index, divisor)
    return _HeadAndLoss.apply(hidden, weight, targets, ignore_index, divisor, low)  # type: ignore[no-any-return]


def _dtype_of_one_node(hidden: Tensor, weight: Tensor) -> torch.dtype | None:
    """The products' dtype where head and loss are one node, in training; None where they are operators.

    The node's gradient of the logits is that of the mean loss, which float16 would round to 0, and float64's scale
    would have to be float64.
    """
    if not torch.is_grad_enabled():
        return None
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    low = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    dtypes = (torch.float32, low) if autocast else (low,)
    served = low in (torch.float32, torch.bfloat16) and hidden.dtype in dtypes and weight.dtype in dtypes
    return low if served else None


class _HeadAndLoss(torch.autograd.Function):
    """The classifier's pass writes the gradient of the mean loss.

    What scales the loss is then applied to the gradients of hidden and weight, not to that of the logits, which is
    larger, and has been written already.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, divisor: Any, low: torch.dtype
    ):
        """hidden (..., C), weight (V, C), targets (...) -> logits (..., Vp), loss."""
        V, C = weight.shape
        with Below(hidden.device.type):
            x = hidden.to(low)
            padded = weight.new_empty((V + -V % 64, C), dtype=low)
            padded[:V].copy_(weight)
            padded[V:].zero_()
            logits = ops.linear.default(x, padded, None)
            scale = 1 / divisor if isinstance(divisor, Tensor) else x.new_full((), 1 / divisor, dtype=torch.float32)
            losses, dlogits = ops.fused_classifier.default(
                logits.view(-1, V + -V % 64), targets.reshape(-1), V, ignore_index, scale.float()
            )
            loss = losses.sum() / divisor
        ctx.save_for_backward(hidden, weight, targets, x, padded, dlogits.view(logits.shape))
        ctx.ignore_index, ctx.divisor = ignore_index, divisor
        ctx.set_materialize_grads(False)
        return logits, loss

    @staticmethod
    def backward(ctx: Any, dlogits_outside: Tensor | None, dloss: Tensor | None):  # type: ignore[no-untyped-def]
        """All gradients that are wanted."""
        hidden, weight, targets, x, padded, dlogits = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiably(ctx, hidden, weight, targets, (dlogits_outside, dloss))
        needs = ctx.needs_input_grad[:2]
        with Below(hidden.device.type):
            if dloss is not None:
                dloss = dloss.clone()  # torch warns where cuBLAS's is the first call of autograd's thread
            if dlogits_outside is not None:
                own = 0 if dloss is None else dlogits * dloss.view(1)
                dlogits, dloss = (dlogits_outside + own).to(x.dtype), None
            elif dloss is None:
                return (None,) * 6
            dx, dweight, _ = ops.linear_backward.default(dlogits, x, padded, (*needs, False))
            dhidden = _scaled(dx, dloss, hidden.dtype) if needs[0] else None
            dweight = _scaled(dweight[: weight.shape[0]], dloss, weight.dtype) if needs[1] else None
        return dhidden, dweight, None, None, None, None


def _scaled(gradient: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """gradient * scale, in the dtype. A scale of one dimension is not rounded to the gradient's dtype."""
    return (gradient if scale is None else gradient * scale.view(1)).to(dtype)


def _differentiably(
    ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    """The backward as a function that can be differentiated: by the single operators' own autograd."""

    def formula(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        low = ctx.saved_tensors[3].dtype
        with torch.autocast(hidden.device.type, enabled=False):
            return _by_operators(hidden.to(low), weight.to(low), targets, ctx.ignore_index, ctx.divisor)

    return *differentiate(formula, (hidden, weight), ctx.needs_input_grad[:2], grads), None, None, None, None
