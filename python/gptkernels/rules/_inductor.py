"""Registers the ops as Inductor's fallbacks.

For an op without a registration, Inductor up to torch 2.12 formats the arguments and, recursively, their inputs for its
log, which takes time exponential in the depth of a model.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch

_done: list[Any] = []


def operators() -> Iterator[Any]:
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("gptkernels::"):
            yield getattr(torch.ops.gptkernels, name.removeprefix("gptkernels::"))


def register_fallbacks() -> None:
    """Register the ops if Inductor is loaded, so that this package need not import it.

    Every fake rule calls this function, because Inductor calls fake rules when it compiles a graph.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if _done or lowering is None or not hasattr(lowering, "make_fallback"):
        return
    _done.append(lowering)
    for op in operators():
        if op.default not in lowering.lowerings:
            lowering.make_fallback(op.default, warn=False)
