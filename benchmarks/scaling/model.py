"""A model of a training step's time and memory on many GPUs: flops, bytes of memory, and bytes over links.

``python -m benchmarks.scaling --model`` compares it with the measured steps, and searches layouts for larger machines.

The time of a step is the sum of its parts, each of which is its flops or bytes divided by a rate. The rates were
measured on H200s. Exchanges of gradients and parameters run at the same time as matmuls, but delay them by about as
long as the exchanges take alone, so the model hides none of them.
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
    """Rates in flops and bytes per second; ``links`` and ``network`` are those of one GPU in one direction."""

    name: str = "H200"
    matmul: float = 790e12  # of a large matrix product
    matmul_channels: float = 100.0  # the inner dimension for which a product has half of this rate
    matmul_rows: float = 1870.0  # the number of rows for which it has half of this rate
    attention: float = 480e12  # forward and backward of long causal sequences, their flops halved
    attention_length: float = 600.0  # the length for which attention has half of this rate
    copy: float = 4267e9  # bytes read and written
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


ELEMENTWISE_BYTES = 56  # per row, layer and channel: norms, additions, GELU's input and output, of all passes
UPDATE_BYTES = 30  # per parameter: gradient norm, bfloat16 gradient and parameter, float32 master and moments
STATE_BYTES = 16  # per parameter: bfloat16 parameter and gradient, float32 master and moments
ACTIVATION_BYTES = 34  # per row, layer and channel that a layer keeps for its backward


def estimate(shape: Shape, layout: Layout, batch: int, length: int, machine: Machine) -> Estimate:
    """Estimate a step with ``batch`` sequences of ``length`` tokens for each data-parallel process."""
    C, L, tp, cp = shape.channels, shape.layers, layout.tp, layout.cp
    rows = batch * length / cp  # of a tensor-parallel group
    recomputed = 4 / 3 if layout.recompute else 1.0
    rate = machine.matmul * C / (C + machine.matmul_channels) * rows / (rows + machine.matmul_rows)
    layer_flops = 6 * rows * L * shape.layer_weights / tp * recomputed
    matmuls = (layer_flops + 6 * rows * shape.head_weights / tp) / rate
    attention_rate = machine.attention * length / (length + machine.attention_length)
    attention = (9.0 if layout.recompute else 7.0) * rows * length * C * L / tp / attention_rate
    memory_bound = rows * L * C * ELEMENTWISE_BYTES * recomputed / tp / machine.copy
    own = shape.parameters / tp
    held = own / layout.dp / cp if layout.shard == "params" else own
    update = held * UPDATE_BYTES / machine.copy

    tensor = _tensor_exchange(shape, layout, rows, machine)
    context = _context_exchange(shape, layout, rows, machine)
    data = _data_exchange(own, layout, machine)

    optimizer = STATE_BYTES - 2 - 2
    replicas = layout.dp * cp
    state = {
        "none": STATE_BYTES * own,
        "grads": (2 + (2 + optimizer) / replicas) * own,
        "params": STATE_BYTES * own / replicas,
    }[layout.shard]
    kept = 2 * rows * C * L / tp if layout.recompute else ACTIVATION_BYTES * rows * C * L / tp
    logits = min(rows, 2**28 / (shape.vocabulary / tp)) * shape.vocabulary / tp * 2 * 2
    gathered = 4 * shape.layer_weights / tp * (layout.shard == "params")
    return Estimate(matmuls, attention, memory_bound, update, tensor, context, data, state + kept + logits + gathered)


def _rate(machine: Machine, processes: int, stride: int) -> float:
    """Return the rate of a ring over processes whose ranks are ``stride`` apart."""
    return machine.links if processes * stride <= machine.gpus_per_node else machine.network


def _tensor_exchange(shape: Shape, layout: Layout, rows: float, machine: Machine) -> float:
    """4 collectives of a layer's forward and 6 of its backward, of rows * C elements; two run under matmuls."""
    if layout.tp == 1:
        return 0.0
    collectives = (10 + (4 if layout.recompute else 0)) * shape.layers - 2 * shape.layers
    part = rows * shape.channels * 2 * (layout.tp - 1) / layout.tp
    return collectives * (part / _rate(machine, layout.tp, 1) + machine.latency)


def _context_exchange(shape: Shape, layout: Layout, rows: float, machine: Machine) -> float:
    """Keys and values are gathered twice; their float32 gradients are reduced and scattered."""
    if layout.cp == 1:
        return 0.0
    width = 2 * shape.channels * shape.kv_heads / shape.heads / layout.tp
    received = rows * (layout.cp - 1) * width * (2 + 2 + 4)
    gathers = 4 if layout.recompute else 3
    rate = _rate(machine, layout.cp, layout.tp)
    return shape.layers * (received * (5 / 4 if layout.recompute else 1) / rate + gathers * machine.latency)


def _data_exchange(parameters: float, layout: Layout, machine: Machine) -> float:
    """An all-reduce of bfloat16 gradients, or their reduce-scatter and the gathers of the parameters."""
    replicas = layout.dp * layout.cp
    if replicas == 1:
        return 0.0
    passes = {"none": 2, "grads": 2, "params": 3}[layout.shard]
    part = parameters * 2 * (replicas - 1) / replicas
    return passes * part / _rate(machine, replicas, layout.tp)


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
