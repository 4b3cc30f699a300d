"""GPT-2's training kernels, hand-written in C++ and CUDA, as PyTorch operators."""

from gptkernels import _library, functional, models, nn, ops, optim
from gptkernels._info import info

__version__ = _library.build()["version"]
__all__ = ["__version__", "functional", "info", "models", "nn", "ops", "optim"]
