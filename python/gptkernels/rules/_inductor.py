"""Registers the ops as fallbacks in Inductor.

Inductor can call ops that it has no rule for. But up to torch 2.12 it first formats such an op's arguments, and
recursively their inputs, for its log. This takes time exponential in the depth of a model.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch

_done: list[Any] = []


def operators() -> Iterator[Any]:
    """Yield each operator that the libraries register, such as ``torch.ops.gptkernels.gelu``."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("gptkernels::"):
            yield getattr(torch.ops.gptkernels, name.removeprefix("gptkernels::"))


def register_fallbacks() -> None:
    """Register every op as a fallback, if Inductor is loaded.

    Inductor is loaded before it traces a graph, and tracing calls the ops' fake rules. Therefore every fake rule calls
    this function, and importing this package need not import Inductor.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if _done or lowering is None or not hasattr(lowering, "make_fallback"):
        return
    _done.append(lowering)
    for op in operators():
        if op.default not in lowering.lowerings:
            lowering.make_fallback(op.default, warn=False)
