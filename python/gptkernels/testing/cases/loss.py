"""Table entries of cross-entropy, and of the LM head's matmul with cross-entropy."""

import math
from functools import partial

import torch
import torch.nn.functional as F

from gptkernels import functional as G
from gptkernels.testing.cases.products import torchs_linear
from gptkernels.testing.cases.table import (
    ROWS,
    TOKENS,
    WIDTHS,
    Call,
    grid,
    invoke,
    largest_of,
    normal,
    operator,
    ops,
    wide,
)


def classifier_arguments(draw):
    rows = draw.rows("rows", 3)
    width = draw.width("width", rows)
    vocab_size = draw.size("vocab_size", width, 1, real=width) if draw.chance("padded", 0.3) else width
    ignore_index = draw.choose("ignore_index", (-100, 0, -1, vocab_size - 1, 10**6))
    targets = draw.indices("targets", rows, vocab_size)
    if draw.chance("ignored rows", 0.4):
        share = draw.choose("ignored", (0.2, 0.9, 1.0))
        ignored = torch.rand(rows, **draw.source("ignored")) < share
        targets = targets.masked_fill(draw.put(ignored), ignore_index)
    return rows, width, vocab_size, ignore_index, targets


def losses_of(logits, targets, vocab_size, ignore_index, loss):
    kept = targets != ignore_index
    used = torch.where(kept.unsqueeze(-1), logits[..., :vocab_size], 0.0)
    return torch.where(kept, loss(used, targets.long().where(kept, 0).unsqueeze(-1)).squeeze(-1), 0.0)


def torchs_loss(logits, target):
    shifted = logits - logits.detach().amax(-1, keepdim=True)
    return shifted.exp().sum(-1, keepdim=True).log() - shifted.gather(-1, target)


class RoundedGradientLoss(torch.autograd.Function):
    """Rounds the gradient of ``torchs_loss`` to a dtype before it is multiplied by the losses' gradient."""

    @staticmethod
    def forward(ctx, logits, target, dtype):
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            losses = torchs_loss(leaf, target)
            (dlogits,) = torch.autograd.grad(losses.sum(), leaf)
        ctx.save_for_backward(dlogits.to(dtype))
        return losses.detach()

    @staticmethod
    def backward(ctx, dlosses):
        (dlogits,) = ctx.saved_tensors
        return dlogits * dlosses, None, None


def exact_loss(logits, target):
    """The formula is exact even if the target's probability is nearly 1."""
    finite = logits.amax(-1, keepdim=True).isfinite()
    used = torch.where(finite, logits, 0.0)
    largest = used.argmax(-1, keepdim=True)
    shifted = used - used.gather(-1, largest)
    others = shifted.exp().scatter(-1, largest, 0.0).sum(-1, keepdim=True)
    losses = others.log1p() - torch.where(target == largest, 0.0, shifted.gather(-1, target))
    return torch.where(finite, losses, torchs_loss(torch.where(finite, 0.0, logits), target))


IGNORED_ROWS = {"rows.rows": [3, 13, 32], "ignored rows": True}


PADDED = [
    {"rows.rows": 3, "padded": True, "vocab_size": vocab_size, "width": width}
    for vocab_size, width in [(1, 8), (5, 8), (7, 8), (8, 8), (9, 24), (250, 257), (50257, 50304), (131070, 131072)]
]


def classifier(draw, in_place):
    dtype = draw.dtype()
    rows, width, vocab_size, ignore_index, targets = classifier_arguments(draw)
    logits = draw.tensor("logits", (*rows, width), dtype, 3, huge=1e30)
    vocabulary = -1 if vocab_size == width and draw.chance("default vocab_size", 0.5) else vocab_size

    def invocations():
        options = targets, vocabulary, ignore_index
        if in_place:
            return [invoke(ops.fused_classifier_, logits.clone(), *options)]
        _, dlogits = ops.fused_classifier(logits, *options)
        dlosses = wide(normal(draw, "dlosses", *rows))
        return [
            invoke(ops.fused_classifier, logits, *options),
            invoke(ops.fused_classifier_backward, dlosses, dlogits),
            invoke(ops.fused_classifier_backward_, dlosses, dlogits.clone()),
        ]

    def ours(logits, targets):
        if in_place:
            return ops.fused_classifier_((logits * 1).contiguous(), targets, vocabulary, ignore_index)
        return ops.fused_classifier(logits, targets, vocabulary, ignore_index)[0]

    return Call(
        f"fused_classifier{'_' if in_place else ''}(logits, targets, {vocabulary}, {ignore_index})",
        ours,
        lambda logits, targets: losses_of(wide(logits), targets, vocab_size, ignore_index, torchs_loss),
        lambda logits, targets: losses_of(logits, targets, vocab_size, ignore_index, exact_loss),
        {"logits": logits, "targets": targets},
        nan_gradients=False,
        invocations=invocations,
    )


@operator(
    edges=grid({"rows.rows": ROWS, "width": WIDTHS, "padded": [False]}) + PADDED,
    weight=0.6,
    sizes={**IGNORED_ROWS, "width": [4, 513, 5056], "padded": True, "vocab_size": [3, 501, 5000]},
    functions={
        "fused_classifier, all outputs": (lambda x: ops.fused_classifier(x, TOKENS.to(x.device), 4, 0), [(2, 3, 5)]),
        **{
            f"fused_classifier_backward, {len(dlosses)} dimensions": (
                lambda g, x: ops.fused_classifier_backward(g, x),
                [dlosses, (2, 3, 5)],
            )
            for dlosses in [(2, 3), ()]
        },
    },
)
def fused_classifier(draw):
    return classifier(draw, False)


def losses_in_place(logits):
    logits = logits * 1
    losses = ops.fused_classifier_(logits, TOKENS.to(logits.device), 4)
    return losses, logits


@operator(
    edges=grid({"rows.rows": ROWS, "width": WIDTHS}) + PADDED,
    weight=0.4,
    sizes={**IGNORED_ROWS, "width": [3, 501, 5000]},
    functions={"fused_classifier_, all outputs": (losses_in_place, [(2, 3, 5)])},
)
def fused_classifier_(draw):
    return classifier(draw, True)


def shards_of(logits, shards):
    """Yield the shards of the columns, and their first columns."""
    first = 0
    for shard in logits.chunk(shards, -1):
        yield shard, first
        first += shard.shape[-1]


def sharded_classifier(logits, targets, shards, options, dlosses=None):
    """Return the losses, which each shard computes, and dlogits."""
    statistics = [
        ops.fused_classifier_statistics(shard, targets, first, *options) for shard, first in shards_of(logits, shards)
    ]
    dlogits = logits.clone()
    losses = [
        ops.fused_classifier_from_statistics_(shard, targets, torch.stack(statistics), first, *options, dlosses)
        for shard, first in shards_of(dlogits, shards)
    ]
    return losses[-1], dlogits


class ShardedClassifier(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, *options):
        ctx.save_for_backward(logits, targets)
        ctx.options = options
        return sharded_classifier(logits, targets, *options)[0]

    @staticmethod
    def backward(ctx, dlosses):
        return sharded_classifier(*ctx.saved_tensors, *ctx.options, dlosses)[1], None, None, None


@operator(
    edges=grid({"rows.rows": [1, 5], "width": WIDTHS, "padded": [False], "shards": [1, 3]})
    + [{**sizes, "shards": 2} for sizes in PADDED],
    weight=0.4,
    sizes={**IGNORED_ROWS, "width": [4, 513, 5056], "padded": True, "vocab_size": [3, 301, 5000], "shards": 3},
    variants={"": {}, "one shard": {"shards": 1}},
    finite_differences=False,
)
def fused_classifier_statistics(draw):
    dtype = draw.dtype()
    rows, width, vocab_size, ignore_index, targets = classifier_arguments(draw)
    shards = draw.choose("shards", (1, 2, 3, 5))
    logits = draw.tensor("logits", (*rows, width), dtype, 3, huge=1e30)

    def invocations():
        shard, first = list(shards_of(logits, shards))[-1]
        options = first, vocab_size, ignore_index
        statistics = ops.fused_classifier_statistics(shard, targets, *options)[None]
        dlosses = wide(normal(draw, "dlosses", *rows))
        fp8 = shard.float().contiguous(), targets, statistics.float(), *options
        return [
            invoke(ops.fp8_classifier_from_statistics, *fp8),
            invoke(ops.fused_classifier_statistics, shard.contiguous(), targets, *options),
            invoke(ops.fused_classifier_from_statistics_, shard.clone(), targets, statistics, *options, dlosses),
        ]

    return Call(
        f"the classifier of {shards} shards, {vocab_size} of {width} columns, ignore_index {ignore_index}",
        lambda logits, targets: ShardedClassifier.apply(logits, targets, shards, (vocab_size, ignore_index)),
        lambda logits, targets: losses_of(wide(logits), targets, vocab_size, ignore_index, torchs_loss),
        lambda logits, targets: losses_of(logits, targets, vocab_size, ignore_index, exact_loss),
        {"logits": logits, "targets": targets},
        nan_gradients=False,
        takes_floating_alone=False,
        invocations=invocations,
    )


def reduced(losses, targets, ignore_index, reduction):
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (targets != ignore_index).sum()


@operator()
def cross_entropy(draw):
    dtype = draw.dtype()
    rows, width, _, ignore_index, targets = classifier_arguments(draw)
    targets = targets.clamp(max=width - 1).where(targets != ignore_index, ignore_index)
    class_dim = min(1, len(rows))
    logits = draw.tensor("logits", (*rows[:class_dim], width, *rows[class_dim:]), dtype, 3, huge=1e3)
    reduction = draw.choose("reduction", ("mean", "sum", "none"))
    options = {"ignore_index": ignore_index, "reduction": reduction}

    def formula(loss, logits, targets):
        losses = losses_of(logits.movedim(class_dim, -1), targets, width, ignore_index, loss)
        return reduced(losses, targets, ignore_index, reduction)

    return Call(
        f"cross_entropy(logits, targets, {options})",
        lambda logits, targets: G.cross_entropy(logits, targets, **options),
        lambda logits, targets: formula(torchs_loss, wide(logits), targets).to(logits.dtype),
        partial(formula, exact_loss),
        {"logits": logits, "targets": targets},
        nan_gradients=False,
    )


def equal_logits_noise(args, douts, averaged_but):
    """Return an upper bound of the error of dx if all rows of the weight are equal, so that dx is 0.

    A row of dlogits sums to 0 only before it is rounded, and torch's rounding errors may happen to cancel. The loss is
    the mean over the targets other than ``averaged_but``, or no mean if this is None.
    """
    x, weight, targets = args
    count = 1 if averaged_but is None else max(int((targets != averaged_but).sum()), 1)
    return torch.finfo(x.dtype).eps * largest_of(douts) * largest_of([weight]) / count


LM_HEAD = {**IGNORED_ROWS, "inner": [2, 33, 64], "padded": True, "vocab_size": [3, 201, 1000]}


@operator(
    autocast="lower",
    sizes={**LM_HEAD, "width": [4, 213, 1024]},
    variants={
        "": {},
        "sum": {"reduction": "sum", "chunk_size": 7},
        "none": {"reduction": "none", "chunk_size": 7},
        "functional": {"functional": True, "chunk_size": 2},
    },
)
def linear_cross_entropy(draw):
    dtype = draw.dtype()
    rows, width, vocab_size, ignore_index, targets = classifier_arguments(draw)
    inner = draw.size("inner", 100, 1, real=draw.room(math.prod(rows), width))
    chunk_size = draw.choose("chunk_size", (None, 1, 2, 7, 64))
    if chunk_size is not None:
        chunk_size = max(chunk_size, math.prod(rows) // 30)
    reduction = draw.choose("reduction", ("mean", "sum", "none"))
    options = {"vocab_size": vocab_size, "ignore_index": ignore_index, "reduction": reduction, "chunk_size": chunk_size}

    def formula(linear, loss, x, weight, targets):
        losses = losses_of(wide(linear(x, weight)), targets, vocab_size, ignore_index, loss)
        return reduced(losses, targets, ignore_index, reduction)

    functional = draw.chance("functional", 0.5)

    def ours(x, weight, targets):
        if functional:
            return G.linear_cross_entropy(x, weight, targets, **options)
        return ops.linear_cross_entropy(x, weight, targets, vocab_size, ignore_index, reduction, chunk_size or -1)

    # Denormals are excluded because the gradient is rounded to the dtype before the backward scales it.
    x = draw.tensor("x", (*rows, inner), dtype, special="nan", denormal=False)
    weight = draw.tensor("weight", (width, inner), dtype, inner**-0.5, special="none", denormal=False)

    def invocations():
        common, sizes, chunk = (x, weight, targets), (vocab_size, ignore_index), chunk_size or -1
        options = *common, *sizes, reduction, chunk
        dloss = wide(normal(draw, "dloss", *(rows if reduction == "none" else ())))
        calls = [
            invoke(ops.linear_cross_entropy, *options),
            invoke(ops.linear_cross_entropy_with_logits, *common, None, *sizes, chunk, [True] * 2),
            invoke(ops.linear_cross_entropy_backward, dloss, *options, [True] * 2),
        ]
        if reduction != "none":
            calls.append(invoke(ops.linear_cross_entropy_with_gradients, *options, [True] * 2))
        return calls

    return Call(
        f"linear_cross_entropy(x, weight, targets, {options})",
        ours,
        partial(
            formula,
            partial(torchs_linear, chunk=chunk_size),
            lambda logits, target: RoundedGradientLoss.apply(logits, target, dtype),
        ),
        partial(formula, F.linear, exact_loss),
        {"x": x, "weight": weight, "targets": targets},
        any_threads=False,
        nan_gradients=False,
        noise=lambda args, douts: equal_logits_noise(args, douts, ignore_index if reduction == "mean" else None),
        invocations=invocations,
    )
