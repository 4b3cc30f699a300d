import torch
import torch.nn.functional as F

from benchmarks.case import Case, nbytes

ops = torch.ops.gptkernels
SIZES = {"cuda": [(16, 12, 1024, 64)], "cpu": [(2, 4, 256, 32)]}


def torch_forward(qkv, heads):
    batch, tokens, width = qkv.shape
    q, k, v = qkv.view(batch, tokens, 3, heads, width // 3 // heads).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, width // 3)


def cases(device, dtype, small):
    for batch, heads, tokens, size in [(1, 1, 8, 8)] if small else SIZES[device.type]:
        qkv = torch.randn(batch, tokens, 3 * heads * size, device=device, dtype=dtype)
        out, probabilities = ops.attention(qkv, heads)
        shape = f"B={batch} NH={heads} T={tokens} HS={size}"
        flops = 2 * batch * heads * tokens * tokens * size  # two products, half of each above the diagonal
        yield Case(
            "attention fwd",
            shape,
            lambda qkv=qkv, heads=heads: ops.attention(qkv, heads),
            {"torch sdpa": lambda qkv=qkv, heads=heads: torch_forward(qkv, heads)},
            bytes=nbytes(qkv, out),
            flops=flops,
        )
        leaf = qkv.clone().requires_grad_()
        torch_out, dout = torch_forward(leaf, heads), torch.randn_like(out)
        yield Case(
            "attention bwd",
            shape,
            lambda a=(dout, qkv, probabilities, heads): ops.attention_backward(*a),
            {"torch sdpa": lambda a=(torch_out, leaf, dout): torch.autograd.grad(*a, retain_graph=True)},
            bytes=2 * nbytes(qkv) + 2 * nbytes(out),
            flops=5 * flops // 2,
        )
