import torch
import torch.nn.functional as F

from benchmarks.case import Case, nbytes

ops = torch.ops.gptkernels
SIZES = {"cuda": [(64, 12, 1024)], "cpu": [(4, 4, 512)]}


def cases(device, dtype, small):
    for batch, heads, tokens in [(1, 1, 8)] if small else SIZES[device.type]:
        scores, dout = (torch.randn(batch, heads, tokens, tokens, device=device, dtype=dtype) for _ in range(2))
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)
        out = ops.causal_softmax(scores)
        shape = f"{batch}x{heads}x{tokens}x{tokens}"
        yield Case(
            "causal_softmax fwd",
            shape,
            lambda scores=scores: ops.causal_softmax(scores),
            {"torch": lambda scores=scores, mask=mask: F.softmax(scores.masked_fill(mask, float("-inf")), -1)},
            bytes=nbytes(scores) * 3 // 2,  # the lower triangle is read, the square is written
        )
        yield Case(
            "causal_softmax bwd",
            shape,
            lambda dout=dout, out=out: ops.causal_softmax_backward(dout, out),
            {"torch": lambda a=(dout, out, -1, dtype): torch.ops.aten._softmax_backward_data(*a)},
            bytes=nbytes(scores) * 2,
        )
