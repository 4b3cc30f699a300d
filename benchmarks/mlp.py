from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.harness import exact
from benchmarks.harness.case import Case, nbytes
from benchmarks.harness.peers import backward, compiled, training

ops = torch.ops.gptkernels
SIZES = {"bfloat16": [(65536, 768)], "float32": [(65536, 768)]}
CPU_SIZES = [(512, 256)]
TINY = (4, 8)


def formula(x, fc_weight, fc_bias, proj_weight, proj_bias):
    hidden = F.gelu(F.linear(x, fc_weight, fc_bias), approximate="tanh")
    return F.linear(hidden, proj_weight, proj_bias)


def cases(device, dtype, rows, channels):
    hidden = 4 * channels
    x, dout = (torch.randn(rows, channels, device=device, dtype=dtype) for _ in range(2))
    weights = [
        torch.randn(*size, device=device, dtype=dtype) * channels**-0.5
        for size in ((hidden, channels), (hidden,), (channels, hidden), (channels,))
    ]
    _, pre_gelu, post_gelu = ops.mlp(x, *weights)
    shape = f"{rows}x{channels}x{hidden}"
    flops = 4 * rows * channels * hidden

    yield Case(
        "mlp fwd",
        shape,
        lambda: ops.mlp(x, *weights)[0],
        lambda: exact.outputs(formula, [x], weights),
        bytes=nbytes(x, *weights, dout, pre_gelu, post_gelu),
        flops=flops,
        peers={"torch": partial(formula, x, *weights), "compile": training(compiled(formula), x, *weights)},
    )
    yield Case(
        "mlp bwd",
        shape,
        lambda: ops.mlp_backward(dout, x, weights[0], weights[2], pre_gelu, post_gelu, [True] * 5),
        lambda: exact.gradients(formula, dout, [x], weights),
        bytes=nbytes(x, dout, pre_gelu, post_gelu, x) + 2 * nbytes(*weights),
        flops=2 * flops,
        peers={
            "torch": backward(formula, (x, *weights), dout),
            "compile": backward(compiled(formula), (x, *weights), dout),
        },
    )
