"""Each op: what it is called with here, torch's counterpart, and the formula in float64.

A case is a function that draws arguments and returns a :class:`Call`. Its name is the op's.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gptkernels.rules import ops

T = TypeVar("T")
SMALL, ODD, ORDINARY = range(3)


class Draw:
    """Draws arguments.

    Args:
        size: SMALL for derivatives by finite differences, ODD for rows that no vectorized load fits, ORDINARY.
        dtype: of the floating tensors.
        device: of the tensors.
        seed: of the numbers, which are the same on every device.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        self._generator = torch.Generator().manual_seed(seed)

    def of(self, small: T, odd: T, ordinary: T) -> T:
        """The one of this size."""
        return (small, odd, ordinary)[self.size]

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal values that the dtype represents."""
        values = torch.randn(shape, generator=self._generator, dtype=torch.float64) * scale
        return values.to(self.dtype).to(self.device)

    def below(self, count: int, *shape: int) -> Tensor:
        """Whole numbers below count."""
        return torch.randint(count, shape, generator=self._generator).to(self.device)

    def dropout(self, p: float) -> tuple[float, Tensor, Tensor]:
        """A probability, seed and offset."""
        return p, torch.tensor(12345, device=self.device), torch.tensor(6789, device=self.device)


@dataclasses.dataclass
class Call:
    """One call. The three functions take all of ``args`` and return a tensor or several.

    Attributes:
        ours: the op.
        torchs: torch's own kernels in the same dtype.
        exact: the formula, called with float64 in place of each argument.
        args: floating tensors.
        calls: the op and those of its derivative with all their arguments, for ``torch.library.opcheck``.
    """

    ours: Callable[..., Any]
    torchs: Callable[..., Any]
    exact: Callable[..., Any]
    args: tuple[Tensor, ...]
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A line of the table.

    Attributes:
        name: the op, with what is special about the call where an op has several.
        op: the op.
        draw: makes the call.
        differentiable: the op has a derivative.
        float64_results: the results of float64 arguments are float64, so that finite differences say something.
        dtypes: of the arguments, which are held to the rule of exactness.
    """

    name: str
    op: str
    draw: Callable[[Draw], Call]
    differentiable: bool = True
    float64_results: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


CASES: list[Case] = []


def case(of: str | None = None, **options: Any) -> Callable[[Callable[[Draw], Call]], Callable[[Draw], Call]]:
    """Put the function that follows into the table, under its name; ``of`` is the op where the name is longer."""

    def put(function: Callable[[Draw], Call]) -> Callable[[Draw], Call]:
        name = function.__name__
        shown = name if of is None else f"{of}, {name.removeprefix(of).strip('_')}"
        CASES.append(Case(shown, of or name, function, **options))
        return function

    return put


def call(op: Any, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """An entry of ``Call.calls``."""
    return op.default, args, kwargs


def wide(t: Tensor) -> Tensor:
    """In the dtype of losses and statistics."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


# ---- embeddings ------------------------------------------------------------------------------------------------------


@case()
def encoder(draw: Draw) -> Call:
    b, t, v, c = draw.of((2, 2, 3, 2), (3, 21, 60, 33), (4, 64, 300, 96))
    tokens, wte, wpe = draw.below(v, b, t), draw.normal(v, c), draw.normal(t + 2, c)

    def formula(wte: Tensor, wpe: Tensor) -> Tensor:
        return F.embedding(tokens, wte) + wpe[:t]

    dout = draw.normal(b, t, c)
    calls = [
        call(ops.encoder, tokens, wte, wpe),
        call(ops.encoder_backward, dout, tokens, v, t + 2),
        call(ops.encoder_backward_, dout, tokens, wte.clone(), t + 2),
    ]
    return Call(partial(ops.encoder, tokens), formula, formula, (wte, wpe), calls)


@case()
def embedding(draw: Draw) -> Call:
    n, v, c = draw.of((3, 4, 2), (50, 70, 33), (300, 200, 96))
    tokens, weight = draw.below(v, n), draw.normal(v, c)
    formula = partial(F.embedding, tokens)
    calls = [
        call(ops.embedding, tokens, weight),
        call(ops.embedding_backward, draw.normal(n, c), tokens, v),
    ]
    return Call(partial(ops.embedding, tokens), formula, formula, (weight,), calls)


# ---- norms -----------------------------------------------------------------------------------------------------------

EPS = 1e-5


def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The norm of rows."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + EPS) * weight + bias


@case()
def layernorm(draw: Draw) -> Call:
    n, c = draw.of((2, 4), (31, 67), (64, 768))
    x, weight, bias = draw.normal(n, c), draw.normal(c), draw.normal(c)
    out, mean, rstd = ops.layernorm(x, weight, bias, EPS)
    return Call(
        lambda *args: ops.layernorm(*args, EPS)[0],
        lambda x, weight, bias: F.layer_norm(x, (c,), weight, bias, EPS),
        normed,
        (x, weight, bias),
        [
            call(ops.layernorm, x, weight, bias, EPS),
            call(ops.layernorm_backward, out, x, weight, mean, rstd, [True] * 3),
        ],
    )


def sum_and_norm(draw: Draw, p: float) -> Call:
    """residual_layernorm with the bias of the layer before it, and dropout where p is not 0."""
    n, c = draw.of((2, 4), (31, 67), (64, 768))
    args = draw.normal(n, c), draw.normal(n, c), draw.normal(c), draw.normal(c), draw.normal(c)
    dropout = draw.dropout(p) if p else (0.0, None, None)
    kept: Any = ops.dropout_mask(n * c, *dropout).view(n, c) if p else 1

    def added(x: Tensor, residual: Tensor, x_bias: Tensor) -> Tensor:
        return (x + x_bias) * kept / (1 - p) + residual

    def torchs(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, x_bias: Tensor) -> tuple[Tensor, Tensor]:
        total = added(x, residual, x_bias)
        return F.layer_norm(total, (c,), weight, bias, EPS), total

    def exact(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, x_bias: Tensor) -> tuple[Tensor, Tensor]:
        total = added(x, residual, x_bias)
        total = total + (total.detach().to(draw.dtype).double() - total.detach())  # the sum is rounded before the norm
        return normed(total, weight, bias), total

    x, residual, weight, bias, x_bias = args
    options = EPS, x_bias, *dropout
    out, total, mean, rstd = ops.residual_layernorm(x, residual, weight, bias, *options)
    saved = out, None, total, weight, mean, rstd
    calls = [call(ops.residual_layernorm, x, residual, weight, bias, *options)]
    if p:
        calls += [call(ops.residual_layernorm_dropout_backward, *saved, *dropout, [True] * 5)]
    else:
        calls += [
            call(ops.residual_layernorm_backward, *saved, [True] * 3),
            call(ops.residual_layernorm_bias_backward, *saved, [True] * 4),
        ]
    return Call(lambda *args: ops.residual_layernorm(*args[:4], EPS, args[4], *dropout)[:2], torchs, exact, args, calls)


@case()
def residual_layernorm(draw: Draw) -> Call:
    return sum_and_norm(draw, 0.0)


@case(of="residual_layernorm")
def residual_layernorm_dropout(draw: Draw) -> Call:
    return sum_and_norm(draw, 0.25)


# ---- elementwise, softmax --------------------------------------------------------------------------------------------


@case()
def dropout(draw: Draw) -> Call:
    shape = draw.of((2, 3), (7, 33), (64, 768))
    x, (p, seed, offset) = draw.normal(*shape), draw.dropout(0.25)
    kept = ops.dropout_mask(x.numel(), p, seed, offset).view(shape)

    def formula(x: Tensor) -> Tensor:
        return x * kept / (1 - p)

    calls = [
        call(ops.dropout, x, p, seed, offset),
        call(ops.dropout_mask, x.numel(), p, seed, offset),
    ]
    return Call(lambda x: ops.dropout(x, p, seed, offset), formula, formula, (x,), calls)


def gelu_of(draw: Draw, approximate: str, exact: Callable[[Tensor], Tensor]) -> Call:
    """Either form."""
    x = draw.normal(*draw.of((2, 3), (7, 33), (64, 768)), scale=2)
    return Call(
        lambda x: ops.gelu(x, approximate=approximate),
        lambda x: F.gelu(x, approximate=approximate),
        exact,
        (x,),
        [
            call(ops.gelu, x, approximate=approximate),
            call(ops.gelu_backward, x, x, approximate=approximate),
        ],
    )


def tanh_gelu(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(...)), without its cancellation."""
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


@case(of="gelu")
def gelu_tanh(draw: Draw) -> Call:
    return gelu_of(draw, "tanh", tanh_gelu)


@case(of="gelu")
def gelu_none(draw: Draw) -> Call:
    return gelu_of(draw, "none", lambda x: x * 0.5 * torch.erfc(-x * math.sqrt(0.5)))


@case()
def softmax(draw: Draw) -> Call:
    x = draw.normal(*draw.of((2, 3), (31, 67), (64, 1000)), scale=3)

    def exact(x: Tensor) -> Tensor:
        weights = (x - x.amax(-1, keepdim=True)).exp()
        return weights / weights.sum(-1, keepdim=True)

    out = ops.softmax(x)
    calls = [call(ops.softmax, x), call(ops.softmax_backward, x, out)]
    return Call(ops.softmax, lambda x: x.softmax(-1), exact, (x,), calls)


@case()
def causal_softmax(draw: Draw) -> Call:
    n, t = draw.of((1, 3), (2, 33), (2, 128))
    scores = draw.normal(n, t, t, scale=3)
    future = torch.ones(t, t, dtype=torch.bool, device=draw.device).triu(1)

    def formula(scores: Tensor) -> Tensor:
        return (scores * 0.5).masked_fill(future, -math.inf).softmax(-1)

    out = ops.causal_softmax(scores, 0.5)
    calls = [
        call(ops.causal_softmax, scores, 0.5),
        call(ops.causal_softmax_backward, scores, out, 0.5),
    ]
    return Call(lambda scores: ops.causal_softmax(scores, 0.5), formula, formula, (scores,), calls)


# ---- attention -------------------------------------------------------------------------------------------------------


def attend(query: Tensor, key: Tensor, value: Tensor, kept: Any = 1) -> Tensor:
    """Causal attention of (B, NH, T, HS), keys shared by groups of heads, probabilities times ``kept``."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (1 / math.sqrt(query.shape[3]))
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return (scores.masked_fill(future, -math.inf).softmax(-1) * kept) @ value


def packed(function: Callable[..., Tensor], heads: int) -> Callable[[Tensor], Tensor]:
    """The function of query, key and value as one of qkv (B, T, 3C)."""

    def of(qkv: Tensor) -> Tensor:
        query, key, value = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        return function(query, key, value).transpose(1, 2).flatten(2)

    return of


torchs_attention = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
HEADS = 2


def packed_sizes(draw: Draw) -> tuple[int, int, int]:
    """B, T, HS."""
    return draw.of((1, 3, 2), (2, 37, 33), (2, 200, 64))


@case()
def attention(draw: Draw) -> Call:
    b, t, size = packed_sizes(draw)
    qkv = draw.normal(b, t, 3 * HEADS * size)
    out, logsumexp = ops.attention(qkv, HEADS)
    calls = [
        call(ops.attention, qkv, HEADS),
        call(ops.attention_backward, out, qkv, out, logsumexp, HEADS),
    ]
    return Call(
        lambda qkv: ops.attention(qkv, HEADS)[0], packed(torchs_attention, HEADS), packed(attend, HEADS), (qkv,), calls
    )


@case(of="attention")
def attention_dropout(draw: Draw) -> Call:
    b, t, size = packed_sizes(draw)
    qkv, dropout = draw.normal(b, t, 3 * HEADS * size), draw.dropout(0.25)
    kept = ops.attention_dropout_mask(b, HEADS, t, t, *dropout)

    def formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, kept.to(query.dtype) / (1 - dropout[0]))

    calls = [
        call(ops.attention, qkv, HEADS, None, *dropout),
        call(ops.attention_dropout_mask, b, HEADS, t, t, *dropout),
    ]
    return Call(
        lambda qkv: ops.attention(qkv, HEADS, None, *dropout)[0],
        packed(formula, HEADS),
        packed(formula, HEADS),
        (qkv,),
        calls,
    )


@case()
def scaled_dot_product_attention(draw: Draw) -> Call:
    b, heads, shared, t, size = draw.of((1, 2, 1, 3, 2), (2, 4, 2, 37, 33), (2, 4, 2, 200, 64))
    query, key, value = draw.normal(b, heads, t, size), draw.normal(b, shared, t, size), draw.normal(b, shared, t, size)
    out, logsumexp = ops.scaled_dot_product_attention(query, key, value, is_causal=True)
    saved = out, None, query, key, value, out, logsumexp
    return Call(
        lambda *args: ops.scaled_dot_product_attention(*args, is_causal=True)[0],
        torchs_attention,
        attend,
        (query, key, value),
        [
            call(ops.scaled_dot_product_attention, query, key, value, is_causal=True),
            call(ops.scaled_dot_product_attention_backward, *saved, is_causal=True),
        ],
    )


@case()
def attention_probabilities(draw: Draw) -> Call:
    b, t, size = packed_sizes(draw)
    qkv = draw.normal(b, t, 3 * HEADS * size)
    out, probabilities = ops.attention_probabilities(qkv, HEADS)
    formula = packed(attend, HEADS)
    calls = [
        call(ops.attention_probabilities, qkv, HEADS),
        call(ops.attention_probabilities_backward, out, qkv, probabilities, HEADS),
    ]
    return Call(lambda qkv: ops.attention_probabilities(qkv, HEADS)[0], formula, formula, (qkv,), calls)


# ---- matrices --------------------------------------------------------------------------------------------------------


@case()
def linear(draw: Draw) -> Call:
    n, inner, width = draw.of((2, 3, 2), (19, 33, 21), (96, 128, 256))
    x, weight, bias = draw.normal(n, inner), draw.normal(width, inner, scale=inner**-0.5), draw.normal(width)
    calls = [
        call(ops.linear, x, weight, bias),
        call(ops.linear_backward, draw.normal(n, width), x, weight, [True] * 3),
    ]
    return Call(ops.linear, F.linear, lambda x, weight, bias: x @ weight.T + bias, (x, weight, bias), calls)


@case()
def mlp(draw: Draw) -> Call:
    n, c, hidden = draw.of((2, 2, 3), (19, 33, 65), (96, 64, 256))
    x = draw.normal(n, c)
    weights = draw.normal(hidden, c, scale=c**-0.5), draw.normal(hidden), draw.normal(c, hidden, scale=hidden**-0.5)
    args = x, *weights, draw.normal(c)
    out, pre_gelu, post_gelu = ops.mlp(*args)
    calls = [
        call(ops.mlp, *args),
        call(ops.mlp_backward, out, x, weights[0], weights[2], pre_gelu, post_gelu, [True] * 5),
    ]

    def torchs(x: Tensor, fc: Tensor, fc_bias: Tensor, proj: Tensor, proj_bias: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, fc, fc_bias), approximate="tanh"), proj, proj_bias)

    def exact(x: Tensor, fc: Tensor, fc_bias: Tensor, proj: Tensor, proj_bias: Tensor) -> Tensor:
        return tanh_gelu(x @ fc.T + fc_bias) @ proj.T + proj_bias

    return Call(lambda *args: ops.mlp(*args)[0], torchs, exact, args, calls)


# float8: what is held to the rule is the quantisation, and the products of the quantised numbers, which a dtype of 16
# bits has too. A tensor core's sums have fewer bits than float32.
FP8 = torch.float8_e4m3fn


def read_back(x: Tensor, history: Tensor | None = None) -> Tensor:
    """What the float8 numbers of x say."""
    q, _, scale = ops.fp8_quantize(x, history, FP8)
    return (q.to(torch.float32) * scale).to(x.dtype)


@case(differentiable=False, dtypes=(torch.float32, torch.bfloat16, torch.float16))
def fp8_quantize(draw: Draw) -> Call:
    n, c = draw.of((2, 3), (19, 33), (96, 256))
    x, history = draw.normal(n, c), torch.zeros(18, dtype=torch.int32, device=draw.device)

    def formula(x: Tensor) -> Tensor:
        scale = torch.exp2(torch.ceil(torch.log2(x.abs().max().double() / 448)))
        return (x.double() / scale).to(FP8).double() * scale

    return Call(read_back, formula, formula, (x,), [call(ops.fp8_quantize, x, history, FP8, True)])


@case(differentiable=False, dtypes=(torch.float32, torch.bfloat16, torch.float16))
def fp8_layernorm(draw: Draw) -> Call:
    """Torch's is rounded to eight bits, the formula is not."""
    n, c = draw.of((2, 4), (19, 33), (96, 256))
    x, residual, weight, bias = draw.normal(n, c), draw.normal(n, c), draw.normal(c), draw.normal(c)
    history = torch.zeros(18, dtype=torch.int32, device=draw.device)

    def ours(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        q, _, scale, *_ = ops.fp8_layernorm(x, residual, weight, bias, None)
        return (q.to(torch.float32) * scale).to(x.dtype)

    def torchs(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return read_back(F.layer_norm(x + residual, (c,), weight, bias, EPS))

    def exact(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return normed(x + residual, weight, bias)

    calls = [call(ops.fp8_layernorm, x, residual, weight, bias, history, True)]
    return Call(ours, torchs, exact, (x, residual, weight, bias), calls)


@case(differentiable=False, dtypes=(torch.bfloat16,))
def fp8_matmul(draw: Draw) -> Call:
    n, inner, width = draw.of((2, 16, 16), (19, 48, 32), (96, 128, 256))
    x, weight = draw.normal(n, inner), draw.normal(width, inner, scale=inner**-0.5)
    dtype = x.dtype

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        (a, _, scale_a), (b, _, scale_b) = (ops.fp8_quantize(t, None, FP8) for t in (x, weight))
        return ops.fp8_matmul(a, b, scale_a, scale_b, None, dtype)

    def torchs(x: Tensor, weight: Tensor) -> Tensor:
        return read_back(x) @ read_back(weight).T

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        return read_back(x.to(dtype)).double() @ read_back(weight.to(dtype)).double().T

    (a, _, scale_a), (b, _, scale_b) = (ops.fp8_quantize(t.float(), None, FP8) for t in (x, weight))
    return Call(ours, torchs, exact, (x, weight), [call(ops.fp8_matmul, a, b, scale_a, scale_b, None, torch.float32)])


@case(differentiable=False, dtypes=(torch.bfloat16,))
def fp8_linear(draw: Draw) -> Call:
    n, inner, width = draw.of((2, 16, 16), (19, 48, 32), (96, 128, 256))
    x, weight, bias = draw.normal(n, inner), draw.normal(width, inner, scale=inner**-0.5), draw.normal(width)
    dtype = draw.dtype
    histories = [torch.zeros(18, dtype=torch.int32, device=draw.device) for _ in range(2)]
    _, *saved = ops.fp8_linear(x, weight, None, None, None, [True, True])
    calls = [
        call(ops.fp8_linear, x, weight, bias, *histories, [True, True]),
        call(ops.fp8_linear_backward, draw.normal(n, width), *saved, histories[1], [True] * 3),
    ]

    def torchs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(read_back(x), read_back(weight), bias)

    def exact(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(read_back(x.to(dtype)).double(), read_back(weight.to(dtype)).double(), bias)

    return Call(
        lambda *args: ops.fp8_linear(*args, None, None, [False, False])[0], torchs, exact, (x, weight, bias), calls
    )


@case(differentiable=False, dtypes=(torch.bfloat16,))
def fp8_mlp(draw: Draw) -> Call:
    n, c, hidden = draw.of((2, 16, 16), (19, 32, 48), (96, 64, 256))
    x = draw.normal(n, c)
    weights = draw.normal(hidden, c, scale=c**-0.5), draw.normal(hidden), draw.normal(c, hidden, scale=hidden**-0.5)
    args = x, *weights, draw.normal(c)
    dtype = draw.dtype
    histories = [torch.zeros(18, dtype=torch.int32, device=draw.device) for _ in range(4)]
    saved = ops.fp8_mlp(*args, *histories, [True] * 4)[1:]
    calls = [
        call(ops.fp8_mlp, *args, *histories, [True] * 4),
        call(ops.fp8_mlp_backward, draw.normal(n, c), *saved, *histories[2:], [True] * 5),
    ]
    # GELU's argument is rounded to the dtype and its result to eight bits: where the first is another, so may be the
    # second. What follows is therefore compared for the hidden numbers that ours has.
    pre_gelu = ops.fp8_mlp(*args, None, None, None, None, [False] * 4)[1]
    post_gelu = read_back(ops.gelu(pre_gelu))

    def ours(*args: Tensor) -> tuple[Tensor, Tensor]:
        return ops.fp8_mlp(*args, None, None, None, None, [False] * 4)[:2]

    def torchs(x: Tensor, fc: Tensor, fc_bias: Tensor, proj: Tensor, proj_bias: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(post_gelu, read_back(proj), proj_bias), F.linear(read_back(x), read_back(fc), fc_bias)

    def exact(x: Tensor, fc: Tensor, fc_bias: Tensor, proj: Tensor, proj_bias: Tensor) -> tuple[Tensor, Tensor]:
        wide_x, wide_fc, wide_proj = (read_back(t.to(dtype)).double() for t in (x, fc, proj))
        return F.linear(post_gelu.double(), wide_proj, proj_bias), F.linear(wide_x, wide_fc, fc_bias)

    return Call(ours, torchs, exact, args, calls)


# ---- losses ----------------------------------------------------------------------------------------------------------

IGNORED = -100


def some_targets(draw: Draw, vocab_size: int, rows: int) -> Tensor:
    """Of which the last is ignored."""
    targets = draw.below(vocab_size, rows)
    targets[-1] = IGNORED
    return targets


def losses(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """In the formula's dtype; in torch's at least float32, which for 16 bits is stricter than torch in the logits'."""
    return F.cross_entropy(wide(logits)[:, :vocab_size], targets, reduction="none", ignore_index=IGNORED)


@case()
def fused_classifier(draw: Draw) -> Call:
    n, v, padded = draw.of((3, 3, 4), (13, 501, 513), (32, 5000, 5056))
    logits, targets = draw.normal(n, padded, scale=3), some_targets(draw, v, n)
    formula = partial(losses, targets=targets, vocab_size=v)
    _, dlogits = ops.fused_classifier(logits, targets, v)
    calls = [
        call(ops.fused_classifier, logits, targets, v),
        call(ops.fused_classifier_backward, wide(draw.normal(n)), dlogits),
        call(ops.fused_classifier_backward_, wide(draw.normal(n)), dlogits.clone()),
    ]
    return Call(lambda logits: ops.fused_classifier(logits, targets, v)[0], formula, formula, (logits,), calls)


@case()
def fused_classifier_(draw: Draw) -> Call:
    n, v = draw.of((3, 3), (13, 501), (32, 5000))
    logits, targets = draw.normal(n, v, scale=3), some_targets(draw, v, n)
    formula = partial(losses, targets=targets, vocab_size=v)
    return Call(
        lambda logits: ops.fused_classifier_(logits * 1, targets),
        formula,
        formula,
        (logits,),
        [call(ops.fused_classifier_, logits.clone(), targets)],
    )


@case()
def linear_cross_entropy(draw: Draw) -> Call:
    n, c, v, padded = draw.of((3, 2, 3, 4), (13, 33, 201, 213), (64, 64, 1000, 1024))
    x, weight, targets = draw.normal(n, c), draw.normal(padded, c, scale=c**-0.5), some_targets(draw, v, n)

    def formula(x: Tensor, weight: Tensor) -> Tensor:
        return losses(F.linear(x, weight), targets, v).sum() / (n - 1)

    options = v, IGNORED, "mean", -1
    calls = [
        call(ops.linear_cross_entropy, x, weight, targets, v),
        call(ops.linear_cross_entropy_with_gradients, x, weight, targets, *options, [True] * 2),
        call(ops.linear_cross_entropy_with_logits, x, weight, targets, None, v, IGNORED, -1, [True] * 2),
        call(ops.linear_cross_entropy_backward, wide(draw.normal()), x, weight, targets, *options, [True] * 2),
    ]
    return Call(lambda x, weight: ops.linear_cross_entropy(x, weight, targets, v), formula, formula, (x, weight), calls)


@case(differentiable=False, dtypes=(torch.float32, torch.bfloat16, torch.float16))
def fp8_linear_cross_entropy(draw: Draw) -> Call:
    """The loss, which is not of rounded numbers."""
    n, c, v, padded = draw.of((3, 16, 9, 16), (13, 48, 201, 208), (64, 64, 1000, 1024))
    x, weight, targets = draw.normal(n, c), draw.normal(padded, c, scale=c**-0.5), some_targets(draw, v, n)

    def formula(x: Tensor, weight: Tensor) -> Tensor:
        return losses(F.linear(x, weight), targets, v).sum() / (n - 1)

    calls = [
        call(ops.fp8_linear_cross_entropy, x, weight, targets, v),
        call(ops.fp8_linear_cross_entropy_with_gradients, x, weight, targets, v, IGNORED, "mean", -1, True, [True] * 2),
    ]
    return Call(
        lambda x, weight: ops.fp8_linear_cross_entropy(x, weight, targets, v), formula, formula, (x, weight), calls
    )


# ---- the optimizer ---------------------------------------------------------------------------------------------------


@case(differentiable=False)
def adamw_(draw: Draw) -> Call:
    shape = draw.of((2, 3), (7, 33), (64, 768))
    param, grad, exp_avg, square = (draw.normal(*shape) for _ in range(4))
    eps = 1e-3 if draw.dtype == torch.float16 else 1e-8  # torch rounds it to float16, where 1e-8 is 0
    options = {"beta1": 0.9, "beta2": 0.95, "eps": eps, "weight_decay": 0.1}
    lr, step = torch.tensor(1e-2, dtype=torch.float64), 3.0

    def number(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float32, device=draw.device)

    def lists(*args: Tensor) -> list[list[Tensor]]:
        return [[t.detach().clone()] for t in args]

    def ours(*args: Tensor) -> tuple[Tensor, ...]:
        params, grads, exp_avgs, squares = lists(*args)
        ops.adamw_(params, grads, exp_avgs, squares, [number(step)], lr=lr, **options)
        return params[0], exp_avgs[0], squares[0]

    def formula(*args: Tensor) -> tuple[Tensor, ...]:
        param, grad, exp_avg, square = (t.detach().clone() for t in args)
        param.requires_grad_().grad = grad
        betas = options["beta1"], options["beta2"]
        optimizer = torch.optim.AdamW([param], lr.item(), betas, eps, options["weight_decay"], foreach=False)
        optimizer.state[param] = {"step": torch.tensor(step - 1), "exp_avg": exp_avg, "exp_avg_sq": square}
        optimizer.step()
        return param.detach(), exp_avg, square

    args = param, grad, exp_avg, square.abs()
    calls = [call(ops.adamw_, *lists(*args), [number(step)], lr=lr, **options)]
    return Call(ours, formula, formula, args, calls)


@case(float64_results=False)
def global_norm(draw: Draw) -> Call:
    tensors = tuple(draw.normal(*shape) for shape in draw.of([(2, 3), (4,)], [(7, 33), (5,)], [(64, 768), (1000,)]))

    def norm(*tensors: Tensor) -> Tensor:
        return torch.linalg.vector_norm(torch.cat([t.flatten() for t in tensors]))

    def torchs(*tensors: Tensor) -> Tensor:
        return norm(*(t.float() for t in tensors))

    return Call(
        lambda *tensors: ops.global_norm(list(tensors)),
        torchs,
        norm,
        tensors,
        [call(ops.global_norm, list(tensors))],
    )


# ---- layers and generation -------------------------------------------------------------------------------------------


def layer_parameters(draw: Draw, c: int) -> list[Tensor]:
    """The weight and the bias of each of a layer's norms and matrices, in their order."""
    shapes = [(c,), (3 * c, c), (c, c), (c,), (4 * c, c), (c, 4 * c)]
    return [draw.normal(*sizes, scale=sizes[-1] ** -0.5) for shape in shapes for sizes in (shape, shape[:1])]


@case(differentiable=False)
def layer(draw: Draw) -> Call:
    """What the layer adds to the stream, and the stream before it."""
    b, t, c, heads = draw.of((1, 2, 4, 2), (2, 7, 15, 3), (2, 64, 192, 3))
    stream, values, values_bias = draw.normal(b, t, c), draw.normal(b, t, c), draw.normal(c)
    *weights, proj_weight, _ = layer_parameters(draw, c)
    args = stream, values, values_bias, *weights, proj_weight
    options = heads, None, EPS, EPS, "tanh"

    def ours(*args: Tensor) -> tuple[Tensor, Tensor]:
        outputs = ops.layer(*args, *options)
        return outputs[0], outputs[8]

    def formula(stream: Tensor, values: Tensor, values_bias: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        w1, b1, qkv_w, qkv_b, out_w, out_b, w2, b2, fc_w, fc_b, proj_w = weights
        x = values + values_bias + stream
        query, key, value = F.linear(normed(x, w1, b1), qkv_w, qkv_b).view(b, t, 3, heads, -1).transpose(1, 3).unbind(2)
        scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(
            torch.ones(t, t, dtype=torch.bool, device=draw.device).triu(1), -math.inf
        )
        attended = (scores.softmax(-1) @ value).transpose(1, 2).reshape(b, t, c)
        x = F.linear(attended, out_w, out_b) + x
        return F.linear(tanh_gelu(F.linear(normed(x, w2, b2), fc_w, fc_b)), proj_w), x

    out, *kept = ops.layer(*args, *options)
    weights_used = weights[0], weights[2], weights[4], weights[6], weights[8], proj_weight
    calls = [
        call(ops.layer, *args, *options),
        call(ops.layer_backward, out, stream, *kept, *weights_used, heads, None, "tanh", [True] * 14),
    ]
    return Call(ours, formula, formula, args, calls)


@case(differentiable=False, dtypes=(torch.bfloat16,))
def fp8_layer(draw: Draw) -> Call:
    """As ``layer``; torch's has the operands of products rounded to eight bits, the formula has not."""
    b, t, c, heads = draw.of((1, 2, 16, 2), (2, 7, 48, 3), (2, 64, 192, 3))
    stream, values, values_bias = draw.normal(b, t, c), draw.normal(b, t, c), draw.normal(c)
    *weights, proj_weight, _ = layer_parameters(draw, c)
    args = stream, values, values_bias, *weights, proj_weight
    histories = [torch.zeros(18, dtype=torch.int32, device=draw.device) for _ in range(8)]

    def options() -> tuple[Any, ...]:
        copies = [t.clone() for t in histories]
        return copies[:4], copies[4:], heads, None, EPS, EPS

    def ours(*args: Tensor) -> tuple[Tensor, Tensor]:
        outputs = ops.fp8_layer(*args, *options())
        return outputs[0], outputs[2]

    def by_parts(linear: Callable[..., Tensor], *args: Tensor) -> tuple[Tensor, Tensor]:
        stream, values, values_bias, w1, b1, qkv_w, qkv_b, out_w, out_b, w2, b2, fc_w, fc_b, proj_w = args
        x = values + values_bias + stream
        qkv = linear(normed(x, w1, b1), qkv_w, qkv_b)
        query, key, value = qkv.view(b, t, 3, heads, -1).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = linear(attended.transpose(1, 2).reshape(b, t, c), out_w, out_b) + x
        return linear(tanh_gelu(linear(normed(x, w2, b2), fc_w, fc_b)), proj_w, None), x

    def torchs(*args: Tensor) -> tuple[Tensor, Tensor]:
        return by_parts(lambda x, weight, bias: F.linear(read_back(x), read_back(weight), bias), *args)

    out, sum_1, sum_2, *saved = ops.fp8_layer(*args, *options())
    kept = sum_1, sum_2, saved, weights[0], weights[6], histories[4:]
    calls = [
        call(ops.fp8_layer, *args, *options()),
        call(ops.fp8_layer_backward, out, stream, *kept, heads, None, True, [True] * 14),
    ]
    return Call(ours, torchs, partial(by_parts, F.linear), args, calls)


@case(differentiable=False)
def decode(draw: Draw) -> Call:
    """The second token of each sequence through one layer, the first one's keys and values in the cache."""
    b, v, c, heads = draw.of((1, 5, 4, 2), (3, 65, 15, 3), (4, 300, 192, 3))
    tokens, lengths = draw.below(v, b, 2), draw.below(1, b) + 2
    wte, wpe, head = draw.normal(v, c), draw.normal(2, c), draw.normal(v, c, scale=c**-0.5)
    first = draw.normal(2, b, heads, 1, c // heads)
    layer = layer_parameters(draw, c)
    norm = draw.normal(c), draw.normal(c)

    def cache() -> Tensor:
        return torch.cat([first, torch.zeros_like(first)], 3)[None].contiguous()

    def ours(wte: Tensor, wpe: Tensor, head: Tensor, first: Tensor, *weights: Tensor) -> Tensor:
        *layer, norm_weight, norm_bias = weights
        args = tokens, lengths, wte, wpe, layer, norm_weight, norm_bias, head, cache(), heads
        return ops.decode(*args)  # type: ignore[no-any-return]

    def formula(wte: Tensor, wpe: Tensor, head: Tensor, first: Tensor, *weights: Tensor) -> Tensor:
        w1, b1, qkv_w, qkv_b, out_w, out_b, w2, b2, fc_w, fc_b, proj_w, proj_b, *norm = weights
        x = wte[tokens[:, 1]] + wpe[1]
        query, *key_value = F.linear(normed(x, w1, b1), qkv_w, qkv_b).view(b, 3, heads, 1, -1).unbind(1)
        key, value = (torch.cat([old, new], 2) for old, new in zip(first, key_value, strict=True))
        weight = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
        x = x + F.linear((weight @ value).view(b, c), out_w, out_b)
        x = x + F.linear(tanh_gelu(F.linear(normed(x, w2, b2), fc_w, fc_b)), proj_w, proj_b)
        return F.linear(normed(x, *norm), head)

    args = wte, wpe, head, first, *layer, *norm
    calls = [call(ops.decode, tokens, lengths, wte, wpe, layer, *norm, head, cache(), heads)]
    return Call(ours, formula, formula, args, calls)


@case(differentiable=False)
def sample_(draw: Draw) -> Call:
    """The tokens drawn, as numbers of the logits' dtype, which bfloat16 has up to 256."""
    b, v = draw.of((1, 3), (3, 65), (4, 200))
    logits, noise = draw.normal(b, v, scale=3), draw.normal(b, v).float().abs() + 0.01

    def fresh() -> tuple[Tensor, Tensor]:
        return torch.zeros(b, 2, dtype=torch.int64, device=draw.device), draw.below(1, b) + 1

    def ours(logits: Tensor) -> Tensor:
        sequences, lengths = fresh()
        ops.sample_(logits, noise, sequences, lengths, 0.9, v // 2)
        return sequences[:, 1].to(logits.dtype)

    def formula(logits: Tensor) -> Tensor:
        x = wide(logits) / 0.9
        x = x.masked_fill(x < x.topk(v // 2).values[:, -1:], -math.inf)
        return (x.softmax(-1) / noise).argmax(-1).to(logits.dtype)

    return Call(ours, formula, formula, (logits,), [call(ops.sample_, logits, noise, *fresh(), 0.9, v // 2)])
