"""The table of operators. Each file adds the operators of a family to ``table.OPERATORS``."""

import importlib
import pkgutil

from gptkernels.testing.cases.table import ODD, OPERATORS, ORDINARY, SMALL, Call, Case, Operator

__all__ = ["CASES", "ODD", "OPERATORS", "ORDINARY", "SMALL", "Call", "Case", "Operator"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

CASES = [
    Case(operator, variant)
    for operator in OPERATORS.values()
    if operator.sizes is not None
    for variant in operator.variants
]
