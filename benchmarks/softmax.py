from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.harness import exact
from benchmarks.harness.case import Case
from benchmarks.harness.peers import backward, compiled
from gptkernels.testing.cases import OPERATORS

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
    shape = f"{rows}x{width}"
    forward_cost, backward_cost = OPERATORS["softmax"].costs(x)

    yield Case(
        "softmax fwd",
        shape,
        lambda: ops.softmax(x),
        lambda: exact.outputs(formula, [x]),
        **vars(forward_cost),
        peers={
            "torch": partial(formula, x),
            "compile": partial(compiled(formula), x),
            "liger": partial(liger, x),
            "quack": partial(quack, x),
        },
    )
    yield Case(
        "softmax bwd",
        shape,
        lambda: ops.softmax_backward(dout, out),
        lambda: exact.outputs(derivative, [dout, out]),
        **vars(backward_cost),
        peers={
            "torch": backward(formula, [x], dout),
            "compile": backward(compiled(formula), [x], dout),
            "liger": backward(liger, [x], dout),
            "quack": backward(quack, [x], dout),
        },
    )
