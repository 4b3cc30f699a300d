"""Table entries of the linear layer and the MLP."""

import math

import torch
import torch.nn.functional as F

from gptkernels import functional as G
from gptkernels.testing.cases.elementwise import gelu_formula
from gptkernels.testing.cases.table import ROWS, Call, Cost, grid, invoke, nbytes, normal, operator, ops

LONG_SUM = 2**13
# (K, M): every size of WIDTHS as K or M.
LINEAR_SIZES = [
    (1, 1), (1, 50257), (2, 3), (3, 2), (7, 17), (17, 768), (33, 127), (127, 33), (768, 7), (3, 1600), (1600, 33),
    (17, 4097), (4097, 3), (50257, 2), (64, 256),
]  # fmt: skip
# (C, F): cuBLASLt fuses bias and GELU if C and F are multiples of 8.
MLP_SIZES = [
    (1, 1), (2, 3), (3, 8), (7, 17), (8, 50257), (17, 7), (33, 127), (127, 33), (3, 768), (768, 7), (8, 1600),
    (1600, 8), (17, 4097), (4097, 3), (64, 256),
]  # fmt: skip


class Linear(torch.autograd.Function):
    """A linear layer and its gradients, with the BLAS calls of our ops, so that the rounding errors are equal.

    F.linear may make other BLAS calls, such as that of a matrix-vector product for one row. ``chunk`` is the number of
    rows of x (or dout) in each BLAS call for out and dx.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, chunk):
        ctx.save_for_backward(x, weight, bias)
        ctx.chunk = chunk or max(len(x), 1)
        parts = x.split(ctx.chunk)
        return torch.cat([p.mm(weight.T) if bias is None else torch.addmm(bias, p, weight.T) for p in parts])

    @staticmethod
    def backward(ctx, dout):
        x, weight, bias = ctx.saved_tensors
        dx = torch.cat([part.mm(weight) for part in dout.split(ctx.chunk)])
        return dx, dout.T.mm(x), None if bias is None else dout.sum(0), None


def linear_products(tensors, accumulation=(0.0, 0.0)):
    """Yield the arguments of ``assert_product`` for each matmul of a linear layer.

    ``accumulation`` has the relative errors of sums over features and of sums over rows.
    """
    matrices = {
        name: tensors[name].flatten(0, -2) if tensors[name].dim() > 1 else tensors[name][None]
        for name in ("x", "weight", "out", "dout", "dx", "dweight")
        if name in tensors
    }
    x, weight, dout = matrices["x"], matrices["weight"], matrices.get("dout")
    over_features, over_rows = accumulation
    yield matrices["out"], x, weight.T, tensors["bias"], "out", over_features
    if "dx" in matrices:
        yield matrices["dx"], dout, weight, None, "dx", over_features
    if "dweight" in matrices:
        yield matrices["dweight"], dout.T, x, None, "dweight", over_rows
    if "dbias" in tensors:
        yield tensors["dbias"][None], dout.new_ones(1, len(dout)), dout, None, "dbias"


def linear_costs(x, weight, bias):
    rows, products = x.numel() // x.shape[-1], 2 * x.numel() * weight.shape[0]
    out = rows * weight.shape[0] * x.element_size()
    return Cost(nbytes(x, weight, bias) + out, products), Cost(2 * nbytes(x, weight) + out, 2 * products)


def mlp_costs(x, *weights):
    rows, hidden = x.numel() // x.shape[-1], weights[0].shape[0]
    pre_gelu, products = rows * hidden * x.element_size(), 4 * x.numel() * hidden
    forward = Cost(2 * nbytes(x) + nbytes(*weights) + 2 * pre_gelu, products)
    return forward, Cost(3 * nbytes(x) + 2 * nbytes(*weights) + 2 * pre_gelu, 2 * products)


def torchs_linear(x, weight, bias=None, chunk=None):
    rows = Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, chunk)
    return rows.view(*x.shape[:-1], weight.shape[0])


@operator(
    costs=linear_costs,
    edges=[{"x.rows": rows, "inner": inner, "width": width} for inner, width in LINEAR_SIZES for rows in ROWS]
    + grid({"x.rows": [64, 1000, 5000], "inner": [48], "width": [40]})
    + grid({"x.rows": [5], "inner": [33], "width": [127], "has bias": [False]}),
    autocast="lower",
    sizes={"x.rows": [2, 19, 96], "inner": [3, 33, 128], "width": [2, 21, 256]},
    variants={"": {}, "no bias": {"has bias": False}},
    functions={
        "linear_backward": (lambda *args: ops.linear_backward(*args, [True] * 3), [(2, 4), (2, 3), (4, 3)]),
        "linear, three dimensions": (lambda *args: ops.linear(*args), [(2, 2, 3), (4, 3)]),
    },
)
def linear(draw):
    dtype = draw.dtype()
    rows = draw.rows()
    n = math.prod(rows)
    inner = draw.width("inner", rows, real=draw.room(n))
    width = draw.size("width", max(draw.most_elements // max(inner, n), 16), 1, real=draw.room(n, inner))
    # x86's instruction for bfloat16 (vdpbf16ps) reads denormals as 0, and 0 times infinity is NaN.
    denormal = dtype != torch.bfloat16 or draw.device.type != "cpu"
    args = {
        "x": draw.tensor("x", (*rows, inner), dtype, denormal=denormal),
        "weight": draw.tensor("weight", (width, inner), dtype, inner**-0.5, denormal=denormal),
        "bias": draw.tensor("bias", (width,), dtype) if draw.chance("has bias", 0.7) else None,
    }
    return Call(
        "linear(x, weight, bias)",
        G.linear if draw.chance("functional", 0.5) else ops.linear,
        torchs_linear,
        F.linear,
        args,
        any_threads=False,
        tied=("x", "weight"),
        denormal_gradients=denormal,
        torchs_splits=dtype == torch.float32 and max(n, inner, width) > LONG_SUM,
        products=linear_products,
        invocations=lambda: [
            invoke(ops.linear, *args.values()),
            invoke(
                ops.linear_backward,
                normal(draw, "dout", *rows, width),
                args["x"],
                args["weight"],
                [True, True, args["bias"] is not None],
            ),
            invoke(
                ops.linear_dweight_,
                normal(draw, "dout", *rows, width),
                args["x"],
                normal(draw, "dweight", width, inner).contiguous(),
                True,
            ),
        ],
    )


def mlp_backward(dout, x, fc, proj, fc_bias=None):
    _, pre_gelu, post_gelu = ops.mlp(x, fc, fc_bias, proj, None)
    return ops.mlp_backward(dout, x, fc, proj, pre_gelu, post_gelu, [True] * 5)


def mlp_formula(x, fc_weight, fc_bias, proj_weight, proj_bias):
    hidden = x @ fc_weight.T + (0 if fc_bias is None else fc_bias)
    return gelu_formula(hidden) @ proj_weight.T + (0 if proj_bias is None else proj_bias)


@operator(
    costs=mlp_costs,
    edges=[{"x.rows": rows, "width": width, "hidden": hidden} for width, hidden in MLP_SIZES for rows in ROWS]
    + grid({"x.rows": [64, 1000], "width": [16], "hidden": [48, 36]})
    + grid({"x.rows": [5], "width": [24], "hidden": [96, 100], "fc bias": [True, False], "proj bias": [True, False]})
    + grid({"x.rows": [5], "width": [24], "hidden": [64], "another width out": [True], "out": [40]}),
    autocast="lower",
    sizes={"x.rows": [2, 19, 96], "width": [2, 33, 64], "hidden": [3, 65, 256]},
    variants={"": {}, "no biases": {"fc bias": False, "proj bias": False}},
    functions={
        "mlp, all outputs": (lambda *args: ops.mlp(*args), [(2, 3), (4, 3), (4,), (2, 4), (2,)]),
        "mlp_backward": (mlp_backward, [(2, 3), (2, 2), (4, 2), (3, 4), (4,)]),
        "mlp_backward, no bias": (mlp_backward, [(2, 3), (2, 2), (4, 2), (3, 4)]),
    },
)
def mlp(draw):
    dtype = draw.dtype()
    rows = draw.rows()
    n = math.prod(rows)
    width = draw.size("width", 80, 1, real=draw.room(n))
    hidden = draw.size("hidden", 200, 1, real=draw.room(n, width))
    another = draw.chance("another width out", 0.3)
    out = draw.size("out", 80, 1, real=draw.room(n, hidden)) if another else width
    args = {
        "x": draw.tensor("x", (*rows, width), dtype, special="nan"),
        "fc_weight": draw.tensor("fc_weight", (hidden, width), dtype, width**-0.5, special="nan"),
        "fc_bias": draw.tensor("fc_bias", (hidden,), dtype, special="nan") if draw.chance("fc bias", 0.7) else None,
        "proj_weight": draw.tensor("proj_weight", (out, hidden), dtype, hidden**-0.5, special="nan"),
        "proj_bias": draw.tensor("proj_bias", (out,), dtype, special="nan") if draw.chance("proj bias", 0.7) else None,
    }
    recompute_gelu = draw.chance("recompute_gelu", 0.3)

    def products(tensors):
        """The matmuls that read the gradient of pre_gelu are missing, because this gradient is not an output."""
        pre_gelu, post_gelu = (t.to(tensors["x"].device) for t in ops.mlp(*args.values())[1:])
        first = {"x": tensors["x"], "weight": tensors["fc_weight"], "bias": tensors["fc_bias"], "out": pre_gelu}
        second = {"x": post_gelu, "weight": tensors["proj_weight"], "bias": tensors["proj_bias"]}
        second |= {name: tensors[name] for name in ("out", "dout")}
        kept = {"dbias": "dproj_bias"} | ({} if recompute_gelu else {"dweight": "dproj_weight"})
        second |= {name: tensors[of] for name, of in kept.items() if of in tensors}
        return [*linear_products(first), *linear_products(second)]

    def invocations():
        x, fc_weight, fc_bias, proj_weight, proj_bias = args.values()
        dout, pre_gelu, post_gelu = ops.mlp(*args.values())
        wanted = [True, True, fc_bias is not None, True, proj_bias is not None]
        return [
            invoke(ops.mlp, *args.values()),
            invoke(ops.mlp_backward, dout, x, fc_weight, proj_weight, pre_gelu, post_gelu, wanted),
        ]

    return Call(
        f"mlp(x, fc_weight, fc_bias, proj_weight, proj_bias, {recompute_gelu})",
        lambda *args: G.mlp(*args, recompute_gelu),
        lambda x, *ws: torchs_linear(F.gelu(torchs_linear(x, *ws[:2]), approximate="tanh"), *ws[2:]),
        mlp_formula,
        args,
        any_threads=False,
        tied=("x", "fc_weight"),
        torchs_splits=dtype == torch.float32 and max(n, width, hidden, out) > LONG_SUM,
        products=products,
        invocations=invocations,
    )
