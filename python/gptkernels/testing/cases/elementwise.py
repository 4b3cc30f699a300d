"""Table entries of GELU and dropout."""

import math

import torch
import torch.nn.functional as F

from gptkernels import functional as G
from gptkernels.testing.cases.table import ROWS, WIDTHS, Call, grid, invoke, operator, ops, row_costs


def gelu_formula(x, approximate="tanh"):
    """Compute GELU by functions without cancellation."""
    if approximate == "none":
        return x * 0.5 * torch.erfc(-x * math.sqrt(0.5))
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


@operator(
    costs=row_costs((2, 3), (12, 20)),
    edges=grid({"approximate": ["tanh", "none"], "x.rows": ROWS, "width": [0, *WIDTHS]}),
    sizes={"x.rows": [2, 7, 64], "width": [3, 33, 768]},
    variants={"tanh": {}, "none": {"approximate": "none"}},
    functions={
        "gelu_backward, tanh": (lambda g, x: ops.gelu_backward(g, x), [(2, 3), (2, 3)]),
        "gelu_backward, none": (lambda g, x: ops.gelu_backward(g, x, approximate="none"), [(2, 3), (2, 3)]),
    },
)
def gelu(draw):
    dtype = draw.dtype()
    rows = draw.rows()
    approximate = draw.choose("approximate", ("tanh", "none"))
    x = draw.tensor("x", (*rows, draw.width("width", rows, 0)), dtype, 2, huge=1e100)
    kernel = G.gelu if draw.chance("functional", 0.5) else ops.gelu
    return Call(
        f"gelu(x, approximate={approximate!r})",
        lambda x: kernel(x, approximate=approximate),
        lambda x: F.gelu(x, approximate=approximate),
        lambda x: gelu_formula(x, approximate),
        {"x": x},
        invocations=lambda: [
            invoke(ops.gelu, x, approximate=approximate),
            invoke(ops.gelu_backward, x, x, approximate=approximate),
        ],
    )


def dropout_arguments(draw, chance=1.0):
    if not draw.chance("dropout", chance):
        return 0.0, None, None
    p = draw.choose("dropout_p", (0.1, 0.5, 0.0, 0.9, 1e-6, 1.0))
    words = draw.random("seed and offset")
    return p, *(draw.number(words.getrandbits(64) - 2**63, torch.int64) for _ in range(2))


def dropped(x, p, seed, offset):
    kept = ops.dropout_mask(x.numel(), p, seed, offset).view(x.shape).to(x.device)
    return x * kept / (1 - p) if p < 1 else x * 0


@operator(
    costs=row_costs((2, 2), (1, 1)),
    edges=grid({"x.rows": ROWS, "width": [0, *WIDTHS]})
    + grid({"x.rows": [3], "width": [100], "dropout_p": [0.0, 1e-6, 0.5, 0.9, 1.0]}),
    sizes={"x.rows": [2, 7, 64], "width": [3, 33, 768]},
)
def dropout(draw):
    dtype = draw.dtype()
    rows = draw.rows()
    arguments = dropout_arguments(draw)
    x = draw.tensor("x", (*rows, draw.width("width", rows, 0)), dtype, 2)

    def formula(x):
        return dropped(x, *arguments)

    return Call(
        f"dropout(x, {', '.join(map(str, arguments))})",
        lambda x: ops.dropout(x, *arguments),
        formula,
        formula,
        {"x": x},
        invocations=lambda: [
            invoke(ops.dropout, x, *arguments, 8),
            invoke(ops.dropout_mask, x.numel(), *arguments, 8),
        ],
    )
