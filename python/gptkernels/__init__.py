"""GPT-2's training kernels, hand-written in C++ and CUDA, as PyTorch operators."""

from gptkernels import _library, ops
from gptkernels._info import info

__version__ = _library.build()["version"]
__all__ = ["__version__", "info", "ops"]
