"""Models of attention/sm90/forward.cu, with four warpgroups and with two."""

import re

from .checker import CUDA, Buffers, Model, Ring, Staging, add_warps, find_constant, find_ring_size, load_tiles

FORWARD = "attention/sm90/forward.cu"


def find_stages(name):
    """Return kStages, the last template argument of the type ``name`` (a ForwardTile) in the kernel's source."""
    return int(re.search(rf"using {name} = ForwardTile<[^;]*, (\d+)>;", (CUDA / FORWARD).read_text())[1])


MOST_SKIPPED = find_constant(FORWARD, "kMostSkipped", kStages=find_stages("FourWarpgroups"))


def four_warpgroups(tiles, stages=None, most_skipped=None, warpgroups=2, loaded=None):
    """Model the kernel with four warpgroups, each of which computes a group of 64 queries of a query tile.

    Args:
        tiles: for each query tile, the number of key tiles that each group sees; 1 for a group beyond the last query.
        stages: the size of the ring of key tiles; the kernel's by default.
        most_skipped: the most key tiles that a warpgroup skips in a query tile; the kernel's number by default.
        warpgroups: the number of warpgroups in the model, and of groups in a query tile.
        loaded: the number of key tiles that are loaded for each query tile; by default the most that a group sees.
    """
    stages = stages or find_stages("FourWarpgroups")
    most_skipped = find_constant(FORWARD, "kMostSkipped", kStages=stages) if most_skipped is None else most_skipped
    model = Model()
    queries = Buffers(model, "query", find_ring_size(FORWARD, "query"), warpgroups)
    keys = Buffers(model, "stage", stages, warpgroups)  # each stage has keys and values
    loaded = loaded or [*map(max, tiles)]
    load_tiles(model.process("loader"), queries, loaded, keys)

    def compute(p, group, _):
        query = stage = 0

        def open_tile():
            nonlocal stage
            skipped = min(loaded[query] - tiles[query][group], most_skipped)
            for _ in range(skipped):
                keys.skip(p, stage)
                stage += 1
            return loaded[query] - 1 - skipped

        queries.get(p, 0)
        block, more = open_tile(), True
        keys.get(p, stage)
        p.read(queries(query))
        while more:
            last, slot, of_slot = block == 0, stage, query
            stage += 1
            block -= 1
            if last:
                query += 1
                queries.get(p, query)
                more = query < len(tiles)
                group = warpgroups - 1 - group
                if more:
                    block = open_tile()
            if more:
                keys.get(p, stage)  # computes scores
                p.read(queries(query))
                keys.free(p, slot)  # computes out
            if last:
                if more:
                    queries.free(p, of_slot)  # the kernel's store_out()
                else:
                    p.read(keys(slot))

    return add_warps(model, warpgroups, 1, compute)


def two_warpgroups(tiles, turns_at_exponentials=True, stages=None, warpgroups=2, warps=1):
    """Model the kernel with two warpgroups, which both compute all key tiles of a query tile.

    ``tiles`` has the number of key tiles of each query tile. The warpgroups take turns either in computing exponentials
    or in issuing MMAs.
    """
    stages = stages or find_stages("TwoWarpgroups")
    model = Model(turn=2 * warps)
    queries = Buffers(model, "query", find_ring_size(FORWARD, "query"), warpgroups * warps)
    keys, values = (Buffers(model, name, stages, warpgroups * warps) for name in ("key", "value"))
    out = [Staging(model, ("out", warpgroup), warps) for warpgroup in range(warpgroups)]
    load_tiles(model.process("loader"), queries, tiles, keys, values)

    def compute(p, warpgroup, warp):
        key = query = tile = 0
        value = None  # number of the value tile whose matmul is in flight
        turns, turn = [Ring(("turn", i)) for i in range(2)], [0, 0]
        model.arrivals |= {own.name: 2 * warps for own in turns}

        def next_turn(of):
            turn[of] += 1
            return turns[of](turn[of] - 1)

        def wait_for_turn():
            if warpgroups == 2:
                p.sync(next_turn(warpgroup))

        def turn_to_other():
            if warpgroups == 2:
                p.arrive(next_turn(1 - warpgroup))

        queries.get(p, 0)
        block, more = tiles[0] - 1, True
        if warpgroup == 1:
            turn_to_other()
        keys.get(p, 0)
        p.read(queries(0))
        while more:
            first, last, key_now, query_now = block == tiles[tile] - 1, block == 0, key, query
            key += 1
            if last:
                query += 1
                queries.get(p, query)
                more = query < len(tiles)
            if more:
                keys.get(p, key)  # computes the next scores
                p.read(queries(query))
            if not turns_at_exponentials and value is not None:
                turn_to_other()
            if turns_at_exponentials:
                wait_for_turn()
                if more or warpgroup == 0:
                    turn_to_other()
            p.read(queries(query_now))  # the kernel's compute_scores_again()
            keys.free(p, key_now)
            if last:
                queries.free(p, query_now)
            next_value = 0 if value is None else value + 1
            p.wait(values.full(next_value))
            if more:
                p.read(queries(query), keys(key))  # the next scores are complete
            if value is not None:
                values.free(p, value)
                if first:
                    out[warpgroup].store(p, warp)
            value = next_value
            if not turns_at_exponentials:
                wait_for_turn()
            p.read(values(value))
            block -= 1
            if last and more:
                tile += 1
                block = tiles[tile] - 1
        if not turns_at_exponentials and warpgroup == 0:
            turn_to_other()
        p.read(values(value))
        out[warpgroup].store(p, warp)

    return add_warps(model, warpgroups, warps, compute)
