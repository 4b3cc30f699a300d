"""The operators with ``torch.nn.functional``'s names and signatures, and the fusions torch has no name for.

Shapes: B batch, T tokens, C channels, V vocabulary, Vp padded vocabulary, N rows. Everything here runs on this
package's kernels. An option that they do not serve raises a ValueError that names it; no option is ignored, and none
is handed to another library's kernel.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gptkernels._linear_cross_entropy import check_reduction, linear_cross_entropy
from gptkernels.ops._register import ops

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
    """Raise a ValueError that names the first option that is set, that is, neither None nor False."""
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
    """:func:`torch.nn.functional.layer_norm`. Several normalised dimensions are flattened to one.

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
    out, _, _ = ops.layernorm.default(*_as_one(dims, input, weight, bias), eps)
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
    out, total, _, _ = ops.residual_layernorm.default(*_as_one(dims, x, residual, weight, bias), eps)
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
    return ops.gelu.default(input, approximate=approximate)


def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """:func:`torch.nn.functional.softmax`. Another dimension than the last is transposed to the end.

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
        return ops.softmax.default(input)
    return ops.softmax.default(input.transpose(dim, -1)).transpose(dim, -1)


def causal_softmax(scores: Tensor, scale: float = 1.0) -> Tensor:
    """Softmax of ``scale * scores`` over the keys that each query may see.

    Args:
        scores: (..., T, T), a row for each query.
        scale: what the scores are multiplied by.

    Returns:
        (..., T, T), exactly 0 above the diagonal.
    """
    return ops.causal_softmax.default(scores, scale)


# ---- matrices --------------------------------------------------------------------------------------------------------


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`torch.nn.functional.linear`: input (..., I), weight (O, I), bias (O) -> (..., O)."""
    return ops.linear.default(input, weight, bias)


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
    return ops.mlp.default(x, fc_weight, fc_bias, proj_weight, proj_bias)[0]


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
        input: logits (V), (N, V) or (N, V, d1, ...); a class dimension that is not the last is transposed to the end.
        target: int64 or int32, of input's shape without V.
        ignore_index: a row with this target is ignored: its loss and its gradient are 0.
        reduction: "mean" (over the rows that are not ignored; nan if all are), "sum" or "none".
        size_average: deprecated, see ``reduction``.
        reduce: deprecated, see ``reduction``.

    Raises:
        ValueError: for ``weight``, ``label_smoothing`` or soft (floating) targets, which no kernel serves; for shapes
            that do not fit; for an unknown ``reduction``.
    """
    refuse("cross_entropy", weight=weight, label_smoothing=label_smoothing or None)
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    check_reduction("cross_entropy", reduction)
    if target.is_floating_point():
        raise ValueError(f"cross_entropy: soft targets ({target.dtype}) are not supported: target must hold classes")
    class_dim = 0 if input.dim() == 1 else 1
    if input.dim() == 0 or target.shape != input.shape[:class_dim] + input.shape[class_dim + 1 :]:
        raise ValueError(
            f"cross_entropy: target must have the input's shape {tuple(input.shape)} without its classes "
            f"(dimension {class_dim}), got {tuple(target.shape)}"
        )
    logits = input.movedim(class_dim, -1).reshape(-1, input.shape[class_dim])
    losses, _ = ops.fused_classifier.default(logits, target.reshape(-1), ignore_index=ignore_index)
    loss = losses.view(target.shape) if reduction == "none" else losses.sum()
    if reduction == "mean":
        loss = loss / _count(target, ignore_index)
    # torch's dtype: the input's, but inside autocast float32, which the losses have.
    return loss if _in_autocast(input.device.type) else loss.to(input.dtype)


def _count(targets: Tensor, ignore_index: int) -> Tensor:
    """The number of rows that are not ignored, on the targets' device."""
    return (targets != ignore_index).sum()


def _in_autocast(device_type: str) -> bool:
    """False also for device types that autocast does not know, such as "meta"."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
