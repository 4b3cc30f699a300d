"""GPT-2's training kernels, hand-written in C++ and CUDA, as PyTorch operators."""

from gptkernels import _command

if _command.is_command():  # before torch is imported
    _command.wait_passively()
    _command.let_interrupts_end_imports()

from gptkernels import _library, functional, models, nn, optim, testing  # noqa: E402
from gptkernels._info import info  # noqa: E402
from gptkernels.graphs import graphed_step  # noqa: E402
from gptkernels.swapping import register_attention, swap, unswap  # noqa: E402

__version__ = _library.build()["version"]
__all__ = [
    "__version__", "functional", "graphed_step", "info", "models", "nn", "optim", "register_attention", "swap",
    "testing", "unswap",
]  # fmt: skip
