"""The table of operators: how to draw a call of each, what torch answers, and the formula in float64.

To add an operator, write a function that draws its arguments and returns a ``Call``, and mark it with ``@entry``.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import test_causal_softmax
import test_dropout
import test_fp8
import test_gelu
import test_layernorm
import test_mlp
import test_residual_layernorm
import test_sample
import test_softmax
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gptkernels.functional as G

ops = torch.ops.gptkernels


@dataclasses.dataclass
class Call:
    """One call. The three functions take all of ``args`` and return a tensor or several.

    Attributes:
        text: the call for a reader.
        ours: the operator.
        torchs: torch's own kernels in the same dtype.
        exact: the formula, called with float64 in place of each floating argument.
        args: name -> tensor, or None for what is absent.
        fixed: the arguments that never ask for a gradient.
        any_threads: the bits do not depend on the number of threads (torch's BLAS has no part).
        tied: arguments that share their dtype and last dimension; breaking that must be an error.
        nan_gradients: a NaN in the result's gradient shows in all that the formula makes of it. Not so for the losses,
            where an exact 0 stays 0 whatever it is multiplied by.
        denormal_gradients: the results' gradients may all be denormal.
        takes_floating_alone: an integer in place of a floating argument must be an error.
        products: arguments of ``assert_product`` for each product of the call, from all its tensors by name: the
            arguments, "out", "dout" and the gradients that are wanted.
    """

    text: str
    ours: Callable
    torchs: Callable
    exact: Callable
    args: dict[str, Tensor | None]
    fixed: tuple[str, ...] = ()
    any_threads: bool = True
    tied: tuple[str, ...] = ()
    nan_gradients: bool = True
    denormal_gradients: bool = True
    takes_floating_alone: bool = True
    products: Callable = lambda tensors: []


ENTRIES = {}


def entry(function=None, *, weight=1.0):
    """Put this function into the table, with a share of the calls."""
    if function is None:
        return partial(entry, weight=weight)
    ENTRIES[function.__name__] = (function, weight)
    return function


# ---- elementwise and rows -------------------------------------------------------------------------------------------


@entry
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
        lambda x: test_gelu.exact(x, approximate),
        {"x": x},
    )


@entry
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
        lambda x: test_softmax.exact(x.movedim(dim, -1)).movedim(-1, dim) if x.numel() else x * 1,
        {"x": x},
    )


@entry
def causal_softmax(draw):
    dtype = draw.dtype()
    lead = draw.rows("lead", 3)
    most = max(int(math.sqrt(draw.most_elements / max(math.prod(lead), 1))), 4)
    tokens = draw.size("tokens", most, real=most)
    scale = draw.choose("scale", (1.0, 0.125, -0.5, 0.0, 3.0))
    scores = draw.tensor("scores", (*lead, tokens, tokens), dtype, 3)

    def alone(function):
        """What is above the diagonal takes no part, neither in a row of NaN nor in the gradient."""

        def of(scores):
            if not scores.numel():
                return scores * 1
            below = torch.ones(tokens, tokens, dtype=torch.bool, device=scores.device).tril()
            return torch.where(below, function(torch.where(below, scores, 0.0), scale), 0.0)

        return of

    return Call(
        f"causal_softmax(scores, {scale})",
        partial(G.causal_softmax if draw.chance("functional", 0.5) else ops.causal_softmax, scale=scale),
        alone(test_causal_softmax.torchs),
        alone(test_causal_softmax.exact),
        {"scores": scores},
    )


def norm_arguments(draw, inputs):
    """Inputs, weight, bias, how many dimensions are normalised, and eps."""
    dtype = draw.dtype()
    rows = draw.rows()
    dims = draw.choose("normalised dims", (1, 2), (9, 1))
    normalised = tuple(draw.size(f"normalised{i}", 12, 1) for i in range(dims - 1))
    normalised += (draw.width("width", (*rows, *normalised)),)
    huge = min(1e14, torch.finfo(dtype).max / 4)  # two of which do not overflow
    # No denormal weights and gradients: their product, rounded, is still to be multiplied by up to eps**-0.5.
    args = {name: draw.tensor(name, (*rows, *normalised), dtype, huge=huge) for name in inputs}
    for name in ("weight", "bias"):
        here = draw.chance(f"has {name}", 0.75)
        args[name] = draw.tensor(name, normalised, dtype, special="nan", denormal=name == "bias") if here else None
    return args, normalised, draw.choose("eps", (1e-5, 1e-3, 1e-8)), draw.chance("functional", 0.4) or dims > 1


def flat(exact, dims):
    """The formula over one dimension, of several as one."""

    def function(*args):
        found = exact(*(None if t is None else t.flatten(-dims) for t in args[:-1]), args[-1])
        views = [t.reshape(args[0].shape) for t in (found if isinstance(found, tuple) else (found,))]
        return tuple(views) if isinstance(found, tuple) else views[0]

    return function


def torchs_layer_norm(x, shape, weight, bias, eps):
    """F.layer_norm, never without weight and bias: its backward on CUDA then fails for more than 65 536 rows."""
    weight = x.new_ones(shape) if weight is None else weight
    return F.layer_norm(x, shape, weight, x.new_zeros(shape) if bias is None else bias, eps)


@entry
def layernorm(draw):
    args, shape, eps, functional = norm_arguments(draw, ("x",))
    exact = flat(test_layernorm.exact, len(shape))
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
    )


def dropout_arguments(draw, chance=1.0):
    """A probability, 0 in the other calls, and the numbers."""
    if not draw.chance("dropout", chance):
        return 0.0, None, None
    p = draw.choose("dropout_p", (0.1, 0.5, 0.0, 0.9, 1e-6, 1.0))
    words = draw.random("seed and offset")
    return p, *(draw.number(words.getrandbits(64) - 2**63, torch.int64) for _ in range(2))


@entry
def dropout(draw):
    dtype = draw.dtype()
    rows = draw.rows()
    arguments = dropout_arguments(draw)
    formula = partial(test_dropout.dropped, **dict(zip(("p", "seed", "offset"), arguments, strict=True)))
    return Call(
        f"dropout(x, {', '.join(map(str, arguments))})",
        lambda x: ops.dropout(x, *arguments),
        formula,
        formula,
        {"x": draw.tensor("x", (*rows, draw.width("width", rows, 0)), dtype, 2)},
    )


@entry
def residual_layernorm(draw):
    args, shape, eps, functional = norm_arguments(draw, ("x", "residual"))
    dtype = args["x"].dtype
    args["x_bias"] = draw.tensor("x_bias", shape, dtype, special="nan") if draw.chance("has x_bias", 0.4) else None
    exact = flat(partial(test_residual_layernorm.exact, dtype=dtype), len(shape))
    p, seed, offset = dropout_arguments(draw, 0.4 if not functional else 0)

    def ours(x, residual, weight, bias, x_bias):
        if functional:
            return G.residual_layer_norm(x, residual, shape, weight, bias, eps, x_bias)
        return ops.residual_layernorm(x, residual, weight, bias, eps, x_bias, p, seed, offset)[:2]

    def drop(x, x_bias):
        x = x if x_bias is None else x + x_bias
        return x if p == 0 else test_dropout.dropped(x, p, seed, offset)

    def torchs(x, residual, weight, bias, x_bias):
        total = drop(x, x_bias) + residual
        return torchs_layer_norm(total, shape, weight, bias, eps), total

    # A float32 residual is taken beside a 16-bit x, if all else is float32 too, or absent.
    mixed = dtype.itemsize == 2 and args["weight"] is None and args["bias"] is None
    return Call(
        f"residual_layernorm(x, residual, weight, bias, {eps}, x_bias, {p}, {seed}, {offset})",
        ours,
        torchs,
        lambda x, residual, weight, bias, x_bias: exact(drop(x, x_bias), residual, weight, bias, eps),
        args,
        tied=() if functional or mixed else ("x", "residual", "weight", "bias", "x_bias"),
        denormal_gradients=False,
    )


# ---- embeddings -----------------------------------------------------------------------------------------------------


@entry
def encoder(draw):
    dtype = draw.dtype()
    batch, length = draw.size("batch", 40, real=64), draw.size("length", 40, real=1100)
    vocabulary, more = draw.size("vocabulary", 300, 1, real=60_000), draw.size("more positions", 9)
    width = draw.width("width", (max(batch * length, vocabulary),))
    args = {
        "tokens": draw.indices("tokens", (batch, length), vocabulary),
        "wte": draw.tensor("wte", (vocabulary, width), dtype, huge=1e300),
        "wpe": draw.tensor("wpe", (length + more, width), dtype, huge=1e300),
    }

    def formula(tokens, wte, wpe):
        return F.embedding(tokens, wte) + wpe[: tokens.shape[-1]]

    return Call("encoder(tokens, wte, wpe)", ops.encoder, formula, formula, args, tied=("wte", "wpe"))


@entry
def embedding(draw):
    dtype = draw.dtype()
    rows = draw.rows()
    vocabulary = draw.size("vocabulary", 1000, 1, real=60_000)
    width = draw.width("width", (max(math.prod(rows), vocabulary),))
    tokens = draw.indices("tokens", rows, vocabulary)
    return Call(
        "embedding(tokens, weight)",
        G.embedding if draw.chance("functional", 0.5) else ops.embedding,
        F.embedding,
        F.embedding,
        {"tokens": tokens, "weight": draw.tensor("weight", (vocabulary, width), dtype, huge=1e300)},
    )


# ---- matrices -------------------------------------------------------------------------------------------------------


class Linear(torch.autograd.Function):
    """x @ weight.T + bias of matrices, and its gradients, by the calls of torch's BLAS that our operators make.

    Other calls round in other ways: F.linear takes one row for a vector. ``chunk`` is how many rows go together.
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
    """The products of a linear layer, for ``Call.products``.

    ``accumulation`` is for the sums over features, and for those over rows.
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


def torchs_linear(x, weight, bias=None, chunk=None):
    rows = Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, chunk)
    return rows.view(*x.shape[:-1], weight.shape[0])


@entry
def linear(draw):
    dtype = draw.dtype()
    rows = draw.rows()
    n = math.prod(rows)
    inner = draw.width("inner", rows, real=draw.room(n))
    width = draw.size("width", max(draw.most_elements // max(inner, n), 16), 1, real=draw.room(n, inner))
    # x86's products of bfloat16 (vdpbf16ps) take denormals for 0, and 0 times infinity is NaN.
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
        products=linear_products,
    )


@entry
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
        """All but those of the gradient between the two layers, which nobody sees."""
        pre_gelu, post_gelu = (t.to(tensors["x"].device) for t in ops.mlp(*args.values())[1:])
        first = {"x": tensors["x"], "weight": tensors["fc_weight"], "bias": tensors["fc_bias"], "out": pre_gelu}
        second = {"x": post_gelu, "weight": tensors["proj_weight"], "bias": tensors["proj_bias"]}
        second |= {name: tensors[name] for name in ("out", "dout")}
        kept = {"dbias": "dproj_bias"} | ({} if recompute_gelu else {"dweight": "dproj_weight"})
        second |= {name: tensors[of] for name, of in kept.items() if of in tensors}
        return [*linear_products(first), *linear_products(second)]

    return Call(
        f"mlp(x, fc_weight, fc_bias, proj_weight, proj_bias, {recompute_gelu})",
        lambda *args: G.mlp(*args, recompute_gelu),
        lambda x, *ws: torchs_linear(F.gelu(torchs_linear(x, *ws[:2]), approximate="tanh"), *ws[2:]),
        test_mlp.exact,
        args,
        any_threads=False,
        tied=("x", "fc_weight"),
        products=products,
    )


# ---- attention ------------------------------------------------------------------------------------------------------


def attention_formula(q, k, v, scale=None, product=torch.matmul, seen=None, added=None, kept=None):
    """(..., T, HS) each; ``seen`` says which keys each query sees, None is causal; ``added`` is for scaled scores,
    ``kept`` the factors of the probabilities that dropout gives."""
    scores = product(q, k.mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if added is not None:
        scores = scores + added.masked_fill(added == -math.inf, 0)
    seen = causal(q) if seen is None else seen
    nothing = ~seen.any(-1, keepdim=True)
    p = scores.masked_fill(~seen, -math.inf).masked_fill(nothing, 0).softmax(-1)
    p = p.masked_fill(nothing, 0)
    return product(p if kept is None else p * kept, v)


def causal(q):
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()


MOST_SCORES = 2**25  # of the sequences whose formula is computed together


def by_sequences(function, scores, *args):
    """``function`` of some sequences after the other, and again in the backward, so that few scores are in memory.

    Args:
        function: of tensors (B, ...), or (1, ...) for all sequences alike, or None.
        scores: of one sequence.
        args: its arguments.
    """
    batch, each = args[0].shape[0], max(MOST_SCORES // max(scores, 1), 1)
    if batch <= each:
        return function(*args)
    parts = [[t] * batch if t is None or t.shape[0] == 1 else t.split(each) for t in args]
    options = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.cat([checkpoint(function, *some, **options) for some in zip(*parts, strict=False)])


def backwards(a, b):
    """a @ b for heads of queries, keys and values, summed from the last term to the first.

    So its roundings are not those of the formula, which has roundings too in float64, nor those of a sum that cancels
    against this one.
    """
    return a.flip(-1) @ b.flip(-2)


LOWEST = torch.finfo(torch.float64).min / 2  # of scores: their products with log2(e) are finite


class FlashAttention(torch.autograd.Function):
    """Attention in torch ops, rounded where FlashAttention-2 and -3 round: the yardstick of kernels that take powers of
    2 and save out and logsumexp in place of the probabilities."""

    @staticmethod
    def forward(ctx, q, k, v, scale, seen, added, kept):
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        q, k, v = q.detach(), k.detach(), v.detach()
        seen = causal(q) if seen is None else seen
        scores = backwards((q * (-1 if scale < 0 else 1)).to(wide), k.to(wide).mT)
        ctx.units = abs(scale) / math.log(2)
        if scale == 0:
            scores = scores * 0
            ctx.units = 1.0
        if added is not None:
            scores = (scores.double() * abs(scale) + added).clamp(min=LOWEST).to(wide)
            ctx.units = 1 / math.log(2)
        scores = scores.masked_fill(~seen, -math.inf)
        origin = power_of_two_origin(scores, q.dtype).double() * ctx.units
        p = multiply_subtract(scores, ctx.units, origin).to(wide).exp2()
        total = p.sum(-1, keepdim=True)
        nothing = total == 0
        weights = p.to(q.dtype).to(wide)
        weights = weights if kept is None else weights * kept.to(wide)
        out = (weights @ v.to(wide) * (1 / total.masked_fill(nothing, 1))).to(q.dtype)
        logsumexp = (origin * math.log(2) + total.masked_fill(nothing, 1).log()).to(wide)
        # Scores as low as a mask's lowest number have no digits left for the number of keys in their logsumexp.
        given = (p / total.masked_fill(nothing, 1)).masked_fill(logsumexp.abs() < 1e30, math.nan)
        ctx.save_for_backward(q, k, v, out, scores, logsumexp, kept, given if added is not None else None)
        ctx.scale, ctx.wide = scale, wide
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, scores, logsumexp, kept, given = ctx.saved_tensors
        dtype, wide = q.dtype, ctx.wide
        kept = 1 if kept is None else kept.to(wide)
        q, k, v, out, dout = (t.to(wide) for t in (q, k, v, out, dout))
        in_units = logsumexp / math.log(2)  # the lowest number overflows
        in_units = torch.where(in_units.isinf(), logsumexp.double() / math.log(2), in_units.double())
        p = multiply_subtract(scores, ctx.units, in_units).to(wide).exp2()
        p = p if given is None else torch.where(given.isnan(), p, given)
        delta = (dout * out).sum(-1, keepdim=True)
        ds = (p * (backwards(dout, v.mT) * kept - delta)).to(dtype).to(wide) * ctx.scale
        dv = (p.to(dtype).to(wide) * kept).mT @ dout
        return *((t.to(dtype)) for t in (ds @ k, ds.mT @ q, dv)), None, None, None, None


def flash_attention(q, k, v, scale=None, seen=None, added=None, kept=None):
    return FlashAttention.apply(q, k, v, scale, seen, added, kept)


def power_of_two_origin(scores, dtype):
    """What a row's probabilities are relative to when they are rounded to the dtype.

    In 16 bits it need not be the row's largest score, as in a block of keys that comes before it: with the largest, the
    largest probability is 1 and has no rounding. Here it is the largest of some columns, the first among them.
    """
    largest = scores.amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -math.inf, 0)
    if dtype.itemsize > 2:
        return largest
    others = torch.arange(scores.shape[-1], device=scores.device) % 32 >= 8
    return torch.maximum(scores.masked_fill(others, -math.inf).amax(-1, keepdim=True), largest - 10)


def multiply_subtract(a, b, c):
    """a * b - c with one rounding (float64: with two)."""
    return (a.double() * b - c.double()).to(a.dtype)


def product(a, b):
    """a @ b, (B, NH, ., .) each, by the calls of torch's BLAS that attention_probabilities makes.

    Other calls round in other ways.
    """
    if not a.shape[0]:
        return a @ b
    dim = 0 if a.shape[0] < a.shape[1] else 1
    shape = (a.shape[1 - dim], a.shape[2], b.shape[3])
    pairs = zip(a.unbind(dim), b.unbind(dim), strict=True)
    return torch.stack([(x.squeeze(0) @ y.squeeze(0)).view(shape) for x, y in pairs], dim)


def attention_takes_denormals(draw, dtype):
    """On CUDA exact float32 is three products of TF32: of what is below 2^-115 they keep 11 bits."""
    return dtype != torch.float32 or draw.device.type == "cpu"


HEAD_SIZES = (8, 16, 64, 1, 2, 3, 5, 7, 32, 33, 40, 72, 80, 96, 128, 160, 192, 256)
COMMON_HEAD_SIZES = [3 if size in (32, 64, 128) else 1 for size in HEAD_SIZES]


def many_heads(draw, batch, heads, scores, queries, elements):
    """Sequences and heads: at most so many in a small call, at real size for some tiles of 256 queries on each
    multiprocessor. The other numbers are a head's."""
    if not draw.real:
        return draw.size("batch", batch), draw.size("heads", heads, 1)
    pairs = math.ceil(draw.tiles("queries") / math.ceil(queries / 256))
    pairs = min(pairs, max(draw.most_products // 256 // scores, 1), max(2 * draw.most_elements // elements, 1))
    heads = draw.size("heads", 0, 1, real=max(min(pairs, MOST_SCORES // scores, 25), 1))
    return math.ceil(pairs / heads), heads


def real_tokens(draw):
    """The longest sequence at real size."""
    return min(2000, math.isqrt(draw.most_products // 256))


def packed_attention(draw, name, kernel, torchs):
    dtype = draw.dtype()
    head = draw.choose("head", HEAD_SIZES, COMMON_HEAD_SIZES)
    tokens = draw.size("tokens", 90 if draw.most_elements < 60_000 else 300, 1, real=real_tokens(draw))
    batch, heads = many_heads(draw, 5, 6, tokens**2, tokens, tokens * head)
    scale = draw.choose("scale", (None, 0.125, 1.0, 0.0, -0.5))
    denormal = name == "attention_probabilities" or attention_takes_denormals(draw, dtype)

    def merged(function):
        def some(qkv):
            q, k, v = qkv.contiguous().view(len(qkv), tokens, 3, heads, head).permute(2, 0, 3, 1, 4)
            return function(q, k, v, scale).transpose(1, 2).reshape(len(qkv), tokens, heads * head)

        return partial(by_sequences, some, heads * tokens**2)

    return Call(
        f"{name}(qkv, {heads}, {scale})",
        lambda qkv: kernel(qkv, heads, scale),
        merged(torchs),
        merged(attention_formula),
        {"qkv": draw.tensor("qkv", (batch, tokens, 3 * heads * head), dtype, special="none", denormal=denormal)},
        any_threads=False,
        # attention_probabilities rounds the scores' gradients to the dtype, where denormals have few digits.
        denormal_gradients=denormal and (name != "attention_probabilities" or dtype.itemsize > 2),
        nan_gradients=False,  # of a query, it reaches keys that the query does not see, by 0 * NaN in a product
    )


@entry
def attention(draw):
    if draw.chance("functional", 0.5):
        return packed_attention(draw, "causal_attention", G.causal_attention, flash_attention)
    return packed_attention(draw, "attention", lambda *args: ops.attention(*args)[0], flash_attention)


@entry(weight=0.5)
def attention_probabilities(draw):
    return packed_attention(
        draw,
        "attention_probabilities",
        lambda *args: ops.attention_probabilities(*args)[0],
        partial(attention_formula, product=product),
    )


def attention_mask(draw, batch, heads, queries, keys, dtype):
    """None, or what a query sees or has added to its scores, of a shape that broadcasts; some rows hide all keys."""
    kind = draw.choose("mask", ("none", "bool", "added"), (4, 3, 3))
    if kind == "none":
        return None
    sizes = {"batch": batch, "heads": heads, "queries": queries, "keys": keys}
    shape = [1 if draw.chance(f"one mask for all {name}", 0.4) else size for name, size in sizes.items()]
    share = draw.choose("hidden", (0.3, 0.0, 0.9, 1.0))
    hidden = draw.put(torch.rand(shape, **draw.source("hidden"))) < share
    if kind == "bool":
        return draw.layout("attn_mask", ~hidden)
    lowest = draw.choose("lowest", (-math.inf, torch.finfo(dtype).min))
    if draw.chance("ALiBi", 0.2):
        distance = (torch.arange(shape[2])[:, None] - torch.arange(shape[3])).abs()
        added = draw.put((distance * -(2.0 ** -torch.arange(1, shape[1] + 1))[:, None, None]).expand(shape))
    else:
        deviation = draw.choose("added.deviation", (2.0, 1.0, 10.0, 30.0))
        added = draw.put(torch.randn(shape, **draw.source("added"))) * deviation
    return draw.layout("attn_mask", added.to(dtype).masked_fill(hidden, lowest))


def seen_keys(queries, keys, is_causal, query_offset, mask, key_begin, key_end, device):
    """(B, NH, Tq, Tk), or of a shape that broadcasts to it."""
    row, column = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    seen = (column <= row + query_offset) if is_causal else (column >= 0).expand(queries, keys)
    for bound, inside in (key_begin, column.__ge__), (key_end, column.__lt__):
        if bound is not None:
            seen = seen & inside(bound[:, None, None, None])
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else mask != -math.inf)
    return seen


@entry
def scaled_dot_product_attention(draw):
    dtype = draw.dtype()
    queries = draw.size("tokens", 80, 1, real=real_tokens(draw))
    other = draw.chance("another number of keys", 0.4)
    keys = draw.size("keys", 150, 1, real=real_tokens(draw)) if other else queries
    group = draw.choose("heads of a key head", (1, 2, 3), (6, 1, 1))
    head = draw.choose("head", HEAD_SIZES, COMMON_HEAD_SIZES)
    elements = max(group * queries, keys) * head
    batch, heads = many_heads(draw, 4, 4, group * queries * keys, group * queries, elements)
    scale = draw.choose("scale", (None, 0.125, 1.0))
    is_causal = draw.choose("is_causal", (True, False))
    options = {"is_causal": is_causal, "scale": scale, "query_offset": 0}
    if is_causal:
        options["query_offset"] = draw.choose("query_offset", (0, 1, 60, -1), (6, 1, 1, 1))
    denormal = attention_takes_denormals(draw, dtype)
    args = {
        "query": draw.tensor("query", (batch, heads * group, queries, head), dtype, special="none", denormal=denormal)
    }
    for name in ("key", "value"):
        args[name] = draw.tensor(name, (batch, heads, keys, head), dtype, special="none", denormal=denormal)
    args["attn_mask"] = attention_mask(draw, batch, heads * group, queries, keys, dtype)
    for name in ("key_begin", "key_end"):
        here = draw.chance(f"has {name}", 0.15)
        args[name] = draw.indices(name, (batch,), keys + 1, torch.int32) if here else None
    p, seed, offset = dropout_arguments(draw, 0.15)

    def ours(query, key, value, attn_mask, key_begin, key_end):
        more = {"key_begin": key_begin, "key_end": key_end, "dropout_p": p, "seed": seed, "offset": offset}
        return ops.scaled_dot_product_attention(query, key, value, attn_mask, **options, **more)[0]

    def of(function):
        def some(query, key, value, mask, key_begin, key_end, kept):
            where = is_causal, options["query_offset"], mask, key_begin, key_end, query.device
            key, value = (t.repeat_interleave(group, 1) for t in (key, value))
            added = None if mask is None or mask.dtype == torch.bool else mask
            kept = None if kept is None else kept.double() * (1 / (1 - p) if p < 1 else 0)
            return function(query, key, value, scale, seen=seen_keys(queries, keys, *where), added=added, kept=kept)

        def call(query, *others):
            sizes = batch, heads * group, queries, keys
            kept = None if p == 0 else ops.attention_dropout_mask(*sizes, p, seed, offset).to(query.device)
            return by_sequences(some, heads * group * queries * keys, query, *others, kept)

        return call

    return Call(
        f"scaled_dot_product_attention(query, key, value, attn_mask, {options}, key_begin, key_end, {p}, {seed}, "
        f"{offset})",
        ours,
        of(flash_attention),
        of(attention_formula),
        args,
        fixed=("attn_mask",),
        any_threads=False,
        denormal_gradients=denormal,
        nan_gradients=False,
    )


# ---- losses ---------------------------------------------------------------------------------------------------------


def classifier_arguments(draw):
    """Logits' rows and width, V, ignore_index, targets."""
    rows = draw.rows("rows", 3)
    width = draw.width("width", rows)
    vocab_size = draw.size("vocab_size", width, 1, real=width) if draw.chance("padded", 0.3) else width
    ignore_index = draw.choose("ignore_index", (-100, 0, -1, vocab_size - 1, 10**6))
    targets = draw.indices("targets", rows, vocab_size)
    if draw.chance("ignored rows", 0.4):
        share = draw.choose("ignored", (0.2, 0.9, 1.0))
        ignored = torch.rand(rows, **draw.source("ignored")) < share
        targets = targets.masked_fill(draw.put(ignored), ignore_index)
    return rows, width, vocab_size, ignore_index, targets


def losses_of(logits, targets, vocab_size, ignore_index, loss):
    """``loss`` of each row's used logits and target. An ignored row is 0 and has no gradient, whatever its logits."""
    kept = targets != ignore_index
    used = torch.where(kept.unsqueeze(-1), logits[..., :vocab_size], 0.0)
    return torch.where(kept, loss(used, targets.long().where(kept, 0).unsqueeze(-1)).squeeze(-1), 0.0)


def torchs_loss(logits, target):
    shifted = logits - logits.detach().amax(-1, keepdim=True)
    return shifted.exp().sum(-1, keepdim=True).log() - shifted.gather(-1, target)


class RoundedGradientLoss(torch.autograd.Function):
    """``torchs_loss``, whose gradient is rounded to a dtype before that of the losses multiplies it."""

    @staticmethod
    def forward(ctx, logits, target, dtype):
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            losses = torchs_loss(leaf, target)
            (dlogits,) = torch.autograd.grad(losses.sum(), leaf)
        ctx.save_for_backward(dlogits.to(dtype))
        return losses.detach()

    @staticmethod
    def backward(ctx, dlosses):
        (dlogits,) = ctx.saved_tensors
        return dlogits * dlosses, None, None


def exact_loss(logits, target):
    """The formula. Where the target has nearly all of the probability, no digit of the others' is lost."""
    finite = logits.amax(-1, keepdim=True).isfinite()
    used = torch.where(finite, logits, 0.0)
    largest = used.argmax(-1, keepdim=True)
    shifted = used - used.gather(-1, largest)
    others = shifted.exp().scatter(-1, largest, 0.0).sum(-1, keepdim=True)
    losses = others.log1p() - torch.where(target == largest, 0.0, shifted.gather(-1, target))
    return torch.where(finite, losses, torchs_loss(torch.where(finite, 0.0, logits), target))


def wide(logits):
    """The losses' dtype."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@entry
def fused_classifier(draw):
    dtype = draw.dtype()
    rows, width, vocab_size, ignore_index, targets = classifier_arguments(draw)
    logits = draw.tensor("logits", (*rows, width), dtype, 3, huge=1e30)
    vocabulary = -1 if vocab_size == width and draw.chance("default vocab_size", 0.5) else vocab_size
    in_place = draw.chance("in place", 0.4)

    def ours(logits, targets):
        if in_place:
            return ops.fused_classifier_((logits * 1).contiguous(), targets, vocabulary, ignore_index)
        return ops.fused_classifier(logits, targets, vocabulary, ignore_index)[0]

    return Call(
        f"fused_classifier{'_' if in_place else ''}(logits, targets, {vocabulary}, {ignore_index})",
        ours,
        lambda logits, targets: losses_of(wide(logits), targets, vocab_size, ignore_index, torchs_loss),
        lambda logits, targets: losses_of(logits, targets, vocab_size, ignore_index, exact_loss),
        {"logits": logits, "targets": targets},
        nan_gradients=False,
    )


def reduced(losses, targets, ignore_index, reduction):
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (targets != ignore_index).sum()


@entry
def cross_entropy(draw):
    dtype = draw.dtype()
    rows, width, _, ignore_index, targets = classifier_arguments(draw)
    targets = targets.clamp(max=width - 1).where(targets != ignore_index, ignore_index)
    class_dim = min(1, len(rows))
    logits = draw.tensor("logits", (*rows[:class_dim], width, *rows[class_dim:]), dtype, 3, huge=1e3)
    reduction = draw.choose("reduction", ("mean", "sum", "none"))
    options = {"ignore_index": ignore_index, "reduction": reduction}

    def formula(loss, logits, targets):
        losses = losses_of(logits.movedim(class_dim, -1), targets, width, ignore_index, loss)
        return reduced(losses, targets, ignore_index, reduction)

    return Call(
        f"cross_entropy(logits, targets, {options})",
        lambda logits, targets: G.cross_entropy(logits, targets, **options),
        lambda logits, targets: formula(torchs_loss, wide(logits), targets).to(logits.dtype),
        partial(formula, exact_loss),
        {"logits": logits, "targets": targets},
        nan_gradients=False,
    )


@entry
def linear_cross_entropy(draw):
    dtype = draw.dtype()
    rows, width, vocab_size, ignore_index, targets = classifier_arguments(draw)
    inner = draw.size("inner", 100, 1, real=draw.room(math.prod(rows), width))
    chunk_size = draw.choose("chunk_size", (None, 1, 2, 7, 64))
    if chunk_size is not None:
        chunk_size = max(chunk_size, math.prod(rows) // 30)
    options = {
        "vocab_size": vocab_size,
        "ignore_index": ignore_index,
        "reduction": draw.choose("reduction", ("mean", "sum", "none")),
        "chunk_size": chunk_size,
    }

    def formula(linear, loss, x, weight, targets):
        losses = losses_of(wide(linear(x, weight)), targets, vocab_size, ignore_index, loss)
        return reduced(losses, targets, ignore_index, options["reduction"])

    return Call(
        f"linear_cross_entropy(x, weight, targets, {options})",
        lambda *args: G.linear_cross_entropy(*args, **options),
        partial(
            formula,
            partial(torchs_linear, chunk=chunk_size),
            lambda logits, target: RoundedGradientLoss.apply(logits, target, dtype),
        ),
        partial(formula, F.linear, exact_loss),
        {
            # No denormals: the gradient is rounded to the dtype before the backward scales it.
            "x": draw.tensor("x", (*rows, inner), dtype, special="nan", denormal=False),
            "weight": draw.tensor("weight", (width, inner), dtype, inner**-0.5, special="none", denormal=False),
            "targets": targets,
        },
        any_threads=False,
        nan_gradients=False,
    )


# ---- generation ------------------------------------------------------------------------------------------------------


def decode_formula(args, lengths, heads, approximate, layers):
    """The newest token of each sequence through GPT-2, one sequence after the other, in the dtype of the weights."""
    sequences, _, wte, wpe, head, keys_values, norm_weight, norm_bias, *weights = args
    each = 6 if norm_bias is None else 12
    rows = []
    for b, length in enumerate(lengths):
        x = wte[sequences[b, length - 1]] + wpe[length - 1]
        for i in range(layers):
            layer = weights[each * i : each * (i + 1)]
            matrices = layer[::2] if each == 12 else layer
            biases = layer[1::2] if each == 12 else [None] * 6
            w = list(zip(matrices, biases, strict=True))
            qkv = F.linear(F.layer_norm(x, x.shape, *w[0]), *w[1])
            query, key, value = qkv.view(3, heads, 1, -1)
            key, value = (
                torch.cat([old[b, :, : length - 1], new], 1)
                for old, new in zip(keys_values[i], (key, value), strict=True)
            )
            weight = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
            x = x + F.linear((weight @ value).flatten(), *w[2])
            x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, x.shape, *w[3]), *w[4]), approximate=approximate), *w[5])
        rows.append(F.linear(F.layer_norm(x, x.shape, norm_weight, norm_bias), head))
    return torch.stack(rows)


@entry(weight=0.5)
def decode(draw):
    dtype = draw.dtype()
    batch, layers = draw.size("batch", 8, 1), draw.choose("layers", (1, 2, 0))
    heads = draw.size("heads", 8, 1, real=12)
    head_size = draw.choose("head size", (1, 2, 5, 8, 20, 32, 64, 128), (1, 1, 2, 2, 2, 4, 4, 2))
    width = heads * head_size
    vocabulary, length = draw.size("vocabulary", 300, 1), draw.size("length", 150, 1, real=1024)
    room = length + draw.choose("room", (0, 1, 9))
    bias = draw.chance("bias", 0.7)
    approximate = draw.choose("approximate", ("tanh", "none"))
    sequences = draw.put(torch.randint(vocabulary, (batch, length), **draw.source("sequences")))
    lengths = torch.randint(1, length + 1, (batch,), **draw.source("lengths"))
    known_lengths = lengths.tolist()

    def weight(name, *shape):
        return draw.tensor(name, shape, dtype, shape[-1] ** -0.5, special="none").contiguous()

    norm = weight("norm_weight", width), weight("norm_bias", width) if bias else None
    args = {
        "sequences": sequences,
        "lengths": draw.put(lengths),
        "wte": weight("wte", vocabulary, width),
        "wpe": weight("wpe", room, width),
        "head": weight("head", draw.size("head rows", 300, 1, real=50_304), width),
        "keys_values": weight("keys_values", layers, 2, batch, heads, room, head_size),
        "norm_weight": norm[0],
        "norm_bias": norm[1],
    }
    names = ("ln_1", "c_attn", "attn.c_proj", "ln_2", "c_fc", "mlp.c_proj")
    shapes = ((width,), (3 * width, width), (width, width), (width,), (4 * width, width), (width, 4 * width))
    for i in range(layers):
        for name, shape in zip(names, shapes, strict=True):
            args[f"{i}.{name}"] = weight(f"{i}.{name}", *shape)
            if bias:
                args[f"{i}.{name}.bias"] = weight(f"{i}.{name}.bias", shape[0])

    def ours(sequences, lengths, wte, wpe, head, keys_values, norm_weight, norm_bias, *layers):
        norm, cache = (norm_weight, norm_bias), keys_values.clone()
        return ops.decode(
            sequences, lengths, wte, wpe, layers, *norm, head, cache, heads, approximate=approximate
        )  # fmt: skip

    def formula(*args):
        return decode_formula(args, known_lengths, heads, approximate, layers)

    text = f"decode({layers} layers, {heads} heads, lengths {known_lengths}, {approximate})"
    return Call(text, ours, formula, formula, args, fixed=tuple(args), takes_floating_alone=False)


@entry(weight=0.5)
def sample_(draw):
    """Compares how likely the drawn token is, beside its noise: of two that are equally likely, both are right."""
    batch = draw.size("batch", 40, 1, real=300)
    most = max(draw.most_elements // batch, 16)
    vocabulary = draw.size("vocabulary", most, 1, real=most)
    # No denormals: softmax makes their probabilities equal, and top_p keeps all of them or the largest alone.
    logits = draw.tensor("logits", (batch, vocabulary), draw.dtype(), 3, denormal=False)
    source = draw.source("noise")
    noise = torch.empty(batch, vocabulary, device=source["device"])
    noise = draw.put(noise.exponential_(generator=source["generator"]))
    greedy = draw.chance("greedy", 0.2)
    temperature = draw.choose("temperature", (1.0, 0.7, 5.0))
    top_k = draw.choose("top_k", (None, 1, 2, 40, 10**6))
    top_p = draw.choose("top_p", (None, 0.9, 0.5, 1.0, 1e-9))

    def likelihood(choose):
        def of(logits, noise):
            scores = logits.float().double()  # as the operator reads them
            taken = choose(logits, noise)
            bad = scores.isnan().any(-1) | (scores.amax(-1).abs() == math.inf)
            if not greedy:
                scores = scores / temperature - noise.double().log()
            found = scores.gather(1, taken.clamp(min=0)[:, None])[:, 0].where(taken >= 0, math.nan)
            return found.where(~bad, torch.where(taken < 0, math.nan, 0.0)).float()

        return of

    def ours(logits, noise):
        sequences = torch.zeros(batch, 2, dtype=torch.int64, device=draw.device)
        lengths = torch.ones(batch, dtype=torch.int64, device=draw.device)
        ops.sample_(logits, None if greedy else noise, sequences, lengths, temperature, top_k, top_p)
        return sequences[:, 1]

    def formula(logits, noise):
        x = logits.float()
        bad = x.isnan().any(-1) | (x.amax(-1).abs() == math.inf)
        options = (None,) if greedy else (noise, temperature, top_k, top_p)
        return test_sample.formula(x, *options).where(~bad, -1)

    return Call(
        f"sample_(logits, noise, greedy={greedy}, temperature={temperature}, top_k={top_k}, top_p={top_p})",
        likelihood(ours),
        likelihood(formula),
        lambda logits, noise: likelihood(formula)(logits.float(), noise.float()).double(),
        {"logits": logits, "noise": noise},
        fixed=("logits", "noise"),
        takes_floating_alone=False,
    )


# ---- float8 ----------------------------------------------------------------------------------------------------------


def fp8_dtype(draw):
    return draw.choose("dtype", test_fp8.DTYPES)


def fp8_size(draw, name, *others, most=20):
    """Features of a float8 product, beside its other sizes."""
    return 16 * draw.size(f"{name} / 16", most, 1, real=draw.room(*others) // 16)


def fp8_history(draw, name):
    """None, that of no call, of some, or of magnitudes that leave no room for what comes; on the CPU."""
    kind = draw.choose(f"{name}.history", ("none", "new", "some", "full"))
    if kind == "none":
        return None
    history = test_fp8.new_history("cpu")
    count = {"new": 0, "some": 3, "full": test_fp8.CALLS}[kind]
    sizes = torch.rand(count, **draw.source(f"{name}.history")) * 10 ** draw.choose(f"{name}.size", (0, -3))
    history[test_fp8.CALLS - count : test_fp8.CALLS] = sizes.view(torch.int32)
    return history


def fp8_scale(x, fp8, history):
    """The scale with which x is rounded, and its own largest magnitude, 0-dim float64 where x is.

    The scale is the least power of two with which the magnitude is within the format, whose largest number is 7/8 of a
    power of two. It is computed without waiting for the device.
    """
    own = x.detach().abs().where(x.isfinite(), 0.0).double()
    own = own.max() if x.numel() else own.sum()
    known = 0.0 if history is None else history.view(torch.float32)[: test_fp8.CALLS].max().item()
    fraction, exponent = torch.frexp(torch.full_like(own, known) if known else own)
    exponent = exponent - math.frexp(test_fp8.LARGEST[fp8])[1] + (fraction > 7 / 8)
    return torch.where(fraction == 0, 1.0, exponent.clamp(-126, 126).double().exp2()).float().double(), own


def exact_fp8(x, fp8, history):
    """x as float8, by its definition, and the scale."""
    scale, _ = fp8_scale(x, fp8, history)
    return test_fp8.rounded(x.detach().double() / scale, fp8).view(fp8), scale


def torchs_fp8(x, fp8, history):
    """x as float8, by torch's conversion, and the scale."""
    scale, _ = fp8_scale(x, fp8, history)
    most = test_fp8.LARGEST[fp8]
    return (x.detach().float() / scale).clamp(-most, most).where(x.isfinite(), math.nan).to(fp8), scale


def exact_fp8_product(a, b, fast):
    """a @ b^T of what pairs of float8 numbers and scale say."""
    return (a[0].double() * a[1]) @ (b[0].double() * b[1]).T


def torchs_fp8_product(a, b, fast):
    """The same in float32; on CUDA on the tensor cores, for sums with as many bits."""
    (a, scale_a), (b, scale_b) = a, b
    if a.device.type == "cpu" or not a.numel():
        return (a.float() @ b.float().T) * (scale_a * scale_b)
    scales = [
        scale.float() if isinstance(scale, Tensor) else a.new_full((), scale, dtype=torch.float32)
        for scale in (scale_a, scale_b)
    ]
    return torch._scaled_mm(a.contiguous(), b.contiguous().t(), *scales, out_dtype=torch.float32, use_fast_accum=fast)


def fp8_transposed(pair):
    """The transposed numbers, with rows of zeros to a multiple of 16."""
    q, scale = pair
    bytes = F.pad(q.view(torch.uint8), (0, 0, 0, -len(q) % 16))
    return bytes.t().contiguous().view(q.dtype), scale


FAST_SUMS, SUMS = 2.0**-6, 2.0**-10  # relative errors of the tensor cores' sums of products of float8 numbers


class FP8Linear(torch.autograd.Function):
    """x (N, K), weight (M, K) -> (N, M), wide, with the gradients that float8 layers have.

    ``way`` is how numbers are rounded, and how they are multiplied.
    """

    @staticmethod
    def forward(ctx, x, weight, way, history, dout_history):
        quantise, multiply = way
        pairs = quantise(x, test_fp8.E4M3, history), quantise(weight, test_fp8.E4M3, None)
        ctx.way, ctx.pairs, ctx.history, ctx.dtypes = way, pairs, dout_history, (x.dtype, weight.dtype)
        return multiply(*pairs, True)

    @staticmethod
    def backward(ctx, dout):
        quantise, multiply = ctx.way
        dout = quantise(dout, test_fp8.E5M2, ctx.history)
        x, weight = ctx.pairs
        dx = multiply(dout, fp8_transposed(weight), True)
        dweight = multiply(fp8_transposed(dout), fp8_transposed(x), False)
        return dx.to(ctx.dtypes[0]), dweight.to(ctx.dtypes[1]), None, None, None


TORCHS_FP8, EXACT_FP8 = (torchs_fp8, torchs_fp8_product), (exact_fp8, exact_fp8_product)


@entry(weight=0.5)
def fp8_quantize(draw):
    dtype, fp8 = fp8_dtype(draw), draw.choose("format", (test_fp8.E4M3, test_fp8.E5M2))
    rows = draw.rows()
    history = fp8_history(draw, "x")

    def read(pair):
        return pair[0].float() * pair[1]

    def ours(x):
        after = copied(history, x.device)
        q, q_t, scale = ops.fp8_quantize(x, after, fp8, True)
        return read((q, scale)), read((q_t, scale)), *(() if after is None else (after.view(torch.float32),))

    def formula(quantise, x):
        wide = x.float()  # which says the same
        q, scale = quantise(wide, fp8, history)
        q_t = fp8_transposed((q.reshape(-1, x.shape[-1]), scale))
        outs = read((q, scale)), read(q_t)
        if history is None:
            return outs
        before = copied(history, x.device).view(torch.float32)[1 : test_fp8.CALLS]
        own = fp8_scale(wide, fp8, history)[1].float()
        return *outs, torch.cat([before, own[None], own.new_zeros(2)])

    return Call(
        f"fp8_quantize(x, history, {fp8}, True)",
        ours,
        partial(formula, torchs_fp8),
        lambda x: tuple(t.double() for t in formula(exact_fp8, x)),
        {"x": draw.tensor("x", (*rows, draw.width("width", rows)), dtype)},
        fixed=("x",),
    )


@entry(weight=0.5)
def fp8_matmul(draw):
    """Of tensors whose numbers are rounded to float8 first."""
    dtype, fast = fp8_dtype(draw), draw.chance("fast_accumulation", 0.5)
    formats = draw.choose("formats", ((0, 0), (1, 0), (0, 1)))
    a_format, b_format = ((test_fp8.E4M3, test_fp8.E5M2)[i] for i in formats)
    rows = draw.rows("a")
    inner = fp8_size(draw, "inner", math.prod(rows))
    columns = fp8_size(draw, "columns", math.prod(rows), inner)
    scales = draw.choose("scale_a", (1.0, 2.0**-9, 4.0)), draw.choose("scale_b", (1.0, 0.5))
    bias = draw.tensor("bias", (columns,), dtype, special="nan") if draw.chance("has bias", 0.5) else None

    def rounded(x, fp8):
        return x.float().to(fp8)

    def ours(a, b, bias):
        a, b = rounded(a, a_format).contiguous(), rounded(b, b_format).contiguous()
        return ops.fp8_matmul(a, b, *map(draw.number, scales), bias, dtype, fast)

    def formula(multiply, a, b, bias):
        flat = rounded(a, a_format).reshape(-1, inner)
        product = multiply((flat, scales[0]), (rounded(b, b_format), scales[1]), fast)
        product = product if bias is None else product + bias
        return product.view(*a.shape[:-1], columns).to(dtype if multiply is torchs_fp8_product else torch.float64)

    def products(tensors):
        x, weight = (
            rounded(tensors["a"], a_format).double() * scales[0],
            rounded(tensors["b"], b_format).double() * scales[1],
        )
        return linear_products({**tensors, "x": x, "weight": weight}, (FAST_SUMS if fast else SUMS, 0.0))

    return Call(
        f"fp8_matmul({a_format}, {b_format}, {scales}, bias, {dtype}, {fast})",
        ours,
        partial(formula, torchs_fp8_product),
        partial(formula, exact_fp8_product),
        {
            "a": draw.tensor("a", (*rows, inner), torch.float32, special="nan"),
            "b": draw.tensor("b", (columns, inner), torch.float32, special="none"),
            "bias": bias,
        },
        fixed=("a", "b", "bias"),
        any_threads=False,
        takes_floating_alone=False,
        products=products,
    )


def with_copies(function, histories):
    """The function, called with its own copies of the histories, where its arguments are."""
    return lambda *args: function(*args, *(copied(h, args[0].device) for h in histories))


def copied(history, device):
    return None if history is None else history.to(device, copy=True, non_blocking=True)


@entry(weight=0.5)
def fp8_layernorm(draw):
    """Beside its parts, which have entries: a norm's last bit decides how a number is rounded to eight."""
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
        return read(test_fp8.composed_norm(*args, history, x_bias), history)

    return Call(
        "fp8_layernorm(x, residual, weight, bias, history, True, 1e-5, x_bias)",
        with_copies(ours, [history]),
        with_copies(parts, [history]),
        lambda *args: tuple(t.double() for t in with_copies(parts, [history])(*args)),
        args,
        fixed=tuple(args),
        tied=tuple(args),
    )


@entry(weight=0.5)
def fp8_linear(draw):
    dtype, rows = fp8_dtype(draw), draw.rows()
    inner = fp8_size(draw, "inner", math.prod(rows))
    outer = fp8_size(draw, "outer", math.prod(rows), inner)
    histories = [fp8_history(draw, of) for of in ("x", "dout")]

    def formula(way, x, weight, bias):
        product = FP8Linear.apply(x.reshape(-1, inner), weight, way, *histories)
        product = product if bias is None else product + bias
        return product.view(*x.shape[:-1], outer).to(x.dtype)

    def products(tensors):
        """Those of the numbers rounded to float8."""
        read = {name: t for name, t in tensors.items() if name != "dbias"}  # the sum of dout's own numbers
        forms = (test_fp8.E4M3, histories[0]), (test_fp8.E4M3, None), (test_fp8.E5M2, histories[1])
        for name, form in zip(("x", "weight", "dout"), forms, strict=True):
            q, scale = torchs_fp8(tensors[name], *form)
            read[name] = q.double() * scale
        return linear_products(read, (FAST_SUMS, SUMS))

    return Call(
        "fp8_linear(x, weight, bias, histories)",
        with_copies(G.fp8_linear, histories),
        partial(formula, TORCHS_FP8),
        partial(formula, EXACT_FP8),
        {
            "x": draw.tensor("x", (*rows, inner), dtype, special="nan"),
            "weight": draw.tensor("weight", (outer, inner), dtype, inner**-0.5, special="none"),
            "bias": draw.tensor("bias", (outer,), dtype, special="nan") if draw.chance("has bias", 0.7) else None,
        },
        any_threads=False,
        tied=("x", "weight"),
        products=products,
    )


@entry(weight=0.5)
def fp8_mlp(draw):
    """Beside its parts, which have entries: a sum's last bit decides how the next number is rounded to eight."""
    dtype, rows = fp8_dtype(draw), draw.rows()
    width = fp8_size(draw, "width", math.prod(rows), most=8)
    hidden = fp8_size(draw, "hidden", math.prod(rows), width)
    arguments = {"x": draw.tensor("x", (*rows, width), dtype, special="nan")}
    for name, shape in ("fc", (hidden, width)), ("proj", (width, hidden)):
        bias = draw.chance(f"has {name}_bias", 0.7)
        arguments[f"{name}_weight"] = draw.tensor(f"{name}_weight", shape, dtype, shape[1] ** -0.5, special="none")
        arguments[f"{name}_bias"] = draw.tensor(f"{name}_bias", shape[:1], dtype, special="nan") if bias else None
    histories = [fp8_history(draw, of) for of in ("x", "hidden", "dhidden", "dout")]

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
    )


@entry(weight=0.5)
def fp8_linear_cross_entropy(draw):
    """Beside products of the float8 numbers that its parts give: a logit's last bit decides how a number is rounded."""
    dtype = draw.choose("dtype", test_fp8.DTYPES)
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
    fp8_logits = draw.chance("fp8_logits", 0.5)
    options = vocab_size, ignore_index, reduction, chunk_size

    def ours(x, weight, targets):
        return ops.fp8_linear_cross_entropy_with_gradients(x, weight, targets, *options, fp8_logits, [True, True])

    def logits_of(x, weight, chunk):
        """Of each chunk."""
        if not fp8_logits:
            return [ops.linear(some, weight) for some in x.split(chunk)]
        (x, _, scale_x), (weight, _, scale) = (ops.fp8_quantize(t, None, test_fp8.E4M3, True) for t in (x, weight))
        return [ops.fp8_matmul(some, weight, scale_x, scale, None, dtype, True) for some in x.split(chunk)]

    def parts(multiply, x, weight, targets):
        x, weight = x.to(dtype), weight.to(dtype)
        flat, classes = x.reshape(-1, inner), targets.reshape(-1)
        chunk = max(len(flat), 1) if chunk_size == -1 else math.ceil(chunk_size / 16) * 16
        losses, dlogits = zip(
            *(
                ops.fused_classifier(logits.float(), of_some, vocab_size, ignore_index)
                for logits, of_some in zip(logits_of(flat, weight, chunk), classes.split(chunk), strict=True)
            ),
            strict=True,
        )
        d = (torch.cat(dlogits) * 2.0**15).to(test_fp8.E5M2)
        count = (classes != ignore_index).sum().double()
        factor = 2.0**-15 * (1.0 if reduction == "sum" else torch.where(count == 0, 0.0, 1 / count))
        w_t, x_t = (ops.fp8_quantize(t.contiguous(), None, test_fp8.E4M3, True)[1:] for t in (weight, flat))
        dx = multiply((d, factor), w_t, False).view(x.shape)
        dweight = multiply(fp8_transposed((d, factor)), x_t, False)
        loss = ops.linear_cross_entropy(x, weight, targets, *options)
        if fp8_logits:
            total = torch.cat(losses).double().sum()
            loss = (total if reduction == "sum" else total / count).float()
        return loss, *((dx, dweight) if multiply is exact_fp8_product else (dx.to(wide), dweight.to(wide)))

    return Call(
        f"fp8_linear_cross_entropy_with_gradients(x, weight, targets, {options}, {fp8_logits}, [True, True])",
        ours,
        partial(parts, torchs_fp8_product),
        lambda *args: tuple(t.double() for t in parts(exact_fp8_product, *args)),
        {
            "x": draw.tensor("x", (*rows, inner), dtype, special="nan", denormal=False),
            "weight": draw.tensor("weight", (width, inner), dtype, inner**-0.5, special="none", denormal=False),
            "targets": targets,
        },
        fixed=("x", "weight"),
        any_threads=False,
        tied=("x", "weight"),
    )


# ---- lists of tensors -----------------------------------------------------------------------------------------------


def shapes(draw, most):
    count = draw.size("tensors", most, 1)
    return [
        tuple(draw.size(f"shape{i}.{d}", 60, real=int(2 ** (21 / dims))) for d in range(dims))
        for i in range(count)
        for dims in [draw.choose(f"shape{i}.dims", (1, 0, 2, 3))]
    ]


@entry
def global_norm(draw):
    from fuzz.draw import FLOATING

    same = draw.choose("same dtype", (True, False))
    args = {}
    for i, shape in enumerate(shapes(draw, 20)):
        dtype = draw.dtype() if same else draw.choose(f"dtype{i}", FLOATING)
        args[f"tensors{i}"] = draw.tensor(f"tensors{i}", shape, dtype, huge=1e30, denormal=dtype != torch.float64)

    def exact(*tensors):
        """The gradient of a norm of 0 is 0."""
        return torch.linalg.vector_norm(torch.cat([t.double().flatten() for t in tensors]))

    def torchs(*tensors):
        """As torch.nn.utils.get_total_norm, in float32; a power of 2 keeps the squares in float32's range."""
        largest = torch.stack([t.detach().double().abs().amax() for t in tensors if t.numel()] or [draw.number(0)])
        exponent = torch.frexp(largest.amax()).exponent.clamp(-126, 126)
        scale = torch.where(largest.isfinite().all(), (-exponent).double().exp2(), 1.0).float()
        norms = [torch.linalg.vector_norm(t.float() * scale) for t in tensors]
        return torch.linalg.vector_norm(torch.stack(norms)) / scale

    # The norm is float32, and so are the digits of a float64 tensor's gradient: no rule of float64 holds for it.
    doubles = tuple(name for name, t in args.items() if t.dtype == torch.float64)
    return Call("global_norm(tensors)", lambda *tensors: ops.global_norm(list(tensors)), torchs, exact, args, doubles)


@entry
def adamw_(draw):
    dtype = draw.dtype()
    low = dtype in (torch.bfloat16, torch.float16)
    masters = low and draw.chance("masters", 0.3)
    grad_dtype = draw.choose("gradients in float32", (dtype, torch.float32))
    state_dtype = draw.choose("state in float32", (dtype, torch.float32))
    made = shapes(draw, 6)
    lr = draw.choose("lr", (1e-2, 0.0, 0.3))
    o = {
        "beta1": draw.choose("beta1", (0.9, 0.0, 0.99)),
        "beta2": draw.choose("beta2", (0.95, 0.0, 0.999)),
        # torch rounds eps to float16, where 1e-8 is 0
        "eps": 1e-3 if dtype == torch.float16 else draw.choose("eps", (1e-8, 1e-3)),
        "weight_decay": draw.choose("weight_decay", (0.1, 0.0)),
        "maximize": draw.chance("maximize", 0.2),
    }
    step = float(draw.choose("step", (1, 2, 10, 100_000)))
    scale = draw.choose("grad_scale", (None, 1.0, 256.0, 0.37))
    max_norm = draw.choose("max_grad_norm", (None, 1.0))
    found_inf = draw.choose("found_inf", (None, 0.0, 1.0), (8, 1, 1))
    args = {}
    for i, shape in enumerate(made):
        wide = torch.float32 if masters else dtype
        args[f"params{i}"] = draw.tensor(f"params{i}", shape, dtype, special="none").contiguous()
        args[f"grads{i}"] = draw.tensor(f"grads{i}", shape, grad_dtype, special="nan")
        args[f"exp_avgs{i}"] = draw.tensor(f"exp_avgs{i}", shape, state_dtype, special="none").contiguous()
        squares = draw.tensor(f"exp_avg_sqs{i}", shape, state_dtype, special="none").contiguous()
        args[f"exp_avg_sqs{i}"] = squares.abs() + 1e-2
        if masters:
            drawn = draw.tensor(f"masters{i}", shape, wide, special="none").contiguous()
            near = args[f"params{i}"].float() * (1 + 2**-13)  # rounds to the parameter
            args[f"masters{i}"] = torch.where(drawn > 0, drawn, near)
    parts = 5 if masters else 4
    exact_scale = 1.0 if scale is None else torch.tensor(scale, dtype=torch.float32).item()
    norm = 3.0  # what is clipped is not this list's own norm: only the number counts

    def split(tensors):
        return [list(tensors[i::parts]) for i in range(parts)]

    def ours(*tensors):
        lists = [[t.clone() for t in part] for part in split(tensors)]
        ops.adamw_(
            *lists[:4],
            [draw.number(step) for _ in made],
            lr=torch.tensor(lr, dtype=torch.float64),
            grad_scale=None if scale is None else draw.number(scale),
            found_inf=None if found_inf is None else draw.number(found_inf),
            master_params=lists[4] if masters else None,
            grad_norm=None if max_norm is None else draw.number(norm),
            max_grad_norm=max_norm,
            **o,
        )
        return tuple(t for i, part in enumerate(lists) if i != 1 for t in part)

    def formula(*tensors):
        """torch.optim.AdamW's step in the dtype of the arguments, and what is rounded of it."""
        lists = [[t.clone() for t in part] for part in split(tensors)]
        doubles = all(t.dtype == torch.float64 for t in tensors)
        params, grads, exp_avgs, exp_avg_sqs = lists[:4]
        # clip_grad_norm_ computes its coefficient in float32, whatever the gradients' dtype.
        clip = 1.0 if max_norm is None else min((1 / (torch.tensor(norm) + 1e-6) * max_norm).item(), 1.0)
        factor = clip / exact_scale
        if found_inf:
            return tuple(t for i, part in enumerate(lists) if i != 1 for t in part)
        if masters:
            pairs = zip(lists[4], params, strict=True)
            params = lists[4] = [torch.where(m.to(dtype) == p, m, p.to(m.dtype)) for m, p in pairs]
        arithmetic = torch.float64 if doubles else torch.promote_types(params[0].dtype, torch.float32)
        for i in range(len(params)):
            p, g, m, v = (t[i].to(arithmetic) for t in (params, grads, exp_avgs, exp_avg_sqs))
            g = g * (-factor if o["maximize"] else factor)
            m = m.lerp(g, 1 - o["beta1"])
            v = v * o["beta2"] + (1 - o["beta2"]) * g * g
            denominator = v.sqrt() / math.sqrt(1 - o["beta2"] ** step) + o["eps"]
            p = p * (1 - lr * o["weight_decay"]) - lr / (1 - o["beta1"] ** step) * m / denominator
            for part, value in ((params, p), (exp_avgs, m), (exp_avg_sqs, v)):
                part[i] = value.to(part[i].dtype)
            if masters:
                lists[0][i] = p.to(lists[0][i].dtype)
        return tuple(t for i, part in enumerate(lists) if i != 1 for t in part)

    options = {**o, "lr": lr, "step": step, "grad_scale": scale, "found_inf": found_inf, "max_grad_norm": max_norm}
    return Call(f"adamw_({len(made)} tensors, {options})", ours, formula, formula, args, fixed=tuple(args))
