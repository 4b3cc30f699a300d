"""The table of operators. Each file has the operators of a family, and adds them to ``table.OPERATORS``."""

from gptkernels.testing.cases import (  # noqa: F401
    attention,
    block,
    decode,
    elementwise,
    embedding,
    fp8,
    loss,
    norm,
    optimizer,
    products,
    softmax,
)
from gptkernels.testing.cases.table import ODD, OPERATORS, ORDINARY, SMALL, Call, Case, Operator

__all__ = ["CASES", "ODD", "OPERATORS", "ORDINARY", "SMALL", "Call", "Case", "Operator"]

CASES = [
    Case(operator, variant)
    for operator in OPERATORS.values()
    if operator.sizes is not None
    for variant in operator.variants
]
