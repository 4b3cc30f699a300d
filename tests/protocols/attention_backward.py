"""Models of the two kernels of attention/sm90/backward.cu, which use backward_loader.cuh and backward_mask.cuh.

The kernel of dq has tiles of queries and blocks of keys, the kernel of dk and dv has tiles of keys and blocks of
queries. In the models, each half of a tile is a string with a character for each block: "." if a mask or causality
hides the whole block from the half, otherwise "x". If ``masked`` is false, only the first block may be hidden.
"""

from .checker import Buffers, Model, Staging, add_warps, find_constant, find_ring_size, load_tiles

FILE = "attention/sm90/backward.cu"
MASK = "attention/sm90/backward_mask.cuh"


def backward(tiles, dkey, masked=True, group=1, stages=None, most_passed=None, warps=1):
    """Model the kernel of dq, or with ``dkey`` that of dk and dv. ``group`` query heads share a tile of keys."""
    stages = stages or find_ring_size(FILE, "ring")
    most_passed = find_constant(MASK, "kMostPassed", kStages=stages) if most_passed is None else most_passed
    model = Model()
    tile_at = Buffers(model, "tile", find_ring_size(FILE, "at"), 2 * warps)
    blocks = Buffers(model, "block", stages, 2 * warps)
    out = [Staging(model, ("out", warpgroup), warps) for warpgroup in range(2)]
    load_tiles(model.process("loader"), tile_at, [len(tile[0]) * group for tile in tiles], blocks)

    def compute(p, warpgroup, warp):
        ring = block = passed = 0
        seen = ""

        def find_own():
            """Wait for the next block that the warpgroup computes, or return False if the tile has no more blocks.

            Hidden blocks are skipped. If ``most_passed`` blocks have been skipped directly before and after the last
            computed block, the next block is computed even if it is hidden.
            """
            nonlocal ring, block, passed
            before, passed = passed, 0
            while block < len(seen):
                if seen[block] == "x" or (masked and before + passed == most_passed):
                    blocks.get(p, ring)
                    return True
                blocks.skip(p, ring)
                ring, block, passed = ring + 1, block + 1, passed + 1
            return False

        for at, tile in enumerate(tiles):
            tile_at.get(p, at)
            seen, block, passed, freed = tile[(warpgroup + 1 + at) % 2] * group, 0, 0, None
            if not dkey:
                tile_at.free(p, at)
            more = find_own()
            while more:
                now = ring
                ring, block = ring + 1, block + 1
                more = find_own()  # computes the next block's scores
                p.read(blocks(now), *[tile_at(at)] * dkey)
                if freed is not None:
                    blocks.free(p, freed)  # the previous block's matmuls are complete
                freed = now
            if freed is not None:
                blocks.free(p, freed)
            if dkey:
                tile_at.free(p, at)
                out[warpgroup].store(p, warp)
            out[warpgroup].store(p, warp)
        tile_at.get(p, len(tiles))

    return add_warps(model, 2, warps, compute)
