"""Models of matmul_sm90.cuh, matmul_sm90_weight.cu and fp8_gelu_sm90.cu.

In a cluster, version 0 of a block's memory is that its barriers are initialised and version 1 that it has ended; nobody
may send to it before the one or after the other.
"""

from .checker import Model, Ring, constant, ring_size

MATMUL, WEIGHT, GELU = "matmul_sm90.cuh", "matmul_sm90_weight.cu", "fp8_gelu_sm90.cu"


class Cluster:
    """The barriers, buffers and loading threads of the blocks that share an operand."""

    def __init__(self, model, stages, blocks, threads):
        self.model, self.blocks, self.stages = model, range(blocks), stages
        self.alive, self.met = Ring("block", blocks, writes=2), Ring("cluster_barrier")
        model.arrivals[self.met.name] = threads
        self.full, self.empty, self.a_at = (
            [Ring((name, rank), stages) for rank in self.blocks] for name in ("full", "empty", "a")
        )
        self.b_at = [[Ring(("b", rank, part), stages) for part in self.blocks] for rank in self.blocks]
        for full in self.full:
            model.arrivals[full.name] = 1 + blocks  # the loading thread, and the bytes of each

    def begin(self, name, rank, initialises=False):
        p = self.model.process(f"block {rank}'s {name}")
        if initialises:
            p.write(self.alive(rank))
        p.sync(self.met(0))
        return p

    def end(self, p, rank):
        p.sync(self.met(1))
        if "loader" in p.name:
            p.write(self.alive(rank, 1))

    def load(self, rank, steps):
        p = self.begin("loader", rank, initialises=True)
        for ring in range(steps):
            p.wait(self.empty[rank](ring - self.stages))
            p.arrive(self.full[rank](ring))
            for other in self.blocks:
                own = [self.a_at[rank](ring)] if other == rank else []
                p.copy(self.full[other](ring), *own, self.b_at[other][rank](ring))
        self.end(p, rank)

    def operands(self, rank, ring):
        return self.a_at[rank](ring), *(part(ring) for part in self.b_at[rank])

    def release(self, p, ring):
        """Says to the loading threads of all blocks that a stage was read."""
        for rank in self.blocks:
            p.read(self.alive(rank))
            p.arrive(self.empty[rank](ring))


def matmul(tiles, steps, stages=None, blocks=None, pairs=1, sums=2):
    """``sums`` is the number of buffers for column sums; ``pairs`` warps add theirs together."""
    stages, blocks = stages or ring_size(MATMUL, "ring"), blocks or constant(MATMUL, "kCluster")
    model = Model(column_sums=pairs)
    cluster = Cluster(model, stages, blocks, blocks * (1 + 2 * pairs))
    for rank in range(blocks):
        model.arrivals[cluster.empty[rank].name] = blocks * pairs
        cluster.load(rank, tiles * steps)
        barrier, sums_at = Ring(("warpgroup", rank)), [Ring(("sums", rank, pair), sums) for pair in range(pairs)]
        model.arrivals[barrier.name] = pairs
        for pair in range(pairs):
            rounded, taken = (Ring((name, rank, pair)) for name in ("rounded", "taken"))
            rows_at = Ring(("rounded rows", rank, pair), writes=2)  # half of the columns, then the other

            p = cluster.begin(f"product {pair}", rank)
            ring = 0
            p.wait(cluster.full[rank](ring))
            p.read(*cluster.operands(rank, ring))
            for tile in range(tiles):
                for _ in range(steps - 1):
                    p.read(*cluster.operands(rank, ring))
                    cluster.release(p, ring)
                    ring += 1
                    p.wait(cluster.full[rank](ring))
                    p.read(*cluster.operands(rank, ring))
                p.wait(taken(tile - 1))
                p.write(rows_at(tile, 0))
                p.read(*cluster.operands(rank, ring))
                cluster.release(p, ring)
                ring += 1
                if tile < tiles - 1:
                    p.wait(cluster.full[rank](ring))
                    p.read(*cluster.operands(rank, ring))
                p.write(rows_at(tile, 1))
                p.arrive(rounded(tile))
            cluster.end(p, rank)

            p = cluster.begin(f"finish {pair}", rank)
            for tile in range(tiles):
                p.wait(rounded(tile))
                p.read(rows_at(tile, 1))
                p.arrive(taken(tile))
                p.write(sums_at[pair](tile))
                p.sync(barrier(tile))
                p.read(*[own(tile) for own in sums_at])
            cluster.end(p, rank)
    return model


def matmul_weight(segments, stages=None):
    """Of each segment its number of steps."""
    stages, blocks = stages or ring_size(WEIGHT, "ring"), constant(WEIGHT, "kCluster")
    model = Model()
    cluster = Cluster(model, stages, blocks, blocks * 3)
    for rank in range(blocks):
        model.arrivals[cluster.empty[rank].name] = blocks + 1  # kArrivals, with a warp each
        cluster.load(rank, sum(segments))

        p = cluster.begin("sums", rank)
        for ring in range(sum(segments)):
            p.wait(cluster.full[rank](ring))
            p.read(cluster.a_at[rank](ring))
            p.arrive(cluster.empty[rank](ring))
        cluster.end(p, rank)

        p = cluster.begin("product", rank)
        ring = 0
        for steps in segments:
            for step in range(steps):
                p.wait(cluster.full[rank](ring))
                p.read(*cluster.operands(rank, ring))
                if step > 0:
                    p.read(*cluster.operands(rank, ring - 1))
                    cluster.release(p, ring - 1)
                ring += 1
            p.read(*cluster.operands(rank, ring - 1))
            cluster.release(p, ring - 1)
        cluster.end(p, rank)
    return model


def fp8_gelu(tiles, steps, stages=None, warps=1, pieces=1):
    """``warps`` of one warpgroup in each pair, which transpose pieces together."""
    stages, pairs = stages or ring_size(GELU, "ring"), constant(GELU, "kPairs")
    model = Model(full=2, empty=warps, weights=2, turn=warps, all=pairs * warps)
    full, empty, a_at = (Ring(name, stages) for name in ("full", "empty", "a"))
    weights, b_at, everybody = Ring("weights"), Ring("b"), Ring("all")
    turn = [Ring(("turn", pair)) for pair in range(pairs)]
    largest = [[Ring(("largest", pair, warp)) for warp in range(warps)] for pair in range(pairs)]

    loader = model.process("loader")
    loader.load(weights(), b_at())
    for ring in range(tiles * steps):
        loader.wait(empty(ring - stages))
        loader.load(full(ring), a_at(ring))

    def compute(p, pair, warp):
        position, syncs = pair * steps, 0
        barrier, transposed = Ring(("warpgroup", pair)), [Ring(("transposed", pair, i)) for i in range(warps)]
        model.arrivals |= {barrier.name: warps, turn[pair].name: warps}
        p.wait(weights())
        for own, _ in enumerate(range(pair, tiles, pairs)):
            p.wait(turn[pair](own - 1 + pair))
            for step in range(steps):
                p.wait(full(position))
                p.read(a_at(position), b_at())
                if step > 0:
                    p.read(a_at(position - 1))
                    p.arrive(empty(position - 1))
                position += 1
            p.arrive(turn[1 - pair](own))
            p.read(a_at(position - 1))
            p.arrive(empty(position - 1))
            position += steps  # the other pair's
            for _ in range(pieces):
                p.sync(barrier(2 * syncs))
                p.write(transposed[warp](syncs))
                p.sync(barrier(2 * syncs + 1))
                p.read(*[rows(syncs) for rows in transposed])
                syncs += 1
        p.write(largest[pair][warp]())
        p.sync(everybody())
        if pair == warp == 0:
            p.read(*[of() for both in largest for of in both])

    for pair in range(pairs):
        for warp in range(warps):
            compute(model.process(f"pair {pair}, warp {warp}"), pair, warp)
    return model
