"""Loads the native libraries. ``without_cuda_because`` is why the CUDA library is not in use, or an empty string."""

import ctypes
import functools
import json
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "lib"
CPU_LIBRARY = FOLDER / "libgptkernels.so"
CUDA_LIBRARY = FOLDER / "libgptkernels_cuda.so"


@functools.cache
def build() -> dict[str, str]:
    return json.loads((FOLDER / "build.json").read_text())


def _load_cuda() -> str:
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    if not CUDA_LIBRARY.exists():
        reason = build()["without_cuda_because"] or f"{CUDA_LIBRARY.name} is missing from {FOLDER}"
        return f"gptkernels was built without its CUDA library: {reason}"
    try:
        torch.ops.load_library(str(CUDA_LIBRARY))
    except OSError as error:
        return f"{CUDA_LIBRARY.name} could not be loaded: {error.__cause__ or error}"
    return ""


def _load_cpu() -> None:
    if not CPU_LIBRARY.exists():
        raise ImportError(f"{CPU_LIBRARY} is missing: build it with `pip install -e .` in the checkout")
    torch.ops.load_library(str(CPU_LIBRARY))
    if error := _string("gptkernels_cpu_capability_error"):
        raise ImportError(f"gptkernels: {error}")


def _string(function: str) -> str:
    found = getattr(ctypes.CDLL(str(CPU_LIBRARY)), function)
    found.restype = ctypes.c_char_p
    return found().decode()


def cpu_capability() -> str:
    """Return "default", "avx2" or "avx512", the instruction set for which the CPU kernels in use were compiled."""
    return _string("gptkernels_cpu_capability")


_load_cpu()
without_cuda_because = _load_cuda()
