"""The rules torch takes in Python for each operator: fake, autograd, autocast, flops. One file an op."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
