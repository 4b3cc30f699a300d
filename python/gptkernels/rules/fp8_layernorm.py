"""Layernorm, optionally after an addition to the residual stream, with float8 output for the following matmul.

The op has no derivative. For training, ``fp8_layer`` calls the C++ function of this op.
"""

import torch

from gptkernels.rules import _register as register
from gptkernels.rules._register import accumulate_dtype
from gptkernels.rules._vmap import loop
from gptkernels.rules.fp8 import scale_like, transposed_like


def _fake(x, residual, weight, bias, history, transposed=False, *args, **kwargs):
    sum = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    statistics = x.new_empty(x.shape[:-1], dtype=accumulate_dtype(x.dtype))
    return (
        x.new_empty(x.shape, dtype=torch.float8_e4m3fn),
        transposed_like(x, torch.float8_e4m3fn, transposed),
        scale_like(x),
        sum,
        statistics,
        torch.empty_like(statistics),
    )


register.fake("fp8_layernorm", _fake)
register.mutates("fp8_layernorm")
register.without_derivative("fp8_layernorm")
register.vmap("fp8_layernorm", loop)
