"""Checks at each call: whether the kernels support its tensors, and whether a submodule has changed since ``swap``."""

import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from gptkernels._unmodified import runs_only_its_forward
from gptkernels.rules._autocast import autocast_dtype
from gptkernels.swapping.classes import kind_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", "cuda", "meta")
TORCHS_ATTENTION = F.scaled_dot_product_attention
_TENSORS = (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)


def why_not(*tensors: Tensor | None) -> str | None:
    given = [t for t in tensors if t is not None]
    first = given[0]
    if first.device.type not in DEVICES:
        return f"there are no kernels for {first.device.type}"
    autocast = autocast_dtype(first.device.type) is not None
    for t in given:
        if type(t) not in _TENSORS:
            return f"a tensor is a {type(t).__name__}"
        if t.dtype not in DTYPES or t.layout != torch.strided:
            return f"a tensor is {t.dtype}, {t.layout}"
        if t.dtype != first.dtype and not autocast:
            return f"dtypes differ: {t.dtype} and {first.dtype}"
    return None


def has_librarys_forward(kind: Any) -> bool:
    code = getattr(kind.forward, "__code__", None)
    library = sys.modules[kind.__module__.partition(".")[0]].__file__
    inside = code is not None and library is not None and code.co_filename.startswith(os.path.dirname(library))
    return inside and kind.forward.__qualname__ == f"{kind.__qualname__}.forward"


def count(module: torch.nn.Module, reason: str) -> None:
    if not torch.compiler.is_compiling():
        report = module.__dict__.get("gptkernels_report")
        if report is not None:
            report.calls[type(module).__name__, reason] += 1


def bare(module: torch.nn.Module) -> bool:
    """Return whether a call runs only the class's forward. Hooks of transformers that record outputs are ignored."""
    return runs_only_its_forward(module, passive="transformers.utils.output_capturing")


def untouched(module: torch.nn.Module, kind: str) -> bool:
    return kind_of(module) == kind and bare(module)


def dropout_of(module: Any) -> float | None:
    """Return the current probability of a ``torch.nn.Dropout``; None for a module that must be called."""
    if type(module) is not torch.nn.Dropout or not bare(module):
        return None
    return module.p if module.training else 0.0


def attention_is_replaced() -> bool:
    """Return whether ``F.scaled_dot_product_attention`` was replaced; torch's ``context_parallel`` does so.

    If so, the original attention must run, because it calls the replacement.
    """
    return F.scaled_dot_product_attention is not TORCHS_ATTENTION
