"""The operators' Python rules for torch: fake, autograd, vmap, autocast, flops. Each operator has a file.

``from gptkernels.rules import ops`` gives the operators with these rules registered: ``ops.gelu(x)``.
"""

import importlib
import pkgutil

from gptkernels.rules._register import ops

__all__ = ["ops"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
