"""Context parallelism: the tokens of each sequence are divided over the ranks of a process group.

A sequence of T tokens is cut into 2 * R chunks of equal length, R being the number of ranks. Rank r has chunk r, its
head, and chunk 2 * R - 1 - r, its tail, so that all ranks compute equally many causal scores. Only attention needs the
tokens of other ranks. It gathers their keys and values.

Shapes: B batch, T tokens of the whole sequence, NH query heads, KH key heads, HS head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from gptkernels import functional
from gptkernels.block.fused import draw
from gptkernels.parallel._collectives import reduce_scatter, refuse_second_derivative, start_gather, wait
from gptkernels.parallel._dropout import drop_rows, place
from gptkernels.rules import ops
from gptkernels.rules._autocast import autocast_dtype
from gptkernels.rules._register import accumulate_dtype, save, saved
from gptkernels.rules.attention import Options

DROPOUT_TOKENS = 32
"""A rank's number of tokens must be a multiple of this if attention weights are dropped. Head and tail then begin at
multiples of the 16 rows whose masks have common random numbers (``csrc/philox.h``)."""


def _as_group(group: ProcessGroup | DeviceMesh) -> ProcessGroup:
    return group.get_group() if isinstance(group, DeviceMesh) else group


def _in_order(gathered: Tensor, group: ProcessGroup) -> Tensor:
    """Wait for all ranks' tokens (T, ...), and return them in the order of the sequence."""
    chunks = wait(gathered).tensor_split(2 * group.size())
    return torch.cat([*chunks[::2], *chunks[::-2]])  # heads in the order of ranks, tails in the reverse order


def _add_and_scatter(t: Tensor, group: ProcessGroup) -> Tensor:
    """Add all ranks' t (T, ...), which is in the order of the sequence, and return this rank's tokens (T / R, ...)."""
    ranks = group.size()
    chunks = t.tensor_split(2 * ranks)
    by_rank = torch.cat([chunk for i in range(ranks) for chunk in (chunks[i], chunks[-1 - i])])
    return reduce_scatter(by_rank, group)


def split_sequence(t: Tensor, group: ProcessGroup | DeviceMesh, dim: int = 1) -> Tensor:
    """Return this rank's head and tail of a tensor that all ranks have, concatenated.

    Args:
        t: the whole tensor, such as tokens or targets (B, T).
        group: the process group, or a mesh of one dimension.
        dim: the dimension of the T tokens.

    Raises:
        ValueError: if T is not a multiple of twice the number of ranks.
    """
    group = _as_group(group)
    tokens, chunks = t.shape[dim], 2 * group.size()
    if tokens % chunks:
        raise ValueError(
            f"split_sequence: dimension {dim} must be a multiple of {chunks}, twice the number of ranks, got {tokens}"
        )
    parts = t.tensor_split(chunks, dim)
    return torch.cat([parts[group.rank()], parts[-1 - group.rank()]], dim)


@torch.no_grad()
def gather_sequence(t: Tensor, group: ProcessGroup | DeviceMesh, dim: int = 1) -> Tensor:
    """Return the whole tensor of which each rank has the part that :func:`split_sequence` returns, without gradients.

    Args:
        t: this rank's head and tail, such as logits (B, T / R, V) for R ranks. All ranks' tensors have the same shape.
        group: the process group, or a mesh of one dimension.
        dim: the dimension of the tokens.

    Raises:
        ValueError: if the number of this rank's tokens is odd.
    """
    _check_even("gather_sequence", "t", t.shape[dim])
    group = _as_group(group)
    return _in_order(start_gather(t.movedim(dim, 0), group), group).movedim(0, dim)


def _check_even(function: str, name: str, tokens: int) -> None:
    if tokens % 2:
        raise ValueError(f"{function}: {name} must have an even number of tokens, a head and a tail, got {tokens}")


def _pack(key: Tensor, value: Tensor) -> Tensor:
    """(B, KH, T, HS) each -> (T, 2, B, KH, HS). The first dimension is the one that collectives divide."""
    return torch.stack([t.permute(2, 0, 1, 3) for t in (key, value)], 1)


def _unpack(packed: Tensor) -> tuple[Tensor, ...]:
    return packed.permute(1, 2, 3, 0, 4).unbind()


def _queries(query: Tensor, group: ProcessGroup, options: Options) -> Iterator[tuple[slice, int, Options]]:
    """Yield for head and tail: the slice of this rank's queries, the number of keys they see, and their options."""
    length, last = query.shape[2] // 2, 2 * group.size() - 1
    for i, chunk in enumerate((group.rank(), last - group.rank())):
        keys, first = chunk + 1 if options.is_causal else last + 1, chunk * length
        placed = options._replace(query_offset=first, first_query=first if options.dropout_p else 0)
        yield slice(i * length, (i + 1) * length), keys * length, placed


def attend(query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output (B, NH, T / R, HS) and the scores' logsumexp (B, NH, T / R), without gradients.

    The options have no mask and no bounds of keys; ``query_offset`` and ``first_query`` have no effect.
    """
    if options.dropout_p and query.shape[2] % DROPOUT_TOKENS:
        raise ValueError(
            f"context_parallel_attention: with dropout, query must have a multiple of {DROPOUT_TOKENS} tokens, got "
            f"{query.shape[2]}"
        )
    keys, values = _unpack(_in_order(start_gather(_pack(key, value), group), group))
    outs, logsumexps = [], []
    for part, end, placed in _queries(query, group, options):
        out, logsumexp = ops.scaled_dot_product_attention.default(
            query[:, :, part], keys[:, :, :end], values[:, :, :end], *placed
        )
        outs.append(out.transpose(1, 2))  # (B, T, NH, HS) is the order of dimensions in memory
        logsumexps.append(logsumexp)
    return torch.cat(outs, 1).transpose(1, 2), torch.cat(logsumexps, 2)


def attend_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    group: ProcessGroup,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's query, key and value."""
    gathered = start_gather(_pack(key, value), group)
    # Head, tail and ranks are added in float32, because 16-bit sums would be rounded at each addition.
    sums = gathered.new_zeros(gathered.shape, dtype=accumulate_dtype(query.dtype))
    keys, values = _unpack(_in_order(gathered, group))
    del gathered
    dkeys, dvalues = _unpack(sums)
    dqueries = []
    for part, end, placed in _queries(query, group, options):
        dquery, dkey, dvalue = ops.scaled_dot_product_attention_backward.default(
            dout[:, :, part], None, query[:, :, part], keys[:, :, :end], values[:, :, :end], out[:, :, part],
            logsumexp[:, :, part], *placed,
        )  # fmt: skip
        dqueries.append(dquery)
        dkeys[:, :, :end].add_(dkey)
        dvalues[:, :, :end].add_(dvalue)
    del keys, values, dkey, dvalue  # their memory is free for the reduction
    dkey, dvalue = _unpack(_add_and_scatter(sums, group).to(key.dtype))
    return torch.cat(dqueries, 2), dkey, dvalue


class _ContextParallelAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup, *options: Any
    ):
        ctx.group = group
        out, logsumexp = attend(query, key, value, group, Options(*options))
        save(ctx, query, key, value, out, logsumexp, *options)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor):  # type: ignore[no-untyped-def]
        refuse_second_derivative("context_parallel_attention")
        query, key, value, out, logsumexp, *options = saved(ctx)
        gradients = attend_backward(dout, query, key, value, out, logsumexp, ctx.group, Options(*options))
        return *gradients, *(None,) * (1 + len(options))


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: ProcessGroup | DeviceMesh,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Compute attention over sequences of T tokens, of which each of R ranks has a head and a tail, T / R tokens.

    The forward gathers the keys and values of all ranks. They are not kept: the backward gathers them again, and adds
    the gradients of all ranks in float32 (float64 for float64). All ranks must call the function with tensors of the
    same shapes, and must run the backward. Inside autocast the tensors are cast to autocast's dtype.

    Args:
        query: (B, NH, T / R, HS), this rank's part as in :func:`split_sequence`.
        key, value: (B, KH, T / R, HS). NH is a multiple of KH, and NH / KH neighbouring query heads share a key head.
        group: the process group, or a mesh of one dimension.
        is_causal: whether a query sees only the keys up to its own position in the sequence.
        scale: the factor of the scores; None is 1/sqrt(HS).
        dropout_p: the probability with which an attention weight is dropped, from 0 to 1. All ranks must have the same
            random seed; the mask is then that of the whole sequences.

    Returns:
        The output (B, NH, T / R, HS).

    Raises:
        ValueError: if T / R is odd, or not the same for query and key; if ``dropout_p`` is out of range, or not 0 while
            T / R is not a multiple of 32.
        RuntimeError: for a second derivative.
    """
    name = "context_parallel_attention"
    _check_even(name, "query", query.shape[2])
    if key.shape[2] != query.shape[2] or value.shape != key.shape:
        raise ValueError(
            f"{name}: key and value must have one shape and the {query.shape[2]} tokens of query, "
            f"got {tuple(key.shape)} and {tuple(value.shape)}"
        )
    functional._check_dropout(name, "dropout_p", dropout_p)
    low = autocast_dtype(query.device.type)
    if low is not None and query.dtype != torch.float64:
        query, key, value = query.to(low), key.to(low), value.to(low)
    _, seed, offset = draw(dropout_p, query)
    options = Options(dropout_p=dropout_p, is_causal=is_causal, scale=scale, seed=seed, offset=offset)
    return _ContextParallelAttention.apply(query, key, value, _as_group(group), *options)  # type: ignore[no-any-return]


def dropout(x: Tensor, p: float, group: ProcessGroup) -> Tensor:
    """Apply dropout to this rank's tokens, x (B, T / R, C), with the mask of the whole sequences."""
    rows = x.flatten(0, 1)
    return drop_rows(rows, place(draw(p, x), rows, 0, x.shape[1], group)).view_as(x)


def context_parallel(model: torch.nn.Module, group: ProcessGroup | DeviceMesh) -> torch.nn.Module:
    """Divide the sequences of a :class:`gptkernels.models.GPT2` over the ranks of a process group, in place.

    The model then takes this rank's tokens and targets (B, T / R), the parts that :func:`split_sequence` returns, and
    returns this rank's logits. The mean of the losses that the R ranks return is the loss of the whole sequences: each
    rank divides the sum of its losses by the mean number of targets of a rank, which takes an all-reduce of one number.
    The gradients of the whole sequences are thus the mean over the ranks, as with data parallelism: use DDP or FSDP2
    with a process group of all data-parallel and context-parallel ranks.

    For dropout, the R ranks need the same random seed, and T / R must be a multiple of 32; the masks are those of the
    whole sequences.

    Without tensor parallelism each layer runs single operators instead of one autograd node. ``generate`` raises an
    error.

    Args:
        model: a ``GPT2``, also inside another module, or a part of it, such as its ``transformer``.
        group: the process group, or a mesh of one dimension, whose ranks have parts of the same sequences.

    Returns:
        The model.

    Raises:
        ValueError: if the model has a dropout of another class than :class:`gptkernels.nn.Dropout`.
        TypeError: if the model contains no layer of a ``GPT2``.
    """
    from gptkernels import nn
    from gptkernels.models.gpt2 import GPT2
    from gptkernels.models.transformer import Transformer

    parts = [part for part in model.modules() if isinstance(part, nn.CausalSelfAttention | Transformer | GPT2)]
    if not parts:
        raise TypeError(f"context_parallel: the model must be or contain a GPT2, got {type(model).__name__}")
    dropouts = [part for part in model.modules() if isinstance(part, torch.nn.Dropout)]
    for dropout in dropouts:
        if not isinstance(dropout, nn.Dropout) and dropout.p:
            raise ValueError("context_parallel: a dropout must be a gptkernels.nn.Dropout, got torch.nn.Dropout")
    for part in (*parts, *dropouts):
        part.context_group = _as_group(group)
    return model


@contextmanager
def whole_sequences(model: torch.nn.Module) -> Iterator[None]:
    """Let a model that :func:`context_parallel` has divided compute whole sequences, as before, in this context."""
    # A layer that tensor_parallel has divided reads the group of its attention, and stores none.
    divided = [(part, group) for part in model.modules() if (group := part.__dict__.get("context_group")) is not None]
    try:
        for part, _ in divided:
            part.context_group = None  # type: ignore[assignment]
        yield
    finally:
        for part, group in divided:
            part.context_group = group
