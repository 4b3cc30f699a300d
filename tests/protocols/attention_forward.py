"""Models of attention_sm90_forward_64.cu and attention_sm90_forward.cu."""

from .checker import Model, Ring, constant, ring_size

FORWARD_64, FORWARD = "attention_sm90_forward_64.cu", "attention_sm90_forward.cu"


def forward_64(tiles, stages=None, most_skipped=None, warpgroups=2):
    """A tile is how many blocks of keys each group of its queries sees; 1 where a group is beyond the last query.

    Two of the four warpgroups are modelled: all run the same code, and none waits for another.
    """
    stages = stages or ring_size(FORWARD_64, "stage")
    most_skipped = constant(FORWARD_64, "kMostSkipped", kStages=stages) if most_skipped is None else most_skipped
    model = Model(query_full=2, query_empty=warpgroups, full=2, empty=warpgroups)
    queries = ring_size(FORWARD_64, "query")
    query_full, query_empty, query_at = (Ring(name, queries) for name in ("query_full", "query_empty", "queries"))
    full, empty, key_at = (Ring(name, stages) for name in ("full", "empty", "keys and values"))

    loader = model.process("loader")
    query = stage = 0
    for tile in [*tiles, None]:
        loader.wait(query_empty(query - queries))
        loader.load(query_full(query), query_at(query))
        query += 1
        for _ in range(max(tile) if tile else 0):
            loader.wait(empty(stage - stages))
            loader.load(full(stage), key_at(stage))
            stage += 1

    def compute(p, group):
        query = stage = 0

        def open_tile():
            """Skips the blocks that only other groups see; a block that is too many is computed."""
            nonlocal stage
            blocks = max(tiles[query])
            skipped = min(blocks - tiles[query][group], most_skipped)
            for _ in range(skipped):
                p.wait(full(stage))
                p.arrive(empty(stage))
                stage += 1
            return blocks - 1 - skipped

        p.wait(query_full(0))
        p.read(query_at(0))
        block = open_tile()
        p.wait(full(stage))
        p.read(query_at(query), key_at(stage))
        more = True
        while more:
            last = block == 0
            slot, of_slot = stage, query
            stage += 1
            if last:
                query += 1
                p.wait(query_full(query))
                p.read(query_at(query))
                more = query < len(tiles)
                group = warpgroups - 1 - group
                if more:
                    block = open_tile()
            else:
                block -= 1
            if more:
                p.wait(full(stage))
                p.read(query_at(query), key_at(stage))  # scores
                p.read(key_at(slot))  # out
                p.arrive(empty(slot))
            if last:
                p.read(query_at(of_slot), *[] if more else [key_at(slot)])
                p.arrive(query_empty(of_slot))

    for warpgroup in range(warpgroups):
        compute(model.process(f"warpgroup {warpgroup}"), warpgroup)
    return model


def forward(tiles, turns_at_exponentials=True, stages=None, warpgroups=2, warps=1):
    """A tile is its number of blocks of keys, which both warpgroups compute."""
    stages = stages or ring_size(FORWARD, "key")
    all_warps = warpgroups * warps
    model = Model(
        query_full=2,
        query_empty=all_warps,
        key_full=2,
        key_empty=all_warps,
        value_full=2,
        value_empty=all_warps,
        turn=2 * warps,
        warpgroup=warps,
    )
    queries = ring_size(FORWARD, "query")
    query_full, query_empty, query_at = (Ring(name, queries) for name in ("query_full", "query_empty", "queries"))
    key_full, key_empty, key_at = (Ring(name, stages) for name in ("key_full", "key_empty", "keys"))
    value_full, value_empty, value_at = (Ring(name, stages) for name in ("value_full", "value_empty", "values"))

    loader = model.process("loader")
    query = key = 0
    for blocks in [*tiles, 0]:
        loader.wait(query_empty(query - queries))
        loader.load(query_full(query), query_at(query))
        query += 1
        for _ in range(blocks):
            loader.wait(key_empty(key - stages))
            loader.load(key_full(key), key_at(key))
            loader.wait(value_empty(key - stages))
            loader.load(value_full(key), value_at(key))
            key += 1

    def compute(p, warpgroup, warp):
        key = query = tile = 0
        value = None  # of p v under way
        turns = [Ring(f"turn of {i}") for i in range(2)]
        for turn in turns:
            model.arrivals[turn.name] = 2 * warps
        own_turn = other_turn = 0
        barrier, syncs = Ring(("warpgroup", warpgroup)), 0
        model.arrivals[barrier.name] = warps
        out = [Ring(("out", warpgroup, i)) for i in range(warps)]

        def wait_for_turn():
            nonlocal own_turn
            if warpgroups == 2:
                p.sync(turns[warpgroup](own_turn))
                own_turn += 1

        def turn_to_other():
            nonlocal other_turn
            if warpgroups == 2:
                p.arrive(turns[1 - warpgroup](other_turn))
                other_turn += 1

        def store_out(of):
            nonlocal syncs
            if warp == 0 and of > 0:
                p.read(*[rows(of - 1) for rows in out])  # the store before has read them
            p.sync(barrier(syncs))
            p.write(out[warp](of))
            p.sync(barrier(syncs + 1))
            syncs += 2
            if warp == 0:
                p.read(*[rows(of) for rows in out])

        p.wait(query_full(0))
        p.read(query_at(0))
        block = tiles[0] - 1
        if warpgroup == 1:
            turn_to_other()
        p.wait(key_full(0))
        p.read(query_at(0), key_at(0))
        more = True
        while more:
            first, last = block == tiles[tile] - 1, block == 0
            key_now, query_now = key, query
            key += 1
            if last:
                query += 1
                p.wait(query_full(query))
                p.read(query_at(query))
                more = query < len(tiles)
            if more:
                p.wait(key_full(key))
                p.read(query_at(query), key_at(key))  # the scores ahead
            if not turns_at_exponentials and value is not None:
                turn_to_other()
            if turns_at_exponentials:
                wait_for_turn()
                if more or warpgroup == 0:
                    turn_to_other()
            p.read(query_at(query_now), key_at(key_now))  # the scores once more
            p.arrive(key_empty(key_now))
            if last:
                p.arrive(query_empty(query_now))
            next_value = 0 if value is None else value + 1
            p.wait(value_full(next_value))
            if more:
                p.read(query_at(query), key_at(key))
            if value is not None:
                p.read(value_at(value))
                p.arrive(value_empty(value))
                if first:
                    store_out(tile - 1)
            value = next_value
            if not turns_at_exponentials:
                wait_for_turn()
            p.read(value_at(value))
            block -= 1
            if last and more:
                tile += 1
                block = tiles[tile] - 1
        if not turns_at_exponentials and warpgroup == 0:
            turn_to_other()
        p.read(value_at(value))
        store_out(tile)

    for warpgroup in range(warpgroups):
        for warp in range(warps):
            compute(model.process(f"warpgroup {warpgroup}, warp {warp}"), warpgroup, warp)
    return model
