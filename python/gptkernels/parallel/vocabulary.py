"""Vocabulary parallelism: each process of a group has some rows of the embedding and of the LM head.

The (Vp, C) weight is divided as ``DTensor``'s ``Shard(0)`` and ``torch.chunk`` divide it: S processes have
ceil(Vp / S) rows each, the last ones fewer or none. The shard is a plain tensor, or a ``DTensor`` with the placement
``Shard(0)``, from which the group and Vp are read.

Tokens, targets and results are equal in all processes, and so are the gradients of all arguments but the shard. With
``sequence_parallel=True``, x or the embeddings are divided too: process r has the r-th of S equal ranges of the
flattened rows.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gptkernels._linear_cross_entropy import check_reduction
from gptkernels.parallel._collectives import (
    gather,
    reduce_scatter,
    refuse_second_derivative,
    start_all_reduce,
    start_gather,
    start_reduce_scatter,
    wait,
)
from gptkernels.rules import ops
from gptkernels.rules._autocast import autocast_dtype
from gptkernels.rules._register import accumulate_dtype, present
from gptkernels.rules.fp8 import ALIGNMENT
from gptkernels.rules.fused_classifier_statistics import FP8_DLOGIT
from gptkernels.rules.linear_cross_entropy import scale_saved

__all__ = ["cross_entropy", "embedding", "linear_cross_entropy"]


class _Shard(NamedTuple):
    group: dist.ProcessGroup
    processes: int
    first: int  # the number of the shard's first row in the vocabulary
    most: int  # rows of the largest shard
    vocab_size: int
    padded_vocab_size: int


def _shard(
    function: str,
    name: str,
    t: Tensor,
    dim: int,
    group: dist.ProcessGroup | None,
    vocab_size: int | None,
    padded_vocab_size: int | None,
) -> tuple[Tensor, _Shard]:
    """Return this process's part of ``t``, whose dimension ``dim`` is the vocabulary, and where it is."""
    if isinstance(t, DTensor):
        if group is not None or padded_vocab_size is not None:
            raise ValueError(f"{function}: group and padded_vocab_size must be None for a DTensor, which has both")
        if t.device_mesh.ndim != 1 or not t.placements[0].is_shard(dim):
            raise ValueError(
                f"{function}: a DTensor {name} must have the placement Shard({dim}) on a mesh with one dimension, "
                f"got {t.placements}"
            )
        group, padded_vocab_size, t = t.device_mesh.get_group(), t.shape[dim], t.to_local()
    if padded_vocab_size is None:
        raise ValueError(f"{function}: padded_vocab_size must be given unless {name} is a DTensor")
    group = dist.distributed_c10d._get_default_group() if group is None else group
    processes, rank = group.size(), group.rank()
    most = -(-padded_vocab_size // processes)
    first = min(rank * most, padded_vocab_size)
    wanted = min(most, padded_vocab_size - first)
    if t.shape[dim] != wanted:
        raise ValueError(
            f"{function}: {name} must have {wanted} of the {padded_vocab_size} entries of the padded vocabulary in "
            f"process {rank} of {processes}, got {t.shape[dim]}"
        )
    vocab_size = padded_vocab_size if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= padded_vocab_size:
        raise ValueError(f"{function}: vocab_size must be from 1 to {padded_vocab_size}, got {vocab_size}")
    return t, _Shard(group, processes, first, most, vocab_size, padded_vocab_size)


# ---- embedding -------------------------------------------------------------------------------------------------------


def embedding(
    tokens: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    positions: Tensor | None = None,
    vocab_size: int | None = None,
    padded_vocab_size: int | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """Look up tokens (...) -> (..., C), with the bits of one process: only one process contributes to a row's sum.

    Args:
        tokens: (...), int64 or int32; (B, T) if there are positions.
        weight: (n, C), this process's rows.
        group: the processes; None is the default group.
        positions: (P, C), P >= T, the position embeddings that are added. Each process gets their whole gradient.
        vocab_size: V; tokens must be below it. None is Vp.
        padded_vocab_size: Vp, the rows of all shards; must be given unless weight is a DTensor.
        sequence_parallel: return this process's rows (B * T / S, C).

    Raises:
        ValueError: if n is not this process's number of rows, vocab_size is not in 1..Vp, or S does not divide the
            number of tokens.
        RuntimeError: if a token is not in 0..V-1. On CUDA, such a token fails a device-side assertion instead.
    """
    weight, shard = _shard("embedding", "weight", weight, 0, group, vocab_size, padded_vocab_size)
    if sequence_parallel and tokens.numel() % shard.processes:
        raise ValueError(f"embedding: {shard.processes} processes must divide the {tokens.numel()} tokens")
    return _Embedding.apply(tokens, weight, positions, shard, sequence_parallel)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, positions: Tensor | None, shard: _Shard, sequence_parallel: bool
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.options = weight.shape[0], None if positions is None else positions.shape[0], shard, sequence_parallel
        options = shard.vocab_size, shard.first
        if positions is None:
            out = ops.embedding.default(tokens, weight, *options)
        else:
            out = ops.encoder.default(tokens, weight, positions, *options)
        if sequence_parallel:
            return reduce_scatter(out.view(-1, out.shape[-1]), shard.group)
        return wait(start_all_reduce(out, shard.group))

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("embedding")
        (tokens,) = ctx.saved_tensors
        rows, positions, shard, sequence_parallel = ctx.options
        if sequence_parallel:
            dout = gather(dout, shard.group).view(*tokens.shape, dout.shape[-1])
        if positions is None:
            dweight, dpositions = ops.embedding_backward.default(dout, tokens, rows, shard.first), None
        else:
            dweight, dpositions = ops.encoder_backward.default(dout, tokens, rows, positions, shard.first)
        return None, dweight, dpositions, None, None


# ---- cross-entropy ---------------------------------------------------------------------------------------------------


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    vocab_size: int | None = None,
    padded_vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Compute the cross-entropy of logits whose columns are divided over processes.

    The processes exchange 12 bytes per row, in one all-gather. A second derivative raises a RuntimeError.

    Args:
        logits: (..., n), this process's columns, or a DTensor that is sharded in its last dimension.
        targets: (...), int64 or int32.
        group: the processes; None is the default group.
        vocab_size: V; the columns V..Vp-1 are padding and are not part of the softmax. None is Vp.
        padded_vocab_size: Vp, the columns of all shards; must be given unless logits is a DTensor.
        ignore_index: a row with this target has a loss and a gradient of 0.
        reduction: "mean" (over the rows that are not ignored; nan if all rows are ignored), "sum" or "none".

    Returns:
        The loss in float32 (float64 for float64 logits): 0-dim, or (...) for ``reduction="none"``.

    Raises:
        ValueError: if n is not this process's number of columns, vocab_size is not in 1..Vp, or ``reduction`` is
            unknown.
        RuntimeError: if a target is not in 0..V-1 and not ignored. On CUDA, it fails a device-side assertion instead.
    """
    check_reduction("cross_entropy", reduction)
    logits, shard = _shard("cross_entropy", "logits", logits, logits.dim() - 1, group, vocab_size, padded_vocab_size)
    losses = _CrossEntropy.apply(logits, targets, shard, ignore_index)
    return _reduced(losses, _scale(targets, ignore_index, reduction))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, shard: _Shard, ignore_index: int) -> Tensor:
        options = shard.first, shard.vocab_size, ignore_index
        own = ops.fused_classifier_statistics.default(logits, targets, *options)
        statistics = start_gather(own[None], shard.group)
        dlogits = logits.clone(memory_format=torch.contiguous_format)
        ctx.save_for_backward(dlogits)
        return ops.fused_classifier_from_statistics_.default(dlogits, targets, wait(statistics), *options)

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("cross_entropy")
        (dlogits,) = ctx.saved_tensors
        return ops.fused_classifier_backward.default(dlosses, dlogits), None, None, None


def _scale(targets: Tensor, ignore_index: int, reduction: str) -> Tensor | None:
    """Return the factor of the sum of the losses, or None if they are not added."""
    if reduction == "none":
        return None
    count = (targets != ignore_index).sum() if reduction == "mean" else targets.new_ones(())
    return 1 / count.double()


def _reduced(losses: Tensor, scale: Tensor | None) -> Tensor:
    return losses if scale is None else (losses.sum(dtype=torch.float64) * scale).to(losses.dtype)


# ---- LM head ---------------------------------------------------------------------------------------------------------


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    vocab_size: int | None = None,
    padded_vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_size: int | None = None,
    sequence_parallel: bool = False,
    fp8: bool = False,
    fp8_logits: bool = False,
) -> Tensor:
    """Compute ``cross_entropy(linear(x, weight), targets)`` in chunks of rows, and store two chunks' logits at most.

    If autograd records the call, the forward also computes the gradients, except for ``reduction="none"`` and for
    float16, for which the backward computes each chunk's logits a second time. The exchange of a chunk's statistics,
    and the sum of its dx over the processes, run at the same time as the next chunk's matmuls. A second derivative
    raises a RuntimeError. Inside autocast the matmuls have autocast's dtype.

    Args:
        x: (..., C), the input of the LM head; with ``sequence_parallel`` only this process's rows.
        weight: (n, C), this process's rows of the output embedding.
        targets: (...), int64 or int32, of all rows.
        group: the processes; None is the default group.
        vocab_size: V; the rows V..Vp-1 of the weight are padding and are not part of the softmax. None is Vp.
        padded_vocab_size: Vp, the rows of all shards; must be given unless weight is a DTensor.
        ignore_index: a row with this target has a loss and a gradient of 0.
        reduction: "mean" (over the rows that are not ignored; nan if all rows are ignored), "sum" or "none".
        chunk_size: the rows of all processes in a chunk; None chooses chunks of at most 2^28 logits.
        sequence_parallel: x and its gradient are divided over the processes. The other results stay the same.
        fp8: compute the gradients as :func:`gptkernels.functional.fp8_linear_cross_entropy` does. The reduction is
            "mean" or "sum", and C and the numbers of rows of all shards are multiples of 16.
        fp8_logits: with fp8, if gradients are computed, also compute the logits from the rounded x and weight.

    Returns:
        The loss in float32 (float64 for a float64 x): 0-dim, or of targets' shape for ``reduction="none"``.

    Raises:
        ValueError: if shapes do not match, n is not this process's number of rows, vocab_size is not in 1..Vp,
            ``reduction`` is unknown, ``chunk_size`` is below 1, or fp8 does not support the sizes.
        RuntimeError: if a target is not in 0..V-1 and not ignored. On CUDA, it fails a device-side assertion instead.
            Also if fp8 does not support the dtype.
    """
    name = "linear_cross_entropy"
    check_reduction(name, reduction, ("mean", "sum") if fp8 else ("mean", "sum", "none"))
    weight, shard = _shard(name, "weight", weight, 0, group, vocab_size, padded_vocab_size)
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name}: weight must have shape (n, C) with x (..., C), got {tuple(weight.shape)} and {tuple(x.shape)}"
        )
    parts = shard.processes if sequence_parallel else 1
    rows = math.prod(x.shape[:-1])
    if targets.numel() != parts * rows or not (sequence_parallel or targets.shape == x.shape[:-1]):
        wanted = f"{parts} * {rows} elements" if sequence_parallel else f"shape {tuple(x.shape[:-1])}"
        raise ValueError(f"{name}: targets must have {wanted}, got shape {tuple(targets.shape)}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"{name}: chunk_size must be at least 1, got {chunk_size}")
    if fp8 and any(size % ALIGNMENT for size in (weight.shape[1], shard.most, shard.padded_vocab_size)):
        raise ValueError(
            f"{name}: with fp8, C and the rows of each process must be multiples of {ALIGNMENT}, got C = "
            f"{weight.shape[1]} and {shard.most} of {shard.padded_vocab_size} rows"
        )
    chunk_size = _default_chunk(parts * rows, shard.most) if chunk_size is None else chunk_size
    if dtype := autocast_dtype(x.device.type):
        x, weight = (t if t.dtype == torch.float64 else t.to(dtype) for t in (x, weight))
    wants = [torch.is_grad_enabled() and t.requires_grad for t in (x, weight)]
    fp8 = fp8 and any(wants)
    head = _Head(shard, -(-chunk_size // parts), ignore_index, sequence_parallel, fp8, fp8 and fp8_logits)
    loss = _LinearCrossEntropy.apply(
        x.reshape(-1, x.shape[-1]), weight, targets.reshape(parts, rows), head, reduction, wants
    )
    return loss.view(targets.shape) if reduction == "none" else loss


def _default_chunk(rows: int, columns: int) -> int:
    """Choose equal chunks of at most 2^28 logits and a multiple of 128 rows, as ``ops/linear_cross_entropy.cpp``."""
    most = max(2**28 // columns // 128, 1) * 128
    each = -(-rows // max(-(-rows // most), 1))
    return max(-(-each // 128), 1) * 128


class _Head(NamedTuple):
    shard: _Shard
    chunk: int  # rows of x
    ignore_index: int
    sequence_parallel: bool
    fp8: bool
    fp8_logits: bool


class _LinearCrossEntropy(torch.autograd.Function):
    """x (rows, C), weight (n, C), targets (parts, rows), where parts is 1 or, if x is divided, the processes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, head: _Head, reduction: str, wants: Sequence[bool]
    ) -> Tensor:
        ctx.head, ctx.dtype = head, x.dtype
        ctx.recompute = reduction == "none" or (x.dtype == torch.float16 and not head.fp8)
        ctx.scale = _scale(targets, head.ignore_index, reduction)
        losses, *gradients = _run(x, weight, targets, ctx.scale, head, [False] * 2 if ctx.recompute else wants)
        ctx.save_for_backward(*((x, weight, targets) if ctx.recompute else gradients))
        return _reduced(losses, ctx.scale)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_cross_entropy")
        wants = ctx.needs_input_grad[:2]
        if ctx.recompute:
            dlosses = dloss if ctx.scale is None else dloss * ctx.scale
            x, weight, targets = ctx.saved_tensors
            _, *gradients = _run(x, weight, targets, dlosses, ctx.head, wants)
            found = present(gradients, wants)
        else:
            found = scale_saved(dloss, ctx.saved_tensors, wants)
        return *(None if g is None else g.to(ctx.dtype) for g in found), None, None, None, None


def _run(
    x: Tensor, weight: Tensor, targets: Tensor, dlosses: Tensor | None, head: _Head, wants: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses (parts, rows) and, if wanted, the gradients dx (rows, C) and dweight (n, C).

    With fp8 and float16, the gradients are float32, because they may underflow before they are multiplied by dloss.
    """
    shard, parts = head.shard, len(targets)
    options = shard.first, shard.vocab_size, head.ignore_index
    wide = accumulate_dtype(x.dtype)
    dtype = wide if head.fp8 and x.dtype == torch.float16 else x.dtype
    chunks = x.split(head.chunk)
    # The matmuls of several chunks add to a float32 sum, which is rounded once.
    dweight = weight.new_empty(weight.shape if wants[1] else 0, dtype=wide if len(chunks) > 1 else dtype)
    gathered: list[Any] = [start_gather(chunk, shard.group) if head.sequence_parallel else chunk for chunk in chunks]
    losses, dx = [], []
    if head.fp8:
        weight_8, weight_t, weight_scale = ops.fp8_quantize.default(weight, None, torch.float8_e4m3fn, wants[0])
        assert dlosses is not None
        # The factor of the mean is infinite if all rows are ignored. dlogits is then 0.
        dlogits_scale = dlosses.to(wide).nan_to_num(posinf=0.0) * FP8_DLOGIT
    elif dlosses is not None:
        dlosses = dlosses.to(wide).expand(targets.shape)

    def start(i: int) -> tuple[Any, ...]:
        rows = wait(gathered[i]) if head.sequence_parallel else gathered[i]
        gathered[i] = None
        if head.fp8:  # all processes have the same rows, and so the same scale
            rows_8, rows_t, rows_scale = ops.fp8_quantize.default(rows, None, torch.float8_e4m3fn, wants[1])
        if head.fp8_logits:
            logits = ops.fp8_matmul.default(rows_8, weight_8, rows_scale, weight_scale, None, x.dtype, True)
        else:
            logits = ops.linear.default(rows, weight)
        of_chunk = targets.split(head.chunk, 1)[i].reshape(-1)
        statistics = ops.fused_classifier_statistics.default(logits, of_chunk, *options)
        saved = (rows_t, rows_scale) if head.fp8 else (rows,)
        return i, saved, logits, of_chunk, start_gather(statistics[None], shard.group)

    def finish(i: int, rows: tuple[Tensor, ...], logits: Tensor, of_chunk: Tensor, statistics: Tensor) -> None:
        if head.fp8:
            found, dlogits = ops.fp8_classifier_from_statistics.default(logits, of_chunk, wait(statistics), *options)
        else:
            scale = None if dlosses is None else dlosses.split(head.chunk, 1)[i].reshape(-1)
            found = ops.fused_classifier_from_statistics_.default(logits, of_chunk, wait(statistics), *options, scale)
        losses.append(found.view(parts, len(chunks[i])))
        if wants[0]:
            if head.fp8:
                partial = ops.fp8_matmul.default(dlogits, weight_t, dlogits_scale, weight_scale, None, dtype)
            else:
                partial = ops.linear.default(logits, weight.t())
            dx.append((start_reduce_scatter if head.sequence_parallel else start_all_reduce)(partial, shard.group))
        if wants[1] and head.fp8:
            rows_t, rows_scale = rows
            ops.fp8_linear_dweight_.default(dlogits, rows_t, dlogits_scale, rows_scale, dweight, i > 0)
        elif wants[1]:
            ops.linear_dweight_.default(logits, *rows, dweight, i > 0)

    # The next chunk's logits are queued first, so that its matmul hides this chunk's exchange.
    started = start(0)
    for i in range(1, len(chunks)):
        following = start(i)
        finish(*started)
        started = following
    finish(*started)
    dx = [wait(part) for part in dx]
    return torch.cat(losses, 1), torch.cat(dx) if dx else x.new_empty(0), dweight.to(dtype)
