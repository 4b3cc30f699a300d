"""Outputs and gradients of a formula in float64, computed for a few rows at a time to save memory."""

import torch

from benchmarks.harness.case import as_tuple

ELEMENTS = 1 << 24  # of one piece


def outputs(function, rows, shared=()):
    """Yield the outputs of ``function(*rows, *shared)``, for ``Case.exact``.

    Args:
        function: the formula, which must compute each row independently.
        rows: tensors with the same first dimension, along which they are split into pieces.
        shared: tensors that all rows use, such as weights.
    """
    shared = [double(t) for t in shared]
    for part in _parts(rows[0]):
        for i, out in enumerate(as_tuple(function(*(double(t[part]) for t in rows), *shared))):
            yield i, part, out


def gradients(function, douts, rows, shared=()):
    """Yield the gradients of ``rows`` piece by piece, and then the gradients of ``shared``."""
    shared = [double(t).requires_grad_() for t in shared]
    totals = [torch.zeros_like(t) for t in shared]
    for part in _parts(rows[0]):
        leaves = [double(t[part]).requires_grad_() for t in rows]
        outs = as_tuple(function(*leaves, *shared))
        found = torch.autograd.grad(outs, [*leaves, *shared], [double(d[part]) for d in as_tuple(douts)])
        for i, grad in enumerate(found[: len(rows)]):
            yield i, part, grad
        for total, grad in zip(totals, found[len(rows) :], strict=True):
            total += grad
    for i, total in enumerate(totals):
        yield len(rows) + i, ..., total


def double(t):
    """Return the tensor detached, in float64 unless it has integers."""
    return t.detach().double() if t.is_floating_point() else t


def _parts(t):
    step = max(1, ELEMENTS // max(1, t[0].numel()))
    return [slice(start, start + step) for start in range(0, len(t), step)]
