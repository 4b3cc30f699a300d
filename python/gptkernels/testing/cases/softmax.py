"""Table entries of softmax and causal softmax."""

import math
from functools import partial

import torch
import torch.nn.functional as F

from gptkernels import functional as G
from gptkernels.testing.cases.table import ROWS, WIDTHS, Call, Cost, grid, invoke, nbytes, operator, ops, row_costs

# Widths near those at which a row moves from registers to shared memory, to a cluster, and to being read twice.
KEPT = [8, 64, 100, 120, 250, 256, 520, 1000, 1536, 2304, 8200, 33000, 65536, 70001, 110000, 150000, 262144, 1000003]


def softmax_formula(x):
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


@operator(
    costs=row_costs((2, 3), (5, 4)),
    edges=grid({"x.rows": ROWS, "width": [0, *WIDTHS]}) + grid({"x.rows": [3], "width": KEPT}),
    autocast="float32 on CUDA",
    sizes={"x.rows": [2, 31, 64], "width": [3, 67, 1000]},
    functions={"softmax_backward": (lambda g, out: ops.softmax_backward(g, out), [(2, 3), (2, 3)])},
)
def softmax(draw):
    dtype = draw.dtype()
    rows = draw.rows()
    x = draw.tensor("x", (*rows, draw.width("width", rows)), dtype, 3, huge=1e300)
    dim = draw.choose("dim", range(-1, -x.dim() - 1, -1))
    raw = dim == -1 and draw.chance("raw", 0.7)
    return Call(
        f"softmax(x, {dim})",
        ops.softmax if raw else lambda x: G.softmax(x, dim),
        lambda x: F.softmax(x, dim),
        lambda x: softmax_formula(x.movedim(dim, -1)).movedim(-1, dim) if x.numel() else x * 1,
        {"x": x},
        invocations=lambda: [invoke(ops.softmax, x), invoke(ops.softmax_backward, x, ops.softmax(x))],
    )


def masked(scores):
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)


def causal_costs(scores):
    square, numbers = nbytes(scores), scores.numel()
    return Cost(square * 3 // 2, 5 * numbers // 2), Cost(2 * square, 2 * numbers)


def torchs_causal_softmax(scores, scale=1.0):
    return torch.softmax(masked(scores * scale), -1)


def causal_softmax_formula(scores, scale=1.0):
    return softmax_formula(masked(scores * scale))


@operator(
    costs=causal_costs,
    edges=grid({"lead.rows": ROWS, "tokens": [0, 1, 2, 3, 7, 8, 17, 33, 64, 127, 250, 768]})
    + grid({"lead.rows": [()], "tokens": [1600, 2051]})
    + grid({"lead.rows": [2], "tokens": [33], "scale": [0.0, -0.5, 3.0]}),
    autocast="float32 on CUDA",
    sizes={"lead.rows": [1, 2, 2], "tokens": [3, 33, 128], "scale": 0.125},
    functions={
        "causal_softmax_backward": (lambda g, out: ops.causal_softmax_backward(g, out, 0.5), [(2, 3, 3), (2, 3, 3)])
    },
)
def causal_softmax(draw):
    dtype = draw.dtype()
    lead = draw.rows("lead", 3)
    most = max(int(math.sqrt(draw.most_elements / max(math.prod(lead), 1))), 4)
    tokens = draw.size("tokens", most, real=most)
    scale = draw.choose("scale", (1.0, 0.125, -0.5, 0.0, 3.0))
    scores = draw.tensor("scores", (*lead, tokens, tokens), dtype, 3)

    def alone(function):
        """Scores above the diagonal affect neither the result nor the gradient, even in a row that contains NaN."""

        def of(scores):
            if not scores.numel():
                return scores * 1
            below = torch.ones(tokens, tokens, dtype=torch.bool, device=scores.device).tril()
            return torch.where(below, function(torch.where(below, scores, 0.0), scale), 0.0)

        return of

    return Call(
        f"causal_softmax(scores, {scale})",
        partial(G.causal_softmax if draw.chance("functional", 0.5) else ops.causal_softmax, scale=scale),
        alone(torchs_causal_softmax),
        alone(causal_softmax_formula),
        {"scores": scores},
        invocations=lambda: [
            invoke(ops.causal_softmax, scores, scale),
            invoke(ops.causal_softmax_backward, scores, ops.causal_softmax(scores, scale), scale),
        ],
    )
