"""Attention that keeps no (T, T) matrix: dropout(softmax(scale * q k^T + mask)) v (Dao, FlashAttention-2, 2023).

``attention`` is causal and takes packed qkv, ``scaled_dot_product_attention`` takes query, key and value.
"""

import math
from typing import Any, NamedTuple

import torch
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
    vmap,
)
from gptkernels.rules._vmap import batches, loop


class Options(NamedTuple):
    """The arguments that follow query, key and value, in the op's order."""

    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    query_offset: int = 0
    key_begin: Tensor | None = None
    key_end: Tensor | None = None
    seed: Tensor | None = None
    offset: Tensor | None = None


TENSORS = ("attn_mask", "key_begin", "key_end", "seed", "offset")


def _save(ctx, differentiable: tuple[Tensor | None, ...], options: Options) -> None:
    ctx.save_for_backward(*differentiable, *(getattr(options, name) for name in TENSORS))
    none: dict[str, Any] = dict.fromkeys(TENSORS)
    ctx.options = options._replace(**none)


def _saved(ctx, count: int) -> tuple[tuple[Tensor | None, ...], Options]:
    """The first ``count`` tensors that were saved, and the options."""
    tensors = ctx.saved_tensors
    return tensors[:count], ctx.options._replace(**dict(zip(TENSORS, tensors[count:], strict=True)))


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _fake_packed(qkv, num_heads, scale=None, dropout_p=0.0, seed=None, offset=None):
    b, t, c3 = qkv.shape
    return qkv.new_empty((b, t, c3 // 3)), qkv.new_empty((b, num_heads, t), dtype=accumulate_dtype(qkv.dtype))


def _fake_packed_backward(dout, qkv, out, logsumexp, num_heads, scale=None, dropout_p=0.0, seed=None, offset=None):
    return qkv.new_empty(qkv.shape)


def _fake(query, key, value, *args, **kwargs):
    b, heads, queries, size = query.shape
    out = query.new_empty((b, queries, heads, size)).transpose(1, 2)
    return out, query.new_empty((b, heads, queries), dtype=accumulate_dtype(query.dtype))


def _fake_gradient(t: Tensor) -> Tensor:
    """Dense, the first three dimensions in the order that those of ``t`` have in memory."""
    strides = t.stride()
    order = sorted(range(3), key=lambda i: -strides[i])
    made = t.new_empty([t.shape[i] for i in order] + [t.shape[3]])
    return made.permute([order.index(i) for i in range(3)] + [3])


def _fake_backward(dout, dlogsumexp, query, key, value, *args, **kwargs):
    return _fake_gradient(query), _fake_gradient(key), _fake_gradient(value)


def _fake_dropout_mask(batches, heads, queries, keys, dropout_p, seed, offset):
    return seed.new_empty((batches, heads, queries, keys), dtype=torch.bool)


# ---- the formula -----------------------------------------------------------------------------------------------------


def visible_keys(query: Tensor, key: Tensor, options: Options) -> Tensor:
    """Which keys each query sees, of a shape that broadcasts to (B, NH, Tq, Tk)."""
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
    """Keys or values (B, KH, Tk, HS) for each of the query's heads."""
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], 1)


def _scores(query: Tensor, key: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """The scaled and masked scores, and which queries see any key; those that see none have scores of 0."""
    scale = 1 / math.sqrt(query.shape[3]) if options.scale is None else options.scale
    scores = query @ _shared(key, query.shape[1]).mT * scale
    seen = visible_keys(query, key, options)
    if options.attn_mask is not None and options.attn_mask.dtype != torch.bool:
        scores = scores + options.attn_mask.masked_fill(options.attn_mask == -math.inf, 0)
    any_seen = seen.any(-1, keepdim=True)
    return scores.masked_fill(~seen & any_seen, -math.inf).masked_fill(~any_seen, 0), any_seen


def _dropout(p: Tensor, options: Options) -> Tensor | None:
    """What dropout multiplies each of the probabilities by: 0 or 1 / (1 - dropout_p); None for 1."""
    if options.dropout_p == 0:
        return None
    kept = ops.attention_dropout_mask(*p.shape, options.dropout_p, options.seed, options.offset)
    return kept.to(p.dtype) / ((1 - options.dropout_p) or 1)


def forward_formula(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Out and logsumexp in torch ops."""
    scores, any_seen = _scores(query, key, options)
    p = scores.softmax(-1) * any_seen
    if (dropout := _dropout(p, options)) is not None:
        p = p * dropout
    logsumexp = scores.logsumexp(-1).masked_fill(~any_seen[..., 0], -math.inf)
    return p @ _shared(value, query.shape[1]), logsumexp


def backward_formula(
    dout: Tensor, dlogsumexp: Tensor | None, query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Dquery, dkey and dvalue in torch ops, with the probabilities as a function of query and key."""
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


# ---- query, key and value --------------------------------------------------------------------------------------------


class ScaledDotProductAttention(torch.autograd.Function):
    """query (B, NH, Tq, HS), key and value (B, KH, Tk, HS) -> out as query, logsumexp (B, NH, Tq)."""

    @staticmethod
    def forward(ctx, query, key, value, *options):
        """Save the inputs, out and the logsumexp."""
        if ctx.needs_input_grad[3]:
            raise RuntimeError(
                "gptkernels::scaled_dot_product_attention: attn_mask requires grad, but has no derivative here"
            )
        out, logsumexp = below_autograd(ops.scaled_dot_product_attention, query, key, value, *options)
        _save(ctx, (query, key, value, out, logsumexp), Options(*options))
        ctx.set_materialize_grads(False)
        return out, logsumexp

    @staticmethod
    def backward(ctx, dout, dlogsumexp):
        """One call for the three gradients."""
        if dout is None and dlogsumexp is None:
            return (None,) * 12
        (query, key, value, out, logsumexp), options = _saved(ctx, 5)
        if dout is None:
            dout = torch.zeros_like(out)
        gradients = ops.scaled_dot_product_attention_backward(
            dout, dlogsumexp, query, key, value, out, logsumexp, *options
        )
        wanted = (g if need else None for g, need in zip(gradients, ctx.needs_input_grad, strict=False))
        return *wanted, *(None,) * 9


class ScaledDotProductAttentionBackward(torch.autograd.Function):
    """The gradient as a differentiable function of dout, dlogsumexp, query, key and value."""

    @staticmethod
    def forward(ctx, dout, dlogsumexp, query, key, value, out, logsumexp, *options):
        """The kernels."""
        _save(ctx, (dout, dlogsumexp, query, key, value), Options(*options))
        ctx.set_materialize_grads(False)
        return below_autograd(
            ops.scaled_dot_product_attention_backward,
            *(dout, dlogsumexp, query, key, value, out, logsumexp),
            *options,
        )

    @staticmethod
    def backward(ctx, *grads):
        """By formula; out and logsumexp are functions of the inputs."""
        inputs, options = _saved(ctx, 5)
        found = differentiate(lambda *t: backward_formula(*t, options), inputs, ctx.needs_input_grad[:5], grads)
        return *found, *(None,) * 11


def _tangents(query, key, value, *options):
    """The op's outputs in torch ops."""
    return forward_formula(query, key, value, Options(*options))


def _backward_tangents(dout, dlogsumexp, query, key, value, out, logsumexp, *options):
    """The backward's outputs in torch ops; out and logsumexp are functions of the inputs."""
    return backward_formula(dout, dlogsumexp, query, key, value, Options(*options))


def _folded(*positions: int):
    """The mapped dimension folded into the batch, where no mask or bound is of single sequences."""

    def rule(op, size, in_dims, args):
        options = Options(*args[positions[-1] + 1 :])
        plain = options.attn_mask is None and options.key_begin is None and options.key_end is None
        return (batches(*positions) if plain else loop)(op, size, in_dims, args)

    return rule


def sdpa_flops(query_shape, key_shape, value_shape, *args, **kwargs) -> int:
    """Two products of 2*B*NH*Tq*Tk*HS each: torch counts no discount for masks, and nor is one taken here."""
    b, heads, queries, size = query_shape
    return 2 * 2 * b * heads * queries * key_shape[2] * size


def sdpa_backward_flops(dout_shape, dlogsumexp_shape, query_shape, key_shape, value_shape, *args, **kwargs) -> int:
    """Five products: the scores once more, and four for the gradients."""
    return 5 * sdpa_flops(query_shape, key_shape, value_shape) // 2


# ---- packed ----------------------------------------------------------------------------------------------------------


def unpack(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """qkv (B, T, 3C) -> query, key and value (B, NH, T, HS), views."""
    return qkv.unflatten(2, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind()


def _packed_options(scale: float | None, dropout_p: float, seed: Tensor | None, offset: Tensor | None) -> Options:
    return Options(is_causal=True, scale=scale, dropout_p=dropout_p, seed=seed, offset=offset)


def packed_backward_formula(dout: Tensor, qkv: Tensor, num_heads: int, options: Options) -> Tensor:
    """Dqkv (B, T, 3C) in torch ops."""
    dout = dout.unflatten(2, (num_heads, -1)).transpose(1, 2)
    query, key, value = unpack(qkv, num_heads)
    gradients = backward_formula(dout, None, query, key, value, options)
    return torch.stack(gradients).permute(1, 3, 0, 2, 4).flatten(2)


def _packed_tangents(qkv, num_heads, *options):
    """Out in torch ops; the packed op's logsumexp has no derivative."""
    query, key, value = unpack(qkv, num_heads)
    out, _ = forward_formula(query, key, value, _packed_options(*options))
    return out.transpose(1, 2).flatten(2), None


def _packed_backward_tangents(dout, qkv, out, logsumexp, num_heads, *options):
    """Dqkv in torch ops; out and logsumexp are functions of qkv."""
    return packed_backward_formula(dout, qkv, num_heads, _packed_options(*options))


class Attention(torch.autograd.Function):
    """qkv (B, T, 3C) -> out (B, T, C), logsumexp (B, NH, T)."""

    @staticmethod
    def forward(ctx, qkv, num_heads, scale, dropout_p, seed, offset):
        """Save qkv, out and the logsumexp."""
        out, logsumexp = below_autograd(ops.attention, qkv, num_heads, scale, dropout_p, seed, offset)
        ctx.save_for_backward(qkv, out, logsumexp, seed, offset)
        ctx.options = num_heads, scale, dropout_p
        ctx.mark_non_differentiable(logsumexp)
        ctx.set_materialize_grads(False)
        return out, logsumexp

    @staticmethod
    def backward(ctx, dout, _dlogsumexp):
        """Packed, as qkv."""
        if dout is None:
            return (None,) * 6
        qkv, out, logsumexp, seed, offset = ctx.saved_tensors
        return ops.attention_backward(dout, qkv, out, logsumexp, *ctx.options, seed, offset), *(None,) * 5


class AttentionBackward(torch.autograd.Function):
    """The gradient of attention as a differentiable function of dout and qkv."""

    @staticmethod
    def forward(ctx, dout, qkv, out, logsumexp, num_heads, scale, dropout_p, seed, offset):
        """The kernels."""
        ctx.save_for_backward(dout, qkv, seed, offset)
        ctx.options = num_heads, scale, dropout_p
        return below_autograd(
            ops.attention_backward, dout, qkv, out, logsumexp, num_heads, scale, dropout_p, seed, offset
        )

    @staticmethod
    def backward(ctx, grad):
        """By formula."""
        dout, qkv, seed, offset = ctx.saved_tensors
        num_heads, scale, dropout_p = ctx.options
        options = _packed_options(scale, dropout_p, seed, offset)
        found = differentiate(
            lambda dout, qkv: (packed_backward_formula(dout, qkv, num_heads, options),),
            (dout, qkv),
            ctx.needs_input_grad[:2],
            (grad,),
        )
        return *found, *(None,) * 7


def attention_flops(qkv_shape, *args, **kwargs) -> int:
    """As ``sdpa_flops``."""
    b, t, c3 = qkv_shape
    return 2 * 2 * b * t * t * (c3 // 3)


def attention_backward_flops(dout_shape, qkv_shape, *args, **kwargs) -> int:
    """As ``sdpa_backward_flops``."""
    return 5 * attention_flops(qkv_shape) // 2


fake("attention", _fake_packed)
fake("attention_backward", _fake_packed_backward)
fake("scaled_dot_product_attention", _fake)
fake("scaled_dot_product_attention_backward", _fake_backward)
fake("attention_dropout_mask", _fake_dropout_mask)
autograd("attention", Attention, jvp=by_formula(_packed_tangents))
autograd("attention_backward", AttentionBackward, jvp=by_formula(_packed_backward_tangents))
autograd("scaled_dot_product_attention", ScaledDotProductAttention, jvp=by_formula(_tangents))
autograd("scaled_dot_product_attention_backward", ScaledDotProductAttentionBackward, jvp=by_formula(_backward_tangents))
vmap("attention", batches(0))
vmap("attention_backward", batches(0, 1, 2, 3))
vmap("scaled_dot_product_attention", _folded(0, 1, 2))
vmap("scaled_dot_product_attention_backward", _folded(0, 1, 2, 3, 4, 5, 6))
for _name in ("attention", "scaled_dot_product_attention"):
    autocast(_name, cuda="lower", cpu="lower")
flops("attention", attention_flops)
flops("attention_backward", attention_backward_flops)
flops("scaled_dot_product_attention", sdpa_flops)
flops("scaled_dot_product_attention_backward", sdpa_backward_flops)
