"""Makes the forward case and the backward case of an operator."""

from benchmarks.harness import exact
from benchmarks.harness.case import Case
from benchmarks.harness.peers import of_backward, of_forward
from gptkernels.testing.cases import OPERATORS


def both(
    op, shape, formula, forward, backward, dout, rows, shared=(), *,
    costs=None, eager=None, differentiated=None, exact_backward=None, more=({}, {}), saves=False,
):  # fmt: skip
    """Yield a case of the forward and a case of the backward, with torch's eager and compiled code as baselines.

    Args:
        rows: tensors with the same first dimension, whose rows the formula computes independently.
        shared: tensors that every row uses, such as weights.
        costs: the bytes and flops of the forward and of the backward (default: those in ``OPERATORS``).
        eager: the function that torch runs eagerly, if it differs from the formula.
        differentiated: the formula and the rows that the backward differentiates, if they differ from the forward's.
        more: further baselines of the forward and of the backward.
        saves: whether the forward saves tensors for its backward, so that the compiled formula must save them too.
    """
    inputs = (*rows, *shared)
    costs = costs or [vars(cost) for cost in OPERATORS[op].costs(*inputs)]
    function, leaves = differentiated or (formula, rows)
    yield Case(
        f"{op} fwd",
        shape,
        forward,
        lambda: exact.outputs(formula, rows, shared),
        **costs[0],
        peers=of_forward(formula, inputs, eager, saves) | more[0],
    )
    yield Case(
        f"{op} bwd",
        shape,
        backward,
        exact_backward or (lambda: exact.gradients(function, dout, leaves, shared)),
        **costs[1],
        peers=of_backward(function, (*leaves, *shared), dout, eager) | more[1],
    )
