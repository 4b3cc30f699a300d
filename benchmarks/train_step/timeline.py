"""The kernels of one step, grouped by what they compute: their time, a lower bound of this time, and the difference."""

import collections
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.measure import roof

# The matmuls of an op in launch order, each with the position of its weight among the op's arguments. If an op launches
# more matmuls, the list begins again. Ops with UNKNOWN have no argument of the weight's shape. For fp8_layer_backward
# the number is the weight's other dimension divided by C, as in GPT-2.
UNKNOWN = -1
PRODUCTS: dict[str, dict[str, int]] = {
    "linear": {"out": 1},
    "linear_backward": {"dx": 2, "dweight": 2},
    "mlp": {"fc and GELU": 1, "proj": 3},
    "mlp_backward": {"dproj_weight": 3, "dhidden and dGELU": 3, "dx": 2, "dfc_weight": 2},
    "linear_cross_entropy": dict.fromkeys(["logits", "dx", "dweight"], 1),
    "fp8_layer": {"qkv": 5, "attention's out": 7, "fc and GELU": 11, "proj": 13},
    "fp8_layer_backward": {
        **{"dproj_weight": 4, "dhidden and dGELU": 4, "fc's dx": 4, "dfc_weight": 4},
        **{"dattended": 1, "dout_weight": 1, "qkv's dx": 3, "dqkv_weight": 3},
    },
}
PRODUCTS |= {f"fp8_{op}": PRODUCTS[op] for op in ("linear", "mlp", "linear_cross_entropy")}
PRODUCTS |= {f"fp8_{op}": dict.fromkeys(PRODUCTS[op], UNKNOWN) for op in ("linear_backward", "mlp_backward")}

PRODUCT = re.compile(r"nvjet|gemm|cutlass|xmma|matmul|fp8_gelu", re.IGNORECASE)
BEFORE_PRODUCT = re.compile(r"Memset")
AFTER_PRODUCT = re.compile(r"splitKreduce")
REDO = "ExpEpilogue<true>"  # the matmul that recomputes rows; usually there are none
PARTS = {"column_sum": "column sums", "partial_sums": "column sums", "ClassifierForwardRow": "classifier"}
PARTS |= {"exp_classifier": "factors", REDO: "factors"}
PARTS |= {"fp8_quantize": "quantisation", "fp8_largest": "largest magnitude", "fp8_transpose": "transposition"}
PARTS_OF_A_LAYER = PARTS | {"layernorm": "norms", "attention": "attention"}
# The number of tensors of the first argument's size that the op reads or writes.
PASSES = {"residual_layernorm": 4, "layernorm": 2, "layernorm_backward": 3}
HEADER = ["op", "", "size", "kernel", "launches", "ms", "floor", "excess"]


class Launch(NamedTuple):
    """A kernel, copy or fill on the device, and the op call that launched it."""

    op: str
    call: int
    shapes: tuple[tuple[int, ...], ...]
    kernel: str
    seconds: float


@dataclass
class Piece:
    """All launches of a step that compute the same thing at one size; `seconds` and `floor` are their sums."""

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
    bytes: float
    flops: float


def rates(device, repeats=10) -> Rates:
    copy, product = roof(device, repeats)
    return Rates(copy.bytes / copy.times["torch"].median, product.flops / product.times["torch"].median)


def launches(step: Callable[[], object]) -> list[Launch]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
        step()
        torch.cuda.synchronize()
    found = []
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        if event.kernels:
            op = owner(event)
            name = op.name.removeprefix("gptkernels::")
            found += [Launch(name, op.id, shapes_of(op), k.name, k.duration * 1e-6) for k in event.kernels]
    return found


def owner(event):
    around = []
    while event is not None:
        around.append(event)
        event = event.cpu_parent
    for prefix in ("gptkernels::", "aten::"):
        for outer in reversed(around):
            if outer.name.startswith(prefix):
                return outer
    return around[0]


def shapes_of(event) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(shape) for shape in event.input_shapes or () if isinstance(shape, list | tuple))


class Sizes(NamedTuple):
    itemsize: int
    parameters: int
    updates: int
    fp8_logits: bool  # whether fp8_linear_cross_entropy computes the logits by float8 matmuls


def pieces(
    found: Iterable[Launch], speed: Rates, *, itemsize: int, parameters: int, fp8_logits: bool = False
) -> list[Piece]:
    by_key: dict[tuple, Piece] = {}
    counted, products, longest = set(), collections.Counter(), collections.Counter()
    updates = len({launch.call for launch in found if launch.op == "adamw_"})
    sizes = Sizes(itemsize, parameters, max(updates, 1), fp8_logits)
    for launch in found:
        what = _what(launch, products)
        size = " ".join("x".join(map(str, shape)) for shape in launch.shapes[:2] if shape)
        key = launch.op, what, size
        piece = by_key.setdefault(key, Piece(launch.op, what, size, ""))
        piece.launches += 1
        piece.seconds += launch.seconds
        if launch.seconds > longest[key]:
            longest[key], piece.kernel = launch.seconds, _short(launch.kernel)
        if (launch.call, what) not in counted:
            counted.add((launch.call, what))
            nbytes, flops = least(launch.op, what, launch.shapes, sizes)
            piece.floor += max(nbytes / speed.bytes, flops / speed.flops)
    return sorted(by_key.values(), key=lambda piece: -piece.excess)


def _what(launch: Launch, products: collections.Counter) -> str:
    names = list(PRODUCTS.get(launch.op, ()))
    if not names:
        return ""
    if PRODUCT.search(launch.kernel) and REDO not in launch.kernel:
        products[launch.call] += 1
    elif BEFORE_PRODUCT.search(launch.kernel):
        return names[products[launch.call] % len(names)]
    elif not AFTER_PRODUCT.search(launch.kernel):
        parts = PARTS_OF_A_LAYER if launch.op.startswith("fp8_layer") else PARTS
        return next((what for part, what in parts.items() if part in launch.kernel), "other")
    return names[(products[launch.call] - 1) % len(names)]


def least(op, what, shapes, sizes) -> tuple[int, int]:
    """Return the fewest bytes and flops of one call.

    For matmuls and attention the bytes are 0, because their flops take longer. Both are 0 for work that another kernel
    could do without additional time.
    """
    n, itemsize = math.prod(shapes[0]) if shapes else 0, sizes.itemsize
    if what in PRODUCTS.get(op, ()):
        flops = matmul_flops(op, what, shapes)
        eight_bits = op.startswith("fp8") and (what != "logits" or sizes.fp8_logits)
        return 0, flops // 2 if eight_bits else flops  # float8 matmuls have twice the rate of 16-bit matmuls
    if op in ("attention", "attention_backward"):
        return 0, attention_flops(op, shapes)
    if op.startswith("fp8_layer") and what == "attention":
        return 0, attention_flops(op, [(*shapes[0][:2], 3 * shapes[0][2])] * 2)
    if op.startswith("fp8_layer") and what == "norms":  # two norms; each writes two float8 copies of its result
        return 2 * 4 * n * itemsize, 0
    if op in ("residual_layernorm_backward", "residual_layernorm_bias_backward"):
        return (4 if len(shapes) > 1 and shapes[1] else 3) * n * itemsize, 0
    if what in ("classifier", "transposition"):
        logits = n // shapes[0][-1] * shapes[1][0]
        written = 1 if op.startswith("fp8") else itemsize
        return logits * (2 if what == "transposition" else itemsize + written), 0
    nbytes = {name: passes * n * itemsize for name, passes in PASSES.items()}
    nbytes |= {
        "encoder": 2 * n * itemsize * (shapes[1][-1] if op == "encoder" else 0),
        "encoder_backward": n * itemsize,
    }
    # AdamW reads the gradient, and reads and writes two moments and the parameter. For a 16-bit parameter, it reads and
    # writes the float32 master and only writes the parameter.
    nbytes |= {"adamw_": 28 * sizes.parameters // sizes.updates, "global_norm": sizes.parameters * itemsize}
    return nbytes.get(op, 0), 0


def matmul_flops(op, what, shapes) -> int:
    """The op's first argument has a row for each token."""
    columns = shapes[0][-1]
    if op == "fp8_linear_backward":
        weight = columns, shapes[1][0]
    elif op == "fp8_mlp_backward":
        weight = columns, shapes[1][-1]
    elif op == "fp8_layer_backward":
        weight = columns, columns * PRODUCTS[op][what]
    else:
        weight = shapes[PRODUCTS[op][what]]
    return 2 * math.prod(shapes[0][:-1]) * math.prod(weight)


def attention_flops(op, shapes) -> int:
    """The half that the causal mask hides does not count."""
    b, t, c3 = shapes[1 if op.endswith("backward") else 0]
    return (5 if op.endswith("backward") else 2) * b * t * t * (c3 // 3)


def _short(kernel: str) -> str:
    name = re.sub(r"^void ", "", kernel).replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", name)[0].split("::")[-1][:60]


def cells(found: list[Piece], least_shown=5e-6) -> list[list[str]]:
    shown = [piece for piece in found if piece.seconds >= least_shown]
    rest = [piece for piece in found if piece.seconds < least_shown]
    lines = [[p.op, p.what, p.size, p.kernel, *_sums([p])] for p in shown]
    return [*lines, *([["the rest", "", "", "", *_sums(rest)]] if rest else []), ["all", "", "", "", *_sums(found)]]


def _sums(some: list[Piece]) -> list[str]:
    times = [sum(values) for values in zip(*((p.seconds, p.floor, p.excess) for p in some), strict=True)]
    return [str(sum(p.launches for p in some)), *(f"{1e3 * seconds:.3f}" for seconds in times)]
