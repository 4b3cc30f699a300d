"""Checks the models of the kernels' synchronization for deadlocks and other faults (docs/protocols.md)."""

import itertools
import re
from functools import partial

import pytest

from protocols.attention_backward import backward
from protocols.attention_backward_128 import dkey_128, dquery_128
from protocols.attention_backward_head import backward_head
from protocols.attention_forward import MOST_SKIPPED, four_warpgroups, two_warpgroups
from protocols.checker import CUDA, Deadlock, Fault, WrongData
from protocols.layernorm_ring import layernorm_ring
from protocols.products import fp8_gelu, matmul

CAUSAL = [(".xxx", "xxxx"), (".xx", "xxx"), ("x", "x"), (".", "x")]
RUNS = [
    ("x......x", "xxxxxxxx"),
    ("xx.....x", "xxxxxxxx"),
    ("xxx", "..."),
]  # more hidden blocks in a row than the kernel may skip
TILES_128 = [(3, (0, 1)), (1, (0, 0)), (2, (1, 0))]

# For each model, the least number of states that its check must visit, and its scenarios. Constants that a scenario
# does not give are the kernel's.
MODELS = {
    "forward, four warpgroups": (
        10_000,
        [
            partial(four_warpgroups, tiles)
            for tiles in [
                [(11, 1), (11, 11), (11, 1), (11, 11)],  # 700 tokens: the last query tile of a head has an empty group
                [(9, 1)] * 3,
                [(1, 9), (9, 1), (2, 12)],
                [(1, 1)] * 5,
            ]
        ]
        + [partial(four_warpgroups, [(1, 1)] * 3, loaded=[4] * 3)],  # causal attention with more keys than queries
    ),
    "forward, two warpgroups": (
        10_000,
        [partial(two_warpgroups, tiles, turns) for turns in (False, True) for tiles in ([3, 2, 1, 6], [1] * 5)]
        + [partial(two_warpgroups, [1, 2, 1], warpgroups=1, warps=2)],
    ),
    **{
        name: (
            20_000,
            [
                partial(backward, RUNS, dkey),
                partial(backward, CAUSAL, dkey, masked=False, group=1 + dkey),
                partial(backward, [("x", "x")] * 4, dkey),
                partial(backward, [("xx", ".x"), ("x", "x")], dkey, warps=2),
            ],
        )
        for name, dkey in [("backward's dquery", False), ("backward's dkey", True)]
    },
    "backward_128's dquery": (
        50_000,
        [
            partial(dquery_128, TILES_128),
            partial(dquery_128, [(5, (1, 0)), (1, (0, 0)), (4, (1, 0))]),
            partial(dquery_128, [(1, (0, 0)), (1, (0, 0))], warps=2),
        ],
    ),
    "backward_128's dkey": (
        5_000,
        [
            partial(dkey_128, TILES_128),
            partial(dkey_128, [(3, (0, 1)), (2, (1, 0))], group=2),
            partial(dkey_128, [(1, (0, 0)), (1, (0, 0))], warps=2),
        ],
    ),
    "backward_head": (
        100_000,
        [
            partial(backward_head, 1, 2, 6),
            partial(backward_head, 1, 2, 4, causal=False, stages=2),
            partial(backward_head, 1, 2, 2, dquery_warps=2),
            partial(backward_head, 3, 1, 2),
        ],
    ),
    "matmul": (
        20_000,
        [partial(matmul, 2, 2, stages=2), partial(matmul, 1, 4), partial(matmul, 3, 2, blocks=1, pairs=2)],
    ),
    "fp8_gelu": (1_000, [partial(fp8_gelu, 5, 3), partial(fp8_gelu, 5, 2, warps=2, pieces=2)]),
    "layernorm_ring": (50, [partial(layernorm_ring, 7, stages) for stages in (2, 3, 4)]),
}


# Further scenarios of ``test_no_fault``. ``test_every_wait_and_arrival_is_needed`` would take too long with them.
LARGE = {
    "forward, four warpgroups": [partial(four_warpgroups, [(9, 9, 9, 1), (9, 8, 8, 9)], warpgroups=4)],
    "backward_head": [
        partial(backward_head, 1, 3, 6),
        partial(backward_head, 2, 2, 1),
        partial(backward_head, 1, 3, 3, causal=False),
    ],
}

# Waits that a kernel does not need, because another wait implies them.
REDUNDANT = {
    # The storing thread releases a tile's buffer after it has read the previous tile's dq from a buffer of dout. The
    # taking thread, which waits for the tile's buffer, need not wait for the buffer of dout.
    "backward_128's dquery": {("taking thread", "wait", "dout_empty")},
    # Only the loading thread of a thread block must wait at the cluster's barrier.
    "matmul": {(f"block *'s {role} *", "wait", "cluster_barrier") for role in ("product", "finish")},
}


@pytest.mark.parametrize("name", MODELS)
def test_no_fault(name):
    least, scenarios = MODELS[name]
    scenarios = scenarios + LARGE.get(name, [])
    states = [scenario().explore() for scenario in scenarios]
    print(f"{name}: {sum(states)} states in {len(states)} scenarios")
    assert sum(states) >= least


PASSED = [(blocks, passed) for blocks in (1, 2, 4) for passed in ((0, 0), (0, 1), (1, 0)) if blocks > max(passed)]
MASKS = ["".join(letters) for letters in itertools.product("x.", repeat=6)]
CHOICES = {
    "forward, four warpgroups": [
        partial(four_warpgroups, tiles, 4)
        for tiles in itertools.product(itertools.product((1, 2, 5, 6), repeat=2), repeat=2)
    ],
    "forward, two warpgroups": [
        partial(two_warpgroups, tiles, turns, 3)
        for turns in (False, True)
        for tiles in itertools.product((1, 2, 4), repeat=3)
    ],
    **{
        f"{name} under masks": [
            partial(backward, [(mask, other), (other, mask)], dkey, stages=4)
            for mask in MASKS
            for other in ("x" * 6, mask.translate(str.maketrans("x.", ".x")))
        ]
        for name, dkey in [("backward's dquery", False), ("backward's dkey", True)]
    },
    "backward_128's dquery": [partial(dquery_128, tiles) for tiles in itertools.product(PASSED, repeat=2)],
    "backward_128's dkey": [
        partial(dkey_128, tiles, group) for group in (1, 2) for tiles in itertools.product(PASSED, repeat=2)
    ],
    "backward_head": [
        partial(backward_head, 1, queries, keys, causal, offset)
        for queries in (1, 2)
        for keys in range(1, 6)
        for causal in (False, True)
        for offset in range(3 * causal + 1)
    ],
    "fp8_gelu": [partial(fp8_gelu, tiles, steps) for tiles in range(1, 8) for steps in range(1, 7)],
}


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice(name):
    states = [choice().explore() for choice in CHOICES[name]]
    print(f"{name}: {sum(states)} states of {len(states)} choices")
    assert len(states) > 20


@pytest.mark.parametrize("name", MODELS)
def test_every_wait_and_arrival_is_needed(name):
    def is_found(place, change):
        for scenario in MODELS[name][1]:
            for mutant in scenario().mutants(place, change):
                try:
                    mutant.explore()
                except Fault:
                    return True
        return False

    places = set().union(*(scenario().places() for scenario in MODELS[name][1]))
    needed = {place for place in places if is_found(place, lambda *operation: [])}
    assert places - needed == REDUNDANT.get(name, set())
    for place in places:
        if place[1] == "wait":
            assert is_found(place, lambda kind, key, phase: [(kind, key, phase + 1)]), f"other parity: {place}"


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        # An earlier version of the forward deadlocked here: a group without queries skipped all key tiles but one.
        (partial(four_warpgroups, [(8, 8), (8, 1)], most_skipped=8), Deadlock),
        (partial(four_warpgroups, [(11, 11), (11, 1)], most_skipped=MOST_SKIPPED + 1), Deadlock),
        (partial(two_warpgroups, [2, 2], stages=1), Deadlock),
        *((partial(backward, RUNS, dkey, most_passed=4), Deadlock) for dkey in (False, True)),
        (partial(backward, CAUSAL, False, masked=False, stages=2), Deadlock),
        (partial(backward, CAUSAL, True, masked=False, group=2, stages=3), Deadlock),
        (partial(dquery_128, [(4, (1, 0)), (4, (1, 0))], keys=3), Deadlock),
        (partial(dquery_128, TILES_128, values=1), Deadlock),
        (partial(dkey_128, TILES_128, stages=2), Deadlock),
        (partial(backward_head, 1, 2, 2, stages=1), Deadlock),
        (partial(matmul, 3, 2, blocks=1, pairs=2, sums=1), WrongData),
        (partial(fp8_gelu, 3, 2, stages=1), Deadlock),
        (partial(layernorm_ring, 7, 3, prior=3), WrongData),
    ],
)
def test_too_few_buffers(model, fault):
    with pytest.raises(fault):
        model().explore()


@pytest.mark.parametrize(
    ("file", "calls"),
    {
        "attention/sm90/forward.cu": 27,
        "attention/sm90/backward.cu": 15,
        "attention/sm90/backward_128.cu": 32,
        "attention/sm90/backward_loader.cuh": 5,
        "attention/sm90/backward_mask.cuh": 4,
        "attention/sm90/backward_one_pass.cu": 25,
        "gemm/sm90_mainloop.cuh": 8,
        "gemm/sm90_gelu.cu": 3,
        "loss/sm90_linear_cross_entropy.cu": 2,
        "fp8/sm90_gelu.cu": 12,
    }.items(),
)
def test_models_match_the_kernels(file, calls):
    """If a source's number of barrier waits and arrivals changes, update the model (docs/protocols.md) before the
    number.
    """
    code = re.sub(r"//.*", "", (CUDA / file).read_text())
    names = r"m?barrier_(wait|arrive\w*|expect)|\w+_barrier|cluster_(arrive|wait)|bar\.(sync|arrive)"
    assert len(re.findall(rf"\b({names})\b", code)) == calls


@pytest.mark.parametrize(("blocks", "tiles"), list(itertools.product(range(1, 4), range(1, 7))))
def test_tile_order_assigns_each_tile_once(blocks, tiles):
    level, states = {(0, *((block,) for block in range(blocks)))}, 0
    while level:
        states += len(level)
        following = set()
        for taken, *lists in level:
            working = [block for block, own in enumerate(lists) if own[-1] < tiles]
            if not working:
                assert sorted(tile for own in lists for tile in own[:-1]) == list(range(tiles))
            for block in working:
                index = blocks + taken  # as in TileOrder::take
                following.add((taken + 1, *lists[:block], (*lists[block], index), *lists[block + 1 :]))
        level = following
    assert states >= tiles


@pytest.mark.parametrize(("width", "tiles"), [(width, tiles) for width in range(1, 6) for tiles in range(width, 14)])
def test_tiles_assigned_back_and_forth_are_taken_once(width, tiles):
    formula = "round * width + (round % 2 ? width - 1 - own : own)"
    assert formula in (CUDA / "attention/tile_order.cuh").read_text()
    rounds = range(1, tiles // width + 2)
    indices = [
        *range(width),
        *(r * width + (width - 1 - own if r % 2 else own) for r in rounds for own in range(width)),
    ]
    assert sorted(index for index in indices if index < tiles) == list(range(tiles))
