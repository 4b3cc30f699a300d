"""The operators with ``torch.nn.functional``'s names and signatures, and the fusions torch has no name for.

Shapes: B batch, T tokens, C channels, V vocabulary, Vp padded vocabulary, N rows. Everything here runs on this
package's kernels. An option that they do not serve raises a ValueError that names it; no option is ignored, and none
is handed to another library's kernel.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gptkernels.ops import ops

__all__ = [
    "causal_attention",
    "causal_softmax",
    "cross_entropy",
    "embedding",
    "gelu",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "mlp",
    "residual_layer_norm",
    "softmax",
]


def refuse(function: str, **options: Any) -> None:
    """Raise a ValueError for the first of these options that asks for something, that is, is not None or False."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise ValueError(f"{function}: the option {name} is not supported: gptkernels has no kernel for it")


# ---- normalisation ---------------------------------------------------------------------------------------------------


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """:func:`torch.nn.functional.layer_norm`. Several normalised dimensions are worked on as one.

    Args:
        input: (..., *normalized_shape).
        normalized_shape: the last dimensions of ``input``.
        weight: of normalized_shape, or None.
        bias: of normalized_shape, or None.
        eps: added to the variance.

    Raises:
        ValueError: ``normalized_shape`` is empty or does not end ``input``'s shape, or ``weight`` or ``bias`` has
            another shape.
    """
    dims = _check_norm("layer_norm", input, normalized_shape, weight, bias)
    out, _, _ = ops.layernorm(*_as_one(dims, input, weight, bias), eps)
    return out if dims == 1 else out.view(input.shape)


def residual_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """The residual stream's addition and the norm that follows it, in one pass over memory.

    Args:
        x: (..., *normalized_shape), what a layer adds to the stream.
        residual: the stream, of x's shape.
        normalized_shape: as in :func:`layer_norm`.
        weight: of normalized_shape, or None.
        bias: of normalized_shape, or None.
        eps: added to the variance.

    Returns:
        ``layer_norm(x + residual, ...)`` and ``x + residual``.

    Raises:
        ValueError: as :func:`layer_norm`, and when x and residual differ in shape.
    """
    if x.shape != residual.shape:
        raise ValueError(
            f"residual_layer_norm: residual must have the shape of x, {tuple(x.shape)}, got {tuple(residual.shape)}"
        )
    dims = _check_norm("residual_layer_norm", x, normalized_shape, weight, bias)
    out, total, _, _ = ops.residual_layernorm(*_as_one(dims, x, residual, weight, bias), eps)
    return (out, total) if dims == 1 else (out.view(x.shape), total.view(x.shape))


def _check_norm(
    function: str, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> int:
    """How many dimensions are normalised."""
    shape = tuple(normalized_shape)
    if not shape or x.shape[-len(shape) :] != shape:
        raise ValueError(
            f"{function}: normalized_shape must be the last dimensions of the input, which has shape "
            f"{tuple(x.shape)}, got {shape}"
        )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != shape:
            raise ValueError(f"{function}: {name} must have shape {shape}, got {tuple(parameter.shape)}")
    return len(shape)


def _as_one(dims: int, *tensors: Tensor | None) -> Iterator[Tensor | None]:
    """The tensors with their last ``dims`` dimensions as one."""
    return (t if t is None or dims == 1 else t.flatten(-dims) for t in tensors)


# ---- activations and softmax -----------------------------------------------------------------------------------------


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """:func:`torch.nn.functional.gelu`: exact ("none"), or by tanh ("tanh") as GPT-2's.

    Raises:
        ValueError: ``approximate`` is neither.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate must be 'none' or 'tanh', got {approximate!r}")
    return ops.gelu(input, approximate=approximate)


def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """:func:`torch.nn.functional.softmax`. The kernel works on the last dimension; another one is moved there.

    Args:
        input: any shape.
        dim: the dimension that sums to 1. None warns and chooses as torch does: 0 for 0, 1 or 3 dimensions, else 1.
        dtype: what ``input`` is converted to first.

    Raises:
        IndexError: ``dim`` is out of range.
    """
    if dim is None:
        dim = 0 if input.dim() in (0, 1, 3) else 1
        warnings.warn(f"softmax: dim is not given; dim={dim} is used, as torch does", stacklevel=_stacklevel - 1)
    if dtype is not None:
        input = input.to(dtype)
    if input.dim() == 0:
        return softmax(input.unsqueeze(0), dim).squeeze(0)
    if dim in (-1, input.dim() - 1):
        return ops.softmax(input)
    return ops.softmax(input.transpose(dim, -1)).transpose(dim, -1)


def causal_softmax(scores: Tensor, scale: float = 1.0) -> Tensor:
    """Softmax of ``scale * scores`` over the keys that each query may see.

    Args:
        scores: (..., T, T), a row for each query.
        scale: what the scores are multiplied by.

    Returns:
        (..., T, T), exactly 0 above the diagonal.
    """
    return ops.causal_softmax(scores, scale)


# ---- matrices --------------------------------------------------------------------------------------------------------


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`torch.nn.functional.linear`: input (..., I), weight (O, I), bias (O) -> (..., O)."""
    return ops.linear(input, weight, bias)


def mlp(x: Tensor, fc_weight: Tensor, fc_bias: Tensor | None, proj_weight: Tensor, proj_bias: Tensor | None) -> Tensor:
    """GPT-2's feed-forward layer, ``linear(gelu(linear(x)))`` with the tanh GELU.

    Args:
        x: (..., C).
        fc_weight: (H, C), H the hidden width.
        fc_bias: (H), or None.
        proj_weight: (C, H).
        proj_bias: (C), or None.

    Returns:
        (..., C).
    """
    return ops.mlp(x, fc_weight, fc_bias, proj_weight, proj_bias)[0]


def causal_attention(qkv: Tensor, num_heads: int, scale: float | None = None) -> Tensor:
    """Causal self-attention of packed queries, keys and values.

    Args:
        qkv: (B, T, 3C), a token's query, key and value side by side, each of its ``num_heads`` heads in turn.
        num_heads: divides C.
        scale: of the scores; 1/sqrt(C / num_heads) when None.

    Returns:
        (B, T, C).
    """
    return ops.attention(qkv, num_heads, scale)[0]


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """:func:`torch.nn.functional.embedding`: input (...) of int64 or int32, weight (V, C) -> (..., C).

    Raises:
        ValueError: for ``padding_idx``, ``max_norm``, ``scale_grad_by_freq`` or ``sparse``, which no kernel serves
            (``norm_type`` only matters beside ``max_norm``).
    """
    refuse(
        "embedding", padding_idx=padding_idx, max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse
    )
    return ops.embedding(input, weight)


# ---- losses ----------------------------------------------------------------------------------------------------------


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """:func:`torch.nn.functional.cross_entropy` for class indices. The host never waits for the device.

    Args:
        input: logits (V), (N, V) or (N, V, d1, ...); a class dimension that is not the last one is moved there.
        target: int64 or int32, of input's shape without V.
        ignore_index: the target of rows that take no part.
        reduction: "mean" (over the rows that take part; nan when there is none), "sum" or "none".
        size_average: deprecated, see ``reduction``.
        reduce: deprecated, see ``reduction``.

    Raises:
        ValueError: for ``weight``, ``label_smoothing`` or soft (floating) targets, which no kernel serves; for shapes
            that do not fit; for an unknown ``reduction``.
    """
    refuse("cross_entropy", weight=weight, label_smoothing=label_smoothing or None)
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    _check_reduction("cross_entropy", reduction)
    if target.is_floating_point():
        raise ValueError(f"cross_entropy: soft targets ({target.dtype}) are not supported: target must hold classes")
    class_dim = 0 if input.dim() == 1 else 1
    if input.dim() == 0 or target.shape != input.shape[:class_dim] + input.shape[class_dim + 1 :]:
        raise ValueError(
            f"cross_entropy: target must have the input's shape {tuple(input.shape)} without its classes "
            f"(dimension {class_dim}), got {tuple(target.shape)}"
        )
    logits = input.movedim(class_dim, -1).reshape(-1, input.shape[class_dim])
    losses, _ = ops.fused_classifier(logits, target.reshape(-1), ignore_index=ignore_index)
    loss = losses.view(target.shape) if reduction == "none" else losses.sum()
    if reduction == "mean":
        loss = loss / _count(target, ignore_index)
    # torch's dtype: the input's, but inside autocast float32, which the losses have.
    return loss if torch.is_autocast_enabled(input.device.type) else loss.to(input.dtype)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """``cross_entropy(linear(x, weight), targets)`` without ever holding all the logits.

    The rows are worked on in chunks. For "mean" and "sum" the forward already computes the gradients of x and weight
    from each chunk's logits, and the backward only scales them. For "none", and for float16 (whose loss scale must be
    in before anything is rounded), the backward computes each chunk's logits once more. Inside autocast the matmuls
    are done in its dtype. Differentiable once.

    Args:
        x: (..., C), the last hidden layer.
        weight: (Vp, C), the output embedding.
        targets: (...), int64 or int32.
        vocab_size: V; the columns from there to Vp are padding and take no part. Vp when None.
        ignore_index: the target of rows that take no part.
        reduction: "mean" (over the rows that take part; nan when there is none), "sum" or "none".
        chunk_size: rows at a time; when None as many as give 2^28 logits.

    Returns:
        float32 (float64 for float64): 0-dim, or of targets' shape for "none".

    Raises:
        ValueError: shapes that do not fit, an unknown ``reduction``, a ``chunk_size`` below 1.
        RuntimeError: its gradients are to be differentiated once more.
    """
    _check_reduction("linear_cross_entropy", reduction)
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            "linear_cross_entropy: weight must have shape (Vp, C) with x (..., C), "
            f"got {tuple(weight.shape)} and {tuple(x.shape)}"
        )
    if targets.shape != x.shape[:-1]:
        raise ValueError(
            f"linear_cross_entropy: targets must have shape {tuple(x.shape[:-1])}, got {tuple(targets.shape)}"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"linear_cross_entropy: chunk_size must be at least 1, got {chunk_size}")
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)

    rows = x.reshape(-1, x.shape[-1])
    vocab_size = weight.shape[0] if vocab_size is None else vocab_size
    chunk = chunk_size or _default_chunk(rows.shape[0], weight.shape[0])
    flat = targets.reshape(-1)
    if reduction == "none" or x.dtype == torch.float16:
        losses = _LinearCrossEntropy.apply(rows, weight, flat, vocab_size, ignore_index, chunk)
        if reduction == "none":
            return losses.view(targets.shape)
        return losses.sum() if reduction == "sum" else losses.sum() / _count(flat, ignore_index)
    accumulate = torch.float64 if x.dtype == torch.float64 else torch.float32
    if reduction == "mean":
        scale = _count(flat, ignore_index).to(accumulate).reciprocal()
    else:
        scale = torch.ones((), dtype=accumulate, device=x.device)
    return _LinearCrossEntropySum.apply(rows, weight, flat, scale, vocab_size, ignore_index, chunk)


def _check_reduction(function: str, reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{function}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")


def _count(targets: Tensor, ignore_index: int) -> Tensor:
    """How many rows take part, on the targets' device."""
    return (targets != ignore_index).sum()


def _default_chunk(rows: int, columns: int) -> int:
    """Even chunks of at most 2^28 logits (512 MiB in bfloat16), in multiples of 128 rows as matmuls like them.

    Each chunk costs a pass over the float32 gradient of the weight, so few large ones are best: at GPT-2's
    vocabulary 5248 rows, where that pass is a twentieth of the chunk's three matmuls.
    """
    most = max(2**28 // max(columns, 1) // 128 * 128, 128)
    chunks = math.ceil(rows / most)
    return most if chunks < 2 else math.ceil(rows / chunks / 128) * 128


def _chunks(rows: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk))


def _losses(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, ignore_index: int, chunk: int) -> Tensor:
    """Each row's loss (N)."""
    parts = [
        ops.fused_classifier_(ops.linear(x[rows], weight), targets[rows], vocab_size, ignore_index)
        for rows in _chunks(len(x), chunk)
    ]
    return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32))


def _losses_and_gradients(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    dlosses: Tensor,
    vocab_size: int,
    ignore_index: int,
    chunk: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The losses (N), and dx and dweight where wanted, for the losses' gradients ``dlosses`` (N) or 0-dim.

    Each chunk's logits become their own gradient in place. With more than one chunk dweight is summed in float32.
    """
    if len(x) <= chunk:
        logits = ops.linear(x, weight)
        losses = ops.fused_classifier_(logits, targets, vocab_size, ignore_index, dlosses)
        dx, dweight, _ = ops.linear_backward(logits, x, weight, [*wanted, False])
        return losses, dx if wanted[0] else None, dweight if wanted[1] else None
    accumulate = torch.promote_types(x.dtype, torch.float32)
    losses = torch.empty(len(x), dtype=accumulate, device=x.device)
    dx = torch.empty_like(x) if wanted[0] else None
    dweight = torch.zeros(weight.shape, dtype=accumulate, device=x.device) if wanted[1] else None
    for rows in _chunks(len(x), chunk):
        logits = ops.linear(x[rows], weight)
        dlosses_part = dlosses[rows] if dlosses.dim() else dlosses
        losses[rows] = ops.fused_classifier_(logits, targets[rows], vocab_size, ignore_index, dlosses_part)
        dx_part, dweight_part, _ = ops.linear_backward(logits, x[rows], weight, [*wanted, False])
        if dx is not None:
            dx[rows] = dx_part
        if dweight is not None:
            dweight += dweight_part
        del logits  # before the next chunk's are made
    return losses, dx, dweight


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "linear_cross_entropy is differentiable once: for create_graph=True use cross_entropy(linear(x, weight), "
            "targets), which holds all the logits"
        )


class _LinearCrossEntropySum(torch.autograd.Function):
    """x (N, C), weight (Vp, C), targets (N), scale 0-dim -> scale * the sum of the losses."""

    @staticmethod
    def forward(ctx, x, weight, targets, scale, vocab_size, ignore_index, chunk):
        """Save the gradients; the incoming one can only scale them."""
        wanted = ctx.needs_input_grad[:2]
        if not any(wanted):
            return _losses(x, weight, targets, vocab_size, ignore_index, chunk).sum() * scale
        losses, dx, dweight = _losses_and_gradients(x, weight, targets, scale, vocab_size, ignore_index, chunk, wanted)
        ctx.save_for_backward(dx, dweight)
        ctx.weight_dtype = weight.dtype
        return losses.sum() * scale

    @staticmethod
    def backward(ctx, dloss):
        """Scale."""
        _refuse_double_backward()
        dx, dweight = ctx.saved_tensors
        return (
            None if dx is None else dx * dloss,
            None if dweight is None else (dweight * dloss).to(ctx.weight_dtype),
            *(None,) * 5,
        )


class _LinearCrossEntropy(torch.autograd.Function):
    """x (N, C), weight (Vp, C), targets (N) -> the losses (N)."""

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, ignore_index, chunk):
        """Save the inputs only."""
        ctx.save_for_backward(x, weight, targets)
        ctx.options = (vocab_size, ignore_index, chunk)
        return _losses(x, weight, targets, vocab_size, ignore_index, chunk)

    @staticmethod
    def backward(ctx, dlosses):
        """The logits once more, now with every row's gradient known."""
        _refuse_double_backward()
        x, weight, targets = ctx.saved_tensors
        _, dx, dweight = _losses_and_gradients(
            x, weight, targets, dlosses, *ctx.options, wanted=ctx.needs_input_grad[:2]
        )
        return dx, None if dweight is None else dweight.to(weight.dtype), *(None,) * 4
