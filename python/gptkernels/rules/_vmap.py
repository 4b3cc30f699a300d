"""Rules for ``torch.vmap``: calls of an op on tensors with one more dimension, over which the op is mapped.

A rule takes the op, the size of that dimension, its index in each argument (None if the argument does not have it), and
the arguments, all by position. It returns the outputs and the index of the dimension in each output. The op is called
with all outer transforms still active, so that mapped functions can be differentiated, and derivatives mapped.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Rule = Callable[[Callable[..., Any], int, Sequence[Any], Sequence[Any]], tuple[Any, Any]]


def loop(op: Callable[..., Any], size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """Call the op once for each index. This works for any op, but is slow.

    Raises:
        RuntimeError: if the dimension has size 0, because without a call the outputs' shapes are unknown.
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
    """Return the mapped dimension, or None, for each argument and for each element of arguments that are lists."""
    flat: list[int | None] = []
    for dim, arg in zip(in_dims, args, strict=True):
        if isinstance(arg, list | tuple):
            flat += dim if isinstance(dim, list | tuple) else [dim] * len(arg)
        else:
            flat.append(dim)
    return flat


def rows(*positions: int, least: int = 1) -> Rule:
    """Make a rule for an op that accepts any leading dimensions in these arguments and returns them in all outputs.

    If only these arguments are mapped, the mapped dimension becomes their first dimension and the op is called once.
    Otherwise the op is called for each index.

    Args:
        positions: the positions of those arguments.
        least: the least number of dimensions, besides the mapped one, of the first of those arguments. With fewer, the
            op is called for each index and raises its own error.
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

    The backward's last argument is the mask of the needed outputs. The first output takes one call. The sums take a
    call for each index, because each index has its own sum.
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
    """Move a tensor's mapped dimension to the front. A tensor without it is expanded to a first dimension of this size.

    Any other value is returned unchanged.
    """
    if not isinstance(t, Tensor):
        return t
    return t.unsqueeze(0).expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def batches(*positions: int) -> Rule:
    """Make a rule for an op with a batch dimension, which is the first of these arguments and of all outputs.

    If only these arguments are mapped, the mapped dimension is folded into the batch dimension and the op is called
    once. Otherwise the op is called for each index.
    """

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
    """Convert tokens (B, ...), where ``tokens[b]`` are of vocabulary b, to tokens of the B vocabularies in a row.

    ``vocab_size`` is the size of each vocabulary. A token that is out of range becomes -1.
    """
    first = torch.arange(tokens.shape[0], device=tokens.device).view(-1, *(1,) * (tokens.dim() - 1)) * vocab_size
    return torch.where((tokens >= 0) & (tokens < vocab_size), tokens + first, -1)
