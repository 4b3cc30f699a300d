"""A layer of GPT-2 in training as one operator, with float8 matmuls."""

from gptkernels.block.tensors import FP8LayerSaved, Weights
from gptkernels.rules import _register as register
from gptkernels.rules.fp8 import scale_like, transposed_like
from gptkernels.rules.fp8_linear import SAVED
from gptkernels.rules.layer import (
    by_name,
    fake_gradients,
    fake_residuals,
    fake_tensors,
    layer_backward_flops,
    layer_flops,
)


def _fake(*, stream, values, qkv_weight, attn_proj_weight, fc_weight, mlp_proj_weight, num_heads, **_):
    tensors = fake_tensors(stream, qkv_weight, fc_weight, num_heads)
    operands = {
        "norm_1": stream,
        "qkv_weight": qkv_weight,
        "attended": stream,
        "attn_proj_weight": attn_proj_weight,
        "norm_2": stream,
        "fc_weight": fc_weight,
        "hidden": tensors["pre_gelu"],
        "mlp_proj_weight": mlp_proj_weight,
    }
    saved = FP8LayerSaved(
        **tensors,
        **{f"{name}_t": transposed_like(t, SAVED, True) for name, t in operands.items()},
        **{f"{name}_scale": scale_like(t) for name, t in operands.items()},
    )
    out = qkv_weight.new_empty((*stream.shape[:-1], mlp_proj_weight.shape[0]))
    return out, *fake_residuals(stream, values), *saved


def _fake_backward(*, dout, residual_1, saved, adds_past, output_mask, values_dropout_p, **_):
    named = FP8LayerSaved(*saved)
    channels, hidden, qkv = residual_1.shape[-1], named.pre_gelu.shape[-1], named.qkv.shape[-1]
    weights = Weights(
        qkv_weight=dout.new_empty((qkv, channels)),
        attn_proj_weight=dout.new_empty((channels, channels)),
        fc_weight=dout.new_empty((hidden, channels)),
        mlp_proj_weight=dout.new_empty((channels, hidden)),
    )
    apart = dout.dtype != residual_1.dtype or values_dropout_p > 0
    return fake_gradients(dout, residual_1, named.qkv, named.pre_gelu, weights, output_mask, apart, adds_past)


def _backward_flops(*, saved, **arguments) -> int:
    return layer_backward_flops(**FP8LayerSaved(*saved)._asdict(), **arguments)


register.fake("fp8_layer", by_name("fp8_layer", _fake))
register.fake("fp8_layer_backward", by_name("fp8_layer_backward", _fake_backward))
register.mutates("fp8_layer")
register.mutates("fp8_layer_backward")
register.without_derivative("fp8_layer")
register.without_derivative("fp8_layer_backward")
register.flops("fp8_layer", by_name("fp8_layer", layer_flops))
register.flops("fp8_layer_backward", by_name("fp8_layer_backward", _backward_flops))
