import torch
import torch.nn.functional as F

from benchmarks.harness.case import nbytes
from benchmarks.harness.directions import both

ops = torch.ops.gptkernels
SIZES = {"bfloat16": [(16, 12, 1024, 64)], "float32": [(16, 12, 1024, 64)]}
CPU_SIZES = [(2, 4, 256, 32)]
TINY = (1, 1, 8, 8)


def cases(device, dtype, batch, heads, tokens, size):
    width = heads * size
    qkv = torch.randn(batch, tokens, 3 * width, device=device, dtype=dtype)
    out, probabilities = ops.attention_probabilities(qkv, heads)
    dout = torch.randn_like(out)
    flops = 2 * batch * heads * tokens * tokens * size  # two matmuls, without the half above the diagonal

    def formula(qkv):
        q, k, v = qkv.view(-1, tokens, 3, heads, size).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(-1, tokens, width)

    yield from both(
        "attention_probabilities",
        f"B={batch} NH={heads} T={tokens} HS={size}",
        formula,
        lambda: ops.attention_probabilities(qkv, heads)[0],
        lambda: ops.attention_probabilities_backward(dout, qkv, probabilities, heads),
        dout,
        [qkv],
        costs=[{"bytes": nbytes(qkv, out), "flops": flops}, {"bytes": 2 * nbytes(qkv, out), "flops": 5 * flops // 2}],
    )
