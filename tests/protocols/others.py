"""Models of norm/ring.cuh, and of decoding by generate/whole_model/kernel.cuh."""

import itertools
import re

from .checker import CUDA, Buffers, Model, Ring


def layernorm_ring(rows, stages, prior=None):
    """One thread, which alone reads what it copies. ``prior`` is how many copies a wait leaves in flight."""
    source = (CUDA / "norm/ring.cuh").read_text()
    priors = dict(re.findall(r"stages_ == (\d)\)\s+__pipeline_wait_prior\((\d)\)", source))
    prior = prior or int(priors.get(str(stages)) or re.search(r"else\s+__pipeline_wait_prior\((\d)\)", source)[1])
    model = Model()
    p, copied, row_at = model.process("thread"), Ring("copied"), Ring("row", stages)
    for started in range(rows + stages - 1):
        p.copy(copied(started), *[row_at(started)] if started < rows else [])
        row = started + 1 - stages
        if row >= 0:  # next()
            p.reach(copied(started - prior))
            p.read(row_at(row))
    return model


class DecodeBlock:
    """The barriers and buffers of a block; all blocks of its cluster write to those of ``senders``."""

    def __init__(self, model, cluster, rank, blocks, warps, weights):
        def ring(name, arrivals=1, writes=1):
            made = Ring((name, cluster, rank), writes=writes)
            model.arrivals[made.name] = arrivals
            return made

        self.cluster, self.rank = cluster, rank
        workers = list(itertools.product(range(blocks), range(warps)))
        senders = {name: list(itertools.product(range(blocks))) for name in ("x", "mlp x")}
        senders |= {name: workers for name in ("newest", "blocks", "hidden")}
        self.alive, self.workers_barrier = ring("alive", writes=2), ring("workers", warps)
        self.own_sums = ring("own sums", warps + 1)
        self.softmax_at = [ring(f"warp {warp}'s softmax") for warp in range(warps)]
        self.arrived = {name: ring(f"{name} arrived", 1 + len(of)) for name, of in senders.items()}
        self.at = {name: {sender: ring(f"{name} of {sender}") for sender in of} for name, of in senders.items()}
        self.weights = {name: Buffers(model, (name, cluster, rank), 1, 0) for name in weights}

    def await_weights(self, p, name, layer):
        if self.weights:
            self.weights[name].get(p, layer)

    def await_sent(self, p, name, layer):
        p.wait(self.arrived[name](layer))
        p.read(*[at(layer) for at in self.at[name].values()])


def decode(layers, clusters=1, blocks=2, warps=2, weights=("qkv", "keys", "proj", "fc", "fcproj")):
    """Warp 0 of those that work tells barriers what to expect; the last one orders weights, keys and values."""
    model = Model()
    for cluster in range(clusters):
        met = Ring(("cluster_barrier", cluster))
        model.arrivals[met.name] = blocks * (warps + 1)
        all_blocks = [DecodeBlock(model, cluster, rank, blocks, warps, weights) for rank in range(blocks)]
        for block in all_blocks:
            for warp in range(warps):
                p = model.process(f"cluster {cluster}, block {block.rank}: warp {warp}")
                work(p, block, all_blocks, met, layers, warp, warps)
            p = model.process(f"cluster {cluster}, block {block.rank}: receiving warp")
            receive(
                p, block, all_blocks, met, layers, [*itertools.product(range(clusters), range(warps)), ("residual",)]
            )
    return model


def words(half, rank, *sender):
    """Words in global memory, which are polled: the flag and what they contain."""
    return Ring(("sent", half, rank, *sender))(), Ring(("words", half, rank, *sender))()


def send_words(p, *name):
    sent, at = words(*name)
    p.write(at)
    p.arrive(sent)


def send(p, all_blocks, name, sender, layer):
    """store_in_block() to all blocks of the cluster."""
    for to in all_blocks:
        p.read(to.alive())
        p.copy(to.arrived[name](layer), to.at[name][sender](layer))


def work(p, block, all_blocks, met, layers, warp, warps):
    barriers = itertools.count()

    def expect(layer, *names):
        if warp == 0 and layer < layers:
            p.arrive(*[block.arrived[name](layer) for name in names])

    def order(name, layer):
        if warp == warps - 1 and layer < layers and block.weights:
            p.load(block.weights[name].full(layer), block.weights[name](layer))

    def workers_barrier():
        p.sync(block.workers_barrier(next(barriers)))

    def run_half(half, first, second, to_expect):
        """AttentionHalf::run() and MlpHalf::run(): weights of the first and second product, what is sent."""
        layer = half // 2
        block.await_weights(p, first, layer)
        workers_barrier()
        order(first, layer + 1)
        block.await_sent(p, to_expect[0], layer)
        send(p, all_blocks, to_expect[1], (block.rank, warp), layer)
        if half % 2 == 0:  # attend(), send_softmax()
            block.await_weights(p, "keys", layer)
            block.await_sent(p, "newest", layer)
            p.write(block.softmax_at[warp](layer))
            workers_barrier()
            order("keys", layer + 1)
            p.read(*[at(layer) for at in block.softmax_at])
            send(p, all_blocks, "blocks", (block.rank, warp), layer)
        block.await_weights(p, second, layer)
        block.await_sent(p, to_expect[-1], layer)
        send_words(p, half, block.rank, block.cluster, warp)
        p.arrive(block.own_sums(half))  # signal_sums_sent()
        workers_barrier()
        order(second, layer + 1)
        expect(layer + 1, *to_expect)

    of_attention, of_mlp = ("x", "newest", "blocks"), ("mlp x", "hidden")
    if warp == 0:
        p.write(block.alive())
    expect(0, *of_attention, *of_mlp)
    workers_barrier()  # __syncthreads()
    p.arrive(met(0))
    for name in block.weights:
        order(name, 0)
    p.wait(met(0))
    for layer in range(layers):
        run_half(2 * layer, "qkv", "proj", of_attention)
        run_half(2 * layer + 1, "fc", "fcproj", of_mlp)
    p.sync(met(1))
    if warp == 0:
        p.write(block.alive(0, 1))


def receive(p, block, all_blocks, met, layers, senders):
    """HalfResidual before each half, and after the last one."""
    p.sync(met(0))
    for half in range(2 * layers + 1):
        if half > 0:
            p.sync(block.own_sums(half - 1))  # wait_until_sums_sent()
            for sender in senders:
                sent, at = words(half - 1, block.rank, *sender)
                p.reach(sent)
                p.read(at)
        if half < 2 * layers:
            send(p, all_blocks, "mlp x" if half % 2 else "x", (block.rank,), half // 2)
            if block.cluster == 0:
                send_words(p, half, block.rank, "residual")
    p.sync(met(1))
