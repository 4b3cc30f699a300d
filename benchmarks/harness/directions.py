"""The forward and backward cases of an operator that computes each row independently."""

from functools import partial

from benchmarks.harness import exact
from benchmarks.harness.case import Case
from benchmarks.harness.peers import backward as backward_of
from benchmarks.harness.peers import compiled
from gptkernels.testing.cases import OPERATORS


def both(op, shape, formula, forward, backward, dout, rows, shared=(), more=({}, {}), compiled_forward=partial):
    """Cases of the forward and the backward, with torch's eager and compiled kernels as peers.

    Args:
        op: the operator's name in ``OPERATORS``, which has its costs.
        shape: the sizes, as text for the tables.
        formula: computes the result from ``rows`` and ``shared`` with torch's operators.
        forward: runs our kernel.
        backward: runs our kernel of the backward.
        dout: the gradient of the result.
        rows: tensors with the same first dimension.
        shared: tensors that every row uses, such as weights.
        more: other peers of each direction.
        compiled_forward: ``training`` if our forward saves tensors for its backward.
    """
    inputs = (*rows, *shared)
    costs = [vars(cost) for cost in OPERATORS[op].costs(*inputs)]
    yield Case(
        f"{op} fwd",
        shape,
        forward,
        lambda: exact.outputs(formula, rows, shared),
        **costs[0],
        peers={
            "torch": partial(formula, *inputs),
            "compile": compiled_forward(compiled(formula), *inputs),
            **more[0],
        },
    )
    yield Case(
        f"{op} bwd",
        shape,
        backward,
        lambda: exact.gradients(formula, dout, rows, shared),
        **costs[1],
        peers={
            "torch": backward_of(formula, inputs, dout),
            "compile": backward_of(compiled(formula), inputs, dout),
            **more[1],
        },
    )
