import torch
import torch.nn.functional as F

from benchmarks.harness.case import Case, nbytes
from benchmarks.harness.directions import both
from benchmarks.harness.peers import of_forward

ops = torch.ops.gptkernels
SHAPES = [(65536, 768, 3072), (65536, 3072, 768), (4096, 768, 2304)]
SIZES = {"bfloat16": SHAPES, "float32": SHAPES}
CPU_SIZES = [(1024, 768, 768)]
TINY = (4, 8, 8)


def column_sums(dout):
    return dout.sum(0)


def cases(device, dtype, rows, inner, outer):
    x, dout = (torch.randn(rows, width, device=device, dtype=dtype) for width in (inner, outer))
    weight, bias = (torch.randn(*size, device=device, dtype=dtype) for size in ((outer, inner), (outer,)))
    yield from both(
        "linear",
        f"{rows}x{inner}x{outer}",
        F.linear,
        lambda: ops.linear(x, weight, bias),
        lambda: ops.linear_backward(dout, x, weight, [True] * 3),
        dout,
        [x],
        [weight, bias],
    )
    yield Case(
        "bias gradient",
        f"{rows}x{outer}",
        lambda: ops.linear_backward(dout, x, weight, [False, False, True])[2],
        lambda: [(0, ..., dout.sum(0, dtype=torch.float64))],
        bytes=nbytes(dout),
        flops=dout.numel(),
        peers=of_forward(column_sums, [dout]),
    )
