"""Registers the ops as fallbacks in Inductor.

Inductor can call ops that it has no rule for. But up to torch 2.12 it first formats such an op's arguments, and
recursively their inputs, for its log. This takes time exponential in the depth of a model.
"""

import sys
from typing import Any

import torch

_done: list[Any] = []


def register_fallbacks() -> None:
    """Register every op as a fallback, if Inductor is loaded.

    Inductor is loaded before it traces a graph, and tracing calls the ops' fake rules. Therefore every fake rule calls
    this function, and importing this package need not import Inductor.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if _done or lowering is None or not hasattr(lowering, "make_fallback"):
        return
    _done.append(lowering)
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("gptkernels::"):
            op = getattr(torch.ops.gptkernels, name.removeprefix("gptkernels::")).default
            if op not in lowering.lowerings:
                lowering.make_fallback(op, warn=False)
