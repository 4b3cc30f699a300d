"""Table entries of layernorm, and of layernorm after an addition to the residual stream."""

import math
from functools import partial

import torch
import torch.nn.functional as F

from gptkernels import functional as G
from gptkernels.testing.cases.elementwise import dropout_arguments, dropped
from gptkernels.testing.cases.table import ROWS, WIDTHS, Call, grid, invoke, largest_of, operator, ops, row_costs


def standardised(x, eps):
    """The mean is subtracted twice, which removes its rounding error."""
    centred = x - x.mean(-1, keepdim=True)
    centred = centred - centred.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)


def layernorm_formula(x, weight, bias, eps=1e-5):
    out = standardised(x, eps)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def residual_layernorm_formula(x, residual, weight, bias, eps=1e-5, dtype=torch.float64):
    """The norm reads the sum after it is rounded to ``dtype``."""
    total = x + residual
    rounding = total.detach().to(dtype).double() - total.detach()
    total = total + torch.where(total.isfinite(), rounding, 0)
    return layernorm_formula(total, weight, bias, eps), total


def norm_arguments(draw, inputs):
    dtype = draw.dtype()
    rows = draw.rows()
    dims = draw.choose("normalised dims", (1, 2), (9, 1))
    normalised = tuple(draw.size(f"normalised{i}", 12, 1) for i in range(dims - 1))
    normalised += (draw.width("width", (*rows, *normalised)),)
    huge = min(1e14, torch.finfo(dtype).max / 4)  # the sum of two such numbers does not overflow
    # A denormal weight is excluded, because dout * weight is rounded before it is multiplied by rstd, up to eps**-0.5.
    # A denormal bias is excluded, because our norm of equal numbers has larger errors (norm_noise).
    mixed = len(inputs) > 1 and draw.chance("mixed", 0.1) and dtype.itemsize == 2
    wide = torch.float32 if mixed else dtype
    args = {name: draw.tensor(name, (*rows, *normalised), dtype if name == "x" else wide, huge=huge) for name in inputs}
    for name in ("weight", "bias"):
        here = draw.chance(f"has {name}", 0.75)
        args[name] = draw.tensor(name, normalised, wide, special="nan", denormal=False) if here else None
    functional = (draw.chance("functional", 0.4) and not mixed) or dims > 1
    return args, normalised, draw.choose("eps", (1e-5, 1e-3, 1e-8)), functional


def flat(exact, dims):
    def function(*args):
        found = exact(*(None if t is None else t.flatten(-dims) for t in args[:-1]), args[-1])
        views = [t.reshape(args[0].shape) for t in (found if isinstance(found, tuple) else (found,))]
        return tuple(views) if isinstance(found, tuple) else views[0]

    return function


def torchs_layer_norm(x, shape, weight, bias, eps):
    """Call torch's function for at most 65536 rows at a time.

    Its backward on CUDA fails or writes outside its memory if there are more rows (docs/notes/layernorm.md).
    """
    rows = x.flatten(0, -len(shape) - 1) if x.dim() > len(shape) else x[None]
    parts = [F.layer_norm(part, shape, weight, bias, eps) for part in rows.split(2**16)]
    return torch.cat(parts).reshape(x.shape)


def norm_noise(args, eps):
    """Return the error that our norm of equal numbers may have: 2^-42 times their magnitude times rstd.

    Torch's norm of equal numbers is exactly 0.
    """
    return 2.0**-42 * largest_of(args) / math.sqrt(eps)


NORM_SIZES = {"x.rows": [2, 31, 64], "width": [4, 67, 768], "normalised dims": 1}
MIXED_WIDTHS = [1, 7, 8, 12, 33, 96, 127, 768, 1600, 4097, 8192]
NOTHING_ELSE = {"has weight": False, "has bias": False}


def layernorm_backward(dout, x, weight, mask):
    _, mean, rstd = ops.layernorm(x, weight, None)
    found = ops.layernorm_backward(dout, x, weight, mean, rstd, mask)
    return tuple(g for g, wanted in zip(found, mask, strict=True) if wanted)


def residual_backward(op, more, dout, dsum, total, weight=None):
    _, mean, rstd = ops.layernorm(total, weight, None)
    return op(dout, dsum, total, weight, mean, rstd, *more(total))


RESIDUAL_BACKWARDS = {
    "residual_layernorm_backward": lambda total: ([True] * 3,),
    "residual_layernorm_bias_backward": lambda total: ([True] * 4,),
    "residual_layernorm_dropout_backward": lambda total: (
        0.4,
        *(torch.tensor(n, device=total.device) for n in (5, 7)),
        [True] * 5,
    ),
}


@operator(
    costs=row_costs((2, 3), (8, 16)),
    edges=grid({"x.rows": ROWS, "width": WIDTHS})
    + grid({"x.rows": [64, 1000, 5000], "width": [96]})
    + grid({"x.rows": [5], "width": [768], "has weight": [True, False], "has bias": [True, False]}),
    autocast="float32 on CUDA",
    sizes=NORM_SIZES,
    variants={"": {}, "x alone": NOTHING_ELSE},
    functions={
        f"layernorm_backward, {name}": (partial(layernorm_backward, mask=mask), [(2, 4), (2, 4), (4,)])
        for name, mask in {
            "all": [True, True, True],
            "dx": [True, False, False],
            "dweight": [False, True, False],
        }.items()
    },
)
def layernorm(draw):
    args, shape, eps, functional = norm_arguments(draw, ("x",))
    exact = flat(layernorm_formula, len(shape))

    def invocations():
        x, weight, bias = args.values()
        out, mean, rstd = ops.layernorm(x, weight, bias, eps)
        backward = out, x, weight, mean, rstd, [True, weight is not None, bias is not None]
        return [invoke(ops.layernorm, x, weight, bias, eps), invoke(ops.layernorm_backward, *backward)]

    return Call(
        f"layernorm(x, weight, bias, {eps})",
        (lambda x, w, b: G.layer_norm(x, shape, w, b, eps))
        if functional
        else (lambda *args: ops.layernorm(*args, eps)[0]),
        lambda x, w, b: torchs_layer_norm(x, shape, w, b, eps),
        lambda *args: exact(*args, eps),
        args,
        tied=() if functional else ("x", "weight", "bias"),
        denormal_gradients=False,
        noise=lambda args, _: norm_noise(args, eps),
        invocations=invocations,
    )


@operator(
    costs=row_costs((4, 4), (9, 17)),
    edges=grid({"x.rows": ROWS, "width": WIDTHS, "has x_bias": [False, True], "dropout": [False, True]})
    + grid({"x.rows": [64, 1000, 5000], "width": [96], "has x_bias": [False, True]})
    + [
        {"x.rows": 400_000 // width, "width": width, "has x_bias": True, "dropout": True, "mixed": mixed}
        for width in [96, 512, 768, 1000, 1024, 1600, 2048, 3072, 4096, 8192]
        for mixed in (False, True)
    ]
    + grid({"x.rows": ROWS, "width": MIXED_WIDTHS, "has x_bias": [True], "mixed": [True], "dropout": [False, True]})
    + grid(
        {"x.rows": [300], "width": [96], "has x_bias": [True], "dropout": [True], "dropout_p": [1e-6, 0.5, 0.9, 1.0]}
    )
    + grid({"x.rows": [5], "width": [768], "has weight": [True, False], "has bias": [True, False]}),
    autocast="torch's steps",
    sizes=NORM_SIZES,
    variants={
        "": {},
        "x_bias": {"has x_bias": True},
        "dropout": {"has x_bias": True, "dropout": True},
        "sum alone": NOTHING_ELSE,
        "mixed": {"mixed": True, "has x_bias": True},
        "mixed, dropout": {"mixed": True, "has x_bias": True, "dropout": True},
    },
    functions={
        **{
            name: (partial(residual_backward, getattr(ops, name), more), [(2, 4), (2, 4), (2, 4), (4,)])
            for name, more in RESIDUAL_BACKWARDS.items()
        },
        **{
            f"{name}, dout and sum alone": (
                lambda dout, total, op=name, more=more: residual_backward(getattr(ops, op), more, dout, None, total)[0],
                [(2, 4), (2, 4)],
            )
            for name, more in RESIDUAL_BACKWARDS.items()
        },
    },
)
def residual_layernorm(draw):
    args, shape, eps, functional = norm_arguments(draw, ("x", "residual"))
    dtype, wide = args["x"].dtype, args["residual"].dtype
    args["x_bias"] = draw.tensor("x_bias", shape, wide, special="nan") if draw.chance("has x_bias", 0.4) else None
    exact = flat(partial(residual_layernorm_formula, dtype=wide), len(shape))
    p, seed, offset = dropout_arguments(draw, 0.4 if not functional else 0)

    def ours(x, residual, weight, bias, x_bias):
        if functional:
            return G.residual_layer_norm(x, residual, shape, weight, bias, eps, x_bias)
        return ops.residual_layernorm(x, residual, weight, bias, eps, x_bias, p, seed, offset)[:2]

    def drop(x, x_bias):
        x = x if x_bias is None else x + x_bias
        return x if p == 0 else dropped(x, p, seed, offset)

    def torchs(x, residual, weight, bias, x_bias):
        total = drop(x.to(residual.dtype), x_bias) + residual
        return torchs_layer_norm(total, shape, weight, bias, eps).to(x.dtype), total

    def invocations():
        x, residual, weight, bias, x_bias = args.values()
        options = eps, x_bias, p, seed, offset, 8
        out, total, mean, rstd = ops.residual_layernorm(x, residual, weight, bias, *options)
        saved = out, None, total, weight, mean, rstd
        wanted = [True, weight is not None, bias is not None, x_bias is not None, True]
        if p or wide != dtype:
            backward = [invoke(ops.residual_layernorm_dropout_backward, *saved, p, seed, offset, wanted, 8)]
        else:
            backward = [
                invoke(ops.residual_layernorm_backward, *saved, wanted[:3]),
                invoke(ops.residual_layernorm_bias_backward, *saved, wanted[:4]),
            ]
        return [invoke(ops.residual_layernorm, x, residual, weight, bias, *options), *backward]

    # The op supports a float32 residual with a 16-bit x, if all other arguments are float32 or absent.
    mixed = wide != dtype or (dtype.itemsize == 2 and args["weight"] is None and args["bias"] is None)
    return Call(
        f"residual_layernorm(x, residual, weight, bias, {eps}, x_bias, {p}, {seed}, {offset})",
        ours,
        torchs,
        lambda x, residual, weight, bias, x_bias: exact(drop(x, x_bias), residual, weight, bias, eps),
        args,
        tied=() if functional or mixed else ("x", "residual", "weight", "bias", "x_bias"),
        denormal_gradients=False,
        noise=lambda args, _: norm_noise(args, eps),
        invocations=invocations,
    )
