"""Tells Inductor that the ops are calls into this package.

Inductor also calls ops that it has no rule for. But up to torch 2.12 it first formats the arguments of such an op for
its log, each with everything that it was computed from, which takes time exponential in the depth of a model.
"""

import sys
from typing import Any

import torch

_done: list[Any] = []


def register_fallbacks() -> None:
    """Register every op, once Inductor is loaded.

    Called by every fake rule: Inductor is loaded before it traces a graph with them and lowers the result. So importing
    this package does not import Inductor.
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
