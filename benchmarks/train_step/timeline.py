"""The kernels of one step, by the op that launched them: their time, the least it could be, and the difference."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

PRODUCT = re.compile(r"nvjet|gemm|cutlass|xmma|matmul_sm90|cublas", re.IGNORECASE)
REDUCTION = re.compile(r"splitK|splitk|reduce_kernel.*cublas", re.IGNORECASE)  # of a product's parts: part of it

# What the products of an op compute, in the order of their launches; once more from the start where there are more.
PRODUCTS = {
    "linear": ["out"],
    "linear_backward": ["dx", "dweight"],
    "mlp": ["fc + GELU", "proj"],
    "mlp_backward": ["dproj_weight", "dGELU", "dx", "dfc_weight"],
    "linear_cross_entropy_with_gradients": ["logits", "dx", "dweight"],
}


class Launch(NamedTuple):
    """A kernel, copy or fill that ran on the device, and the op it belongs to."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    kernel: str
    seconds: float
    start: float


@dataclass
class Piece:
    """All launches of a step that do one thing: an op's part at one shape."""

    op: str
    what: str
    size: str
    kernel: str
    count: int = 0
    seconds: float = 0
    floor: float | None = None


def launches(step: Callable[[], object]) -> list[Launch]:
    """What one call launches, in the order of the op calls."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
        step()
        torch.cuda.synchronize()
    found = []
    for event in profiler.events():
        for kernel in event.kernels:
            op = _owner(event)
            shapes = tuple(tuple(s) for s in (op.input_shapes or ()) if isinstance(s, list | tuple))
            found.append(Launch(op.name, shapes, kernel.name, kernel.duration * 1e-6, event.time_range.start))
    return sorted(found, key=lambda launch: launch.start)


def _owner(event):
    """The outermost op of ours around an event, else the outermost of torch's."""
    chain = []
    while event is not None:
        chain.append(event)
        event = event.cpu_parent
    for prefix in ("gptkernels::", "aten::", ""):
        for outer in reversed(chain):
            if outer.name.startswith(prefix):
                return outer
    return chain[0]
