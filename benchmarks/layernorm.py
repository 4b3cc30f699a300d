from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.harness.directions import both
from benchmarks.harness.peers import backward

ops = torch.ops.gptkernels
SIZES = {"bfloat16": [(65536, 768), (16384, 1600), (8192, 8192), (4096, 768)], "float32": [(65536, 768), (16384, 1600)]}
CPU_SIZES = [(4096, 768)]
TINY = (4, 8)


def formula(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def liger(x, weight, bias):
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, 1e-5)


def quack_forward(x, weight, bias):
    from quack.rmsnorm import layernorm_fwd

    return layernorm_fwd(x, weight, bias, 1e-5, return_rstd=True, return_mean=True)[0]


def quack_backward(dout, x, weight, mean, rstd):
    from quack.rmsnorm import layernorm_bwd

    return layernorm_bwd(x, weight, dout, rstd, mean)


def cases(device, dtype, rows, width):
    x, dout = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(2))
    weight, bias = (torch.randn(width, device=device, dtype=dtype) for _ in range(2))
    wide_weight, wide_bias = weight.float(), bias.float()  # quack requires float32
    _, mean, rstd = ops.layernorm(x, weight, bias)

    yield from both(
        "layernorm",
        f"{rows}x{width}",
        formula,
        lambda: ops.layernorm(x, weight, bias)[0],
        lambda: ops.layernorm_backward(dout, x, weight, mean, rstd, [True] * 3),
        dout,
        [x],
        [weight, bias],
        more=(
            {"liger": partial(liger, x, weight, bias), "quack": partial(quack_forward, x, wide_weight, wide_bias)},
            {
                "liger": backward(liger, (x, weight, bias), dout),
                "quack": partial(quack_backward, dout, x, wide_weight, mean, rstd),
            },
        ),
        saves=True,
    )
