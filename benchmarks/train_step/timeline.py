"""The kernels of one step by what they compute: their time, its lower bound, and the difference."""

import collections
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import roof

PRODUCT = re.compile(r"nvjet|gemm|cutlass|xmma|matmul|fp8_gelu", re.IGNORECASE)
BEFORE_PRODUCT = re.compile(r"Memset")  # launched by cuBLAS with a product
REDO = "ExpEpilogue<true>"  # a product of rows that are computed again, of which there are none
AFTER_PRODUCT = re.compile(r"splitKreduce")  # adds up the parts of a product

# The matrix products of an op in launch order. If there are more products, the list starts again.
PRODUCTS = {
    "linear": ["out"],
    "linear_backward": ["dx", "dweight"],
    "mlp": ["fc and GELU", "proj"],
    "mlp_backward": ["dproj_weight", "dhidden and dGELU", "dx", "dfc_weight"],
    "linear_cross_entropy": ["logits", "dx", "dweight"],
}
PRODUCTS |= {
    f"fp8_{op}": PRODUCTS[op] for op in ("linear", "linear_backward", "mlp", "mlp_backward", "linear_cross_entropy")
}
PRODUCTS["fp8_layer"] = ["qkv", "attention's out", "fc and GELU", "proj"]
PRODUCTS["fp8_layer_backward"] = [
    *("dproj_weight", "dhidden and dGELU", "fc's dx", "dfc_weight"),
    *("dattended", "dout_weight", "qkv's dx", "dqkv_weight"),
]


class Launch(NamedTuple):
    """A kernel, copy or fill that ran on the device, and the op call that launched it."""

    op: str
    call: int
    shapes: tuple[tuple[int, ...], ...]
    kernel: str
    seconds: float


@dataclass
class Piece:
    """All launches of a step that compute the same at one size. `floor` is seconds for all of them."""

    op: str
    what: str
    size: str
    kernel: str
    launches: int = 0
    seconds: float = 0
    floor: float = 0

    @property
    def excess(self) -> float:
        return self.seconds - self.floor


class Rates(NamedTuple):
    """The device's limits: bytes/s of a large copy, flop/s of a large product."""

    bytes: float
    flops: float


def rates(device, repeats=10) -> Rates:
    copy, product = roof.rows(device, repeats)
    return Rates(copy.bytes / copy.times["torch"].median, product.flops / product.times["torch"].median)


# ---- launches --------------------------------------------------------------------------------------------------------


def launches(step: Callable[[], object]) -> list[Launch]:
    """Record the launches of one call on the device, in order."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
        step()
        torch.cuda.synchronize()
    found = []
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        if event.kernels:
            op = _owner(event)
            shapes = tuple(tuple(s) for s in op.input_shapes or () if isinstance(s, list | tuple))
            name = op.name.removeprefix("gptkernels::")
            found += [Launch(name, op.id, shapes, k.name, k.duration * 1e-6) for k in event.kernels]
    return found


def _owner(event):
    """The outermost of our ops around an event, otherwise the outermost of torch's."""
    around = []
    while event is not None:
        around.append(event)
        event = event.cpu_parent
    for prefix in ("gptkernels::", "aten::"):
        for outer in reversed(around):
            if outer.name.startswith(prefix):
                return outer
    return around[0]


# ---- pieces ----------------------------------------------------------------------------------------------------------


def pieces(
    found: Iterable[Launch], speed: Rates, *, itemsize: int, parameters: int, fp8_logits: bool = False
) -> list[Piece]:
    """Group the launches by what they compute, sorted by the excess over the floor.

    Args:
        found: a step's launches.
        speed: the rates from which the floors are computed.
        itemsize: bytes of an activation.
        parameters: the number of AdamW's parameters.
        fp8_logits: whether fp8_linear_cross_entropy computes the logits by float8 products.
    """
    by_key: dict[tuple, Piece] = {}
    counted, products, longest = set(), collections.Counter(), {}
    updates = len({launch.call for launch in found if launch.op == "adamw_"})
    sizes = Sizes(itemsize, parameters, max(updates, 1), fp8_logits)
    for launch in found:
        what = _what(launch, products)
        size = " ".join("x".join(map(str, shape)) for shape in launch.shapes[:2] if shape)
        key = launch.op, what, size
        piece = by_key.setdefault(key, Piece(launch.op, what, size, ""))
        piece.launches += 1
        piece.seconds += launch.seconds
        if launch.seconds > longest.get(key, 0.0):
            longest[key], piece.kernel = launch.seconds, _short(launch.kernel)
        if (launch.call, what) not in counted:
            counted.add((launch.call, what))
            nbytes, flops = least(launch.op, what, launch.shapes, sizes)
            piece.floor += max(nbytes / speed.bytes, flops / speed.flops)
    return sorted(by_key.values(), key=lambda piece: -piece.excess)


def _what(launch: Launch, products: collections.Counter) -> str:
    """The part of the op that a launch computes; `products` counts the products of each call."""
    names = PRODUCTS.get(launch.op)
    if names and PRODUCT.search(launch.kernel) and REDO not in launch.kernel:
        products[launch.call] += 1
        return names[(products[launch.call] - 1) % len(names)]
    if names and BEFORE_PRODUCT.search(launch.kernel):
        return names[products[launch.call] % len(names)]
    if names and AFTER_PRODUCT.search(launch.kernel):
        return names[(products[launch.call] - 1) % len(names)]
    if not names:
        return ""
    parts = {"column_sum": "column sums", "partial_sums": "column sums", "ClassifierForwardRow": "classifier"}
    parts |= {"exp_classifier": "factors", REDO: "factors"}
    parts |= {"fp8_quantize": "quantisation", "fp8_largest": "largest magnitude", "fp8_transpose": "transposition"}
    if launch.op.startswith("fp8_layer"):
        parts |= {"layernorm": "norms", "attention": "attention"}
    return next((what for part, what in parts.items() if part in launch.kernel), "other")


class Sizes(NamedTuple):
    """Sizes that the shapes of a call do not include.

    They are the bytes of an activation, the parameters, the number of calls that update them, and whether
    fp8_linear_cross_entropy computes the logits by float8 products.
    """

    itemsize: int
    parameters: int
    updates: int
    fp8_logits: bool


def attention(op, b, t, c) -> int:
    """The flops of the products, half of which the causal mask hides."""
    return (5 if op.endswith("backward") else 2) * b * t * t * c


def least(op, what, shapes, sizes) -> tuple[int, int]:
    """The fewest bytes and flops of one call; 0 if they could be part of another pass."""
    n, itemsize = math.prod(shapes[0]) if shapes else 0, sizes.itemsize
    if what in PRODUCTS.get(op, ()):
        x, weight = _x_and_weight(op, what, shapes)
        flops = 2 * math.prod(x) * weight[0 if weight[1] == x[-1] else 1]
        eight_bits = op.startswith("fp8") and (what != "logits" or sizes.fp8_logits)
        return 0, flops // 2 if eight_bits else flops  # the rate is that of 16-bit products
    if op in ("attention", "attention_backward"):
        b, t, c3 = shapes[0] if op == "attention" else shapes[1]
        return 0, attention(op, b, t, c3 // 3)
    if op.startswith("fp8_layer") and what == "attention":
        return 0, attention(op, *shapes[0])
    if op.startswith("fp8_layer") and what == "norms":  # two norms; float8 twice has the bytes of 16 bits once
        return 2 * 4 * n * itemsize, 0
    passes = {"residual_layernorm": 4, "layernorm": 2, "layernorm_backward": 3, "encoder": 2}
    if op in ("residual_layernorm_backward", "residual_layernorm_bias_backward"):
        return (4 if len(shapes) > 1 and shapes[1] else 3) * n * itemsize, 0
    if op in passes:
        return passes[op] * n * itemsize * (shapes[1][-1] if op == "encoder" else 1), 0
    if op == "encoder_backward" and not what:
        return n * itemsize, 0
    if what in ("classifier", "transposition"):
        logits = n // shapes[0][-1] * shapes[1][0]
        if what == "transposition":
            return 2 * logits, 0
        return (itemsize + (1 if op.startswith("fp8") else itemsize)) * logits, 0
    # AdamW: the gradient, two moments, the parameter, and for 16 bits its master.
    update = {"adamw_": 28 * sizes.parameters // sizes.updates, "global_norm": sizes.parameters * itemsize}
    return update.get(op, 0), 0


def _x_and_weight(op, what, shapes):
    """The operand of a product with one row for each token, and the matrix."""
    if op == "linear_backward":
        return shapes[1], shapes[2]
    if op == "fp8_linear_backward":  # dout, x transposed
        return shapes[0], (shapes[1][0], shapes[0][-1])
    if op == "fp8_mlp_backward":  # dout, GELU's input
        return shapes[0], (shapes[1][-1], shapes[0][-1])
    if op == "fp8_layer":
        x, weights = shapes[0], dict(zip(PRODUCTS[op], (shapes[i] for i in (5, 7, 11, 13)), strict=True))
        return (*x[:-1], weights[what][1]), weights[what]
    if op == "fp8_layer_backward":  # the shapes in lists of tensors are unknown, so GPT-2's are used
        dout, c = shapes[0], shapes[0][-1]
        wide = {"dattended": c, "dout_weight": c, "qkv's dx": 3 * c, "dqkv_weight": 3 * c}
        return dout, (wide.get(what, 4 * c), c)
    if op in ("mlp", "fp8_mlp"):
        x, fc, _, proj = shapes[:4]
        return (x, fc) if what.startswith("fc") else ((*x[:-1], fc[0]), proj)
    if op == "mlp_backward":
        dout, x, fc, proj = shapes[:4]
        return (dout, proj) if what in ("dproj_weight", "dhidden and dGELU") else (x, fc)
    return shapes[0], shapes[1]


def _short(kernel: str) -> str:
    """A kernel's name without template arguments."""
    name = re.sub(r"^void ", "", kernel).replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", name)[0].split("::")[-1][:60]


# ---- tables ----------------------------------------------------------------------------------------------------------

HEADER = ["op", "", "size", "kernel", "launches", "ms", "floor", "excess"]


def cells(found: list[Piece], least_shown=5e-6) -> list[list[str]]:
    """A line for each piece, then one for all that are too short to show, then the sum."""
    shown = [piece for piece in found if piece.seconds >= least_shown]
    rest = [piece for piece in found if piece.seconds < least_shown]
    lines = [[p.op, p.what, p.size, p.kernel, str(p.launches), *_milliseconds([p])] for p in shown]
    if rest:
        lines.append(["the rest", "", "", "", str(sum(p.launches for p in rest)), *_milliseconds(rest)])
    lines.append(["all", "", "", "", str(sum(p.launches for p in found)), *_milliseconds(found)])
    return lines


def _milliseconds(some: list[Piece]) -> list[str]:
    return [
        f"{1e3 * sum(values):.3f}"
        for values in ([p.seconds for p in some], [p.floor for p in some], [p.excess for p in some])
    ]
