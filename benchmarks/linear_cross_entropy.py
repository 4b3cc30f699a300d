from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.harness.case import Case, nbytes
from benchmarks.harness.peers import compiled

ops = torch.ops.gptkernels
SIZES = {"bfloat16": [(8192, 768, 50304), (8192, 2048, 128256)], "float32": [(8192, 768, 50304)]}
CPU_SIZES = [(256, 256, 4096)]
TINY = (4, 16, 16)
EXACT_ROWS = 1024  # at a time, so that their float64 logits fit into memory


def ours(x, weight, targets):
    return ops.linear_cross_entropy.default(x, weight, targets, reduction="sum")


def ours_fp8(x, weight, targets):
    return ops.fp8_linear_cross_entropy.default(x, weight, targets, reduction="sum")


def formula(x, weight, targets):
    """The sum over rows, as in fused_classifier."""
    return F.cross_entropy(F.linear(x, weight), targets, reduction="sum")


def liger(x, weight, targets):
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    options = [None, None, -100, 0.0, 0.0, "sum"]  # no bias, no class weights, ignore_index, no regularisers, reduction
    return LigerFusedLinearCrossEntropyFunction.apply(x, weight, targets, *options)[0]


def loss_and_gradients(function, x, weight, targets):
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    loss = function(*leaves, targets)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def exact_loss_and_gradients(x, weight, targets):
    weight = weight.double()
    dweight = torch.zeros_like(weight)
    loss = 0
    for start in range(0, len(x), EXACT_ROWS):
        rows = slice(start, start + EXACT_ROWS)
        part, dx, more = loss_and_gradients(formula, x[rows].double(), weight, targets[rows])
        loss += part
        dweight += more
        yield 1, rows, dx
    yield 0, ..., loss
    yield 2, ..., dweight


def exact_loss(x, weight, targets):
    weight = weight.double()
    parts = zip(x.split(EXACT_ROWS), targets.split(EXACT_ROWS), strict=True)
    yield 0, ..., sum(formula(rows.double(), weight, some) for rows, some in parts)


def cases(device, dtype, rows, channels, vocabulary):
    x = torch.randn(rows, channels, device=device, dtype=dtype)
    weight = torch.randn(vocabulary, channels, device=device, dtype=dtype) * channels**-0.5
    targets = torch.randint(vocabulary, (rows,), device=device)
    yield Case(
        "linear_cross_entropy",
        f"{rows}x{channels}x{vocabulary}",
        ours=partial(loss_and_gradients, ours, x, weight, targets),
        exact=lambda: exact_loss_and_gradients(x, weight, targets),
        bytes=2 * nbytes(x, weight) + nbytes(targets),
        flops=6 * rows * channels * vocabulary,
        peers={
            "torch": partial(loss_and_gradients, formula, x, weight, targets),
            "compile": partial(loss_and_gradients, compiled(formula), x, weight, targets),
            "liger": partial(loss_and_gradients, liger, x, weight, targets),
        },
    )
    yield Case(
        "fp8_linear_cross_entropy",
        f"{rows}x{channels}x{vocabulary}",
        ours=partial(loss_and_gradients, ours_fp8, x, weight, targets),
        exact=lambda: exact_loss(x, weight, targets),
        bytes=2 * nbytes(x, weight) + nbytes(targets),
        flops=6 * rows * channels * vocabulary,
        peers={},
        look=lambda out: out[:1],  # the loss only: the gradients have operands rounded to 8 bits
    )
