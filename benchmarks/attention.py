from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import exact
from benchmarks.harness.case import Case, nbytes
from benchmarks.harness.peers import backward, compiled

ops = torch.ops.gptkernels
# Which keys a query sees: all; those up to its position (CAUSAL, and TF32 with TF32 matmuls); or those except padding,
# given as a mask (B, 1, T, T) as by Hugging Face's models (RIGHT, LEFT), or by lengths.
ALL, CAUSAL, RIGHT, LEFT, LENGTHS, TF32 = range(6)
PADDED = {RIGHT: "padded right, bool mask", LEFT: "padded left, additive mask", LENGTHS: "padded right, by lengths"}
# (batch, heads, queries, keys, head size, which keys). Causal attention without padding has packed qkv.
SIZES = {
    "bfloat16": [
        *((batch, 12, keys, keys, 64, CAUSAL) for batch, keys in ((64, 1024), (16, 4096), (4, 16384), (4, 1024))),
        *((batch, 6, keys, keys, 128, CAUSAL) for batch, keys in ((64, 1024), (16, 4096), (4, 16384))),
        (256, 12, 256, 256, 64, CAUSAL),
        (64, 12, 1024, 1024, 64, ALL),
        (16, 12, 4096, 4096, 64, ALL),
        *((32, 12, 1024, 1024, 64, padded) for padded in PADDED),
        *((batch, 12, 1, keys, 64, ALL) for batch in (1, 64) for keys in (1024, 8192, 65536)),
    ],
    "float32": [(batch, 12, 1024, 1024, 64, kind) for kind in (CAUSAL, TF32) for batch in (4, 16)],
}
CPU_SIZES = [
    (1, 12, 1024, 1024, 64, CAUSAL),
    (4, 12, 256, 256, 64, CAUSAL),
    *((4, 12, 256, 256, 64, padded) for padded in PADDED),
    (1, 12, 1, 1024, 64, ALL),
]
TINY = (1, 1, 8, 8, 8, CAUSAL)
MOST_SCORES = 1 << 26


@dataclass
class Seen:
    causal: bool
    begin: Tensor | None = None  # (B): the first key of each sequence that is not padding
    end: Tensor | None = None  # (B): the key after the last key that is not padding
    mask: Tensor | None = None
    by_bounds: bool = False

    @classmethod
    def of(cls, kind, batch, tokens, dtype, device):
        if kind not in PADDED:
            return cls(kind in (CAUSAL, TF32))
        lengths = torch.linspace(tokens // 2, tokens, batch, device=device).int()
        begin = tokens - lengths if kind == LEFT else torch.zeros_like(lengths)
        seen = cls(True, begin, begin + lengths, by_bounds=kind == LENGTHS)
        seen.mask = seen.allowed(tokens, tokens, device)
        if kind == LEFT:
            zeros = torch.zeros(seen.mask.shape, dtype=dtype, device=device)
            seen.mask = zeros.masked_fill_(~seen.mask, torch.finfo(dtype).min)
        return seen

    @property
    def causal_flag(self):
        return self.causal and self.mask is None

    def allows(self, b, h, q, k):
        """flex_attention requires this signature."""
        causal = q >= k
        return causal if self.end is None else causal & (k >= self.begin[b]) & (k < self.end[b])

    def allowed(self, queries, keys, device):
        sizes = 1 if self.end is None else len(self.end), 1, queries, keys
        b, _, q, k = torch.meshgrid(*(torch.arange(n, device=device) for n in sizes), indexing="ij")
        return self.allows(b, 0, q, k)

    def ours(self):
        if self.by_bounds:
            return None, 0.0, True, None, 0, self.begin, self.end
        return self.mask, 0.0, self.causal_flag, None, 0, None, None


def flash3(query, key, value, causal):
    from flash_attn_interface import flash_attn_func

    out = flash_attn_func(*(t.transpose(1, 2) for t in (query, key, value)), causal=causal)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def flex(seen):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend = compiled(lambda query, key, value, mask: flex_attention(query, key, value, block_mask=mask))
    masks = []

    def call(query, key, value):
        if not masks:
            batch = None if seen.end is None else len(seen.end)
            sizes = batch, None, query.shape[2], key.shape[2]
            # flex_attention accepts functions, but not methods.
            allows = lambda b, h, q, k: seen.allows(b, h, q, k)  # noqa: E731
            masks.append(create_block_mask(allows, *sizes, device=query.device) if seen.causal else None)
        return attend(query, key, value, masks[0])

    return call


def allowing_tf32(function):
    def call(*arguments):
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return function(*arguments)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return call


def by_backend(backend, query, key, value, seen):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, seen.mask, is_causal=seen.causal_flag)


def functions(device, dtype, seen):
    flash = device.type == "cpu" or (dtype.itemsize == 2 and seen.mask is None)
    backend = SDPBackend.FLASH_ATTENTION if flash else SDPBackend.EFFICIENT_ATTENTION
    found = {"torch": lambda *t: by_backend(backend, *t, seen)}
    if device.type == "cuda":
        found["cudnn"] = lambda *t: by_backend(SDPBackend.CUDNN_ATTENTION, *t, seen)
    found["flex"] = flex(seen)
    if device.type == "cuda" and seen.end is None:
        found["fa3"] = lambda *t: flash3(*t, seen.causal)
    return found


def formula(query, key, value, allowed):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ value


def checked(inputs, dout, seen):
    """Yield the exact results of a few heads of the first sequence, because all heads would take too long.

    Outputs of queries that see no key are left out, because implementations differ in these outputs.
    """
    query, key, _ = inputs
    heads = max(1, min(4, MOST_SCORES // (query.shape[2] * key.shape[2])))
    part = (slice(0, 1), slice(0, heads))
    allowed = seen.allowed(query.shape[2], key.shape[2], query.device)[:1] if seen.causal else None
    leaves = [exact.double(t[part]).requires_grad_(dout is not None) for t in inputs]
    out = formula(*leaves, allowed)
    if dout is None:
        first = 0 if seen.begin is None else int(seen.begin[0])
        yield 0, (*part, slice(first, None)), out[:, :, first:]
        return
    for i, gradient in enumerate(torch.autograd.grad(out, leaves, exact.double(dout[part]))):
        yield i, part, gradient


def cases(device, dtype, batch, heads, queries, keys, size, kind):
    seen = Seen.of(kind, batch, queries, dtype, device)
    packed = seen.causal_flag and queries == keys
    if seen.causal:
        qkv = torch.randn(batch, queries, 3 * heads * size, device=device, dtype=dtype)
        inputs = _unpack(qkv, heads)
    else:
        inputs = [torch.randn(batch, heads, n, size, device=device, dtype=dtype) for n in (queries, keys, keys)]
    arguments = seen.ours()
    if packed:
        out, logsumexp = ops.attention(qkv, heads)
        dout = torch.randn_like(out)
        douts = dout.unflatten(2, (heads, size)).transpose(1, 2)
    else:
        out, logsumexp = ops.scaled_dot_product_attention(*inputs, *arguments)
        dout = douts = torch.randn_like(out)
        if seen.begin is not None:  # the outputs of padding queries are unused, so their gradient is 0
            dout.masked_fill_((torch.arange(queries, device=device) < seen.begin[:, None])[:, None, :, None], 0)
    shape = f"B={batch} NH={heads} " + (f"T={queries}" if queries == keys else f"Tq={queries} Tk={keys}")
    shape += f" HS={size}" + (" not causal" if kind == ALL and queries > 1 else "")
    precision, rounded = lambda function: function, None
    if kind in PADDED:
        shape += " " + PADDED[kind]
    elif kind == TF32:
        # float16 has as many significand bits as TF32
        precision, rounded, shape = allowing_tf32, torch.float16, f"{shape} TF32"
    pairs = batch * queries * keys / (2 if seen.causal else 1)
    if seen.end is not None:
        pairs = int(seen.allowed(queries, keys, device).sum())
    flops = int(4 * heads * pairs * size)  # two matmuls, for the pairs of a query and a key that it sees
    peers = {name: precision(function) for name, function in functions(device, dtype, seen).items()}

    def ours():
        if packed:
            return ops.attention(qkv, heads)[0].unflatten(2, (heads, size)).transpose(1, 2)
        return ops.scaled_dot_product_attention(*inputs, *arguments)[0]

    mask_bytes = 0 if seen.by_bounds else nbytes(seen.mask)
    yield Case(
        "attention fwd" if queries > 1 else "attention decode",
        shape,
        precision(ours),
        lambda: checked(inputs, None, seen),
        bytes=nbytes(*inputs, out) + mask_bytes,
        flops=flops,
        peers={name: partial(function, *inputs) for name, function in peers.items()},
        rounded=rounded,
    )
    if queries == 1:
        return

    def ours_backward():
        if packed:
            return _unpack(ops.attention_backward(dout, qkv, out, logsumexp, heads), heads)
        return ops.scaled_dot_product_attention_backward(dout, None, *inputs, out, logsumexp, *arguments)

    yield Case(
        "attention bwd",
        shape,
        precision(ours_backward),
        lambda: checked(inputs, douts, seen),
        bytes=2 * nbytes(*inputs, out) + mask_bytes,
        flops=5 * flops // 2,
        peers={name: precision(backward(function, inputs, douts)) for name, function in peers.items()},
        rounded=rounded,
    )


def _unpack(qkv, heads):
    return qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()
