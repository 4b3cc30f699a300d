from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.harness import exact
from benchmarks.harness.case import Case, nbytes
from benchmarks.harness.peers import backward, compiled

ops = torch.ops.gptkernels
SHAPES = [(65536, 768, 3072), (65536, 3072, 768), (4096, 768, 2304)]
SIZES = {"bfloat16": SHAPES, "float32": SHAPES}
CPU_SIZES = [(1024, 768, 768)]
TINY = (4, 8, 8)


def formula(x, weight, bias):
    return F.linear(x, weight, bias)


def column_sums(dout):
    return dout.sum(0)


def exact_column_sums(dout):
    yield 0, ..., dout.sum(0, dtype=torch.float64)


def cases(device, dtype, rows, inner, outer):
    x, dout = (torch.randn(rows, width, device=device, dtype=dtype) for width in (inner, outer))
    weight, bias = (torch.randn(*size, device=device, dtype=dtype) for size in ((outer, inner), (outer,)))
    shape = f"{rows}x{inner}x{outer}"

    yield Case(
        "linear fwd",
        shape,
        lambda: ops.linear(x, weight, bias),
        lambda: exact.outputs(formula, [x], [weight, bias]),
        bytes=nbytes(x, weight, bias, dout),
        flops=2 * rows * inner * outer,
        peers={
            "torch": partial(formula, x, weight, bias),
            "compile": partial(compiled(formula), x, weight, bias),
        },
    )
    yield Case(
        "linear bwd",
        shape,
        lambda: ops.linear_backward(dout, x, weight, [True] * 3),
        lambda: exact.gradients(formula, dout, [x], [weight, bias]),
        bytes=2 * nbytes(x, weight) + nbytes(dout),
        flops=4 * rows * inner * outer,
        peers={
            "torch": backward(formula, (x, weight, bias), dout),
            "compile": backward(compiled(formula), (x, weight, bias), dout),
        },
    )
    yield Case(
        "bias gradient",
        f"{rows}x{outer}",
        lambda: ops.linear_backward(dout, x, weight, [False, False, True])[2],
        lambda: exact_column_sums(dout),
        bytes=nbytes(dout),
        flops=dout.numel(),
        peers={
            "torch": partial(column_sums, dout),
            "compile": partial(compiled(column_sums), dout),
        },
    )
