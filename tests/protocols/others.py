"""Models of layernorm_ring.cuh, of team_sums (common/teams.cuh), and of decoding by decode_halves.cuh."""

import itertools
import re

from .checker import CUDA, Model, Ring


def layernorm_ring(rows, stages, prior=None):
    """One thread: nobody else reads what it copies. ``prior`` is how many copies may still be in flight after a wait."""
    if prior is None:
        source = (CUDA / "layernorm_ring.cuh").read_text()
        waits = {int(n): int(m) for n, m in re.findall(r"stages_ == (\d)\)\s+__pipeline_wait_prior\((\d)\)", source)}
        prior = waits.get(stages, int(re.search(r"else\s+__pipeline_wait_prior\((\d)\)", source)[1]))
    model = Model()
    p, copied, row_at, started = model.process("thread"), Ring("copied"), Ring("row", stages), 0

    def copy():
        nonlocal started
        p.copy(copied(started), *[row_at(started)] if started < rows else [])
        started += 1

    for _ in range(stages - 1):
        copy()
    for row in range(rows):
        copy()
        p.reach(copied(started - 1 - prior))
        p.read(row_at(row))
    return model


def team_sums(calls, warps, slots=2):
    model = Model(barrier=warps)
    barrier, sums = Ring("barrier"), [Ring(("sums", warp), slots) for warp in range(warps)]
    for warp in range(warps):
        p = model.process(f"warp {warp}")
        for call in range(calls):
            p.write(sums[warp](call))
            p.sync(barrier(call))
            p.read(*[own(call) for own in sums])
    return model


class DecodeBlock:
    """A block's barriers and buffers; ``sent`` are those that all blocks of the cluster write."""

    def __init__(self, model, cluster, rank, blocks, warps, weights):
        self.model, self.cluster, self.rank = model, cluster, rank
        self.senders = {"x": [(other,) for other in range(blocks)]}
        self.senders |= {"mlp x": self.senders["x"]}
        for name in ("newest", "blocks", "hidden"):
            self.senders[name] = [(other, warp) for other in range(blocks) for warp in range(warps)]
        self.alive = self.ring("alive", writes=2)
        self.workers_barrier, self.own_sums = self.ring("workers", warps), self.ring("own sums", warps + 1)
        self.warps_at = [self.ring(f"warp {warp}'s softmax") for warp in range(warps)]
        self.arrived = {name: self.ring(f"{name}_arrived", 1 + len(of)) for name, of in self.senders.items()}
        self.sent = {name: {s: self.ring((name, *s)) for s in of} for name, of in self.senders.items()}
        ordered = ("qkv", "keys", "proj", "fc", "fcproj") if weights else ()
        self.ordered = {name: (self.ring(f"{name}_arrived", 2), self.ring(name)) for name in ordered}

    def ring(self, name, arrivals=1, writes=1):
        ring = Ring((name, self.cluster, self.rank), writes=writes)
        self.model.arrivals[ring.name] = arrivals
        return ring

    def process(self, name):
        return self.model.process(f"cluster {self.cluster}, block {self.rank}: {name}")

    def order(self, p, name, layer):
        p.load(*(ring(layer) for ring in self.ordered[name]))

    def await_order(self, p, name, layer):
        if self.ordered:
            arrived, at = self.ordered[name]
            p.wait(arrived(layer))
            p.read(at(layer))

    def await_sent(self, p, name, layer):
        p.wait(self.arrived[name](layer))
        p.read(*[at(layer) for at in self.sent[name].values()])


def decode(layers, clusters=1, blocks=2, warps=2, weights=True):
    """Warp 0 of those that work tells barriers what to expect, and the last one orders weights, keys and values."""
    model = Model()
    of_cluster = [
        [DecodeBlock(model, cluster, rank, blocks, warps, weights) for rank in range(blocks)]
        for cluster in range(clusters)
    ]
    for cluster, all_blocks in enumerate(of_cluster):
        met = Ring(("cluster_barrier", cluster))
        model.arrivals[met.name] = blocks * (warps + 1)
        for block in all_blocks:
            work_and_receive(model, block, all_blocks, met, layers, clusters, warps)
    return model


def work_and_receive(model, block, all_blocks, met, layers, clusters, warps):
    def words(half, *sender):
        """Words in global memory, which whoever receives them polls: the flag and what they contain."""
        return Ring(("sent", half, block.rank, *sender))(), Ring(("words", half, block.rank, *sender))()

    def send_words(p, half, *sender):
        sent, at = words(half, *sender)
        p.write(at)
        p.arrive(sent)

    def send(p, name, sender, layer):
        """store_in_block() to all blocks of the cluster."""
        for to in all_blocks:
            p.read(to.alive())
            p.copy(to.arrived[name](layer), to.sent[name][sender](layer))

    def end(p, last):
        p.sync(met(1))
        if last:
            p.write(block.alive(0, 1))

    for warp in range(warps):
        p, synced = block.process(f"warp {warp}"), 0
        last_warp = warp == warps - 1

        def expect(names, layer, p=p, warp=warp):
            if warp == 0 and layer < layers:
                p.arrive(*[block.arrived[name](layer) for name in names])

        def order(name, layer, p=p, last_warp=last_warp):
            if last_warp and layer < layers and block.ordered:
                block.order(p, name, layer)

        def workers_barrier(p=p):
            nonlocal synced
            p.sync(block.workers_barrier(synced))
            synced += 1

        if warp == 0:
            p.write(block.alive())
        expect(["x", "newest", "blocks"], 0)
        expect(["mlp x", "hidden"], 0)
        workers_barrier()  # __syncthreads(), before anything is ordered
        p.arrive(met(0))
        for name in block.ordered:
            order(name, 0)
        p.wait(met(0))
        for layer in range(layers):
            block.await_order(p, "qkv", layer)  # AttentionHalf::run()
            workers_barrier()
            order("qkv", layer + 1)
            block.await_sent(p, "x", layer)
            send(p, "newest", (block.rank, warp), layer)
            block.await_order(p, "keys", layer)
            block.await_sent(p, "newest", layer)
            p.write(block.warps_at[warp](layer))
            workers_barrier()
            order("keys", layer + 1)
            p.read(*[at(layer) for at in block.warps_at])
            send(p, "blocks", (block.rank, warp), layer)
            block.await_order(p, "proj", layer)
            block.await_sent(p, "blocks", layer)
            send_words(p, 2 * layer, block.cluster, warp)
            p.arrive(block.own_sums(2 * layer))
            workers_barrier()
            order("proj", layer + 1)
            expect(["x", "newest", "blocks"], layer + 1)

            block.await_order(p, "fc", layer)  # MlpHalf::run()
            workers_barrier()
            order("fc", layer + 1)
            block.await_sent(p, "mlp x", layer)
            send(p, "hidden", (block.rank, warp), layer)
            block.await_order(p, "fcproj", layer)
            block.await_sent(p, "hidden", layer)
            send_words(p, 2 * layer + 1, block.cluster, warp)
            p.arrive(block.own_sums(2 * layer + 1))
            workers_barrier()
            order("fcproj", layer + 1)
            expect(["mlp x", "hidden"], layer + 1)
        end(p, warp == 0)

    p = block.process("receiving warp")
    p.sync(met(0))
    for half in range(2 * layers + 1):
        if half > 0:
            p.sync(block.own_sums(half - 1))
            for sender in [*itertools.product(range(clusters), range(warps)), ("residual",)]:
                sent, at = words(half - 1, *sender)
                p.reach(sent)
                p.read(at)
        if half < 2 * layers:
            send(p, "mlp x" if half % 2 else "x", (block.rank,), half // 2)
            if block.cluster == 0:
                send_words(p, half, "residual")
    end(p, False)
