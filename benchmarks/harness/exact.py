"""Verification of variants by exact results, computed in float64 for a few rows at a time to save memory."""

import torch

from benchmarks.harness.case import as_tuple

ELEMENTS = 1 << 24
# Bounds on the largest error relative to the largest element, and on the mean error relative to the mean magnitude.
# They lie between the errors of correct and of wrong kernels.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def outputs(function, rows, shared=()):
    """Yield the outputs for ``Case.exact``; ``function`` must compute each row independently."""
    shared = [double(t) for t in shared]
    for part in _parts(rows[0]):
        for i, out in enumerate(as_tuple(function(*(double(t[part]) for t in rows), *shared))):
            yield i, part, out


def gradients(function, douts, rows, shared=()):
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
    return t.detach().double() if t.is_floating_point() else t


def _parts(t):
    step = max(1, ELEMENTS // max(1, t[0].numel()))
    return [slice(start, start + step) for start in range(0, len(t), step)]


def fault(case, variant, dtype) -> str | None:
    case.reset()
    outputs = case.look(variant())
    pieces: dict[int, list[torch.Tensor]] = {}  # by output: largest error, sum of errors, largest value, sum of values
    for i, part, exact in case.exact():
        if i < len(outputs):
            got = outputs[i][part]
            if got.shape != exact.shape:
                return f"output {i} has shape {tuple(got.shape)}, not {tuple(exact.shape)}"
            both = (got.detach().double() - exact).abs_(), exact.abs()
            pieces.setdefault(i, []).append(torch.stack([f() for t in both for f in (t.max, t.sum)]))
    for i, found in pieces.items():
        largest, total, largest_exact, total_exact = torch.stack(found).unbind(1)
        worst = torch.maximum(largest.max() / largest_exact.max(), total.sum() / total_exact.sum()).item()
        if not worst <= TOLERANCE[case.rounded or dtype]:  # NaN is wrong too
            return f"output {i} is off by {worst:.1e}"
    return None if pieces else "nothing to check"
