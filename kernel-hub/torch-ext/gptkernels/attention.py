"""flash-attention's functions, for any number of query heads per key head, with gradients."""

from typing import Any, Optional

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops


@torch.library.register_fake(add_op_namespace_prefix("scaled_dot_product_attention"))
def _fake(query: Tensor, key: Tensor, value: Tensor, *options: Any, **named: Any) -> tuple:
    b, heads, length, size = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty((b, length, heads, size)).transpose(1, 2)
    return out, query.new_empty((b, heads, length), dtype=wide)


@torch.library.register_fake(add_op_namespace_prefix("scaled_dot_product_attention_backward"))
def _fake_backward(dout: Tensor, dlogsumexp: Optional[Tensor], *tensors: Any, **named: Any) -> tuple:
    return tuple(_fake_gradient(t) for t in tensors[:3])


def _fake_gradient(t: Tensor) -> Tensor:
    """The gradient is dense, with the first three dimensions in the memory order of ``t``."""
    order = sorted(range(3), key=lambda i: -t.stride(i))
    made = t.new_empty([t.shape[i] for i in order] + [t.shape[3]])
    return made.permute([order.index(i) for i in range(3)] + [3])


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    query, key, value, mask, p, causal, scale, query_offset, begin, end, seed, offset, *_ = inputs
    ctx.save_for_backward(query, key, value, *output, mask, begin, end, seed, offset)
    ctx.options = p, causal, scale, query_offset
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Optional[Tensor], dlogsumexp: Optional[Tensor]) -> tuple:
    query, key, value, out, logsumexp, mask, begin, end, seed, offset = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    tensors = dout, dlogsumexp, query, key, value, out, logsumexp
    gradients = ops.scaled_dot_product_attention_backward(*tensors, mask, *ctx.options, begin, end, seed, offset)
    return *gradients, *[None] * 12


torch.library.register_autograd(
    add_op_namespace_prefix("scaled_dot_product_attention"), _backward, setup_context=_setup_context
)


def _check_defaults(window_size: tuple, softcap: float, alibi_slopes: Optional[Tensor], return_attn_probs: bool,
                    block_table: Optional[Tensor] = None) -> None:  # fmt: skip
    """Raise a ValueError for an option that is not its default, because only the defaults are supported."""
    for name, given, default in (
        ("window_size", tuple(window_size), (-1, -1)), ("softcap", softcap, 0.0), ("alibi_slopes", alibi_slopes, None),
        ("return_attn_probs", return_attn_probs, False), ("block_table", block_table, None),
    ):  # fmt: skip
        if given != default:
            raise ValueError(f"{name} is {given}: only {default} is supported")


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], causal: bool, end: Optional[Tensor],
               dropout_p: float, scale: Optional[float]) -> Tensor:  # fmt: skip
    """Return the attention (B, Tq, NH, HS) of q (B, Tq, NH, HS), k and v (B, Tk, KH, HS)."""
    seed = offset = None
    if dropout_p:
        seed = torch.empty((), dtype=torch.int64, device=q.device).random_()
        offset = torch.zeros_like(seed)
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    query_offset = k.shape[1] - q.shape[1]
    return ops.scaled_dot_product_attention(
        *heads_first, mask, dropout_p, causal, scale, query_offset, None, end, seed, offset
    )[0].transpose(1, 2)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """Compute attention; the gradients have the same bits in each call, also without ``deterministic``.

    Args:
        q: (B, Tq, NH, HS), HS at most 256.
        k, v: (B, Tk, KH, HS); KH divides NH, and NH / KH neighbouring query heads share a key head.
        dropout_p: the probability with which an attention weight is dropped.
        softmax_scale: the factor of the scores; None is 1/sqrt(HS).
        causal: the last query sees all keys, the one before it all but one, and so on.
        window_size, softcap, alibi_slopes, return_attn_probs: only the defaults are supported.

    Returns:
        (B, Tq, NH, HS). A query that sees no key has an output of 0.

    Raises:
        ValueError: for an argument that is not supported.
    """
    _check_defaults(window_size, softcap, alibi_slopes, return_attn_probs)
    return _attention(q, k, v, None, causal, None, dropout_p, softmax_scale)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Optional[Tensor] = None,
) -> Tensor:
    """Compute the attention of sequences that are concatenated. They are copied to a tensor with padding.

    With ``causal``, the lengths of queries and keys are only known to be equal if ``cu_seqlens_k`` is the same object
    as ``cu_seqlens_q``; otherwise a mask (B, 1, max_seqlen_q, max_seqlen_k) is made.

    Args:
        q: (the sum of the lengths, NH, HS).
        k, v: (the sum of the lengths, KH, HS).
        cu_seqlens_q, cu_seqlens_k: (B + 1), integers: 0, and the sums of the first 1, 2, ..., B lengths.
        max_seqlen_q, max_seqlen_k: at least the longest length.
        dropout_p, softmax_scale, causal: as in :func:`flash_attn_func`, for each sequence.
        window_size, softcap, alibi_slopes, return_attn_probs, block_table: only the defaults are supported.

    Returns:
        (the sum of the lengths, NH, HS).

    Raises:
        ValueError: for an argument that is not supported.
    """
    _check_defaults(window_size, softcap, alibi_slopes, return_attn_probs, block_table)
    lengths_q, lengths_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    mask = None
    if causal and cu_seqlens_k is not cu_seqlens_q:
        last = torch.arange(max_seqlen_q, device=q.device) + (lengths_k - lengths_q)[:, None]
        mask = (torch.arange(max_seqlen_k, device=q.device) <= last[..., None])[:, None]
    padded = _pad(q, cu_seqlens_q, max_seqlen_q), *(_pad(t, cu_seqlens_k, max_seqlen_k) for t in (k, v))
    out = _attention(*padded, mask, causal and mask is None, lengths_k.int(), dropout_p, softmax_scale)
    rows = torch.arange(len(q), device=q.device)
    sequence = torch.searchsorted(cu_seqlens_q, rows.to(cu_seqlens_q.dtype), right=True) - 1
    return out[sequence, rows - cu_seqlens_q[sequence]]


def _pad(t: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Return (B, longest, heads, HS). The rows after a sequence's end are arbitrary rows of ``t``."""
    rows = cu_seqlens[:-1, None] + torch.arange(longest, device=t.device)
    return t[rows.clamp(max=len(t) - 1)]
