"""Attention that stores no (T, T) matrix: dropout(softmax(scale * q k^T + mask)) v (Dao, FlashAttention-2, 2023).

``attention`` is causal and takes packed qkv, ``scaled_dot_product_attention`` takes query, key and value.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gptkernels.rules import _register as register
from gptkernels.rules._jvp import by_formula
from gptkernels.rules._register import accumulate_dtype, below_autograd, like, ops, save, saved
from gptkernels.rules._vmap import batches, loop


class Options(NamedTuple):
    """The arguments of ``scaled_dot_product_attention`` after query, key and value, in the op's order."""

    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    query_offset: int = 0
    key_begin: Tensor | None = None
    key_end: Tensor | None = None
    seed: Tensor | None = None
    offset: Tensor | None = None
    first_head: int = 0
    total_heads: int | None = None
    first_query: int = 0


def _fake_packed(qkv, num_heads, *args, **kwargs):
    b, t, c3 = qkv.shape
    return qkv.new_empty((b, t, c3 // 3)), qkv.new_empty((b, num_heads, t), dtype=accumulate_dtype(qkv.dtype))


def _fake(query, key, value, *args, **kwargs):
    b, heads, queries, size = query.shape
    out = query.new_empty((b, queries, heads, size)).transpose(1, 2)
    return out, query.new_empty((b, heads, queries), dtype=accumulate_dtype(query.dtype))


def _fake_gradient(t: Tensor) -> Tensor:
    """The gradient is dense, with the first three dimensions in the memory order of ``t``."""
    strides = t.stride()
    order = sorted(range(3), key=lambda i: -strides[i])
    made = t.new_empty([t.shape[i] for i in order] + [t.shape[3]])
    return made.permute([order.index(i) for i in range(3)] + [3])


def _fake_backward(dout, dlogsumexp, query, key, value, *args, **kwargs):
    return _fake_gradient(query), _fake_gradient(key), _fake_gradient(value)


def visible_keys(query: Tensor, key: Tensor, options: Options) -> Tensor:
    rows = torch.arange(query.shape[2], device=query.device)[:, None]
    columns = torch.arange(key.shape[2], device=query.device)
    seen = columns <= rows + options.query_offset if options.is_causal else (columns >= 0).expand(len(rows), -1)
    if options.key_begin is not None:
        seen = seen & (columns >= options.key_begin[:, None, None, None])
    if options.key_end is not None:
        seen = seen & (columns < options.key_end[:, None, None, None])
    if options.attn_mask is not None:
        mask = options.attn_mask
        seen = seen & (mask if mask.dtype == torch.bool else mask != -math.inf)
    return seen


def _shared(t: Tensor, heads: int) -> Tensor:
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], 1)


def _scores(query: Tensor, key: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """The scores of queries that see no key are 0."""
    scale = 1 / math.sqrt(query.shape[3]) if options.scale is None else options.scale
    scores = query @ _shared(key, query.shape[1]).mT * scale
    seen = visible_keys(query, key, options)
    if options.attn_mask is not None and options.attn_mask.dtype != torch.bool:
        scores = scores + options.attn_mask.masked_fill(options.attn_mask == -math.inf, 0)
    any_seen = seen.any(-1, keepdim=True)
    return scores.masked_fill(~seen & any_seen, -math.inf).masked_fill(~any_seen, 0), any_seen


def _dropout(p: Tensor, options: Options) -> Tensor | None:
    if options.dropout_p == 0:
        return None
    kept = ops.attention_dropout_mask(*p.shape, options.dropout_p, *options[-5:])
    return kept.to(p.dtype) / ((1 - options.dropout_p) or 1)


def forward_formula(query, key, value, *args) -> tuple[Tensor, Tensor]:
    options = Options(*args)
    scores, any_seen = _scores(query, key, options)
    p = scores.softmax(-1) * any_seen
    if (dropout := _dropout(p, options)) is not None:
        p = p * dropout
    logsumexp = scores.logsumexp(-1).masked_fill(~any_seen[..., 0], -math.inf)
    return p @ _shared(value, query.shape[1]), logsumexp


def backward_formula(dout, dlogsumexp, query, key, value, out, logsumexp, *args) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the probabilities again, so that second derivatives include how they depend on query and key."""
    options = Options(*args)
    heads, key_heads = query.shape[1], key.shape[1]
    scores, any_seen = _scores(query, key, options)
    p = scores.softmax(-1) * any_seen
    dp = dout @ _shared(value, heads).mT
    dropped = p
    if (dropout := _dropout(p, options)) is not None:
        dp, dropped = dp * dropout, p * dropout
    ds = p * (dp - (dp * p).sum(-1, keepdim=True))
    if dlogsumexp is not None:
        ds = ds + p * dlogsumexp.to(p.dtype)[..., None]
    ds = ds * (1 / math.sqrt(query.shape[3]) if options.scale is None else options.scale)
    dkey, dvalue = ds.mT @ query, dropped.mT @ dout
    if key_heads != heads:
        dkey, dvalue = (t.unflatten(1, (key_heads, heads // key_heads)).sum(2) for t in (dkey, dvalue))
    return ds @ _shared(key, heads), dkey, dvalue


class ScaledDotProductAttention(torch.autograd.Function):
    """query (B, NH, Tq, HS), key and value (B, KH, Tk, HS) -> out (B, NH, Tq, HS), logsumexp (B, NH, Tq)."""

    @staticmethod
    def forward(ctx, query, key, value, *options):
        if ctx.needs_input_grad[3]:
            raise RuntimeError(
                "gptkernels::scaled_dot_product_attention: attn_mask requires grad, but has no derivative here"
            )
        out, logsumexp = below_autograd(ops.scaled_dot_product_attention, query, key, value, *options)
        save(ctx, query, key, value, out, logsumexp, *options)
        ctx.set_materialize_grads(False)
        return out, logsumexp

    @staticmethod
    def backward(ctx, dout, dlogsumexp):
        if dout is None and dlogsumexp is None:
            return (None,) * 15
        query, key, value, out, logsumexp, *options = saved(ctx)
        if dout is None:
            dout = torch.zeros_like(out)
        gradients = ops.scaled_dot_product_attention_backward(
            dout, dlogsumexp, query, key, value, out, logsumexp, *options
        )
        wanted = (g if need else None for g, need in zip(gradients, ctx.needs_input_grad, strict=False))
        return *wanted, *(None,) * 12


def _folded(*positions: int):
    """Fold the mapped dimension into the batch, or, with a mask or key bounds, call the op for each index."""

    def rule(op, size, in_dims, args):
        options = Options(*args[positions[-1] + 1 :])
        plain = options.attn_mask is None and options.key_begin is None and options.key_end is None
        return (batches(*positions) if plain else loop)(op, size, in_dims, args)

    return rule


def sdpa_flops(query_shape, key_shape, value_shape, *args, **kwargs) -> int:
    b, heads, queries, size = query_shape
    return 2 * 2 * b * heads * queries * key_shape[2] * size


def sdpa_backward_flops(dout_shape, dlogsumexp_shape, query_shape, key_shape, value_shape, *args, **kwargs) -> int:
    return 5 * sdpa_flops(query_shape, key_shape, value_shape) // 2


def unpack(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """Return query, key and value (B, NH, T, HS) as views of qkv (B, T, 3C)."""
    return qkv.unflatten(2, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind()


def packed_options(scale, dropout_p=0.0, *rest):
    return Options(None, dropout_p, True, scale, 0, None, None, *rest)


def packed_formula(qkv, num_heads, *options):
    out, _ = forward_formula(*unpack(qkv, num_heads), *packed_options(*options))
    return out.transpose(1, 2).flatten(2), None


def packed_backward_formula(dout, qkv, out, logsumexp, num_heads, *options):
    dout = dout.unflatten(2, (num_heads, -1)).transpose(1, 2)
    gradients = backward_formula(dout, None, *unpack(qkv, num_heads), out, logsumexp, *packed_options(*options))
    return torch.stack(gradients).permute(1, 3, 0, 2, 4).flatten(2)


class Attention(torch.autograd.Function):
    """qkv (B, T, 3C) -> out (B, T, C), logsumexp (B, NH, T)."""

    @staticmethod
    def forward(ctx, qkv, num_heads, scale, dropout_p, seed, offset, *heads):
        out, logsumexp = below_autograd(ops.attention, qkv, num_heads, scale, dropout_p, seed, offset, *heads)
        ctx.save_for_backward(qkv, out, logsumexp, seed, offset)
        ctx.options, ctx.heads = (num_heads, scale, dropout_p), heads
        ctx.mark_non_differentiable(logsumexp)
        ctx.set_materialize_grads(False)
        return out, logsumexp

    @staticmethod
    def backward(ctx, dout, _dlogsumexp):
        if dout is None:
            return (None,) * 8
        qkv, out, logsumexp, seed, offset = ctx.saved_tensors
        dqkv = ops.attention_backward(dout, qkv, out, logsumexp, *ctx.options, seed, offset, *ctx.heads)
        return dqkv, *(None,) * 7


def attention_flops(qkv_shape, *args, **kwargs) -> int:
    b, t, c3 = qkv_shape
    return 2 * 2 * b * t * t * (c3 // 3)


def attention_backward_flops(dout_shape, qkv_shape, *args, **kwargs) -> int:
    return 5 * attention_flops(qkv_shape) // 2


register.fake("attention", _fake_packed)
register.fake("attention_backward", like(1))
register.fake("scaled_dot_product_attention", _fake)
register.fake("scaled_dot_product_attention_backward", _fake_backward)
register.fake("attention_dropout_mask", lambda *args, **kwargs: args[5].new_empty(args[:4], dtype=torch.bool))
register.autograd("attention", Attention, jvp=by_formula(packed_formula))
register.autograd_by_formula("attention_backward", packed_backward_formula, inputs=2)
register.autograd("scaled_dot_product_attention", ScaledDotProductAttention, jvp=by_formula(forward_formula))
register.autograd_by_formula("scaled_dot_product_attention_backward", backward_formula, inputs=5)
register.vmap("attention", batches(0))
register.vmap("attention_backward", batches(0, 1, 2, 3))
register.vmap("scaled_dot_product_attention", _folded(0, 1, 2))
register.vmap("scaled_dot_product_attention_backward", _folded(0, 1, 2, 3, 4, 5, 6))
for _name in ("attention", "scaled_dot_product_attention"):
    register.autocast(_name, cuda="lower", cpu="lower")
register.flops("attention", attention_flops)
register.flops("attention_backward", attention_backward_flops)
register.flops("scaled_dot_product_attention", sdpa_flops)
register.flops("scaled_dot_product_attention_backward", sdpa_backward_flops)
