from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.harness import exact
from benchmarks.harness.case import Case, nbytes
from benchmarks.harness.peers import backward, compiled, training

ops = torch.ops.gptkernels
SIZES = {
    "bfloat16": [(65536, 768), (16384, 1600), (8192, 8192), (4096, 768)],
    "float32": [(65536, 768), (16384, 1600)],
}
CPU_SIZES = [(4096, 768)]
TINY = (4, 8)


def formula(x, residual, weight, bias):
    return norm(x + residual, weight, bias)


def norm(total, weight, bias):
    """The sum is an output too, so its gradient has two parts."""
    return F.layer_norm(total, total.shape[-1:], weight, bias), total


def cases(device, dtype, rows, width):
    x, residual, dout, dsum = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(4))
    weight, bias = (torch.randn(width, device=device, dtype=dtype) for _ in range(2))
    _, total, mean, rstd = ops.residual_layernorm(x, residual, weight, bias)
    shape = f"{rows}x{width}"

    yield Case(
        "residual_layernorm fwd",
        shape,
        lambda: ops.residual_layernorm(x, residual, weight, bias)[:2],
        lambda: exact.outputs(formula, [x, residual], [weight, bias]),
        bytes=4 * nbytes(x),
        flops=9 * x.numel(),
        peers={
            "torch": partial(formula, x, residual, weight, bias),
            "compile": training(compiled(formula), x, residual, weight, bias),
        },
    )
    yield Case(
        "residual_layernorm bwd",
        shape,
        lambda: ops.residual_layernorm_backward(dout, dsum, total, weight, mean, rstd, [True] * 3),
        lambda: exact.gradients(norm, (dout, dsum), [total], [weight, bias]),
        bytes=4 * nbytes(x),
        flops=17 * x.numel(),
        peers={
            "torch": backward(norm, (total, weight, bias), (dout, dsum)),
            "compile": backward(compiled(norm), (total, weight, bias), (dout, dsum)),
        },
    )
