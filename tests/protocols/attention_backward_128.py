"""Models of the two kernels of attention_sm90_backward_128.cu.

A tile is (blocks, passed): how many blocks of keys (queries) it has, and how many of the first ones each of its halves
passes over, at most one.
"""

from .checker import Model, Ring, constant, ring_size

FILE = "attention_sm90_backward_128.cu"


def dquery_128(tiles, keys=None, values=None, warps=1):
    keys, values, douts = keys or ring_size(FILE, "key"), values or ring_size(FILE, "value"), ring_size(FILE, "dout")
    ahead = constant(FILE, "kAhead")
    computing = 2 * warps
    model = Model(
        tile_full=2,
        tile_empty=computing + 1,
        dquery_full=computing,
        key_full=2,
        key_empty=computing,
        value_full=2,
        value_empty=computing,
    )
    tile_full, tile_empty, tile_taken, tile_wanted = map(Ring, ("tile_full", "tile_empty", "tile_taken", "tile_wanted"))
    next_tile, loaded_tile = Ring("next tile, query and out"), Ring("loaded tile")
    dout_empty, dquery_full = Ring("dout_empty", douts), Ring("dquery_full", douts)
    dout_at = [[Ring(("dout", i, j), douts, writes=2) for j in range(warps)] for i in range(2)]  # each warp's rows
    all_douts = [rows for half in dout_at for rows in half]
    key_full, key_empty, key_at = (Ring(name, keys) for name in ("key_full", "key_empty", "keys"))
    value_full, value_empty, value_at = (Ring(name, values) for name in ("value_full", "value_empty", "values"))
    end = len(tiles)

    p = model.process("storing thread")
    for tile in range(end + 1):
        p.wait(tile_full(tile))
        p.read(next_tile(tile))
        p.arrive(tile_empty(tile))
        if tile < end:
            p.wait(dquery_full(tile))
            p.read(*[rows(tile, 1) for rows in all_douts])
            p.arrive(dout_empty(tile))

    p = model.process("taking thread")
    for tile in range(end + 1):
        p.wait(tile_wanted(tile - 1))
        p.write(loaded_tile(tile))
        p.arrive(tile_taken(tile))
        p.wait(tile_empty(tile - 1))
        if tile < end:
            p.wait(dout_empty(tile - douts))
        p.load(tile_full(tile), next_tile(tile), *[rows(tile) for rows in all_douts if tile < end])

    p = model.process("loading thread")
    ring = 0
    for tile in range(end + 1):
        p.wait(tile_taken(tile))
        p.read(loaded_tile(tile))
        blocks = tiles[tile][0] if tile < end else 0
        for left in reversed(range(blocks)):
            if left == min(ahead, blocks) - 1:
                p.arrive(tile_wanted(tile))
            p.wait(key_empty(ring - keys))
            p.load(key_full(ring), key_at(ring))
            p.wait(value_empty(ring - values))
            p.load(value_full(ring), value_at(ring))
            ring += 1

    def compute(p, warpgroup, warp):
        key = value = tile = passed = block = 0
        freed = None
        barrier = Ring(("warpgroup", warpgroup))
        model.arrivals[barrier.name] = warps
        own_douts = dout_at[warpgroup]

        def begin_tile():
            nonlocal key, passed, block
            p.wait(tile_full(tile))
            p.read(next_tile(tile))
            if tile == end:
                return False
            block = tiles[tile][0] - 1
            passed = tiles[tile][1][warpgroup]
            for _ in range(passed):
                p.wait(key_full(key))
                p.arrive(key_empty(key))
                key += 1
                block -= 1
            return True

        def load_statistics():
            nonlocal value
            p.read(next_tile(tile), own_douts[warp](tile))
            p.arrive(tile_empty(tile))
            for _ in range(passed):
                p.wait(value_full(value))
                p.arrive(value_empty(value))
                value += 1

        begin_tile()
        p.wait(key_full(key))
        p.read(key_at(key))
        load_statistics()
        p.read(key_at(key))
        more = True
        while more:
            key_now, tile_dout = key, tile
            p.wait(value_full(value))
            p.read(value_at(value), *[rows(tile_dout) for rows in own_douts])  # dp
            key += 1
            last = block == 0
            if last:
                tile += 1
                more = begin_tile()
            else:
                block -= 1
            if more:
                p.wait(key_full(key))
                p.read(key_at(key))  # the scores ahead
            p.read(value_at(value), *[rows(tile_dout) for rows in own_douts])
            p.arrive(value_empty(value))
            value += 1
            if freed is not None:
                p.read(key_at(freed))
                p.arrive(key_empty(freed))
            freed = key_now
            if last:
                p.read(key_at(key_now))
                p.arrive(key_empty(key_now))
                freed = None
                p.sync(barrier(tile_dout))
                p.write(own_douts[warp](tile_dout, 1))
                p.arrive(dquery_full(tile_dout))
                if more:
                    load_statistics()
            if more:
                p.read(key_at(key))

    for warpgroup in range(2):
        for warp in range(warps):
            compute(model.process(f"warpgroup {warpgroup}, warp {warp}"), warpgroup, warp)
    return model


def dkey_128(tiles, group=1, stages=None, warps=1):
    stages, tile_buffers = stages or ring_size(FILE, "ring"), ring_size(FILE, "at")
    model = Model(tile_full=2, gradients_full=2 * warps, block_full=2, block_empty=2 * warps)
    tile_full, tile_empty, gradients_full, tile_at = (
        Ring(name, tile_buffers) for name in ("tile_full", "tile_empty", "gradients_full", "tile")
    )
    # Keys and values, the rows of each warp.
    rows_at = [[Ring(("keys and values", i, j), tile_buffers, writes=2) for j in range(warps)] for i in range(2)]
    all_rows = [rows for half in rows_at for rows in half]
    block_full, block_empty, block_at = (Ring(name, stages) for name in ("block_full", "block_empty", "block"))
    end = len(tiles)

    p = model.process("storing thread")
    for at in range(end + 1):
        p.wait(tile_full(at))
        p.read(tile_at(at))
        if at < end:
            p.wait(gradients_full(at))
            p.read(*[rows(at, 1) for rows in all_rows])
            p.arrive(tile_empty(at))

    p = model.process("loading thread")
    ring = 0
    for at in range(end + 1):
        p.wait(tile_empty(at - tile_buffers))
        p.load(tile_full(at), tile_at(at), *[rows(at) for rows in all_rows if at < end])
        for _ in range(tiles[at][0] * group if at < end else 0):
            p.wait(block_empty(ring - stages))
            p.load(block_full(ring), block_at(ring))
            ring += 1

    def compute(p, warpgroup, warp):
        ring = at = block = member = 0
        freed = None
        barrier = Ring(("warpgroup", warpgroup))
        model.arrivals[barrier.name] = warps

        def half():
            return (warpgroup + 1 + at) % 2

        def begin_head():
            nonlocal ring, block
            block = tiles[at][1][half()]
            for _ in range(block):
                p.wait(block_full(ring))
                p.arrive(block_empty(ring))
                ring += 1

        def begin_tile():
            nonlocal member
            p.wait(tile_full(at))
            p.read(tile_at(at))
            if at == end:
                return False
            member = 0
            begin_head()
            return True

        def start_products():
            p.read(block_at(ring), *[rows(at) for rows in rows_at[half()]])

        def probabilities():
            nonlocal freed
            if more:
                p.read(block_at(ring))
            if freed is not None:
                p.read(block_at(freed))
                p.arrive(block_empty(freed))
            freed = ring

        more = begin_tile()
        p.wait(block_full(ring))
        start_products()
        probabilities()
        while more:
            now, tile, own = ring, at, rows_at[half()]
            p.read(block_at(now))
            ring += 1
            last = False
            block += 1
            if block == tiles[at][0]:
                member += 1
                if member < group:
                    begin_head()
                else:
                    last = True
                    at += 1
                    more = begin_tile()
            if more:
                p.wait(block_full(ring))
                start_products()
            p.read(block_at(now))
            if last:
                p.read(*[rows(tile) for rows in own])
                p.sync(barrier(tile))
                p.write(own[warp](tile, 1))
                p.arrive(gradients_full(tile))
            if more:
                start_products()
            probabilities()

    for warpgroup in range(2):
        for warp in range(warps):
            compute(model.process(f"warpgroup {warpgroup}, warp {warp}"), warpgroup, warp)
    return model
