"""Table entries of attention that stores the probabilities, and of attention that does not store them."""

import math
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from gptkernels import functional as G
from gptkernels.testing.cases.elementwise import dropout_arguments
from gptkernels.testing.cases.table import Call, invoke, largest_of, operator, ops


def attention_formula(q, k, v, scale=None, product=torch.matmul, seen=None, added=None, kept=None):
    """Compute attention, causal unless ``seen`` is given.

    ``added`` is added to the scaled scores, and ``kept`` has dropout's factors of the probabilities.
    """
    scores = product(q, k.mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if added is not None:
        scores = scores + added.masked_fill(added == -math.inf, 0)
    seen = causal(q) if seen is None else seen
    nothing = ~seen.any(-1, keepdim=True)
    p = scores.masked_fill(~seen, -math.inf).masked_fill(nothing, 0).softmax(-1)
    p = p.masked_fill(nothing, 0)
    return product(p if kept is None else p * kept, v)


def attention_noise(args, douts, dtype, scale):
    """Return the largest error of a query's gradient that is 0, because the query sees one key or all values are equal.

    In float32 and float64 the error comes from the matmuls with dout. In 16-bit dtypes it comes from the rounding of
    out: if all values are equal, torch's out may be exact, while ours may differ by one rounding.
    """
    size = largest_of(douts) * largest_of(args[-1:]) * largest_of(args[:2]) * abs(scale or 1)
    return (8 if dtype.itemsize > 2 else 1) * torch.finfo(dtype).eps * size


def causal(q):
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()


MOST_SCORES = 2**25  # the largest number of scores that the formula computes at a time


def by_sequences(function, scores, *args):
    """Call ``function`` for some sequences at a time, and again in the backward, so that few scores are in memory.

    The arguments are tensors (B, ...), tensors (1, ...) for all sequences, or None.
    """
    batch, each = args[0].shape[0], max(MOST_SCORES // max(scores, 1), 1)
    if batch <= each:
        return function(*args)
    parts = [[t] * batch if t is None or t.shape[0] == 1 else t.split(each) for t in args]
    options = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.cat([checkpoint(function, *some, **options) for some in zip(*parts, strict=False)])


def reversed_product(a, b):
    """Compute a @ b with the terms of the sums in reverse order.

    In float64, the rounding errors then differ from those of the formula, as a kernel's do.
    """
    return a.flip(-1) @ b.flip(-2)


LOWEST = torch.finfo(torch.float64).min / 2  # LOWEST * log2(e) is finite


class FlashAttention(torch.autograd.Function):
    """Attention in torch ops that rounds where FlashAttention-2 and -3 and this package's kernels round.

    All of them compute powers of 2, and save out and logsumexp instead of the probabilities.
    """

    @staticmethod
    def forward(ctx, q, k, v, scale, seen, added, kept):
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        q, k, v = q.detach(), k.detach(), v.detach()
        seen = causal(q) if seen is None else seen
        scores = reversed_product((q * (-1 if scale < 0 else 1)).to(wide), k.to(wide).mT)
        ctx.units = abs(scale) / math.log(2)
        if scale == 0:
            scores = scores * 0
            ctx.units = 1.0
        if added is not None:
            scores = (scores.double() * abs(scale) + added).clamp(min=LOWEST).to(wide)
            ctx.units = 1 / math.log(2)
        scores = scores.masked_fill(~seen, -math.inf)
        origin = reference_exponents(scores.double() * ctx.units, q.dtype)
        p = multiply_subtract(scores, ctx.units, origin).to(wide).exp2()
        total = p.sum(-1, keepdim=True)
        nothing = total == 0
        weights = p.to(q.dtype).to(wide)
        weights = weights if kept is None else weights * kept.to(wide)
        out = (weights @ v.to(wide) * (1 / total.masked_fill(nothing, 1))).to(q.dtype)
        logsumexp = (origin * math.log(2) + total.masked_fill(nothing, 1).log()).to(wide)
        # If all scores are as low as a mask's lowest number, their logsumexp is too large to include the sum's log.
        given = (p / total.masked_fill(nothing, 1)).masked_fill(logsumexp.abs() < 1e30, math.nan)
        ctx.save_for_backward(q, k, v, out, scores, logsumexp, kept, given if added is not None else None)
        ctx.scale, ctx.wide = scale, wide
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, scores, logsumexp, kept, given = ctx.saved_tensors
        dtype, wide = q.dtype, ctx.wide
        kept = 1 if kept is None else kept.to(wide)
        q, k, v, out, dout = (t.to(wide) for t in (q, k, v, out, dout))
        in_units = logsumexp / math.log(2)  # the quotient overflows for a mask's lowest number
        in_units = torch.where(in_units.isinf(), logsumexp.double() / math.log(2), in_units.double())
        p = multiply_subtract(scores, ctx.units, in_units).to(wide).exp2()
        p = p if given is None else torch.where(given.isnan(), p, given)
        delta = (dout * out).sum(-1, keepdim=True)
        ds = (p * (reversed_product(dout, v.mT) * kept - delta)).to(dtype).to(wide) * ctx.scale
        dv = (p.to(dtype).to(wide) * kept).mT @ dout
        return *((t.to(dtype)) for t in (ds @ k, ds.mT @ q, dv)), None, None, None, None


def flash_attention(q, k, v, scale=None, seen=None, added=None, kept=None):
    return FlashAttention.apply(q, k, v, scale, seen, added, kept)


def reference_exponents(exponents, dtype):
    """Return the number that is subtracted from a row's exponents of 2, before the powers are rounded to the dtype.

    For float32 and float64 it is the row's largest exponent, which makes the largest power 1, without a rounding error.
    A kernel may subtract less for 16-bit dtypes. For these the number is lower than the largest exponent, by an amount
    below 8 that differs between rows.
    """
    largest = exponents.amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -math.inf, 0)
    if dtype.itemsize > 2:
        return largest
    return largest - torch.arange(exponents.shape[-2], device=exponents.device).unsqueeze(-1) * 0.618 % 1 * 8


def multiply_subtract(a, b, c):
    """Compute a * b - c with one rounding; with two roundings for float64."""
    return (a.double() * b - c.double()).to(a.dtype)


def product(a, b):
    """Compute a @ b by the BLAS calls of ``attention_probabilities``, to have equal rounding errors."""
    if not a.shape[0]:
        return a @ b
    dim = 0 if a.shape[0] < a.shape[1] else 1
    shape = (a.shape[1 - dim], a.shape[2], b.shape[3])
    pairs = zip(a.unbind(dim), b.unbind(dim), strict=True)
    return torch.stack([(x.squeeze(0) @ y.squeeze(0)).view(shape) for x, y in pairs], dim)


def attention_takes_denormals(draw, dtype):
    """On CUDA float32 matmuls are three TF32 matmuls, which keep only 11 bits of numbers below 2^-115."""
    return dtype != torch.float32 or draw.device.type == "cpu"


HEAD_SIZES = (8, 16, 64, 1, 2, 3, 5, 7, 32, 33, 40, 72, 80, 96, 128, 160, 192, 256)
COMMON_HEAD_SIZES = [3 if size in (32, 64, 128) else 1 for size in HEAD_SIZES]


def many_heads(draw, batch, heads, scores, queries, elements):
    """Draw the batch size and the number of heads. ``scores``, ``queries`` and ``elements`` are those of one head.

    In calls of real size, each SM has about one to five tiles of 256 queries, or fewer if the limits of ``draw`` demand
    it.
    """
    if not draw.real:
        return draw.size("batch", batch), draw.size("heads", heads, 1)
    pairs = math.ceil(draw.tiles("queries") / math.ceil(queries / 256))
    pairs = min(pairs, max(draw.most_products // 256 // scores, 1), max(2 * draw.most_elements // elements, 1))
    heads = draw.size("heads", 0, 1, real=max(min(pairs, MOST_SCORES // scores, 25), 1))
    return math.ceil(pairs / heads), heads


def real_tokens(draw):
    return min(2000, math.isqrt(draw.most_products // 256))


def packed_attention(draw, name, kernel, torchs, operators):
    forward, backward = operators
    dtype = draw.dtype()
    head = draw.choose("head", HEAD_SIZES, COMMON_HEAD_SIZES)
    tokens = draw.size("tokens", 90 if draw.most_elements < 60_000 else 300, 1, real=real_tokens(draw))
    batch, heads = many_heads(draw, 5, 6, tokens**2, tokens, tokens * head)
    scale = draw.choose("scale", (None, 0.125, 1.0, 0.0, -0.5))
    denormal = name == "attention_probabilities" or attention_takes_denormals(draw, dtype)

    def merged(function):
        def some(qkv, kept):
            q, k, v = qkv.contiguous().view(len(qkv), tokens, 3, heads, head).permute(2, 0, 3, 1, 4)
            more = {} if kept is None else {"kept": kept.double() * (1 / (1 - p) if p < 1 else 0)}
            return function(q, k, v, scale, **more).transpose(1, 2).reshape(len(qkv), tokens, heads * head)

        def of(qkv):
            kept = None
            if p:
                kept = ops.attention_dropout_mask(batch, heads, tokens, tokens, p, seed, offset).to(qkv.device)
            return by_sequences(some, heads * tokens**2, qkv, kept)

        return of

    qkv = draw.tensor("qkv", (batch, tokens, 3 * heads * head), dtype, special="none", denormal=denormal)
    p, seed, offset = dropout_arguments(draw, 0)
    options = (heads, scale, p, seed, offset) if p else (heads, scale)

    def invocations():
        out, saved = forward(qkv, *options)
        calls = [invoke(forward, qkv, *options)]
        saved = (out, saved) if forward is ops.attention else (saved,)
        calls += [invoke(backward, out, qkv, *saved, *options)]
        if p:
            calls += [invoke(ops.attention_dropout_mask, batch, heads, tokens, tokens, p, seed, offset)]
        return calls

    return Call(
        f"{name}(qkv, {', '.join(map(str, options))})",
        lambda qkv: kernel(qkv, *options),
        merged(torchs),
        merged(attention_formula),
        {"qkv": qkv},
        any_threads=False,
        # attention_probabilities rounds the scores' gradients to the dtype, where denormals have few digits.
        denormal_gradients=denormal and (name != "attention_probabilities" or dtype.itemsize > 2),
        invocations=invocations,
        noise=lambda args, douts: attention_noise(args, douts, dtype, scale),
        nan_gradients=False,  # a query's NaN reaches keys that the query does not see, as 0 * NaN in a product
    )


# (B, T, NH, HS): sizes near those of the kernels' tiles.
ATTENTION_SIZES = [
    (2, 1, 3, 64), (2, 1, 3, 128), (1, 2, 2, 8), (3, 17, 2, 7), (1, 40, 2, 1), (1, 63, 2, 64), (2, 64, 3, 64),
    (1, 65, 2, 33), (1, 127, 3, 80), (2, 129, 2, 128), (1, 200, 1, 256), (1, 1000, 1, 64), (1, 1024, 2, 64),
    (1, 300, 1, 96),
]  # fmt: skip
# (B, T, NH, HS): more sequences than heads, more heads than sequences, and the sizes of WIDTHS up to 1600 as T or HS.
PROBABILITIES_SIZES = [
    (1, 1, 1, 1), (2, 3, 1, 7), (1, 7, 2, 3), (3, 17, 2, 33), (5, 33, 3, 17), (2, 127, 3, 8), (7, 2, 3, 127),
    (1, 200, 12, 64), (2, 1, 4, 768), (1, 768, 1, 2), (1, 3, 1, 1600),
]  # fmt: skip


def packed_edges(sizes):
    named = [dict(zip(("batch", "tokens", "heads", "head"), size, strict=True)) for size in sizes]
    return named + [{"batch": 2, "tokens": 70, "heads": 3, "head": 5, "scale": s} for s in (0.0, 0.3, 2.0, -1.0)]


PACKED_SIZES = {"batch": [1, 2, 2], "tokens": [3, 37, 200], "head": [2, 33, 64], "heads": 2}


@operator(
    edges=packed_edges(ATTENTION_SIZES),
    autocast="lower",
    sizes=PACKED_SIZES,
    variants={"": {}, "dropout": {"dropout": True}},
    functions={
        "attention_backward": (
            lambda dout, qkv: ops.attention_backward(dout, qkv, *ops.attention(qkv, 2), 2),
            [(2, 3, 4), (2, 3, 12)],
        )
    },
)
def attention(draw):
    functional = draw.chance("functional", 0.5)
    return packed_attention(
        draw,
        "causal_attention" if functional else "attention",
        G.causal_attention if functional else lambda *args: ops.attention(*args)[0],
        flash_attention,
        (ops.attention, ops.attention_backward),
    )


def probabilities_backward(dout, qkv):
    return ops.attention_probabilities_backward(dout, qkv, ops.attention_probabilities(qkv, 2)[1], 2)


@operator(
    edges=packed_edges(PROBABILITIES_SIZES),
    autocast="lower",
    weight=0.5,
    sizes=PACKED_SIZES,
    functions={"attention_probabilities_backward": (probabilities_backward, [(2, 3, 4), (2, 3, 12)])},
)
def attention_probabilities(draw):
    return packed_attention(
        draw,
        "attention_probabilities",
        lambda *args: ops.attention_probabilities(*args)[0],
        partial(attention_formula, product=product),
        (ops.attention_probabilities, ops.attention_probabilities_backward),
    )


def attention_mask(draw, batch, heads, queries, keys, dtype):
    """Draw a mask. Some of its rows may hide all keys."""
    kind = draw.choose("mask", ("none", "bool", "added"), (4, 3, 3))
    if kind == "none":
        return None
    sizes = {"batch": batch, "heads": heads, "queries": queries, "keys": keys}
    shape = [1 if draw.chance(f"one mask for all {name}", 0.4) else size for name, size in sizes.items()]
    share = draw.choose("hidden", (0.3, 0.0, 0.9, 1.0))
    hidden = draw.put(torch.rand(shape, **draw.source("hidden"))) < share
    if kind == "bool":
        return draw.layout("attn_mask", ~hidden)
    lowest = draw.choose("lowest", (-math.inf, torch.finfo(dtype).min))
    if draw.chance("ALiBi", 0.2):
        distance = (torch.arange(shape[2])[:, None] - torch.arange(shape[3])).abs()
        added = draw.put((distance * -(2.0 ** -torch.arange(1, shape[1] + 1))[:, None, None]).expand(shape))
    else:
        deviation = draw.choose("added.deviation", (2.0, 1.0, 10.0, 30.0))
        added = draw.put(torch.randn(shape, **draw.source("added"))) * deviation
    return draw.layout("attn_mask", added.to(dtype).masked_fill(hidden, lowest))


def seen_keys(queries, keys, is_causal, query_offset, mask, key_begin, key_end, device):
    row, column = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    seen = (column <= row + query_offset) if is_causal else (column >= 0).expand(queries, keys)
    for bound, inside in (key_begin, column.__ge__), (key_end, column.__lt__):
        if bound is not None:
            seen = seen & inside(bound[:, None, None, None])
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else mask != -math.inf)
    return seen


def sdpa_backward(dout, query, key, value, dlogsumexp=None):
    found = ops.scaled_dot_product_attention(query, key, value, is_causal=True)
    dlogsumexp = None if dlogsumexp is None else dlogsumexp.to(found[1].dtype)
    return ops.scaled_dot_product_attention_backward(dout, dlogsumexp, query, key, value, *found, is_causal=True)


QUERY, KEY = (2, 2, 3, 4), (2, 1, 3, 4)


@operator(
    autocast="lower",
    sizes={
        "tokens": [3, 37, 200],
        "batch": [1, 2, 2],
        "heads": [1, 2, 2],
        "heads of a key head": 2,
        "head": [2, 33, 64],
        "keys": [5, 50, 150],
    },
    variants={"": {}, "mask": {"mask": "bool", "has key_end": True, "batch": 2}},
    functions={
        "scaled_dot_product_attention, all outputs": (
            lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, is_causal=True),
            [QUERY, KEY, KEY],
        ),
        "scaled_dot_product_attention_backward": (sdpa_backward, [QUERY, QUERY, KEY, KEY, (2, 2, 3)]),
        "scaled_dot_product_attention_backward, no dlogsumexp": (sdpa_backward, [QUERY, QUERY, KEY, KEY]),
    },
)
def scaled_dot_product_attention(draw):
    dtype = draw.dtype()
    queries = draw.size("tokens", 80, 1, real=real_tokens(draw))
    other = draw.chance("another number of keys", 0.4)
    keys = draw.size("keys", 150, 1, real=real_tokens(draw)) if other else queries
    group = draw.choose("heads of a key head", (1, 2, 3), (6, 1, 1))
    head = draw.choose("head", HEAD_SIZES, COMMON_HEAD_SIZES)
    elements = max(group * queries, keys) * head
    batch, heads = many_heads(draw, 4, 4, group * queries * keys, group * queries, elements)
    scale = draw.choose("scale", (None, 0.125, 1.0))
    is_causal = draw.choose("is_causal", (True, False))
    options = {"is_causal": is_causal, "scale": scale, "query_offset": 0}
    if is_causal:
        options["query_offset"] = draw.choose("query_offset", (0, 1, 60, -1), (6, 1, 1, 1))
    denormal = attention_takes_denormals(draw, dtype)
    args = {
        "query": draw.tensor("query", (batch, heads * group, queries, head), dtype, special="none", denormal=denormal)
    }
    for name in ("key", "value"):
        args[name] = draw.tensor(name, (batch, heads, keys, head), dtype, special="none", denormal=denormal)
    args["attn_mask"] = attention_mask(draw, batch, heads * group, queries, keys, dtype)
    for name in ("key_begin", "key_end"):
        here = draw.chance(f"has {name}", 0.15)
        args[name] = draw.indices(name, (batch,), keys + 1, torch.int32) if here else None
    p, seed, offset = dropout_arguments(draw, 0.15)
    dropout = {"dropout_p": p, "seed": seed, "offset": offset}
    place = {"first_head": 1, "total_heads": heads * group + 2, "first_query": 32}

    def ours(query, key, value, attn_mask, key_begin, key_end):
        more = {"key_begin": key_begin, "key_end": key_end, **dropout}
        return ops.scaled_dot_product_attention(query, key, value, attn_mask, **options, **more)[0]

    def invocations():
        query, key, value, attn_mask, key_begin, key_end = args.values()
        more = {**options, "key_begin": key_begin, "key_end": key_end, **dropout}
        out, logsumexp = ops.scaled_dot_product_attention(query, key, value, attn_mask, **more)
        saved = out, None, query, key, value, out, logsumexp, attn_mask
        return [
            invoke(ops.scaled_dot_product_attention, query, key, value, attn_mask, **more, **place),
            invoke(ops.scaled_dot_product_attention_backward, *saved, **more, **place),
        ]

    def of(function):
        def some(query, key, value, mask, key_begin, key_end, kept):
            where = is_causal, options["query_offset"], mask, key_begin, key_end, query.device
            key, value = (t.repeat_interleave(group, 1) for t in (key, value))
            added = None if mask is None or mask.dtype == torch.bool else mask
            kept = None if kept is None else kept.double() * (1 / (1 - p) if p < 1 else 0)
            return function(query, key, value, scale, seen=seen_keys(queries, keys, *where), added=added, kept=kept)

        def call(query, *others):
            sizes = batch, heads * group, queries, keys
            kept = None if p == 0 else ops.attention_dropout_mask(*sizes, p, seed, offset).to(query.device)
            return by_sequences(some, heads * group * queries * keys, query, *others, kept)

        return call

    return Call(
        f"scaled_dot_product_attention(query, key, value, attn_mask, {options}, key_begin, key_end, {p}, {seed}, "
        f"{offset})",
        ours,
        of(flash_attention),
        of(attention_formula),
        args,
        fixed=("attn_mask",),
        any_threads=False,
        denormal_gradients=denormal,
        nan_gradients=False,
        noise=lambda args, douts: attention_noise(args[:3], douts, dtype, scale),
        invocations=invocations,
    )
