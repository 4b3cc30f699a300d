"""A model of attention_sm90_backward_head.cu, with lengths in blocks of 64."""

from .checker import Model, Ring, constant, ring_size

FILE = "attention_sm90_backward_head.cu"


def backward_head(heads, queries, keys, causal=True, query_offset=0, stages=None, parts=None, dquery_warps=1):
    stages, parts = stages or ring_size(FILE, "ring"), parts or ring_size(FILE, "part")
    tile_buffers, head_buffers, helpers = (constant(FILE, name) for name in ("kTiles", "kHeads", "kHelpers"))
    model = Model(tile_full=2, tile_empty=2 + dquery_warps, block_full=2, block_empty=2, statistics_empty=2)
    model.arrivals["dquery"] = dquery_warps
    tile_full, tile_empty, key_at = (Ring(name, tile_buffers) for name in ("tile_full", "tile_empty", "keys"))
    value_at = [Ring(("values", half), tile_buffers, writes=2) for half in range(2)]  # dv is stored through them
    block_full, block_empty, block_at = (Ring(name, stages) for name in ("block_full", "block_empty", "block"))
    part_full, part_empty, part_at = (
        [Ring((name, warpgroup), parts) for warpgroup in range(2)] for name in ("part_full", "part_empty", "part")
    )
    statistics_empty = Ring("statistics_empty", head_buffers)
    statistics_full = [Ring(("statistics_full", block), head_buffers) for block in range(queries)]
    statistics = [[Ring(("statistics", block, i), head_buffers) for i in range(helpers)] for block in range(queries)]
    for warpgroup in range(2):
        model.arrivals[part_empty[warpgroup].name] = dquery_warps
    for full in statistics_full:
        model.arrivals[full.name] = helpers
    tiles = (keys + 1) // 2

    def first_block(key):
        return min(max(key - query_offset, 0), queries) if causal else 0

    def own_first_block(key):
        return first_block(key) if key < keys else queries

    def walk(begin, tile):
        blocks = range(begin, queries)
        return reversed(blocks) if tile % 2 else blocks

    p = model.process("loader")  # load_tiles
    at = ring = 0
    for _ in range(heads):
        for tile in range(tiles):
            p.wait(tile_empty(at - tile_buffers))
            p.load(tile_full(at), key_at(at), *[rows(at) for rows in value_at])
            at += 1
            for _ in walk(first_block(2 * tile), tile):
                p.wait(block_empty(ring - stages))
                p.load(block_full(ring), block_at(ring))
                ring += 1

    for helper in range(helpers):  # compute_statistics
        p = model.process(f"helper {helper}")
        helper_full, rows_at = Ring(("helper_full", helper)), Ring(("out and dout", helper))
        model.arrivals[helper_full.name] = 2
        p.load(helper_full(0), rows_at(0))
        for n in range(heads * queries):
            head, block = divmod(n, queries)
            if block == 0:
                p.wait(statistics_empty(head - head_buffers))
            p.wait(helper_full(n))
            p.read(rows_at(n))
            if n + 1 < heads * queries:
                p.load(helper_full(n + 1), rows_at(n + 1))
            p.write(statistics[block][helper](head))
            p.arrive(statistics_full[block](head))

    def sum_dquery(p, warp):
        at = stored = 0
        part = [0, 0]
        barrier, out = Ring("dquery"), [Ring(("dquery", i)) for i in range(dquery_warps)]
        for _ in range(heads):
            for tile in range(tiles):
                p.wait(tile_full(at))
                p.read(key_at(at))
                p.arrive(tile_empty(at))
                own_first = [own_first_block(2 * tile + (tile + w) % 2) for w in range(2)]
                at += 1
                for block in walk(first_block(2 * tile), tile):
                    of = [0, 1] if block >= max(own_first) else [0] if block >= own_first[0] else [1]
                    for w in of:
                        p.wait(part_full[w](part[w]))
                    p.read(*[part_at[w](part[w]) for w in of])
                    for w in of:
                        p.arrive(part_empty[w](part[w]))
                        part[w] += 1
                    last = min(tiles - 1, (block + query_offset) // 2) if causal else tiles - 1
                    if tile < last:
                        continue
                    if warp == 0 and stored > 0:
                        p.read(*[rows(stored - 1) for rows in out])
                    p.sync(barrier(2 * stored))
                    p.write(out[warp](stored))
                    p.sync(barrier(2 * stored + 1))
                    if warp == 0:
                        p.read(*[rows(stored) for rows in out])
                    stored += 1

    def sum_dkey_and_dvalue(p, warpgroup):
        at = ring = part = 0
        held = None
        out = Ring(("dkey", warpgroup))

        def pass_over():
            nonlocal ring
            for _ in range(own_first - first_block(2 * tile)):
                p.wait(block_full(ring))
                p.arrive(block_empty(ring))
                ring += 1

        def release():
            nonlocal held
            if held is not None:
                p.read(held[0](held[1], 1))  # the store has read it
                p.arrive(tile_empty(held[1]))
            held = None

        def start_block():
            p.wait(block_full(ring))
            p.read(block_at(ring), key_at(at), value_at[half](at))

        for head in range(heads):
            for tile in range(tiles):
                p.wait(tile_full(at))
                half = (tile + warpgroup) % 2
                own_first = own_first_block(2 * tile + half)
                if tile % 2 == 0:
                    pass_over()
                blocks, freed = list(walk(own_first, tile)), None
                if blocks:
                    start_block()
                    release()
                    p.read(block_at(ring))
                for left, block in zip(reversed(range(len(blocks))), blocks, strict=True):
                    slot = ring
                    if tile == 0:
                        p.wait(statistics_full[block](head))
                    p.read(*[rows(head) for rows in statistics[block]])
                    p.read(block_at(slot), key_at(at), value_at[half](at))
                    if freed is not None:
                        p.read(block_at(freed))  # its dk
                        p.arrive(block_empty(freed))
                    freed = slot
                    p.wait(part_empty[warpgroup](part - parts))
                    p.write(part_at[warpgroup](part))
                    p.arrive(part_full[warpgroup](part))
                    part += 1
                    ring += 1
                    if left:
                        start_block()
                    p.read(block_at(slot))
                if blocks:
                    p.read(block_at(freed))
                    p.arrive(block_empty(freed))
                if tile % 2 == 1:
                    pass_over()
                release()
                if at > 0:
                    p.read(out(at - 1))  # the store has read it
                p.write(value_at[half](at, 1), out(at))
                held = value_at[half], at
                at += 1
            p.arrive(statistics_empty(head))

    for warpgroup in range(2):
        sum_dkey_and_dvalue(model.process(f"warpgroup {warpgroup}"), warpgroup)
    for warp in range(dquery_warps):
        sum_dquery(model.process(f"dquery's warp {warp}"), warp)
    return model
