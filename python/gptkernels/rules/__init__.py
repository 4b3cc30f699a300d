"""The operators' Python rules for torch: fake kernels, autograd, vmap, autocast and flops."""

import importlib
import pkgutil

from gptkernels.rules._inductor import operators
from gptkernels.rules._register import ops

__all__ = ["ops"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

for _op in operators():
    _op.__doc__ = str(_op.default._schema)
