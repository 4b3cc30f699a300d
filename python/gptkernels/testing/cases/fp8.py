"""Table entries of quantisation to float8, and of operators with float8 matmuls."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gptkernels import functional as G
from gptkernels.rules.fp8 import CALLS, new_history
from gptkernels.testing.cases.loss import IGNORED_ROWS, classifier_arguments
from gptkernels.testing.cases.norm import NORM_SIZES
from gptkernels.testing.cases.products import linear_products
from gptkernels.testing.cases.table import Call, invoke, normal, operator, ops

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BFLOAT16 = [torch.bfloat16]
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def values(fp8):
    return torch.arange(256, dtype=torch.uint8).view(fp8).double()


def rounded(x, fp8):
    """Return the bit patterns of the float8 numbers nearest to x, ties to even, saturating; NaN if x is not finite."""
    grid = values(fp8)[:128].to(x.device)
    grid = grid[grid.isfinite()]
    magnitude = x.abs().nan_to_num(0.0, 0.0).clamp(max=grid[-1])
    above = torch.searchsorted(grid, magnitude).clamp(max=len(grid) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = grid[above] - magnitude, magnitude - grid[below]
    take_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    found = torch.where(take_above, above, below) + 128 * x.signbit()
    return torch.where(x.isfinite(), found, 127).to(torch.uint8)


def composed_norm(x, residual, weight, bias, history, x_bias):
    if residual is None:
        out, *statistics = ops.layernorm(x, weight, bias, 1e-5)
        sum = x.new_empty(0)
    else:
        out, sum, *statistics = ops.residual_layernorm(x, residual, weight, bias, 1e-5, x_bias)
    return *ops.fp8_quantize(out, history, E4M3, True), sum, *statistics


def fp8_dtype(draw):
    return draw.choose("dtype", DTYPES)


def fp8_size(draw, name, *others, most=20):
    return 16 * draw.size(f"{name} / 16", most, 1, real=draw.room(*others) // 16)


def fp8_history(draw, name):
    """Draw an amax history, or None. The history's amaxes may be smaller than the amax of its tensor."""
    kind = draw.choose(f"{name}.history", ("none", "new", "some", "full"))
    if kind == "none":
        return None
    history = new_history("cpu")
    count = {"new": 0, "some": 3, "full": CALLS}[kind]
    sizes = torch.rand(count, **draw.source(f"{name}.history")) * 10 ** draw.choose(f"{name}.size", (0, -3))
    history[CALLS - count : CALLS] = sizes.view(torch.int32)
    return history


def fp8_scale(x, fp8, history):
    """Return the scale by which x is divided before it is rounded, and x's amax: 0-dim float64 on x's device.

    The scale is the smallest power of two for which amax / scale does not exceed the format's largest number, which is
    7/8 of a power of two. amax is the history's largest, or x's if there is no earlier call.
    """
    own = x.detach().abs().where(x.isfinite(), 0.0).double()
    own = own.max() if x.numel() else own.sum()
    known = 0.0 if history is None else history.view(torch.float32)[:CALLS].max().item()
    fraction, exponent = torch.frexp(torch.full_like(own, known) if known else own)
    exponent = exponent - math.frexp(LARGEST[fp8])[1] + (fraction > 7 / 8)
    return torch.where(fraction == 0, 1.0, exponent.clamp(-126, 126).double().exp2()).float().double(), own


def exact_fp8(x, fp8, history):
    scale, _ = fp8_scale(x, fp8, history)
    return rounded(x.detach().double() / scale, fp8).view(fp8), scale


def torchs_fp8(x, fp8, history):
    scale, _ = fp8_scale(x, fp8, history)
    most = LARGEST[fp8]
    return (x.detach().float() / scale).clamp(-most, most).where(x.isfinite(), math.nan).to(fp8), scale


def exact_fp8_product(a, b, fast):
    return (a[0].double() * a[1]) @ (b[0].double() * b[1]).T


def torchs_fp8_product(a, b, fast):
    """Compute a @ b^T, on CUDA with tensor cores, whose sums have as few bits as the operator's."""
    (a, scale_a), (b, scale_b) = a, b
    if a.device.type == "cpu" or not a.numel():
        return (a.float() @ b.float().T) * (scale_a * scale_b)
    scales = [
        scale.float() if isinstance(scale, Tensor) else a.new_full((), scale, dtype=torch.float32)
        for scale in (scale_a, scale_b)
    ]
    return torch._scaled_mm(a.contiguous(), b.contiguous().t(), *scales, out_dtype=torch.float32, use_fast_accum=fast)


def fp8_transposed(pair):
    q, scale = pair
    bytes = F.pad(q.view(torch.uint8), (0, 0, 0, -len(q) % 16))
    return bytes.t().contiguous().view(q.dtype), scale


FAST_SUMS, SUMS = 2.0**-6, 2.0**-10  # relative errors of sums in float8 matmuls on tensor cores


class FP8Linear(torch.autograd.Function):
    """x (N, K), weight (M, K) -> (N, M) in float32 or float64, with the gradients that ``ops.fp8_linear`` computes.

    ``way`` is a pair of functions, which quantise and multiply.
    """

    @staticmethod
    def forward(ctx, x, weight, way, history, dout_history):
        quantise, multiply = way
        pairs = quantise(x, E4M3, history), quantise(weight, E4M3, None)
        ctx.way, ctx.pairs, ctx.history, ctx.dtypes = way, pairs, dout_history, (x.dtype, weight.dtype)
        return multiply(*pairs, True)

    @staticmethod
    def backward(ctx, dout):
        quantise, multiply = ctx.way
        dout = quantise(dout, E5M2, ctx.history)
        x, weight = ctx.pairs
        dx = multiply(dout, fp8_transposed(weight), True)
        dweight = multiply(fp8_transposed(dout), fp8_transposed(x), False)
        return dx.to(ctx.dtypes[0]), dweight.to(ctx.dtypes[1]), None, None, None


TORCHS_FP8, EXACT_FP8 = (torchs_fp8, torchs_fp8_product), (exact_fp8, exact_fp8_product)


@operator(weight=0.5, sizes={"x.rows": [2, 19, 96], "width": [3, 33, 256]}, dtypes=DTYPES)
def fp8_quantize(draw):
    dtype, fp8 = fp8_dtype(draw), draw.choose("format", (E4M3, E5M2))
    rows = draw.rows()
    x = draw.tensor("x", (*rows, draw.width("width", rows)), dtype)
    history = fp8_history(draw, "x")

    def read(pair):
        return pair[0].float() * pair[1]

    def ours(x):
        after = copied(history, x.device)
        q, q_t, scale = ops.fp8_quantize(x, after, fp8, True)
        return read((q, scale)), read((q_t, scale)), *(() if after is None else (after.view(torch.float32),))

    def formula(quantise, x):
        wide = x.float()
        q, scale = quantise(wide, fp8, history)
        q_t = fp8_transposed((q.reshape(-1, x.shape[-1]), scale))
        outs = read((q, scale)), read(q_t)
        if history is None:
            return outs
        before = copied(history, x.device).view(torch.float32)[1:CALLS]
        own = fp8_scale(wide, fp8, history)[1].float()
        return *outs, torch.cat([before, own[None], own.new_zeros(2)])

    return Call(
        f"fp8_quantize(x, history, {fp8}, True)",
        ours,
        partial(formula, torchs_fp8),
        lambda x: tuple(t.double() for t in formula(exact_fp8, x)),
        {"x": x},
        fixed=("x",),
        invocations=lambda: [invoke(ops.fp8_quantize, x, new_history(draw.device), fp8, True)],
    )


@operator(
    weight=0.5, sizes={"a.rows": [2, 19, 96], "inner / 16": [1, 3, 8], "columns / 16": [1, 2, 16]}, dtypes=BFLOAT16
)
def fp8_matmul(draw):
    dtype, fast = fp8_dtype(draw), draw.chance("fast_accumulation", 0.5)
    formats = draw.choose("formats", ((0, 0), (1, 0), (0, 1)))
    a_format, b_format = ((E4M3, E5M2)[i] for i in formats)
    rows = draw.rows("a")
    inner = fp8_size(draw, "inner", math.prod(rows))
    columns = fp8_size(draw, "columns", math.prod(rows), inner)
    scales = draw.choose("scale_a", (1.0, 2.0**-9, 4.0)), draw.choose("scale_b", (1.0, 0.5))
    args = {
        "a": draw.tensor("a", (*rows, inner), torch.float32, special="nan"),
        "b": draw.tensor("b", (columns, inner), torch.float32, special="none"),
        "bias": draw.tensor("bias", (columns,), dtype, special="nan") if draw.chance("has bias", 0.5) else None,
    }

    def to_format(x, fp8):
        return x.float().to(fp8)

    def invocation(a, b, bias):
        a, b = to_format(a, a_format).contiguous(), to_format(b, b_format).contiguous()
        return invoke(ops.fp8_matmul, a, b, *map(draw.number, scales), bias, dtype, fast)

    def ours(*args):
        op, args, _ = invocation(*args)
        return op(*args)

    def formula(multiply, a, b, bias):
        flat = to_format(a, a_format).reshape(-1, inner)
        product = multiply((flat, scales[0]), (to_format(b, b_format), scales[1]), fast)
        product = product if bias is None else product + bias
        return product.view(*a.shape[:-1], columns).to(dtype if multiply is torchs_fp8_product else torch.float64)

    def products(tensors):
        x, weight = (
            to_format(tensors["a"], a_format).double() * scales[0],
            to_format(tensors["b"], b_format).double() * scales[1],
        )
        return linear_products({**tensors, "x": x, "weight": weight}, (FAST_SUMS if fast else SUMS, 0.0))

    return Call(
        f"fp8_matmul({a_format}, {b_format}, {scales}, bias, {dtype}, {fast})",
        ours,
        partial(formula, torchs_fp8_product),
        partial(formula, exact_fp8_product),
        args,
        fixed=("a", "b", "bias"),
        any_threads=False,
        takes_floating_alone=False,
        products=products,
        invocations=lambda: [invocation(*args.values())],
    )


def new_histories(draw, count):
    return [new_history(draw.device) for _ in range(count)]


def with_copies(function, histories):
    return lambda *args: function(*args, *(copied(h, args[0].device) for h in histories))


def copied(history, device):
    return None if history is None else history.to(device, copy=True, non_blocking=True)


@operator(weight=0.5, sizes={**NORM_SIZES, "width": [4, 33, 256]}, dtypes=DTYPES)
def fp8_layernorm(draw):
    """The reference calls our ops, because the last bit of a norm can decide which float8 number is the nearest."""
    dtype, rows = fp8_dtype(draw), draw.rows()
    width = draw.width("width", rows)
    added = draw.chance("has residual", 0.7)
    args = {name: draw.tensor(name, (*rows, width), dtype, special="nan") for name in ("x", "residual")}
    for name in ("weight", "bias", "x_bias"):
        here = draw.chance(f"has {name}", 0.7)
        args[name] = draw.tensor(name, (width,), dtype, special="nan") if here else None
    if not added:
        args["residual"] = args["x_bias"] = None
    history = fp8_history(draw, "x")

    def read(outputs, history):
        q, q_t, scale, *others = outputs
        return (
            q.float() * scale,
            q_t.float() * scale,
            *others,
            *(() if history is None else (history.view(torch.float32),)),
        )

    def ours(x, residual, weight, bias, x_bias, history):
        return read(ops.fp8_layernorm(x, residual, weight, bias, history, True, 1e-5, x_bias), history)

    def parts(*args):
        *args, x_bias, history = (t if t is None or not t.is_floating_point() else t.to(dtype) for t in args)
        return read(composed_norm(*args, history, x_bias), history)

    return Call(
        "fp8_layernorm(x, residual, weight, bias, history, True, 1e-5, x_bias)",
        with_copies(ours, [history]),
        with_copies(parts, [history]),
        lambda *args: tuple(t.double() for t in with_copies(parts, [history])(*args)),
        args,
        fixed=tuple(args),
        tied=tuple(args),
        invocations=lambda: [
            invoke(ops.fp8_layernorm, *list(args.values())[:4], new_history(draw.device), True, 1e-5, args["x_bias"])
        ],
    )


@operator(
    autocast="lower",
    weight=0.5,
    sizes={"x.rows": [2, 19, 96], "inner / 16": [1, 3, 8], "outer / 16": [1, 2, 16]},
    dtypes=BFLOAT16,
)
def fp8_linear(draw):
    dtype, rows = fp8_dtype(draw), draw.rows()
    inner = fp8_size(draw, "inner", math.prod(rows))
    outer = fp8_size(draw, "outer", math.prod(rows), inner)
    args = {
        "x": draw.tensor("x", (*rows, inner), dtype, special="nan"),
        "weight": draw.tensor("weight", (outer, inner), dtype, inner**-0.5, special="none"),
        "bias": draw.tensor("bias", (outer,), dtype, special="nan") if draw.chance("has bias", 0.7) else None,
    }
    histories = [fp8_history(draw, of) for of in ("x", "dout")]

    def invocations():
        x_history, dout_history = new_histories(draw, 2)
        _, *saved = ops.fp8_linear(args["x"], args["weight"], None, None, None, [True] * 2)
        dout = normal(draw, "dout", *rows, outer)
        x_t, _, x_scale, _ = saved
        dout_8, _, dout_scale = ops.fp8_quantize(dout, None, E5M2)
        dweight = torch.zeros(outer, inner, device=dout.device)
        return [
            invoke(ops.fp8_linear_dweight_, dout_8, x_t, dout_scale, x_scale, dweight, True),
            invoke(ops.fp8_linear, *args.values(), x_history, dout_history, [True] * 2),
            invoke(ops.fp8_linear_backward, dout, *saved, dout_history, [True] * 3),
        ]

    def formula(way, x, weight, bias):
        product = FP8Linear.apply(x.reshape(-1, inner), weight, way, *histories)
        product = product if bias is None else product + bias
        return product.view(*x.shape[:-1], outer).to(x.dtype)

    def products(tensors):
        """The operands of the matmuls are rounded to float8."""
        read = {name: t for name, t in tensors.items() if name != "dbias"}  # dbias is the sum of dout before rounding
        forms = (E4M3, histories[0]), (E4M3, None), (E5M2, histories[1])
        for name, form in zip(("x", "weight", "dout"), forms, strict=True):
            q, scale = torchs_fp8(tensors[name], *form)
            read[name] = q.double() * scale
        return linear_products(read, (FAST_SUMS, SUMS))

    return Call(
        "fp8_linear(x, weight, bias, histories)",
        with_copies(G.fp8_linear, histories),
        partial(formula, TORCHS_FP8),
        partial(formula, EXACT_FP8),
        args,
        any_threads=False,
        tied=("x", "weight"),
        products=products,
        invocations=invocations,
    )


@operator(
    autocast="lower",
    weight=0.5,
    sizes={"x.rows": [2, 19, 96], "width / 16": [1, 2, 4], "hidden / 16": [1, 3, 16]},
    dtypes=BFLOAT16,
)
def fp8_mlp(draw):
    """The reference calls our ops, because the last bit of a GELU can decide which float8 number is the nearest."""
    dtype, rows = fp8_dtype(draw), draw.rows()
    width = fp8_size(draw, "width", math.prod(rows), most=8)
    hidden = fp8_size(draw, "hidden", math.prod(rows), width)
    arguments = {"x": draw.tensor("x", (*rows, width), dtype, special="nan")}
    for name, shape in ("fc", (hidden, width)), ("proj", (width, hidden)):
        bias = draw.chance(f"has {name}_bias", 0.7)
        arguments[f"{name}_weight"] = draw.tensor(f"{name}_weight", shape, dtype, shape[1] ** -0.5, special="none")
        arguments[f"{name}_bias"] = draw.tensor(f"{name}_bias", shape[:1], dtype, special="nan") if bias else None
    histories = [fp8_history(draw, of) for of in ("x", "hidden", "dhidden", "dout")]

    def invocations():
        _, *saved = ops.fp8_mlp(*arguments.values(), *[None] * 4, [True] * 4)
        new, dout = new_histories(draw, 4), normal(draw, "dout", *rows, width)
        return [
            invoke(ops.fp8_mlp, *arguments.values(), *new, [True] * 4),
            invoke(ops.fp8_mlp_backward, dout, *saved, *new[2:], [True] * 5),
        ]

    def parts(x, fc, fc_bias, proj, proj_bias, history, hidden, dhidden, dout):
        x, fc, fc_bias, proj, proj_bias = (t if t is None else t.to(dtype) for t in (x, fc, fc_bias, proj, proj_bias))
        post = G.gelu(G.fp8_linear(x, fc, fc_bias, history, dhidden), approximate="tanh")
        return G.fp8_linear(post, proj, proj_bias, hidden, dout)

    return Call(
        "fp8_mlp(x, fc_weight, fc_bias, proj_weight, proj_bias, histories)",
        with_copies(G.fp8_mlp, histories),
        with_copies(parts, histories),
        lambda *args: with_copies(parts, histories)(*args).to(args[0].dtype),
        arguments,
        any_threads=False,
        invocations=invocations,
    )


@operator(
    weight=0.5,
    sizes={**IGNORED_ROWS, "width": 16, "columns / 16": [1, 13, 64], "inner / 16": [1, 3, 4]},
    variants={"": {}, "float8 logits": {"fp8_logits": True, "reduction": "sum", "chunk_size": 16}},
    dtypes=DTYPES,
)
def fp8_linear_cross_entropy(draw):
    """The reference calls our ops, because a logit's last bit can decide how its gradient is rounded."""
    dtype = draw.choose("dtype", DTYPES)
    wide = torch.float32 if dtype == torch.float16 else dtype
    rows, _, _, ignore_index, targets = classifier_arguments(draw)
    width = fp8_size(draw, "columns", math.prod(rows), most=200)
    inner = fp8_size(draw, "inner", math.prod(rows), width, most=8)
    vocab_size = width - draw.size("padding", 15) if draw.chance("padded columns", 0.5) else width
    targets = targets.where(targets == ignore_index, targets % vocab_size)
    reduction = draw.choose("reduction", ("mean", "sum"))
    chunk_size = draw.choose("chunk_size", (-1, 1, 16, 40))
    if chunk_size != -1:
        chunk_size = max(chunk_size, math.prod(rows) // 30)
    rows_of_chunk = math.ceil(chunk_size / 16) * 16 if chunk_size > 0 else -1
    fp8_logits = draw.chance("fp8_logits", 0.5)
    options = vocab_size, ignore_index, reduction, chunk_size
    # If all targets are ignored, the gradients' factor is 0. cuBLASLt may then return 0 where x is NaN.
    special = "nan" if (targets != ignore_index).any() else "none"
    x = draw.tensor("x", (*rows, inner), dtype, special=special, denormal=False)
    weight = draw.tensor("weight", (width, inner), dtype, inner**-0.5, special="none", denormal=False)

    def ours(x, weight, targets):
        return ops.fp8_linear_cross_entropy_with_gradients(x, weight, targets, *options, fp8_logits, [True, True])

    def logits_of(x, weight, chunk):
        if not fp8_logits:
            return [ops.linear(some, weight) for some in x.split(chunk)]
        (x, _, scale_x), (weight, _, scale) = (ops.fp8_quantize(t, None, E4M3, True) for t in (x, weight))
        return [ops.fp8_matmul(some, weight, scale_x, scale, None, dtype, True) for some in x.split(chunk)]

    def parts(multiply, nudge, x, weight, targets):
        x, weight = x.to(dtype), weight.to(dtype)
        flat, classes = x.reshape(-1, inner), targets.reshape(-1)
        chunk = max(len(flat), 1) if rows_of_chunk == -1 else rows_of_chunk
        losses, dlogits = zip(
            *(
                ops.fused_classifier(logits.float(), of_some, vocab_size, ignore_index)
                for logits, of_some in zip(logits_of(flat, weight, chunk), classes.split(chunk), strict=True)
            ),
            strict=True,
        )
        d = (torch.cat(dlogits) * (2.0**15 * nudge)).to(E5M2)
        count = (classes != ignore_index).sum().double()
        factor = 2.0**-15 * (1.0 if reduction == "sum" else torch.where(count == 0, 0.0, 1 / count))
        w_t, x_t = (ops.fp8_quantize(t.contiguous(), None, E4M3, True)[1:] for t in (weight, flat))
        dx = multiply((d, factor), w_t, False).view(x.shape)
        dweight = sum(
            multiply(fp8_transposed((some, factor)), (some_x, x_t[1]), False)
            for some, some_x in zip(d.split(chunk), x_t[0].split(math.ceil(chunk / 16) * 16, 1), strict=True)
        )
        loss = ops.linear_cross_entropy(x, weight, targets, vocab_size, ignore_index, reduction, rows_of_chunk)
        if fp8_logits:
            total = torch.cat(losses).double().sum()
            loss = (total if reduction == "sum" else total / count).float()
        return loss, *((dx, dweight) if multiply is exact_fp8_product else (dx.to(wide), dweight.to(wide)))

    return Call(
        f"fp8_linear_cross_entropy_with_gradients(x, weight, targets, {options}, {fp8_logits}, [True, True])",
        ours,
        partial(parts, torchs_fp8_product, 1 + 2.0**-20),
        lambda *args: tuple(t.double() for t in parts(exact_fp8_product, 1.0, *args)),
        {"x": x, "weight": weight, "targets": targets},
        fixed=("x", "weight"),
        any_threads=False,
        tied=("x", "weight"),
        invocations=lambda: [
            invoke(ops.fp8_linear_cross_entropy, x, weight, targets, *options, fp8_logits),
            invoke(ops.fp8_linear_cross_entropy_with_gradients, x, weight, targets, *options, fp8_logits, [True] * 2),
        ],
    )
