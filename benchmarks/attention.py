from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import exact
from benchmarks.harness.case import Case, nbytes
from benchmarks.harness.peers import backward, compiled

ops = torch.ops.gptkernels
# batch, query heads, queries, keys, head size, causal. Where there are as many queries as keys, packed qkv.
SIZES = {
    "bfloat16": [
        (64, 12, 1024, 1024, 64, 1),
        (16, 12, 4096, 4096, 64, 1),
        (4, 12, 16384, 16384, 64, 1),
        (4, 12, 1024, 1024, 64, 1),
        (64, 6, 1024, 1024, 128, 1),
        (16, 6, 4096, 4096, 128, 1),
        (4, 6, 16384, 16384, 128, 1),
        (64, 12, 1024, 1024, 64, 0),
        (16, 12, 4096, 4096, 64, 0),
        *((batch, 12, 1, keys, 64, 0) for batch in (1, 64) for keys in (1024, 8192, 65536)),
    ],
    "float32": [(4, 12, 1024, 1024, 64, 1), (16, 12, 1024, 1024, 64, 1)],
}
CPU_SIZES = [(1, 12, 1024, 1024, 64, 1), (4, 12, 256, 256, 64, 1), (1, 12, 1, 1024, 64, 0)]
TINY = (1, 1, 8, 8, 8, 1)
MOST_SCORES = 1 << 26  # of the float64 reference at a time


def flash3(query, key, value, causal):
    """FlashAttention-3, where it is installed."""
    from flash_attn_interface import flash_attn_func

    out = flash_attn_func(*(t.transpose(1, 2) for t in (query, key, value)), causal=causal)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def flex(causal):
    """flex_attention under torch.compile."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    masks = {}

    def call(query, key, value):
        mask = None
        if causal:
            sizes = query.shape[2], key.shape[2], query.device
            if sizes not in masks:
                masks[sizes] = create_block_mask(lambda b, h, q, k: q >= k, None, None, *sizes[:2], device=sizes[2])
            mask = masks[sizes]
        return flex_attention(query, key, value, block_mask=mask)

    return compiled(call)


def by_backend(backend, query, key, value, causal):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)


def functions(device, causal):
    """What else computes attention, of query, key and value."""
    flash = SDPBackend.FLASH_ATTENTION
    if device.type == "cpu":
        return {"torch": lambda *t: by_backend(flash, *t, causal), "flex": flex(causal)}

    def torchs(*t):
        half = t[0].dtype in (torch.bfloat16, torch.float16)
        return by_backend(flash if half else SDPBackend.EFFICIENT_ATTENTION, *t, causal)

    return {
        "torch": torchs,
        "cudnn": lambda *t: by_backend(SDPBackend.CUDNN_ATTENTION, *t, causal),
        "flex": flex(causal),
        "fa3": lambda *t: flash3(*t, causal),
    }


def reference(causal):
    """The formula of query, key and value (rows of B * NH); in float64."""

    def function(query, key, value):
        scores = query @ key.mT / query.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        return scores.softmax(-1) @ value

    return function


def checked(inputs, dout, causal):
    """A few whole heads of out, or of the gradients, beside float64: all of them would take longer than the rest."""
    query, key, _ = inputs
    heads = max(1, min(4, MOST_SCORES // (query.shape[2] * key.shape[2])))
    part = (slice(0, 1), slice(0, heads))
    formula, pieces = reference(causal), [exact.double(t[part]) for t in inputs]
    if dout is None:
        yield 0, part, formula(*pieces)
        return
    leaves = [t.requires_grad_() for t in pieces]
    for i, gradient in enumerate(torch.autograd.grad(formula(*leaves), leaves, exact.double(dout[part]))):
        yield i, part, gradient


def cases(device, dtype, batch, heads, queries, keys, size, causal):
    causal = bool(causal)
    packed = causal and queries == keys
    if packed:
        qkv = torch.randn(batch, queries, 3 * heads * size, device=device, dtype=dtype)
        query, key, value = _unpack(qkv, heads)
        out, logsumexp = ops.attention(qkv, heads)
        dout = torch.randn_like(out)
        douts = dout.unflatten(2, (heads, size)).transpose(1, 2)
    else:
        query, key, value = (
            torch.randn(batch, heads, n, size, device=device, dtype=dtype) for n in (queries, keys, keys)
        )
        out, logsumexp = ops.scaled_dot_product_attention(query, key, value)
        dout = douts = torch.randn_like(out)
    inputs = [query, key, value]
    what = f"T={queries}" if queries == keys else f"Tq={queries} Tk={keys}"
    shape = f"B={batch} NH={heads} {what} HS={size}" + ("" if causal or queries == 1 else " not causal")
    # Two products, of which half is above the diagonal.
    flops = 4 * batch * heads * queries * keys * size // (2 if causal else 1)
    peers = functions(device, causal)

    def ours():
        if packed:
            return ops.attention(qkv, heads)[0].unflatten(2, (heads, size)).transpose(1, 2)
        return ops.scaled_dot_product_attention(query, key, value)[0]

    yield Case(
        "attention fwd" if queries > 1 else "attention decode",
        shape,
        ours,
        lambda: checked(inputs, None, causal),
        bytes=nbytes(*inputs, out),
        flops=flops,
        peers={name: partial(function, *inputs) for name, function in peers.items()},
    )
    if queries == 1:
        return

    def ours_backward():
        if packed:
            return _unpack(ops.attention_backward(dout, qkv, out, logsumexp, heads), heads)
        return ops.scaled_dot_product_attention_backward(dout, None, query, key, value, out, logsumexp)

    yield Case(
        "attention bwd",
        shape,
        ours_backward,
        lambda: checked(inputs, douts, causal),
        bytes=2 * nbytes(*inputs) + 2 * nbytes(out),
        flops=5 * flops // 2,
        peers={name: backward(function, inputs, douts) for name, function in peers.items()},
    )


def _unpack(qkv, heads):
    return qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()
