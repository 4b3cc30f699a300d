"""A layer of GPT-2 in training as one operator, which takes less host time than an operator for each of its parts.

The operator has no autograd rule. The autograd node in ``block/node.py`` calls ``layer`` in the forward, and
``layer_backward`` in the backward.
"""

from gptkernels.block.tensors import BlockParameters, LayerSaved, Weights
from gptkernels.rules import _register as register
from gptkernels.rules._register import accumulate_dtype, ops
from gptkernels.rules.attention import attention_backward_flops, attention_flops
from gptkernels.rules.linear import fake_weight_gradient, linear_flops


def by_name(name, function):
    arguments = getattr(ops, name).default._schema.arguments
    names = [argument.name for argument in arguments]
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return lambda *args, **kwargs: function(**{**defaults, **dict(zip(names, args, strict=False)), **kwargs})


def fake_tensors(stream, qkv_weight, fc_weight, num_heads):
    rows, channels = stream.shape[:-1], stream.shape[-1]

    def statistic():
        return stream.new_empty(rows, dtype=accumulate_dtype(stream.dtype))

    return {
        **{name: statistic() for name in ("mean_1", "rstd_1", "mean_2", "rstd_2")},
        "qkv": qkv_weight.new_empty((*rows, qkv_weight.shape[0])),
        "attended": qkv_weight.new_empty((*rows, channels)),
        "logsumexp": qkv_weight.new_empty((rows[0], num_heads, rows[1]), dtype=accumulate_dtype(qkv_weight.dtype)),
        "pre_gelu": qkv_weight.new_empty((*rows, fc_weight.shape[0])),
    }


def fake_residuals(stream, values):
    return stream.new_empty((0,) if values is None else stream.shape), stream.new_empty(stream.shape)


def _fake(*, stream, values, qkv_weight, fc_weight, mlp_proj_weight, num_heads, keep_post_gelu, **_):
    rows = stream.shape[:-1]
    residual_1, residual_2 = fake_residuals(stream, values)
    saved = LayerSaved(
        residual_1=residual_1,
        norm_1=qkv_weight.new_empty(stream.shape),
        residual_2=residual_2,
        norm_2=qkv_weight.new_empty(stream.shape),
        post_gelu=qkv_weight.new_empty((*rows, fc_weight.shape[0]) if keep_post_gelu else (0,)),
        **fake_tensors(stream, qkv_weight, fc_weight, num_heads),
    )
    return qkv_weight.new_empty((*rows, mlp_proj_weight.shape[0])), *saved


def fake_gradients(dout, residual_1, qkv, pre_gelu, weights, output_mask, apart, adds_past):
    """Make the fake gradients of ``layer_backward`` and ``fp8_layer_backward``.

    ``apart`` is True if the gradient of the argument ``values`` (the pending addition to the residual stream) differs
    from that of ``stream``.
    """
    need_stream, need_values, *needs = output_mask

    def sums(like, t):
        return like.new_empty(t.shape[-1])

    gradients = (
        sums(residual_1, residual_1),  # of the values' bias
        *BlockParameters(
            norm_1_weight=sums(residual_1, residual_1),
            norm_1_bias=sums(residual_1, residual_1),
            qkv_weight=weights.qkv_weight,
            qkv_bias=sums(dout, qkv),
            attn_proj_weight=weights.attn_proj_weight,
            attn_proj_bias=sums(residual_1, residual_1),
            norm_2_weight=sums(residual_1, residual_1),
            norm_2_bias=sums(residual_1, residual_1),
            fc_weight=weights.fc_weight,
            fc_bias=sums(dout, pre_gelu),
            mlp_proj_weight=weights.mlp_proj_weight,
        ),
    )
    wanted = (g if need else g.new_empty(0) for g, need in zip(gradients, needs, strict=True))
    shape, none = residual_1.shape, (0,)
    dstream = residual_1.new_empty(shape if need_stream or not adds_past or (need_values and not apart) else none)
    if not adds_past:
        return dstream, residual_1.new_empty(shape if need_stream or need_values else none), *wanted
    return dstream, dout.new_empty(shape if need_values and apart else none), *wanted


def _fake_backward(
    *, dout, residual_1, qkv, pre_gelu, qkv_weight, attn_proj_weight, fc_weight, mlp_proj_weight, output_mask,
    values_dropout_p, has_values, adds_past, **_,
):  # fmt: skip
    weights = Weights(*map(fake_weight_gradient, (qkv_weight, attn_proj_weight, fc_weight, mlp_proj_weight)))
    apart = has_values and (dout.dtype != residual_1.dtype or values_dropout_p > 0)
    return fake_gradients(dout, residual_1, qkv, pre_gelu, weights, output_mask, apart, adds_past)


def layer_flops(*, stream, qkv_weight, attn_proj_weight, fc_weight, mlp_proj_weight, num_heads, **_) -> int:
    qkv, hidden = (*stream[:-1], qkv_weight[0]), (*stream[:-1], fc_weight[0])
    products = sum(linear_flops(stream, weight) for weight in (qkv_weight, attn_proj_weight, fc_weight))
    return products + linear_flops(hidden, mlp_proj_weight) + attention_flops(qkv, num_heads)


def layer_backward_flops(*, dout, qkv, attended, logsumexp, pre_gelu, num_heads, output_mask, **_) -> int:
    need_stream, need_values, need_values_bias, *rest = output_mask
    needs = BlockParameters(*rest)
    through_norm_1 = any((need_stream, need_values, need_values_bias, needs.norm_1_weight, needs.norm_1_bias))
    channels, hidden = dout[-1:], pre_gelu[-1:]
    return (
        linear_flops(dout, qkv[-1:]) * (through_norm_1 + needs.qkv_weight)
        + linear_flops(dout, channels) * (1 + needs.attn_proj_weight)
        + linear_flops(dout, hidden) * (1 + needs.fc_weight)
        + linear_flops(dout, hidden) * (1 + needs.mlp_proj_weight)
        + attention_backward_flops(attended, qkv, attended, logsumexp, num_heads)
    )


register.fake("layer", by_name("layer", _fake))
register.fake("layer_backward", by_name("layer_backward", _fake_backward))
register.without_derivative("layer")
register.without_derivative("layer_backward")
register.flops("layer", by_name("layer", layer_flops))
register.flops("layer_backward", by_name("layer_backward", layer_backward_flops))
