"""Models of attention/sm90/forward_64.cu and attention/sm90/forward.cu."""

from .checker import Buffers, Model, Ring, Staging, constant, load_tiles, ring_size, warps_of

FORWARD_64, FORWARD = "attention/sm90/forward_64.cu", "attention/sm90/forward.cu"


def forward_64(tiles, stages=None, most_skipped=None, warpgroups=2):
    """A tile is how many blocks of keys each group of its queries sees; 1 where a group is beyond the last query."""
    stages = stages or ring_size(FORWARD_64, "stage")
    most_skipped = constant(FORWARD_64, "kMostSkipped", kStages=stages) if most_skipped is None else most_skipped
    model = Model()
    queries = Buffers(model, "query", ring_size(FORWARD_64, "query"), warpgroups)
    keys = Buffers(model, "stage", stages, warpgroups)  # and values
    load_tiles(model.process("loader"), queries, map(max, tiles), keys)

    def compute(p, group, _):
        query = stage = 0

        def open_tile():
            nonlocal stage
            skipped = min(max(tiles[query]) - tiles[query][group], most_skipped)
            for _ in range(skipped):
                keys.skip(p, stage)
                stage += 1
            return max(tiles[query]) - 1 - skipped

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
                keys.get(p, stage)  # scores
                p.read(queries(query))
                keys.free(p, slot)  # out
            if last:
                p.read(*[keys(slot)] * (not more))
                queries.free(p, of_slot)  # store_out

    return warps_of(model, warpgroups, 1, compute)


def forward(tiles, turns_at_exponentials=True, stages=None, warpgroups=2, warps=1):
    """A tile is its number of blocks of keys, which both warpgroups compute."""
    stages = stages or ring_size(FORWARD, "key")
    model = Model(turn=2 * warps)
    queries = Buffers(model, "query", ring_size(FORWARD, "query"), warpgroups * warps)
    keys, values = (Buffers(model, name, stages, warpgroups * warps) for name in ("key", "value"))
    out = [Staging(model, ("out", warpgroup), warps) for warpgroup in range(warpgroups)]
    load_tiles(model.process("loader"), queries, tiles, keys, values)

    def compute(p, warpgroup, warp):
        key = query = tile = 0
        value = None  # of p v under way
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
                keys.get(p, key)  # the scores ahead
                p.read(queries(query))
            if not turns_at_exponentials and value is not None:
                turn_to_other()
            if turns_at_exponentials:
                wait_for_turn()
                if more or warpgroup == 0:
                    turn_to_other()
            p.read(queries(query_now))  # compute_scores_again
            keys.free(p, key_now)
            if last:
                queries.free(p, query_now)
            next_value = 0 if value is None else value + 1
            p.wait(values.full(next_value))
            if more:
                p.read(queries(query), keys(key))  # the scores ahead are complete
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

    return warps_of(model, warpgroups, warps, compute)
