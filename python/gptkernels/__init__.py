"""GPT-2's training kernels, hand-written in C++ and CUDA, as PyTorch operators."""

from gptkernels import _command

if _command.is_command():  # before torch is imported
    _command.wait_passively()
    _command.let_interrupts_end_imports()

from gptkernels import _library, functional, models, nn, optim, testing
from gptkernels._info import info
from gptkernels.graphs import graphed_step
from gptkernels.swapping import register_attention, swap, unswap

__version__ = _library.build()["version"]
__all__ = [
    "__version__", "functional", "graphed_step", "info", "models", "nn", "optim", "register_attention", "swap",
    "testing", "unswap",
]  # fmt: skip
