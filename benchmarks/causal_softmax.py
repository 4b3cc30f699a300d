from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.harness import exact
from benchmarks.harness.case import Case
from benchmarks.harness.peers import backward, compiled
from gptkernels.testing.cases import OPERATORS

ops = torch.ops.gptkernels
SIZES = {"bfloat16": [(64, 12, 1024)], "float32": []}
CPU_SIZES = [(4, 4, 512)]
TINY = (1, 1, 8)


def formula(scores):
    i = torch.arange(scores.shape[-1], device=scores.device)
    return F.softmax(scores.masked_fill(i > i[:, None], float("-inf")), -1)


def derivative(dout, out):
    return out * (dout - (out * dout).sum(-1, keepdim=True))


def cases(device, dtype, batch, heads, tokens):
    scores, dout = (torch.randn(batch, heads, tokens, tokens, device=device, dtype=dtype) for _ in range(2))
    # The mask that eager code adds; its gradient is not computed.
    mask = torch.full((tokens, tokens), float("-inf"), device=device, dtype=dtype).triu(1)
    out = ops.causal_softmax(scores)
    shape = f"{batch}x{heads}x{tokens}x{tokens}"
    forward_cost, backward_cost = OPERATORS["causal_softmax"].costs(scores)

    def eager(scores):
        return F.softmax(scores + mask, -1)

    yield Case(
        "causal_softmax fwd",
        shape,
        lambda: ops.causal_softmax(scores),
        lambda: exact.outputs(formula, [scores]),
        **vars(forward_cost),
        peers={"torch": partial(eager, scores), "compile": partial(compiled(formula), scores)},
    )
    yield Case(
        "causal_softmax bwd",
        shape,
        lambda: ops.causal_softmax_backward(dout, out),
        lambda: exact.outputs(derivative, [dout, out]),
        **vars(backward_cost),
        peers={
            "torch": backward(eager, [scores], dout),
            "compile": backward(compiled(formula), [scores], dout),
        },
    )
