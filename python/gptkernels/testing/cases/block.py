"""Table entries of the operators that compute a layer of GPT-2, with and without float8 matmuls."""

from functools import partial

import torch.nn.functional as F

from gptkernels.block.tensors import LayerSaved
from gptkernels.testing.cases.attention import attention_formula
from gptkernels.testing.cases.elementwise import gelu_formula
from gptkernels.testing.cases.fp8 import BFLOAT16, E4M3, new_histories
from gptkernels.testing.cases.norm import layernorm_formula
from gptkernels.testing.cases.table import Call, invoke, operator, ops

EPS = 1e-5
WEIGHTS = ("norm_1_weight", "qkv_weight", "attn_proj_weight", "norm_2_weight", "fc_weight", "mlp_proj_weight")


def layer_arguments(draw):
    b, t, heads = draw.size("batch", 4, 1), draw.size("tokens", 64, 1), draw.size("heads", 4, 1)
    c = heads * draw.size("head size", 64, 1)
    dtype = draw.dtype()
    args = {name: draw.tensor(name, (b, t, c), dtype) for name in ("stream", "values")}
    args["values_bias"] = draw.tensor("values_bias", (c,), dtype)
    for name, shape in zip(WEIGHTS, [(c,), (3 * c, c), (c, c), (c,), (4 * c, c), (c, 4 * c)], strict=True):
        args[name] = draw.tensor(name, shape, dtype, shape[-1] ** -0.5)
        if name != "mlp_proj_weight":  # the bias of mlp_proj is added after the layer
            args[name.replace("weight", "bias")] = draw.tensor(f"{name}.bias", shape[:1], dtype, shape[0] ** -0.5)
    return args, heads


def layer_formula(linear, heads, *args):
    stream, values, values_bias, w1, b1, qkv_w, qkv_b, attn_w, attn_b, w2, b2, fc_w, fc_b, proj_w = args
    x = values + values_bias + stream
    qkv = linear(layernorm_formula(x, w1, b1), qkv_w, qkv_b)
    query, key, value = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    x = linear(attention_formula(query, key, value).transpose(1, 2).flatten(2), attn_w, attn_b) + x
    return linear(gelu_formula(linear(layernorm_formula(x, w2, b2), fc_w, fc_b)), proj_w, None), x


@operator(
    finite_differences=False,
    weight=0,
    sizes={"batch": [1, 2, 2], "tokens": [2, 7, 64], "heads": [2, 3, 3], "head size": [2, 5, 64]},
)
def layer(draw):
    args, heads = layer_arguments(draw)
    options = heads, None, EPS, EPS, "tanh"
    formula = partial(layer_formula, F.linear, heads)

    def ours(*args):
        out, *saved = ops.layer(*args, *options)
        return out, LayerSaved(*saved).residual_2

    def invocations():
        out, *kept = ops.layer(*args.values(), *options)
        weights = [args[name] for name in WEIGHTS]
        return [
            invoke(ops.layer, *args.values(), *options),
            invoke(ops.layer_backward, out, args["stream"], *kept, *weights, heads, None, "tanh", [True] * 14),
        ]

    text = f"layer(..., {heads})"
    return Call(text, ours, formula, formula, args, fixed=tuple(args), any_threads=False, invocations=invocations)


@operator(
    weight=0,
    sizes={"batch": [1, 2, 2], "tokens": [2, 7, 64], "heads": [2, 3, 3], "head size": [8, 16, 64]},
    dtypes=BFLOAT16,
)
def fp8_layer(draw):
    """Torch's counterpart rounds the matmuls' operands to float8, the formula does not."""
    args, heads = layer_arguments(draw)

    def options():
        return new_histories(draw, 4), new_histories(draw, 4), heads, None, EPS, EPS

    def ours(*args):
        out, _, residual_2, *_ = ops.fp8_layer(*args, *options())
        return out, residual_2

    def read_back(x):
        q, _, scale = ops.fp8_quantize(x, None, E4M3)
        return (q.float() * scale).to(x.dtype)

    def rounded_linear(x, weight, bias):
        return F.linear(read_back(x), read_back(weight), bias)

    def invocations():
        out, residual_1, residual_2, *saved = ops.fp8_layer(*args.values(), *options())
        kept = residual_1, residual_2, saved, args["norm_1_weight"], args["norm_2_weight"], new_histories(draw, 4)
        return [
            invoke(ops.fp8_layer, *args.values(), *options()),
            invoke(ops.fp8_layer_backward, out, args["stream"], *kept, heads, None, True, [True] * 14),
        ]

    return Call(
        f"fp8_layer(..., {heads})",
        ours,
        partial(layer_formula, rounded_linear, heads),
        partial(layer_formula, F.linear, heads),
        args,
        fixed=tuple(args),
        any_threads=False,
        invocations=invocations,
    )
