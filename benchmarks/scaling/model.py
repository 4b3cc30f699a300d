"""A model of a training step's time and memory on many GPUs: flops, bytes of memory, and bytes over links.

``python -m benchmarks.scaling --model`` compares it with the measured steps, and searches layouts for larger machines.

The time of a step is the sum of its parts, each of which is its flops or bytes divided by a rate, plus the fixed times
of its kernels and collectives. Exchanges run at the same time as matmuls, but delay them by about as long as the
exchanges take alone, so the model hides none of them.
"""

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Shape:
    """A decoder. ``gated`` MLPs have three matrices (Llama), others two (GPT-2)."""

    name: str
    layers: int
    channels: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    gated: bool = False
    tied: bool = True

    @property
    def layer_weights(self) -> int:
        C, kv = self.channels, self.channels * self.kv_heads // self.heads
        return C * (2 * C + 2 * kv) + (3 if self.gated else 2) * C * self.hidden

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.channels

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_weights + self.head_weights * (1 if self.tied else 2)


@dataclass(frozen=True)
class Machine:
    """Rates in flops and bytes per second; ``links`` and ``network`` are those of one GPU in one direction.

    ``matmul`` and ``attention`` were fitted to the steps of one GPU with 16 x 1024 and 1 x 131072 tokens. ``launch``
    and ``copy`` are those of copies of 13 MB to 4 GB, ``permuting_copy`` and ``converting_add`` those of 400 MiB, and
    ``links`` and ``latency`` those of collectives alone.
    """

    name: str = "H200"
    matmul: float = 700e12  # of matmuls in a step, at the power limit; a single large one has 790e12
    matmul_fp8: float = 1240e12  # 1.77 times as many: the ratio in the profiled steps of docs/step.md
    matmul_channels: float = 100.0  # the inner dimension for which a matmul has half of its rate
    tile: tuple[int, int] = (128, 192)  # of a matmul's output, which an SM computes
    multiprocessors: int = 132
    attention: float = 480e12  # forward and backward of long causal sequences, their flops halved
    attention_length: float = 300.0  # the length for which attention has half of this rate
    copy: float = 4267e9  # bytes read and written
    permuting_copy: float = 980e9  # of torch's kernels that permute dimensions
    converting_add: float = 2340e9  # of torch's additions of bfloat16 to float32
    launch: float = 2.5e-6  # of a kernel, until it has its full rate and after its last bytes
    links: float = 270e9  # received by a GPU in a collective between GPUs of a node
    network: float = 45e9  # between nodes, 400 Gbit/s per GPU
    gpus_per_node: int = 8
    latency: float = 26e-6  # of a collective
    memory: float = 141e9


@dataclass(frozen=True)
class Layout:
    """Processes that divide the batch, the layers and the sequences, and what data-parallel processes shard."""

    dp: int = 1
    tp: int = 1
    cp: int = 1
    shard: str = "none"
    recompute: bool = False
    in_order: bool = False  # --deterministic-layout
    fp8: bool = False  # all matmuls, also those of the LM head

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.cp


class Estimate(NamedTuple):
    """Seconds of a step's parts, and bytes of memory of a GPU."""

    matmuls: float
    attention: float
    memory_bound: float
    update: float
    tensor_exchange: float
    context_exchange: float
    data_exchange: float
    bytes: float

    @property
    def seconds(self) -> float:
        return sum(self[:-1])


NORM_BYTES = 32  # per row, layer and channel: two additions with their norms, forward and backward
FP8_BYTES = 32  # per row, layer and channel: quantisation of the matmuls' operands and their transposes
FP8_LOGIT_BYTES = 5  # per logit: bfloat16 logits are read, float8 gradients written, read and transposed
LAYER_KERNELS = 8  # besides matmuls: norms, attention, column sums, of the forward and the backward
FP8_KERNELS = 18  # of a layer: the quantisations' passes (742 launches of a step instead of 524)
CONTEXT_KERNELS = 25  # of a layer: copies, additions, and attention once more
UPDATE_BYTES = 30  # per parameter: gradient norm, bfloat16 gradient and parameter, float32 master and moments
STATE_BYTES = 16  # per parameter: bfloat16 parameter and gradient, float32 master and moments
ACTIVATION_BYTES = 34  # per row, layer and channel that a layer keeps for its backward


def estimate(shape: Shape, layout: Layout, batch: int, length: int, machine: Machine) -> Estimate:
    """Estimate a step with ``batch`` sequences of ``length`` tokens for each data-parallel process."""
    C, L, tp, cp = shape.channels, shape.layers, layout.tp, layout.cp
    rows = batch * length / cp  # of a tensor-parallel group
    forwards = 2 if layout.recompute else 1
    matmuls = _matmuls(shape, layout, rows, machine)
    attention_rate = machine.attention * length / (length + machine.attention_length)
    attention_flops = (2 * forwards + 5) * rows * length * C * L * _share_of_heads(shape, tp)
    bytes_of_rows = (NORM_BYTES / 2 * (1 + forwards) + FP8_BYTES * layout.fp8) * rows * L * C / tp
    bytes_of_logits = FP8_LOGIT_BYTES * layout.fp8 * rows * shape.vocabulary / tp
    kernels = L * (LAYER_KERNELS / 2 * (1 + forwards) + FP8_KERNELS * layout.fp8 + CONTEXT_KERNELS * (cp > 1))
    memory_bound = (bytes_of_rows + bytes_of_logits) / machine.copy + kernels * machine.launch
    if cp > 1:
        memory_bound += _context_copies(shape, layout, rows, machine)
    own = shape.parameters / tp
    held = own if layout.shard == "none" else own / layout.dp / cp
    update = held * UPDATE_BYTES / machine.copy

    tensor = _tensor_exchange(shape, layout, rows, machine)
    context = _context_exchange(shape, layout, rows, machine)
    data = _data_exchange(shape, layout, machine)

    optimizer = STATE_BYTES - 2 - 2
    replicas = layout.dp * cp
    state = {
        "none": STATE_BYTES * own,
        "grads": (2 + (2 + optimizer) / replicas) * own,
        "params": STATE_BYTES * own / replicas,
    }[layout.shard]
    kept = 4 * rows * C * L / tp if layout.recompute else ACTIVATION_BYTES * rows * C * L / tp
    logits = min(rows, 2**28 / (shape.vocabulary / tp)) * shape.vocabulary / tp * 2 * 2
    gathered = 4 * shape.layer_weights / tp * (layout.shard == "params")
    gathered += 9 * rows * cp * _key_channels(shape, tp) * (cp > 1)
    attention = attention_flops / attention_rate
    return Estimate(matmuls, attention, memory_bound, update, tensor, context, data, state + kept + logits + gathered)


def _share_of_heads(shape: Shape, tp: int) -> float:
    """Return the largest share of the heads that a process has."""
    return math.ceil(shape.heads / tp) / shape.heads


def _key_channels(shape: Shape, tp: int) -> float:
    """Return the channels of a process's keys and values together."""
    return 2 * shape.channels * shape.kv_heads / shape.heads * _share_of_heads(shape, tp)


def _matmuls(shape: Shape, layout: Layout, rows: float, machine: Machine) -> float:
    C, V, hidden = shape.channels, shape.vocabulary / layout.tp, shape.hidden / layout.tp
    queries = C * _share_of_heads(shape, layout.tp)
    inputs_and_outputs = [
        (C, queries + _key_channels(shape, layout.tp)), (queries, C), (C, (1 + shape.gated) * hidden), (hidden, C)
    ]  # fmt: skip
    peak = machine.matmul_fp8 if layout.fp8 else machine.matmul

    def time(m: float, n: float, k: float, is_split: bool = False) -> float:
        """Multiply (m, k) by (k, n). The last wave of tiles is half empty, unless SMs split the sum over k."""
        padded = math.ceil(m / machine.tile[0]) * machine.tile[0] * math.ceil(n / machine.tile[1]) * machine.tile[1]
        half_a_wave = 0 if is_split else machine.multiprocessors / 2 * math.prod(machine.tile)
        rate = peak * k / (k + machine.matmul_channels)
        return 2 * (padded + half_a_wave) * k / rate + machine.launch

    def with_gradients(m: float, k: float, n: float, forwards: int = 1) -> float:
        return forwards * time(m, n, k) + time(m, k, n) + time(n, k, m, is_split=True)

    layer = sum(with_gradients(rows, *sizes, 1 + layout.recompute) for sizes in inputs_and_outputs)
    chunks = math.ceil(rows * V / 2**28)
    return shape.layers * layer + chunks * with_gradients(rows / chunks, C, V)


def _context_copies(shape: Shape, layout: Layout, rows: float, machine: Machine) -> float:
    """Time of the copies of gptkernels.parallel.context: passes over this process's keys and values, in bfloat16."""
    R, keys = layout.cp, rows * _key_channels(shape, layout.tp) * 2
    queries = rows * shape.channels * _share_of_heads(shape, layout.tp) * 2
    packed, ordered = 2 * keys, 2 * R * keys
    forward = packed / machine.permuting_copy + (ordered + 2 * queries) / machine.copy
    # The float32 sums are cleared, and copied in the order of ranks; head and tail are added to them; this process's
    # part becomes bfloat16. (2R + 1) / (2R) of the keys are seen by head and tail together.
    sums = (2 * R + 4 * R + 3) * keys
    added = (2 + 1 + 2) * R * keys * (2 * R + 1) / (2 * R)
    unpacked = 2 * 2 * (queries + keys)  # stacked, and copied in the layout of the packed queries, keys and values
    backward = (packed + unpacked) / machine.permuting_copy + added / machine.converting_add
    backward += (ordered + sums + 2 * queries) / machine.copy
    return shape.layers * (forward * (1 + layout.recompute) + backward)


def _exchange(received: float, collectives: float, processes: int, stride: int, machine: Machine) -> float:
    """Time collectives among processes whose ranks are ``stride`` apart, of which each receives some bytes in all.

    Rings pass through all GPUs of a node, and enter and leave it by the network links of these GPUs in turn.
    """
    nodes = processes * stride / machine.gpus_per_node
    if nodes <= 1:
        return received / machine.links + collectives * machine.latency
    rate = min(machine.links, max(1, machine.gpus_per_node // stride) * machine.network)
    return received / rate + collectives * machine.latency * (1 + math.log2(nodes))


def _tensor_exchange(shape: Shape, layout: Layout, rows: float, machine: Machine) -> float:
    """4 collectives of a layer's forward and 6 of its backward, of rows * C elements, and a small one.

    The embedding has 2 and the LM head 3.
    """
    if layout.tp == 1:
        return 0.0
    large = (10 + 4 * layout.recompute) * shape.layers + 5
    part = rows * shape.channels * 2 * (layout.tp - 1) / layout.tp
    return _exchange(large * part, large + shape.layers, layout.tp, 1, machine)


def _context_exchange(shape: Shape, layout: Layout, rows: float, machine: Machine) -> float:
    """Keys and values are gathered twice; their float32 gradients are reduced and scattered."""
    if layout.cp == 1:
        return 0.0
    received = rows * (layout.cp - 1) * _key_channels(shape, layout.tp) * (2 + 2 + 4 + 2 * layout.recompute)
    collectives = shape.layers * (3 + layout.recompute)
    return _exchange(shape.layers * received, collectives, layout.cp, layout.tp, machine)


def _data_exchange(shape: Shape, layout: Layout, machine: Machine) -> float:
    """An all-reduce of bfloat16 gradients, or their reduce-scatter and the gathers of the parameters."""
    replicas, own = layout.dp * layout.cp, 2 * shape.parameters / layout.tp
    if replicas == 1:
        return 0.0
    passes = {"none": 2, "grads": 2, "params": 3}[layout.shard]
    if layout.shard == "none":
        collectives = 1 + layout.in_order
        # In order, a copy is padded, the parts are added and divided, and the result is copied twice.
        copied = (2 + 3 * (replicas - 1) / replicas + 3 * 2) * own * layout.in_order
    else:
        collectives = passes * (shape.layers + 1)
        # FSDP2 copies gradients into the order of the ranks before the exchange, and gathered parameters after it.
        copied = passes * 2 * own
    received = passes * own * (replicas - 1) / replicas
    return _exchange(received, collectives, replicas, layout.tp, machine) + copied / machine.copy


def best(shape: Shape, gpus: int, sequences: int, length: int, machine: Machine) -> tuple[Layout, Estimate] | None:
    """Find the fastest layout whose memory fits, for ``sequences`` sequences in a step of all GPUs."""
    found = []
    powers = [2**i for i in range(int(math.log2(gpus)) + 1)]
    for tp, cp, shard, recompute in itertools.product(powers, powers, ("none", "grads", "params"), (False, True)):
        dp = gpus // (tp * cp)
        if tp * cp > gpus or tp > min(machine.gpus_per_node, shape.kv_heads) or sequences % dp:
            continue
        if cp > 1 and length // (2 * cp) < 1024:
            continue
        if tp > 1 and dp * cp > 1 and shard == "none":  # the trainer has DTensors of tensor parallelism only with FSDP2
            continue
        layout = Layout(dp, tp, cp, shard, recompute)
        found.append((layout, estimate(shape, layout, sequences // dp, length, machine)))
    fitting = [pair for pair in found if pair[1].bytes < 0.9 * machine.memory]
    return min(fitting, key=lambda pair: pair[1].seconds, default=None)


GPT2_124M = Shape("GPT-2 124M", 12, 768, 12, 12, 3072, 50304)
GPT2_XL = Shape("GPT-2 1.6B", 48, 1600, 25, 25, 6400, 50304)
LLAMA_8B = Shape("Llama 3 8B", 32, 4096, 32, 8, 14336, 128256, gated=True, tied=False)
LLAMA_70B = Shape("Llama 3 70B", 80, 8192, 64, 8, 28672, 128256, gated=True, tied=False)
SHAPES = (GPT2_124M, GPT2_XL, LLAMA_8B, LLAMA_70B)
SIZES = (8, 64, 512, 4096)
