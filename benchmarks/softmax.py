from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.harness import exact
from benchmarks.harness.directions import both
from benchmarks.harness.peers import backward

ops = torch.ops.gptkernels
NARROW = [(65536, width) for width in (64, 128, 256, 768, 1000, 1024)]
WIDE = [(8192, 4096), (4096, 50257), (512, 100000), (256, 262144)]
SIZES = {"bfloat16": NARROW + WIDE, "float32": [(65536, 768), (8192, 4096)]}
CPU_SIZES = [(4096, 768)]
TINY = (4, 8)


def formula(x):
    return F.softmax(x, -1)


def derivative(dout, out):
    return out * (dout - (out * dout).sum(-1, keepdim=True))


def liger(x):
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply(x)


def quack(x):
    from quack.softmax import softmax

    return softmax(x)


def cases(device, dtype, rows, width):
    x, dout = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(2))
    out = ops.softmax(x)
    libraries = {"liger": liger, "quack": quack}
    yield from both(
        "softmax",
        f"{rows}x{width}",
        formula,
        lambda: ops.softmax(x),
        lambda: ops.softmax_backward(dout, out),
        dout,
        [x],
        exact_backward=lambda: exact.outputs(derivative, [dout, out]),
        more=(
            {name: partial(function, x) for name, function in libraries.items()},
            {name: backward(function, [x], dout) for name, function in libraries.items()},
        ),
    )
