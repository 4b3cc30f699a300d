"""Models of gemm/sm90_mainloop.cuh and fp8/sm90_gelu.cu.

The other thread blocks of a cluster may access a thread block's shared memory only after it has initialized its
barriers and before it ends. ``Cluster`` has a buffer for each thread block, whose first write is the initialization and
whose second write is the end. An arrival from another thread block reads this buffer.
"""

from .checker import Buffers, Model, Ring, Staging, add_warps, find_constant, find_ring_size

MATMUL, GELU = "gemm/sm90_mainloop.cuh", "fp8/sm90_gelu.cu"


class Cluster:
    """The barriers, buffers and loading threads of the thread blocks of a cluster, which share the operand b."""

    def __init__(self, model, stages, blocks, threads, arrivals):
        self.model, self.blocks, self.stages = model, range(blocks), stages
        self.alive, self.met = Ring("block", blocks, writes=2), Ring("cluster_barrier")
        self.full, self.empty, self.a_at = (
            [Ring((name, rank), stages) for rank in self.blocks] for name in ("full", "empty", "a")
        )
        self.b_at = [[Ring(("b", rank, part), stages) for part in self.blocks] for rank in self.blocks]
        model.arrivals[self.met.name] = threads
        # A stage is full after the announcement of its loading thread and a copy from each thread block.
        model.arrivals |= {full.name: 1 + blocks for full in self.full}
        model.arrivals |= {empty.name: arrivals for empty in self.empty}

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

    def read(self, p, rank, ring):
        p.read(self.a_at[rank](ring), *(part(ring) for part in self.b_at[rank]))

    def get(self, p, rank, ring):
        p.wait(self.full[rank](ring))
        self.read(p, rank, ring)

    def release(self, p, rank, ring):
        self.read(p, rank, ring)
        for other in self.blocks:
            p.read(self.alive(other))
            p.arrive(self.empty[other](ring))


def matmul(tiles, steps, stages=None, blocks=None, pairs=1, sums=2):
    """Model a matmul in which each thread block computes ``tiles`` tiles, each in ``steps`` stages.

    A tile has ``pairs`` parts. One warp issues the MMAs of a part. Another warp finishes the part's rows and adds up
    their columns in one of ``sums`` buffers.
    """
    stages, blocks = stages or find_ring_size(MATMUL, "ring"), blocks or find_constant(MATMUL, "kCluster")
    cluster = Cluster(Model(), stages, blocks, blocks * (1 + 2 * pairs), blocks * pairs)
    for rank in range(blocks):
        cluster.load(rank, tiles * steps)
        barrier, sums_at = Ring(("warpgroup", rank)), [Ring(("sums", rank, pair), sums) for pair in range(pairs)]
        cluster.model.arrivals[barrier.name] = pairs
        for pair in range(pairs):
            rounded, taken = (Ring((name, rank, pair)) for name in ("rounded", "taken"))
            rows_at = Ring(("rounded rows", rank, pair), writes=2)  # two writes, each of half of the columns

            p = cluster.begin(f"product {pair}", rank)
            ring = 0
            cluster.get(p, rank, ring)
            for tile in range(tiles):
                for _ in range(steps - 1):
                    cluster.release(p, rank, ring)
                    ring += 1
                    cluster.get(p, rank, ring)
                p.wait(taken(tile - 1))
                p.write(rows_at(tile, 0))
                cluster.release(p, rank, ring)
                ring += 1
                if tile < tiles - 1:
                    cluster.get(p, rank, ring)
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
    return cluster.model


def fp8_gelu(tiles, steps, stages=None, warps=1, pieces=1):
    """Model the float8 matmul with GELU, in which pairs of warpgroups compute tiles in turns.

    A pair is ``warps`` processes, which together transpose ``pieces`` pieces of each tile.
    """
    pairs = find_constant(GELU, "kPairs")
    model = Model(all=pairs * warps, turn=warps)
    a_at, b_at = Buffers(model, "a", stages or find_ring_size(GELU, "ring"), warps), Buffers(model, "weights", 1, 0)
    turn, everybody = [Ring(("turn", pair)) for pair in range(pairs)], Ring("all")
    model.arrivals |= {of.name: warps for of in turn}
    largest = [Ring(("largest", i)) for i in range(pairs * warps)]

    loader = model.process("loader")
    loader.load(b_at.full(), b_at())
    for _ in range(tiles * steps):
        a_at.fill(loader)

    def compute(p, pair, warp):
        position = pair * steps
        p.wait(b_at.full())
        for own in range(len(range(pair, tiles, pairs))):
            p.wait(turn[pair](own - 1 + pair))  # the first pair begins without waiting
            for step in range(steps):
                a_at.get(p, position)
                p.read(b_at())
                if step > 0:
                    a_at.free(p, position - 1)
                position += 1
            p.arrive(turn[1 - pair](own))
            a_at.free(p, position - 1)
            position += steps  # skip the other pair's stages
            for _ in range(pieces):
                transposed[pair].store(p, warp)
        p.write(largest[pair * warps + warp]())
        p.sync(everybody())
        if pair == warp == 0:
            p.read(*[of() for of in largest])

    transposed = [Staging(model, ("transposed", pair), warps, all_read=True) for pair in range(pairs)]
    return add_warps(model, pairs, warps, compute)
