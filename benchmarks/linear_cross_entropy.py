from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.harness.case import Case, nbytes
from benchmarks.harness.peers import compiled, loss_and_gradients

ops = torch.ops.gptkernels
SIZES = {"bfloat16": [(8192, 768, 50304), (8192, 2048, 128256)], "float32": [(8192, 768, 50304)]}
CPU_SIZES = [(256, 256, 4096)]
TINY = (4, 16, 16)
EXACT_ROWS = 1024


def formula(x, weight, targets):
    return F.cross_entropy(F.linear(x, weight), targets, reduction="sum")


def liger(x, weight, targets):
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    options = [None, None, -100, 0.0, 0.0, "sum"]
    return LigerFusedLinearCrossEntropyFunction.apply(x, weight, targets, *options)[0]


def exact_loss_and_gradients(x, weight, targets):
    weight = weight.double()
    dweight = torch.zeros_like(weight)
    loss = 0
    for start in range(0, len(x), EXACT_ROWS):
        rows = slice(start, start + EXACT_ROWS)
        part, dx, more = loss_and_gradients(formula, targets[rows], x[rows].double(), weight)
        loss += part
        dweight += more
        yield 1, rows, dx
    yield 0, ..., loss
    yield 2, ..., dweight


def cases(device, dtype, rows, channels, vocabulary):
    x = torch.randn(rows, channels, device=device, dtype=dtype)
    weight = torch.randn(vocabulary, channels, device=device, dtype=dtype) * channels**-0.5
    targets = torch.randint(vocabulary, (rows,), device=device)

    def exact_loss():
        wide = weight.double()
        parts = zip(x.split(EXACT_ROWS), targets.split(EXACT_ROWS), strict=True)
        yield 0, ..., sum(formula(rows.double(), wide, some) for rows, some in parts)

    def both(function, **options):
        return partial(loss_and_gradients, partial(function, **options), targets, x, weight)

    common = {
        "shape": f"{rows}x{channels}x{vocabulary}",
        "bytes": 2 * nbytes(x, weight) + nbytes(targets),
        "flops": 6 * rows * channels * vocabulary,
    }
    yield Case(
        "linear_cross_entropy",
        ours=both(ops.linear_cross_entropy.default, reduction="sum"),
        exact=lambda: exact_loss_and_gradients(x, weight, targets),
        peers={"torch": both(formula), "compile": both(compiled(formula)), "liger": both(liger)},
        **common,
    )
    yield Case(
        "fp8_linear_cross_entropy",
        ours=both(ops.fp8_linear_cross_entropy.default, reduction="sum"),
        exact=exact_loss,
        look=lambda out: out[:1],  # the gradients' operands are rounded to 8 bits
        **common,
    )
