import torch
import torch.nn.functional as F

from benchmarks.harness import exact
from benchmarks.harness.directions import both
from benchmarks.softmax import derivative

ops = torch.ops.gptkernels
SIZES = {"bfloat16": [(64, 12, 1024)], "float32": []}
CPU_SIZES = [(4, 4, 512)]
TINY = (1, 1, 8)


def formula(scores):
    i = torch.arange(scores.shape[-1], device=scores.device)
    return F.softmax(scores.masked_fill(i > i[:, None], float("-inf")), -1)


def cases(device, dtype, batch, heads, tokens):
    scores, dout = (torch.randn(batch, heads, tokens, tokens, device=device, dtype=dtype) for _ in range(2))
    mask = torch.full((tokens, tokens), float("-inf"), device=device, dtype=dtype).triu(1)
    out = ops.causal_softmax(scores)
    yield from both(
        "causal_softmax",
        f"{batch}x{heads}x{tokens}x{tokens}",
        formula,
        lambda: ops.causal_softmax(scores),
        lambda: ops.causal_softmax_backward(dout, out),
        dout,
        [scores],
        eager=lambda scores: F.softmax(scores + mask, -1),
        exact_backward=lambda: exact.outputs(derivative, [dout, out]),
    )
