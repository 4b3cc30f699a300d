from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.harness import exact
from benchmarks.harness.case import Case, nbytes
from benchmarks.harness.peers import backward, compiled

ops = torch.ops.gptkernels
SIZES = {"bfloat16": [(65536, 3072)], "float32": [(65536, 3072)]}
CPU_SIZES = [(4096, 768)]
TINY = (4, 8)


def cases(device, dtype, rows, width):
    for approximate in ("tanh", "none"):
        yield from cases_of(device, dtype, rows, width, approximate)


def cases_of(device, dtype, rows, width, approximate):
    x, dout = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(2))
    shape = f"{rows}x{width} {approximate}"

    def formula(x):
        return F.gelu(x, approximate=approximate)

    yield Case(
        "gelu fwd",
        shape,
        lambda: ops.gelu(x, approximate=approximate),
        lambda: exact.outputs(formula, [x]),
        bytes=2 * nbytes(x),
        flops=12 * x.numel(),
        peers={"torch": partial(formula, x), "compile": partial(compiled(formula), x)},
    )
    yield Case(
        "gelu bwd",
        shape,
        lambda: ops.gelu_backward(dout, x, approximate=approximate),
        lambda: exact.gradients(formula, dout, [x]),
        bytes=3 * nbytes(x),
        flops=20 * x.numel(),
        peers={"torch": backward(formula, [x], dout), "compile": backward(compiled(formula), [x], dout)},
    )
