"""A layer of GPT-2 in training with float8 products, as ``layer.py``'s without.

It has no autograd rule of its own: the node that calls it is one (``_fp8_layer_node.py``).
"""

from gptkernels.rules._register import accumulate_dtype, fake, flops, mutates, without_derivative
from gptkernels.rules.attention import attention_backward_flops, attention_flops
from gptkernels.rules.fp8 import scale_like, transposed_like
from gptkernels.rules.fp8_linear import SAVED
from gptkernels.rules.linear import linear_flops


def _fake(
    stream, values, values_bias, norm_1_weight, norm_1_bias, qkv_weight, qkv_bias, out_weight, out_bias, norm_2_weight,
    norm_2_bias, fc_weight, fc_bias, proj_weight, histories, dout_histories, num_heads, *options,
):  # fmt: skip
    low, rows = stream if values is None else values, stream.shape[:-1]

    def hidden(width):
        return low.new_empty((*rows, width))

    def transposed(t):
        return transposed_like(t, SAVED, True), scale_like(t)

    def norm():
        return *(stream.new_empty(rows, dtype=accumulate_dtype(stream.dtype)) for _ in range(2)), *transposed(stream)

    qkv, attended, pre_gelu = (hidden(width) for width in (qkv_weight.shape[0], stream.shape[-1], fc_weight.shape[0]))
    logsumexp = low.new_empty((rows[0], num_heads, rows[1]), dtype=accumulate_dtype(low.dtype))
    saved = (
        *(*norm(), *transposed(qkv_weight)),
        *(qkv, attended, logsumexp, *transposed(attended), *transposed(out_weight)),
        *(*norm(), *transposed(fc_weight), pre_gelu, *transposed(pre_gelu), *transposed(proj_weight)),
    )
    sum_1 = stream.new_empty((0,) if values is None else stream.shape)
    return hidden(proj_weight.shape[0]), sum_1, stream.new_empty(stream.shape), *saved


def _fake_backward(
    dout, dsum, sum_1, sum_2, saved, norm_1_weight, norm_2_weight, histories, num_heads, scale, adds_past, output_mask,
    values_dropout_p=0.0, *dropouts,
):  # fmt: skip
    apart = dout.dtype != sum_1.dtype or values_dropout_p > 0
    need_stream, need_values, *needs = output_mask
    channels, hidden, qkv = sum_1.shape[-1], saved[19].shape[-1], saved[6].shape[-1]

    def gradient(like, *shape):
        return like.new_empty(shape)

    gradients = (
        *(gradient(sum_1, channels) for _ in range(3)),  # of the values' bias and the first norm
        *(gradient(dout, qkv, channels), gradient(dout, qkv), gradient(dout, channels, channels)),
        *(gradient(sum_1, channels) for _ in range(3)),  # of the projection's bias and the second norm
        *(gradient(dout, hidden, channels), gradient(dout, hidden), gradient(dout, channels, hidden)),
    )
    wanted = (g if need else g.new_empty(0) for g, need in zip(gradients, needs, strict=True))
    dstream = sum_1.new_empty(sum_1.shape if need_stream or (need_values and not apart) else (0,))
    if not adds_past:
        return dstream, sum_2.new_empty(sum_2.shape), *wanted
    return dstream, dout.new_empty(sum_1.shape if need_values and apart else (0,)), *wanted


def fp8_layer_flops(stream, *args, **kwargs) -> int:
    """Of its operators."""
    qkv_weight, out_weight, fc_weight, proj_weight, num_heads = (args[i] for i in (4, 6, 10, 12, 15))
    qkv, hidden = (*stream[:-1], qkv_weight[0]), (*stream[:-1], fc_weight[0])
    products = linear_flops(stream, qkv_weight) + linear_flops(stream, out_weight) + linear_flops(stream, fc_weight)
    return products + linear_flops(hidden, proj_weight) + attention_flops(qkv, num_heads)


def fp8_layer_backward_flops(dout, *args, **kwargs) -> int:
    """Of its operators: of each product's two gradients those that are wanted."""
    saved, num_heads, mask = args[3], args[7], args[10]
    qkv, attended, logsumexp, pre_gelu = saved[6], saved[7], saved[8], saved[19]
    channels = dout[-1]
    return (
        linear_flops(dout, (qkv[-1],)) * (any(mask[:5]) + mask[5])
        + linear_flops(dout, (channels,)) * (1 + mask[7])
        + linear_flops(dout, (pre_gelu[-1],)) * (1 + mask[11])
        + linear_flops(dout, (pre_gelu[-1],)) * (1 + mask[13])
        + attention_backward_flops(attended, qkv, attended, logsumexp, num_heads)
    )


fake("fp8_layer", _fake)
fake("fp8_layer_backward", _fake_backward)
mutates("fp8_layer")
mutates("fp8_layer_backward")
without_derivative("fp8_layer")
without_derivative("fp8_layer_backward")
flops("fp8_layer", fp8_layer_flops)
flops("fp8_layer_backward", fp8_layer_backward_flops)
