"""The LM head and the loss of a language model.

Shapes: C channels, V vocabulary; Vp is V rounded up to a multiple of 64.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gptkernels import functional
from gptkernels.rules import _jvp, ops
from gptkernels.rules._autocast import autocast_dtype, below, without_autocast
from gptkernels.rules._register import differentiate
from gptkernels.rules.linear_cross_entropy import is_last_backward, scale_in_place
from gptkernels.swapping.layers import products_dtype

CHUNK = -1  # rows of the logits' gradient stored at a time in eager training; -1 lets the operator choose


def head_and_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    divisor: Any = None,
    return_logits: bool | Literal["detached"] = True,
) -> tuple[Tensor | None, Tensor]:
    """Compute logits (..., V), a view of (..., Vp), and their cross-entropy, 0-dim float32 (float64 for float64).

    ``divisor`` divides the sum of the losses; None stands for the number of targets that are not ignored.
    ``return_logits`` is False for no logits, "detached" for logits without a gradient.
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
        from gptkernels._in_graph import compiled_head_and_loss

        divisor = _counted(targets, ignore_index) if divisor is None else divisor
        logits, loss = compiled_head_and_loss(*args, divisor, low)
    else:
        logits, loss = apply_head_and_loss(*args, divisor, low)
    logits = logits[..., :V]
    return logits.detach() if return_logits == "detached" else logits, loss


def padded_weight(weight: Tensor) -> Tensor:
    """Pad the weight (V, C) with zeros to a multiple of 64 rows, in autocast's dtype.

    Matmuls on tensor cores need rows of logits aligned to 128 bytes. Rows of 50257 16-bit logits are not.
    """
    weight = weight.to(products_dtype(weight))
    padding = -weight.shape[0] % 64
    return F.pad(weight, (0, 0, 0, padding)) if padding else weight


def _by_operators(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, divisor: Any
) -> tuple[Tensor, Tensor]:
    if divisor is None:
        divisor = _counted(targets, ignore_index)
    padded = padded_weight(weight)
    logits = functional.linear(hidden, padded)
    losses, _ = ops.fused_classifier(
        logits.view(-1, padded.shape[0]), targets.reshape(-1), weight.shape[0], ignore_index
    )
    return logits, losses.sum() / divisor


def _counted(targets: Tensor, ignore_index: int) -> Tensor:
    return (targets != ignore_index).sum()


def compiled_head_and_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, divisor: Any, low: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute LM head and loss under ``torch.compile``.

    Dynamo puts a call of this function into its graph (``allow_in_graph``). AOTAutograd then records the operators that
    the function calls.
    """
    if _jvp.active():  # under a transform of torch.func
        return _by_operators(hidden, weight, targets, ignore_index, divisor)
    return _CompiledHeadAndLoss.apply(hidden, weight, targets, ignore_index, divisor, low)  # type: ignore[no-any-return]


def _dtype_of_one_node(hidden: Tensor, weight: Tensor) -> torch.dtype | None:
    """Return the matmuls' dtype, or None if LM head and loss cannot be one node of autograd's graph.

    float16 would round the gradient of the mean loss to 0. float64 is not supported, because the factor 1 / (number of
    targets) is float32.
    """
    if not torch.is_grad_enabled() or (not torch.compiler.is_compiling() and _jvp.active()):
        return None
    autocast = autocast_dtype(hidden.device.type)
    low = autocast or hidden.dtype
    dtypes = (torch.float32, low) if autocast else (low,)
    supported = low in (torch.float32, torch.bfloat16) and hidden.dtype in dtypes and weight.dtype in dtypes
    return low if supported else None


class _HeadAndLoss(torch.autograd.Function):
    """LM head and loss in eager training. The forward also computes the gradients of hidden and weight for dloss = 1.

    The operator works in chunks of rows, because the gradient of all logits would be as large as the logits, and most
    memory is in use at this time.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, divisor: Any, low: torch.dtype
    ):
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
        """``dlogits`` comes from other uses of the logits than the loss."""
        hidden, weight, targets, dx, dweight = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiably(ctx, hidden, weight, targets, (dlogits, dloss))
        needs = ctx.needs_input_grad[:2]
        dhidden = dvocabulary = None
        with below():
            if dloss is not None:
                dloss = dloss.clone()  # torch warns if the first CUDA call in autograd's thread is a call of cuBLAS
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


# Function.apply's C++ part. Its Python part supports torch.func, under which there is no node.
apply_head_and_loss = super(torch.autograd.Function, _HeadAndLoss).apply  # type: ignore[misc]


class _CompiledHeadAndLoss(torch.autograd.Function):
    """LM head and loss for ``torch.compile``. The forward saves dlogits, the gradient of the loss for dloss = 1.

    If a compiled graph returns the logits, its backward always gets a gradient for them. Adding this gradient to
    dlogits is faster than separate matmuls. Otherwise dloss multiplies the gradients of hidden and weight, which are
    smaller than dlogits.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, divisor: Any, low: torch.dtype
    ):
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
    V, C = weight.shape
    padded = weight.new_empty((V + -V % 64, C), dtype=low)
    padded[:V].copy_(weight)
    padded[V:].zero_()
    return padded


def _scale(divisor: Any, like: Tensor) -> Tensor:
    if isinstance(divisor, Tensor):
        return (1 / divisor).float()
    return like.new_full((), 1 / divisor, dtype=torch.float32)


def _sum(gradient: Tensor | None, more: Tensor, dtype: torch.dtype) -> Tensor:
    return more.to(dtype) if gradient is None else gradient + more


def _scaled(gradient: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply by the scale as a 1-dim tensor, because torch would round a 0-dim scale to the gradient's dtype."""
    return (gradient if scale is None else gradient * scale.view(1)).to(dtype)


def _differentiably(
    ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    def formula(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        with without_autocast(hidden.device.type):
            return _by_operators(hidden.to(ctx.low), weight.to(ctx.low), targets, ctx.ignore_index, ctx.divisor)

    return *differentiate(formula, (hidden, weight), ctx.needs_input_grad[:2], grads), None, None, None, None
