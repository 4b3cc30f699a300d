"""A layer of GPT-2 in training as one call of its operators, which takes less of the host's time (``_layer_node.py``).

It has no autograd rule of its own: the node that calls it is one.
"""

from gptkernels.rules._register import accumulate_dtype, fake, flops, without_derivative
from gptkernels.rules.attention import attention_backward_flops, attention_flops
from gptkernels.rules.linear import fake_weight_gradient, linear_flops


def _fake(
    stream, values, values_bias, norm_1_weight, norm_1_bias, qkv_weight, qkv_bias, out_weight, out_bias, norm_2_weight,
    norm_2_bias, fc_weight, fc_bias, proj_weight, num_heads, scale, eps_1, eps_2, approximate, values_dropout_p=0.0,
    values_seed=None, values_offset=None, attention_dropout_p=0.0, attention_seed=None, attention_offset=None,
    out_dropout_p=0.0, out_seed=None, out_offset=None, keep_post_gelu=True,
):  # fmt: skip
    low, rows = qkv_weight, stream.shape[:-1]

    def hidden(width):
        return low.new_empty((*rows, width))

    def norm():
        statistics = (stream.new_empty(rows, dtype=accumulate_dtype(stream.dtype)) for _ in range(2))
        return *statistics, hidden(stream.shape[-1])

    sum_1 = stream.new_empty((0,) if values is None else stream.shape)
    logsumexp = low.new_empty((rows[0], num_heads, rows[1]), dtype=accumulate_dtype(low.dtype))
    post_gelu = hidden(fc_weight.shape[0]) if keep_post_gelu else low.new_empty(0)
    return (
        *(hidden(proj_weight.shape[0]), sum_1, *norm(), hidden(qkv_weight.shape[0]), hidden(stream.shape[-1])),
        *(logsumexp, stream.new_empty(stream.shape), *norm(), hidden(fc_weight.shape[0]), post_gelu),
    )


def _fake_backward(
    dout, dsum, sum_1, mean_1, rstd_1, norm_1, qkv, attended, logsumexp, sum_2, mean_2, rstd_2, norm_2, pre_gelu,
    post_gelu, norm_1_weight, qkv_weight, out_weight, norm_2_weight, fc_weight, proj_weight, num_heads, scale,
    approximate, output_mask, values_dropout_p=0.0, values_seed=None, values_offset=None, attention_dropout_p=0.0,
    attention_seed=None, attention_offset=None, out_dropout_p=0.0, out_seed=None, out_offset=None, has_values=True,
    adds_past=True,
):  # fmt: skip
    def sums(like, t):
        return like.new_empty(t.shape[-1])

    apart = has_values and (dout.dtype != sum_1.dtype or values_dropout_p > 0)
    need_stream, need_values, *needs = output_mask
    matrices = [fake_weight_gradient(weight) for weight in (qkv_weight, out_weight, fc_weight, proj_weight)]
    gradients = (
        *(sums(sum_1, sum_1) for _ in range(3)),  # of the values' bias and the first norm
        *(matrices[0], sums(dout, qkv), matrices[1]),
        *(sums(sum_1, sum_1) for _ in range(3)),  # of the projection's bias and the second norm
        *(matrices[2], sums(dout, pre_gelu), matrices[3]),
    )
    wanted = (g if need else g.new_empty(0) for g, need in zip(gradients, needs, strict=True))
    dstream = sum_1.new_empty(sum_1.shape if need_stream or not adds_past or (need_values and not apart) else (0,))
    if not adds_past:
        return dstream, sum_1.new_empty(sum_1.shape if need_stream or need_values else (0,)), *wanted
    return dstream, dout.new_empty(sum_1.shape if need_values and apart else (0,)), *wanted


def layer_flops(stream, *args, **kwargs) -> int:
    """Of its operators."""
    qkv_weight, out_weight, fc_weight, proj_weight, num_heads = (args[i] for i in (4, 6, 10, 12, 13))
    qkv, hidden = (*stream[:-1], qkv_weight[0]), (*stream[:-1], fc_weight[0])
    products = linear_flops(stream, qkv_weight) + linear_flops(stream, out_weight) + linear_flops(stream, fc_weight)
    return products + linear_flops(hidden, proj_weight) + attention_flops(qkv, num_heads)


def layer_backward_flops(dout, *args, **kwargs) -> int:
    """Of its operators: of each product's two gradients those that are wanted."""
    qkv, attended, logsumexp, pre_gelu = args[5], args[6], args[7], args[12]
    qkv_weight, out_weight, fc_weight, proj_weight, num_heads = (args[i] for i in (15, 16, 18, 19, 20))
    mask = args[23]
    return (
        linear_flops(dout, qkv_weight) * (any(mask[:5]) + mask[5])
        + linear_flops(dout, out_weight) * (1 + mask[7])
        + linear_flops(dout, fc_weight) * (1 + mask[11])
        + linear_flops(pre_gelu, proj_weight) * (1 + mask[13])
        + attention_backward_flops(attended, qkv, attended, logsumexp, num_heads)
    )


fake("layer", _fake)
fake("layer_backward", _fake_backward)
without_derivative("layer")
without_derivative("layer_backward")
flops("layer", layer_flops)
flops("layer_backward", layer_backward_flops)
