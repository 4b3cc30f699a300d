"""A model of attention/sm90/backward_one_pass.cu. Numbers of queries and keys are counted in blocks of 64."""

from .checker import Buffers, Model, Ring, Staging, find_constant, find_ring_size

FILE = "attention/sm90/backward_one_pass.cu"


def backward_head(heads, queries, keys, causal=True, query_offset=0, stages=None, dquery_warps=1):
    tile_buffers, head_buffers, helpers = (find_constant(FILE, name) for name in ("kTiles", "kHeads", "kHelpers"))
    model, tiles = Model(), (keys + 1) // 2
    key_at = Buffers(model, "tile", tile_buffers, 2 + dquery_warps)
    # The tile's values (first write), and later its dv (second write), which is stored to global memory from here.
    value_at = [Ring(("values", half), tile_buffers, writes=2) for half in range(2)]
    blocks = Buffers(model, "block", stages or find_ring_size(FILE, "ring"), 2)
    parts = [Buffers(model, ("part", warpgroup), find_constant(FILE, "kParts"), dquery_warps) for warpgroup in range(2)]
    statistics_empty = Ring("statistics_empty", head_buffers)
    statistics_full = [Ring(("statistics_full", block), head_buffers) for block in range(queries)]
    statistics = [[Ring(("statistics", block, i), head_buffers) for i in range(helpers)] for block in range(queries)]
    model.arrivals |= {statistics_empty.name: 2, **{full.name: helpers for full in statistics_full}}
    model.arrivals |= {part.full.name: 1 for part in parts}
    dquery_out = Staging(model, "dquery", dquery_warps)

    def first_block(key):
        return min(max(key - query_offset, 0), queries) if causal else 0

    def own_first_block(key):
        return first_block(key) if key < keys else queries

    def walk(begin, tile):
        return list(range(begin, queries))[:: -1 if tile % 2 else 1]

    p = model.process("loader")  # the kernel's load_tiles()
    for head_tile in range(heads * tiles):
        key_at.fill(p, *[rows(head_tile) for rows in value_at])
        for _ in walk(first_block(2 * (head_tile % tiles)), 0):
            blocks.fill(p)

    for helper in range(helpers):  # the kernel's compute_statistics()
        p = model.process(f"helper {helper}")
        rows_at = Buffers(model, ("out and dout", helper), 1, 1)
        p.load(rows_at.full(0), rows_at(0))
        for n in range(heads * queries):
            head, block = divmod(n, queries)
            if block == 0:
                p.wait(statistics_empty(head - head_buffers))
            rows_at.get(p, n)
            if n + 1 < heads * queries:
                p.load(rows_at.full(n + 1), rows_at(n + 1))
            p.write(statistics[block][helper](head))
            p.arrive(statistics_full[block](head))

    def sum_dquery(p, warp):
        part = [0, 0]
        for head_tile in range(heads * tiles):
            tile = head_tile % tiles
            p.wait(key_at.full(head_tile))
            key_at.free(p, head_tile)
            own_first = [own_first_block(2 * tile + (tile + w) % 2) for w in range(2)]
            for block in walk(first_block(2 * tile), tile):
                of = [0, 1] if block >= max(own_first) else [0] if block >= own_first[0] else [1]
                for w in of:
                    parts[w].get(p, part[w])
                for w in of:
                    parts[w].free(p, part[w])
                    part[w] += 1
                if tile == (min(tiles - 1, (block + query_offset) // 2) if causal else tiles - 1):
                    dquery_out.store(p, warp)

    def sum_dkey_and_dvalue(p, warpgroup):
        ring = part = 0
        held, out, own_parts = None, Ring(("dkey", warpgroup)), parts[warpgroup]

        def pass_over():
            nonlocal ring
            for _ in range(own_first - first_block(2 * tile)):
                blocks.skip(p, ring)
                ring += 1

        def release():
            nonlocal held
            if held:
                p.read(held[0](held[1], 1))  # the store has read the buffer
                p.arrive(key_at.empty(held[1]))
            held = None

        def start_block():
            blocks.get(p, ring)
            p.read(key_at(at), values(at))

        for at in range(heads * tiles):
            head, tile = divmod(at, tiles)
            p.wait(key_at.full(at))
            half = (tile + warpgroup) % 2
            own_first, values, freed = own_first_block(2 * tile + half), value_at[half], None
            if tile % 2 == 0:
                pass_over()
            own_blocks = walk(own_first, tile)
            if own_blocks:
                start_block()
                release()
            for block in own_blocks:
                slot = ring
                if tile == 0:
                    p.wait(statistics_full[block](head))
                p.read(*[rows(head) for rows in statistics[block]])
                p.read(blocks(slot), key_at(at), values(at))
                if freed is not None:
                    blocks.free(p, freed)  # dk of the last block is complete
                freed = slot
                p.wait(own_parts.empty(part - own_parts.size))
                p.write(own_parts(part))
                p.arrive(own_parts.full(part))
                part, ring = part + 1, ring + 1
                if block != own_blocks[-1]:
                    start_block()
                p.read(blocks(slot))
            if freed is not None:
                blocks.free(p, freed)
            if tile % 2 == 1:
                pass_over()
            release()
            if at > 0:
                p.read(out(at - 1))  # the store has read the buffer
            p.write(values(at, 1), out(at))
            held = values, at
            if tile == tiles - 1:
                p.arrive(statistics_empty(head))

    for warpgroup in range(2):
        sum_dkey_and_dvalue(model.process(f"warpgroup {warpgroup}"), warpgroup)
    for warp in range(dquery_warps):
        sum_dquery(model.process(f"dquery's warp {warp}"), warp)
    return model
