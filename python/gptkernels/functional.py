"""The operators with ``torch.nn.functional``'s names and signatures, and fused operators that torch does not have.

Shapes: B batch, T tokens, C channels, V vocabulary, Vp padded vocabulary, N rows. An option that the kernels do not
support raises a ValueError that names the option. Only :func:`scaled_dot_product_attention` and
:func:`causal_attention` fall back to torch's function, in the cases that their docstrings list.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptkernels._linear_cross_entropy import check_reduction, fp8_linear_cross_entropy, linear_cross_entropy
from gptkernels.rules import ops
from gptkernels.rules._autocast import autocast_dtype
from gptkernels.rules.attention import unpack

__all__ = [
    "causal_attention", "causal_softmax", "cross_entropy", "dropout", "embedding", "fp8_linear",
    "fp8_linear_cross_entropy", "fp8_mlp", "gelu", "layer_norm", "linear", "linear_cross_entropy", "mlp",
    "residual_layer_norm", "scaled_dot_product_attention", "softmax",
]  # fmt: skip
for _name in __all__:
    torch.fx.wrap(_name)  # torch.fx.symbolic_trace then records a call of the function, not its operators


def refuse(function: str, **options: Any) -> None:
    """Raise a ValueError that names the first option that is neither None nor False."""
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
    """Compute :func:`torch.nn.functional.layer_norm`. Several normalised dimensions are flattened to one.

    Args:
        input: ``(..., *normalized_shape)``.
        normalized_shape: the last dimensions of ``input``.
        weight, bias: of shape normalized_shape, or None.
        eps: added to the variance.

    Raises:
        ValueError: if ``normalized_shape`` is empty or is not the end of ``input``'s shape, or ``weight`` or ``bias``
            has another shape.
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
    x_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream and normalise the sum, in one pass over memory.

    Args:
        x, residual: ``(..., *normalized_shape)``.
        normalized_shape: the last dimensions of ``x``.
        weight, bias: of shape normalized_shape, or None.
        eps: added to the variance.
        x_bias: of shape normalized_shape, or None: the bias of the linear layer that computes ``x``, if that layer has
            not added it. Neither adding the bias nor computing its gradient takes a further pass over memory.
        dropout_p: the probability with which an element of x + x_bias is dropped, as in :func:`dropout`.
        training: False disables dropout.

    Returns:
        ``layer_norm(sum, ...)`` and ``sum = dropout(x + x_bias, dropout_p, training) + residual``.

    Raises:
        ValueError: if x and residual differ in shape, ``normalized_shape`` is not the end of this shape, a parameter
            has another shape than ``normalized_shape``, or ``dropout_p`` is not from 0 to 1.
    """
    _check_dropout("residual_layer_norm", "dropout_p", dropout_p)
    if x.shape != residual.shape:
        raise ValueError(
            f"residual_layer_norm: residual must have the shape of x, {tuple(x.shape)}, got {tuple(residual.shape)}"
        )
    dims = _check_norm("residual_layer_norm", x, normalized_shape, weight, bias, x_bias)
    *norm, x_bias = _as_one(dims, x, residual, weight, bias, x_bias)
    dropout = (dropout_p, *_dropout_numbers(dropout_p, x)) if training and dropout_p > 0 else ()
    out, total, _, _ = ops.residual_layernorm.default(*norm, eps, x_bias, *dropout)
    return (out, total) if dims == 1 else (out.view(x.shape), total.view(x.shape))


def _check_norm(
    function: str,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    x_bias: Tensor | None = None,
) -> int:
    shape = tuple(normalized_shape)
    if not shape or x.shape[-len(shape) :] != shape:
        raise ValueError(
            f"{function}: normalized_shape must be the last dimensions of the input, which has shape "
            f"{tuple(x.shape)}, got {shape}"
        )
    for name, parameter in (("weight", weight), ("bias", bias), ("x_bias", x_bias)):
        if parameter is not None and parameter.shape != shape:
            raise ValueError(f"{function}: {name} must have shape {shape}, got {tuple(parameter.shape)}")
    return len(shape)


def _as_one(dims: int, *tensors: Tensor | None) -> Iterator[Tensor | None]:
    return (t if t is None or dims == 1 else t.flatten(-dims) for t in tensors)


# ---- activations and softmax -----------------------------------------------------------------------------------------


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """Compute :func:`torch.nn.functional.gelu`: exact ("none"), or approximated by tanh ("tanh") as in GPT-2.

    Any other value of ``approximate`` raises a ValueError.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate must be 'none' or 'tanh', got {approximate!r}")
    return ops.gelu.default(input, approximate=approximate)


def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """Compute :func:`torch.nn.functional.softmax`. If ``dim`` is not the last dimension, the input is transposed.

    If ``dim`` is None, a warning is given, and torch's choice is used: 0 if ``input`` has 0, 1 or 3 dimensions,
    otherwise 1. If ``dtype`` is given, ``input`` is first converted to it. A ``dim`` out of range raises an IndexError.
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
    """Compute the softmax of ``scale * scores``, (..., T, T), over the keys that each query may see.

    The probabilities (..., T, T) are exactly 0 above the diagonal.
    """
    return ops.causal_softmax.default(scores, scale)


# ---- matrices --------------------------------------------------------------------------------------------------------


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`torch.nn.functional.linear`: input (..., I), weight (O, I), bias (O) -> (..., O)."""
    return ops.linear.default(input, weight, bias)


def mlp(
    x: Tensor,
    fc_weight: Tensor,
    fc_bias: Tensor | None,
    proj_weight: Tensor,
    proj_bias: Tensor | None,
    recompute_gelu: bool = False,
) -> Tensor:
    """Compute GPT-2's feed-forward layer, ``linear(gelu(linear(x)))`` with the tanh GELU: (..., C) -> (..., C).

    Args:
        x: (..., C).
        fc_weight, fc_bias: (H, C), H the hidden width; (H), or None.
        proj_weight, proj_bias: (C, H); (C), or None.
        recompute_gelu: save only the GELU's input for the backward, which computes the GELU's output (..., H) again.
    """
    return ops.mlp.default(x, fc_weight, fc_bias, proj_weight, proj_bias, not recompute_gelu)[0]


def fp8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    history: Tensor | None = None,
    dout_history: Tensor | None = None,
) -> Tensor:
    """Compute :func:`linear` with float8 matmuls: input and weight in e4m3, the output's gradient in e5m2.

    An amax history contains the amax of a tensor in each of the last 16 calls, from which the scale is computed before
    the tensor is read. Without a history, at the first call, and for the weight, the scale is computed from the tensor
    itself, which CUDA then reads twice.

    Args:
        input: (..., I), float32, bfloat16 or float16; I is a multiple of 16.
        weight: (O, I), in input's dtype; O is a multiple of 16.
        bias: (O), or None.
        history: the input's amax history, (18) int32, initially zeros, which the call updates; or None.
        dout_history: the amax history of the output's gradient, (18) int32, which the backward updates; or None.

    Returns:
        The output (..., O), in input's dtype.

    Raises:
        RuntimeError: if shapes do not match, a dtype is not supported, or I or O is not a multiple of 16.
    """
    return ops.fp8_linear.default(input, weight, bias, history, dout_history, (False, False))[0]


def fp8_mlp(
    x: Tensor,
    fc_weight: Tensor,
    fc_bias: Tensor | None,
    proj_weight: Tensor,
    proj_bias: Tensor | None,
    history: Tensor | None = None,
    hidden_history: Tensor | None = None,
    dhidden_history: Tensor | None = None,
    dout_history: Tensor | None = None,
) -> Tensor:
    """Compute :func:`mlp` with float8 matmuls, as in :func:`fp8_linear`; one kernel computes and quantises the GELU.

    Args:
        x: (..., C), float32, bfloat16 or float16; C is a multiple of 16.
        fc_weight, fc_bias: (H, C), H the hidden width, a multiple of 16; (H), or None.
        proj_weight, proj_bias: (C, H); (C), or None.
        history, hidden_history: the amax histories, (18) int32, of x and of the GELU's output, which the call updates;
            or None.
        dhidden_history, dout_history: the amax histories of the gradients of the GELU's input and of the output, which
            the backward updates; or None.

    Returns:
        The output (..., C), in x's dtype.

    Raises:
        RuntimeError: if shapes do not match, a dtype is not supported, or C or H is not a multiple of 16.
    """
    histories = history, hidden_history, dhidden_history, dout_history
    return ops.fp8_mlp.default(x, fc_weight, fc_bias, proj_weight, proj_bias, *histories, (False,) * 4)[0]


# ---- attention -------------------------------------------------------------------------------------------------------

MAX_HEAD_SIZE = 256
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def causal_attention(qkv: Tensor, num_heads: int, scale: float | None = None, dropout_p: float = 0.0) -> Tensor:
    """Compute causal self-attention of packed queries, keys and values, in memory linear in T.

    If the head size is above 256, torch's ``scaled_dot_product_attention`` computes the result.

    Args:
        qkv: (B, T, 3C): for each token the query, the key and the value, each with ``num_heads`` heads.
        num_heads: a divisor of C.
        scale: the factor of the scores; None is 1/sqrt(C / num_heads).
        dropout_p: the probability with which an attention weight is dropped; as in torch, pass 0 in evaluation.

    Returns:
        The output (B, T, C).

    Raises:
        ValueError: if ``dropout_p`` is not from 0 to 1.
    """
    _check_dropout("causal_attention", "dropout_p", dropout_p)
    if num_heads > 0 and qkv.dim() == 3 and qkv.shape[2] > 3 * MAX_HEAD_SIZE * num_heads and qkv.is_floating_point():
        query, key, value = unpack(qkv, num_heads)
        out = F.scaled_dot_product_attention(query, key, value, None, dropout_p, True, scale=scale)
        return out.transpose(1, 2).flatten(2)
    return ops.attention(qkv, num_heads, scale, dropout_p, *_dropout_numbers(dropout_p, qkv))[0]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    query_offset: int = 0,
    key_begin: Tensor | None = None,
    key_end: Tensor | None = None,
    return_logsumexp: bool = False,
) -> Any:
    """Compute :func:`torch.nn.functional.scaled_dot_product_attention`, in memory linear in T.

    A query that sees no key has an output of 0 and a logsumexp of -inf, and makes no gradient NaN. If ``attn_mask`` and
    ``is_causal`` are given together, both apply.

    In these cases torch's function is called:

    - ``attn_mask`` requires grad, or its dtype is neither bool nor the query's;
    - the value's head size is not the key's, or a head size is above 256;
    - batches or heads of query, key and value differ (except as allowed by ``enable_gqa``) and would be broadcast;
    - there are fewer than 3 dimensions;
    - a tensor is nested or sparse, or on another device than CPU, CUDA and meta;
    - a dtype is not float64, float32, bfloat16 or float16, or the dtypes differ.

    Args:
        query: (..., NH, Tq, HS).
        key, value: (..., KH, Tk, HS). KH is NH, or with ``enable_gqa`` a divisor of NH. A tensor whose last dimension
            is not contiguous is copied.
        attn_mask: broadcastable to (..., NH, Tq, Tk): bool, True if a key is seen, or added to the scaled scores.
        dropout_p: the probability with which an attention weight is dropped; pass 0 in evaluation.
        is_causal: whether query i sees only the keys up to i + ``query_offset``.
        scale: the factor of the scores; None is 1/sqrt(HS).
        enable_gqa: allow a KH below NH; NH / KH neighbouring query heads then share a key head.
        query_offset: the position of the first query among the keys, for ``is_causal``.
        key_begin, key_end: (B), integers, for padding: sequence b sees only keys from key_begin[b] to key_end[b] - 1. B
            is the product of the dimensions before the heads.
        return_logsumexp: also return the logsumexp.

    Returns:
        The output (..., NH, Tq, HS). With ``return_logsumexp``, also the logsumexp of the scaled and masked scores,
        (..., NH, Tq), float32 (float64 for float64), which is differentiable.

    Raises:
        ValueError: if ``dropout_p`` is not from 0 to 1, or if ``query_offset``, ``key_begin``, ``key_end`` or
            ``return_logsumexp``, which torch's function does not have, is given in one of the cases above.
    """
    _check_dropout("scaled_dot_product_attention", "dropout_p", dropout_p)
    if (reason := _not_ours(query, key, value, attn_mask, enable_gqa)) is not None:
        own = {"query_offset": query_offset, "key_begin": key_begin, "key_end": key_end}
        for name, given in {**own, "return_logsumexp": return_logsumexp}.items():
            if given is not None and given is not False and not (isinstance(given, int) and given == 0):
                raise ValueError(f"scaled_dot_product_attention: {name} is not supported here: {reason}")
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    leading = query.shape[:-3]
    if attn_mask is not None and attn_mask.dim() > 3 and query.dim() != 4:
        attn_mask = attn_mask.expand(*leading, *attn_mask.shape[-3:]).reshape(-1, *attn_mask.shape[-3:])
    bounds = (t if t is None else t.reshape(-1).to(torch.int32) for t in (key_begin, key_end))
    out, logsumexp = ops.scaled_dot_product_attention(
        *(t if t.dim() == 4 else t.reshape(-1, *t.shape[-3:]) for t in (query, key, value)),
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        query_offset,
        *bounds,
        *_dropout_numbers(dropout_p, query),
    )
    if query.dim() != 4:
        out = out[0] if query.dim() == 3 else out.unflatten(0, leading)
        logsumexp = logsumexp[0] if query.dim() == 3 else logsumexp.unflatten(0, leading)
    return (out, logsumexp) if return_logsumexp else out


def _not_ours(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool) -> str | None:
    tensors = (query, key, value)
    device = query.device.type
    dtype = autocast_dtype(device)

    def seen_as(t: Tensor) -> torch.dtype:
        return t.dtype if dtype is None or not t.is_floating_point() or t.dtype == torch.float64 else dtype

    if any(t.is_nested or t.layout != torch.strided for t in tensors) or device not in ("cpu", "cuda", "meta"):
        return "the tensors are nested, sparse, or on a device without kernels"
    if query.dim() < 3 or key.dim() != query.dim() or key.shape != value.shape or key.shape[-1] != query.shape[-1]:
        return "query, key and value have other numbers of dimensions than 3 or more, or other head sizes or lengths"
    if not 0 < query.shape[-1] <= MAX_HEAD_SIZE:
        return f"the head size {query.shape[-1]} is not from 1 to {MAX_HEAD_SIZE}"
    heads, key_heads = query.shape[-3], key.shape[-3]
    if query.shape[:-3] != key.shape[:-3] or (
        heads != key_heads and not (enable_gqa and key_heads and heads % key_heads == 0)
    ):
        return "batches or heads differ"
    if seen_as(query) not in DTYPES or any(seen_as(t) != seen_as(query) for t in tensors):
        return "the dtypes differ, or are not floating ones"
    if attn_mask is not None:
        if attn_mask.requires_grad and torch.is_grad_enabled():
            return "attn_mask requires grad"
        if attn_mask.dtype != torch.bool and seen_as(attn_mask) != seen_as(query):
            return "attn_mask is neither bool nor of the query's dtype"
    return None


# ---- dropout ---------------------------------------------------------------------------------------------------------


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Compute :func:`torch.nn.functional.dropout`. No mask is stored; the backward generates it again.

    With the same seed of torch's generator, torch drops other elements.

    Args:
        input: any shape.
        p: the probability of dropping an element. The kernel rounds it to a multiple of 2^-16, and divides the elements
            that it keeps by 1 - p, without this rounding.
        training: False returns ``input``.
        inplace: not supported.

    Raises:
        ValueError: if ``p`` is not from 0 to 1, or ``inplace`` is set.
    """
    _check_dropout("dropout", "p", p)
    refuse("dropout", inplace=inplace)
    if not training or p == 0:
        return input
    return ops.dropout.default(input, p, *_dropout_numbers(p, input))


def _check_dropout(function: str, name: str, p: float) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"{function}: {name} must be from 0 to 1, got {p}")


def _dropout_numbers(dropout_p: float, like: Tensor) -> tuple[Tensor | None, ...]:
    return _draw_numbers(2, like) if dropout_p else (None, None)


mask_key = 0
"""An int64 that changes the masks of dropout. Processes that divide the batch have the same random numbers, so that
resumed runs need only one generator's state, and different keys."""


def _draw_numbers(count: int, like: Tensor) -> tuple[Tensor, ...]:
    """Draw 0-dim int64 numbers from torch's generator for the device. Each replay of a CUDA graph draws new numbers."""
    numbers = torch.randint(2**63 - 1, (count,), device=like.device)
    return (numbers ^ mask_key if mask_key else numbers).unbind()


# ---- embedding -------------------------------------------------------------------------------------------------------


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    vocab_size: int = -1,
) -> Tensor:
    """Compute :func:`torch.nn.functional.embedding`: input (...), int64 or int32, weight (Vp, C) -> (..., C).

    Args:
        input: the tokens.
        weight: the table.
        vocab_size: V. A token from V on is an error, because its row is padding and must not be trained. -1 is Vp.
        padding_idx, max_norm, scale_grad_by_freq, sparse: not supported.
        norm_type: has no effect.

    Raises:
        ValueError: if ``padding_idx``, ``max_norm``, ``scale_grad_by_freq`` or ``sparse`` is set.
        RuntimeError: if vocab_size is not in 1..Vp, or a token is not in 0..V-1. On CUDA, such a token fails a
            device-side assertion instead.
    """
    refuse(
        "embedding", padding_idx=padding_idx, max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse
    )
    return ops.embedding.default(input, weight, vocab_size)


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
    """Compute :func:`torch.nn.functional.cross_entropy` for class indices, without synchronising with the device.

    Args:
        input: logits (V), (N, V) or (N, V, d1, ...); if the class dimension is not the last, they are transposed.
        target: int64 or int32, of input's shape without V.
        ignore_index: a row with this target has a loss and a gradient of 0.
        reduction: "mean" (over the rows that are not ignored; nan if all rows are ignored), "sum" or "none".
        size_average, reduce: deprecated, see ``reduction``.

    Raises:
        ValueError: if ``weight`` or ``label_smoothing`` is set, targets are class probabilities (floating), shapes do
            not match, or ``reduction`` is unknown.
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
        loss = loss / (target != ignore_index).sum()
    # As in torch, the loss has the input's dtype, or float32 under autocast.
    return loss if autocast_dtype(input.device.type) else loss.to(input.dtype)
