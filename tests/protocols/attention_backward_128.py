"""Models of the two kernels of attention/sm90/backward_128.cu.

The kernel of dq has tiles of queries and blocks of keys, the kernel of dk and dv has tiles of keys and blocks of
queries. A tile is (blocks, passed): its number of blocks, and for each of its two halves the number of blocks (0 or 1)
that the half's warpgroup skips at the beginning.
"""

from .checker import Buffers, Model, Ring, add_warps, find_constant, find_ring_size

FILE = "attention/sm90/backward_128.cu"


def dquery_128(tiles, keys=None, values=None, warps=1):
    douts, ahead, end = find_ring_size(FILE, "dout"), find_constant(FILE, "kAhead"), len(tiles)
    model = Model(dquery_full=2 * warps)
    next_tile = Buffers(model, "tile", 1, 2 * warps + 1)  # a tile's buffer includes its query and out
    loaded_tile, tile_taken, tile_wanted = map(Ring, ("loaded tile", "tile_taken", "tile_wanted"))
    dout_empty, dquery_full = Ring("dout_empty", douts), Ring("dquery_full", douts)
    dout_at = [[Ring(("dout", i, j), douts, writes=2) for j in range(warps)] for i in range(2)]  # each warp's rows
    all_douts = [rows for half in dout_at for rows in half]
    key_at = Buffers(model, "key", keys or find_ring_size(FILE, "key"), 2 * warps)
    value_at = Buffers(model, "value", values or find_ring_size(FILE, "value"), 2 * warps)

    p = model.process("storing thread")
    for tile in range(end + 1):
        p.wait(next_tile.full(tile))
        next_tile.free(p, tile)
        if tile < end:
            p.wait(dquery_full(tile))
            p.read(*[rows(tile, 1) for rows in all_douts])
            p.arrive(dout_empty(tile))

    p = model.process("taking thread")
    for tile in range(end + 1):
        p.wait(tile_wanted(tile - 1))
        p.write(loaded_tile(tile))
        p.arrive(tile_taken(tile))
        p.wait(next_tile.empty(tile - 1))
        if tile < end:
            p.wait(dout_empty(tile - douts))
        p.load(next_tile.full(tile), next_tile(tile), *[rows(tile) for rows in all_douts if tile < end])

    p = model.process("loading thread")
    for tile in range(end + 1):
        p.wait(tile_taken(tile))
        p.read(loaded_tile(tile))
        blocks = tiles[tile][0] if tile < end else 0
        for left in reversed(range(blocks)):
            if left == min(ahead, blocks) - 1:
                p.arrive(tile_wanted(tile))
            key_at.fill(p)
            value_at.fill(p)

    def compute(p, warpgroup, warp):
        key = value = tile = passed = block = 0
        freed, barrier, own_douts = None, Ring(("warpgroup", warpgroup)), dout_at[warpgroup]
        model.arrivals[barrier.name] = warps

        def begin_tile():
            nonlocal key, passed, block
            next_tile.get(p, tile)
            if tile == end:
                return False
            passed = tiles[tile][1][warpgroup]
            for _ in range(passed):
                key_at.skip(p, key)
                key += 1
            block = tiles[tile][0] - 1 - passed
            return True

        def load_statistics():
            nonlocal value
            p.read(own_douts[warp](tile))
            next_tile.free(p, tile)
            for _ in range(passed):
                value_at.skip(p, value)
                value += 1

        more = begin_tile()
        key_at.get(p, key)
        load_statistics()
        p.read(key_at(key))
        while more:
            key_now, tile_dout, last = key, tile, block == 0
            value_at.get(p, value)
            p.read(*[rows(tile_dout) for rows in own_douts])  # reads dout to compute dp
            key += 1
            block -= 1
            if last:
                tile += 1
                more = begin_tile()
            if more:
                key_at.get(p, key)  # computes the next scores
            p.read(*[rows(tile_dout) for rows in own_douts])
            value_at.free(p, value)
            value += 1
            if freed is not None:
                key_at.free(p, freed)
            freed = key_now
            if last:
                key_at.free(p, freed)
                freed = None
                p.sync(barrier(tile_dout))  # all warps of the warpgroup have read dout
                p.write(own_douts[warp](tile_dout, 1))
                p.arrive(dquery_full(tile_dout))
                if more:
                    load_statistics()
            if more:
                p.read(key_at(key))

    return add_warps(model, 2, warps, compute)


def dkey_128(tiles, group=1, stages=None, warps=1):
    model, end = Model(gradients_full=2 * warps), len(tiles)
    tile_at = Buffers(model, "tile", find_ring_size(FILE, "at"), 1)
    gradients_full = Ring("gradients_full", tile_at.size)
    # Each warp writes dk and dv (second write) over these rows of the tile's keys and values (first write).
    rows_at = [[Ring(("rows", i, j), tile_at.size, writes=2) for j in range(warps)] for i in range(2)]
    all_rows = [rows for half in rows_at for rows in half]
    blocks = Buffers(model, "block", stages or find_ring_size(FILE, "ring"), 2 * warps)

    p = model.process("storing thread")
    for at in range(end + 1):
        tile_at.get(p, at)
        if at < end:
            p.wait(gradients_full(at))
            p.read(*[rows(at, 1) for rows in all_rows])
            tile_at.free(p, at)

    p = model.process("loading thread")
    for at in range(end + 1):
        tile_at.fill(p, *[rows(at) for rows in all_rows if at < end])
        for _ in range(tiles[at][0] * group if at < end else 0):
            blocks.fill(p)

    def compute(p, warpgroup, warp):
        ring = at = block = member = 0
        freed, barrier = None, Ring(("warpgroup", warpgroup))
        model.arrivals[barrier.name] = warps

        def half():
            return (warpgroup + 1 + at) % 2

        def begin_head():
            nonlocal ring, block
            block = tiles[at][1][half()]
            for _ in range(block):
                blocks.skip(p, ring)
                ring += 1

        def begin_tile():
            nonlocal member
            tile_at.get(p, at)
            if at == end:
                return False
            member = 0
            begin_head()
            return True

        def read_operands():
            p.read(blocks(ring), *[rows(at) for rows in rows_at[half()]])

        def probabilities():
            nonlocal freed
            if freed is not None:
                blocks.free(p, freed)  # dk of the last block is complete
            freed = ring

        more = begin_tile()
        blocks.get(p, ring)
        read_operands()
        probabilities()
        while more:
            now, tile, own, last = ring, at, rows_at[half()], False
            ring, block = ring + 1, block + 1
            if block == tiles[at][0]:
                member += 1
                if member < group:
                    begin_head()
                else:
                    last = True
                    at += 1
                    more = begin_tile()
            if more:
                blocks.get(p, ring)
                read_operands()
            p.read(blocks(now))
            if last:
                p.read(*[rows(tile) for rows in own])
                p.sync(barrier(tile))  # all warps of the warpgroup have read keys and values
                p.write(own[warp](tile, 1))
                p.arrive(gradients_full(tile))
            if more:
                read_operands()
            probabilities()

    return add_warps(model, 2, warps, compute)
