"""Models of the two kernels of attention_sm90_backward.cu.

A tile has, for each of its halves, a string with a letter for each block: "x" where the half's queries (keys) see it and
"." where it is hidden, by causality (``masked=False``, and then at most one block at the side where both kernels begin)
or by a mask.
"""

from .checker import Model, Ring, constant, ring_size

FILE = "attention_sm90_backward.cu"


def rings(warps, stages):
    """The barriers and buffers that both kernels have (BackwardBarriers in attention_sm90_backward.cuh)."""
    computing = 2 * warps
    model = Model(tile_full=2, tile_empty=computing, block_full=2, block_empty=computing)
    tiles = ring_size(FILE, "at")
    return (
        model,
        tiles,
        *(
            Ring(name, size)
            for name, size in [
                ("tile_full", tiles),
                ("tile_empty", tiles),
                ("tile", tiles),
                ("block_full", stages),
                ("block_empty", stages),
                ("block", stages),
            ]
        ),
    )


def store_tile(model, p, warpgroup, warp, warps, number):
    """The number-th of all tiles that the warpgroup stores through its buffer."""
    barrier = Ring(("warpgroup", warpgroup))
    model.arrivals[barrier.name] = warps
    out = [Ring(("out", warpgroup, i)) for i in range(warps)]
    if warp == 0 and number > 0:
        p.read(*[rows(number - 1) for rows in out])  # tma_store_wait_read
    p.sync(barrier(2 * number))
    p.write(out[warp](number))
    p.sync(barrier(2 * number + 1))
    if warp == 0:
        p.read(*[rows(number) for rows in out])


def backward(tiles, dkey, masked=True, group=1, stages=None, most_passed=None, warps=1):
    """Both kernels: of dq where ``dkey`` is false. ``group`` query heads share the keys of a tile of dk and dv."""
    stages = stages or ring_size(FILE, "ring")
    most_passed = constant(FILE, "kMostPassed", kStages=stages) if most_passed is None else most_passed
    model, tile_buffers, tile_full, tile_empty, tile_at, block_full, block_empty, block_at = rings(warps, stages)

    loader = model.process("loader")
    at = ring = 0
    for tile in [*tiles, None]:
        loader.wait(tile_empty(at - tile_buffers))
        loader.load(tile_full(at), tile_at(at))
        at += 1
        for _ in range(len(tile[0]) * group if tile else 0):
            loader.wait(block_empty(ring - stages))
            loader.load(block_full(ring), block_at(ring))
            ring += 1

    def compute(p, warpgroup, warp):
        ring = 0
        for at, tile in enumerate(tiles):
            p.wait(tile_full(at))
            p.read(tile_at(at))
            seen = tile[(warpgroup + 1 + at) % 2] * group
            if not dkey:
                p.arrive(tile_empty(at))
            block = passed = 0

            def pass_over():
                nonlocal ring, block
                p.wait(block_full(ring))  # or its buffer may still be the other warpgroup's
                p.arrive(block_empty(ring))
                ring += 1
                block += 1

            def find_own():
                """On to the next block that the warpgroup computes, which it waits for; whether there is one."""
                nonlocal passed
                before, passed = passed, 0
                while block < len(seen):
                    hidden = seen[block] == "."
                    if not hidden or (masked and before + passed == most_passed):
                        p.wait(block_full(ring))
                        return True
                    pass_over()
                    passed += 1
                return False

            more = find_own()
            if more:
                p.read(block_at(ring))  # the first scores
            freed = None
            while more:
                now = ring
                ring += 1
                block += 1
                more = find_own()
                if more:
                    p.read(block_at(ring))  # the scores ahead
                p.read(block_at(now), *[tile_at(at)] if dkey else [])  # dp, and for dk and dv the values
                if freed is not None:
                    p.read(block_at(freed))  # the products of the block before, which are complete now
                    p.arrive(block_empty(freed))
                freed = now
            if freed is not None:
                p.read(block_at(freed))
                p.arrive(block_empty(freed))
            if dkey:
                p.read(tile_at(at))
                p.arrive(tile_empty(at))
            for result in range(1 + dkey):
                store_tile(model, p, warpgroup, warp, warps, at * (1 + dkey) + result)
        p.wait(tile_full(len(tiles)))
        p.read(tile_at(len(tiles)))

    for warpgroup in range(2):
        for warp in range(warps):
            compute(model.process(f"warpgroup {warpgroup}, warp {warp}"), warpgroup, warp)
    return model
