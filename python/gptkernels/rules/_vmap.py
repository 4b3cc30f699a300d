"""Rules for ``torch.vmap``, which calls an op on tensors with one more dimension, over which the op is mapped.

A rule takes the op, the size of the mapped dimension, its index in each argument (None if the argument is not mapped),
and all arguments by position. The rule returns the outputs, and the mapped dimension's index in each output.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Rule = Callable[[Callable[..., Any], int, Sequence[Any], Sequence[Any]], tuple[Any, Any]]


def loop(op: Callable[..., Any], size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """Call the op once for each index: slow, but right for any op.

    Raises RuntimeError for a dimension of size 0, because without a call the outputs' shapes are unknown.
    """
    if size == 0:
        raise RuntimeError(f"{getattr(op, '__name__', 'vmap')}: vmap over a dimension of size 0 is not supported")
    flat, spec = pytree.tree_flatten(tuple(args))
    dims = _dims_of(in_dims, args)
    parts = [a.unbind(d) if d is not None else (a,) * size for a, d in zip(flat, dims, strict=True)]
    outputs = [op(*pytree.tree_unflatten(list(one), spec)) for one in zip(*parts, strict=True)]
    if isinstance(outputs[0], Tensor):
        return torch.stack(outputs), 0
    stacked = tuple(torch.stack(out) for out in zip(*outputs, strict=True))
    return stacked, (0,) * len(stacked)


def _dims_of(in_dims: Sequence[Any], args: Sequence[Any]) -> list[int | None]:
    flat: list[int | None] = []
    for dim, arg in zip(in_dims, args, strict=True):
        if isinstance(arg, list | tuple):
            flat += dim if isinstance(dim, list | tuple) else [dim] * len(arg)
        else:
            flat.append(dim)
    return flat


def rows(*positions: int, least: int = 1) -> Rule:
    """Make a rule for an op whose arguments at ``positions``, and all outputs, may have any leading dimensions.

    If only these arguments are mapped, the op is called once. If the first of them has fewer than ``least`` dimensions
    besides the mapped one, the op is called for each index, and raises its usual error.
    """

    def rule(op: Callable[..., Any], size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Any, Any]:
        first = positions[0]
        dims = args[first].dim() - (in_dims[first] is not None)
        if dims < least or not _only(positions, in_dims):
            return loop(op, size, in_dims, args)
        outputs = op(
            *(leading(a, d, size) if i in positions else a for i, (a, d) in enumerate(zip(args, in_dims, strict=True)))
        )
        return outputs, 0 if isinstance(outputs, Tensor) else (0,) * len(outputs)

    return rule


def rows_and_sums(*positions: int) -> Rule:
    """Make a rule for a backward whose first output has rows and whose other outputs are sums over all rows.

    One call computes the first output for all indices. The sums need a call for each index.
    """
    over_rows = rows(*positions)

    def rule(op: Callable[..., Any], size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Any, Any]:
        *tensors, mask = args
        if not _only(positions, in_dims):
            return loop(op, size, in_dims, args)
        if any(mask[1:]):
            found, dims = loop(op, size, in_dims, (*tensors, [False, *mask[1:]]))
        else:
            found, dims = (tensors[0].new_empty(0),) * len(mask), (None,) * len(mask)
        if not mask[0]:
            return found, dims
        (first, *_), _ = over_rows(op, size, in_dims, (*tensors, [True, *(False for _ in mask[1:])]))
        return (first, *found[1:]), (0, *dims[1:])

    return rule


def _only(positions: Sequence[int], in_dims: Sequence[Any]) -> bool:
    return all(i in positions or d is None for i, d in enumerate(in_dims))


def leading(t: Any, dim: int | None, size: int) -> Any:
    if not isinstance(t, Tensor):
        return t
    return t.unsqueeze(0).expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def batches(*positions: int) -> Rule:
    def rule(op: Callable[..., Any], size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Any, Any]:
        if not _only(positions, in_dims):
            return loop(op, size, in_dims, args)
        folded = (
            leading(a, d, size).flatten(0, 1) if i in positions and a is not None else a
            for i, (a, d) in enumerate(zip(args, in_dims, strict=True))
        )
        outputs = op(*folded)
        if isinstance(outputs, Tensor):
            return _unfold(outputs, size), 0
        return tuple(_unfold(out, size) for out in outputs), (0,) * len(outputs)

    return rule


def _unfold(t: Tensor, size: int) -> Tensor:
    return t.view(size, t.shape[0] // max(size, 1), *t.shape[1:])


def offset_tokens(tokens: Tensor, vocab_size: Any) -> Tensor:
    """Shift ``tokens[b]`` by b * vocab_size, so that one call of an op processes all b. Invalid tokens become -1."""
    first = torch.arange(tokens.shape[0], device=tokens.device).view(-1, *(1,) * (tokens.dim() - 1)) * vocab_size
    return torch.where((tokens >= 0) & (tokens < vocab_size), tokens + first, -1)
