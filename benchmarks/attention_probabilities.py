from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.harness import exact
from benchmarks.harness.case import Case, nbytes
from benchmarks.harness.peers import backward, compiled

ops = torch.ops.gptkernels
SIZES = {"bfloat16": [(16, 12, 1024, 64)], "float32": [(16, 12, 1024, 64)]}
CPU_SIZES = [(2, 4, 256, 32)]
TINY = (1, 1, 8, 8)


def cases(device, dtype, batch, heads, tokens, size):
    width = heads * size
    qkv = torch.randn(batch, tokens, 3 * width, device=device, dtype=dtype)
    out, probabilities = ops.attention_probabilities(qkv, heads)
    dout = torch.randn_like(out)
    shape = f"B={batch} NH={heads} T={tokens} HS={size}"
    flops = 2 * batch * heads * tokens * tokens * size  # two products, half of each above the diagonal

    def formula(qkv):
        q, k, v = qkv.view(-1, tokens, 3, heads, size).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(-1, tokens, width)

    yield Case(
        "attention_probabilities fwd",
        shape,
        lambda: ops.attention_probabilities(qkv, heads)[0],
        lambda: exact.outputs(formula, [qkv]),
        bytes=nbytes(qkv, out),
        flops=flops,
        peers={"torch": partial(formula, qkv), "compile": partial(compiled(formula), qkv)},
    )
    yield Case(
        "attention_probabilities bwd",
        shape,
        lambda: ops.attention_probabilities_backward(dout, qkv, probabilities, heads),
        lambda: exact.gradients(formula, dout, [qkv]),
        bytes=2 * nbytes(qkv) + 2 * nbytes(out),
        flops=5 * flops // 2,
        peers={"torch": backward(formula, [qkv], dout), "compile": backward(compiled(formula), [qkv], dout)},
    )
