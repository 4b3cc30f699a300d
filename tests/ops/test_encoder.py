import itertools
import random
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import gptkernels  # noqa: F401
from helpers import (
    all_dtypes,
    as_view,
    assert_as_exact_with_gradients,
    assert_equal,
    assert_same_bits,
    gradients,
    raises,
    randn,
    refused,
    run_python,
    tolerance,
)

ops = torch.ops.gptkernels

all_index_dtypes = pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])


def torchs(tokens, wte, wpe):
    return F.embedding(tokens, wte) + wpe[: tokens.shape[-1]]


def inputs(batch, length, width, dtype, device, vocabulary=13, positions=None, index=torch.int64):
    positions = length + 2 if positions is None else positions
    return (
        torch.randint(vocabulary, (batch, length), dtype=index).to(device),
        randn(vocabulary, width, dtype=dtype, device=device),
        randn(positions, width, dtype=dtype, device=device),
    )


def check(tokens, wte, wpe, dout):
    functions = (partial(f, tokens) for f in (ops.encoder, torchs, torchs))
    dwte, _ = assert_as_exact_with_gradients(*functions, (wte, wpe), dout, ("dwte", "dwpe"))
    (dweight,) = gradients(lambda weight: ops.embedding(tokens, weight), (wte,), dout)
    assert_equal([ops.embedding(tokens, wte), dweight], [F.embedding(tokens, wte), dwte], equal_nan=True)


@all_index_dtypes
@pytest.mark.parametrize("shape", [(64, 1), (1, 1000), (40, 100), (3000, 2)], ids=str)
@all_dtypes
def test_many_tokens(shape, index, dtype, device):
    check(*inputs(*shape, 24, dtype, device, index=index), randn(*shape, 24, dtype=dtype, device=device))


@pytest.mark.parametrize("count", [1, 31, 32, 33, 63, 64, 65, 97, 129, 300])
def test_runs_of_a_token_across_windows(count, device):
    """The CUDA backward divides the sorted tokens into units of 32 and windows of 64."""
    for before in (0, 1, 31, 32, 40, 66):
        check_counts([0, 0, before, 0, 0, count] + [1] * (400 - before - count), "shuffled", 8, torch.float32, device)


@pytest.mark.parametrize("vocabulary", [1, 2, 300, 70000, 1000000])
@pytest.mark.parametrize("shape", [(1, 9000), (9000, 1), (140, 70)], ids=str)
def test_long_sums(shape, vocabulary, device):
    """The CUDA kernels add the parts of a long sum in groups of 64, and then the groups' sums."""
    dout = torch.randint(-8, 8, (*shape, 8)).float().to(device)
    common = torch.randint(vocabulary, shape)
    for share in (0.0, 0.5, 0.9, 1.0):
        tokens = torch.where(torch.rand(shape) < share, vocabulary - 1, common).to(device)
        dwte, dwpe = ops.encoder_backward(dout, tokens, vocabulary, shape[1] + 3)
        assert torch.equal(dwte, exact_sums(tokens, dout, vocabulary))
        assert torch.equal(dwpe[: shape[1]], dout.sum(0))
        assert not dwpe[shape[1] :].any()
        check_added(dout, tokens, vocabulary)


def exact_sums(tokens, dout, vocabulary, there=0):
    """Return each token's float64 sum of its rows of dout, plus ``there``, rounded to the dtype of dout once."""
    sums = torch.zeros(vocabulary, dout.shape[-1], dtype=torch.float64, device=dout.device)
    return (sums.index_add_(0, tokens.flatten(), dout.double().view(-1, dout.shape[-1])) + there).to(dout.dtype)


def check_counts(counts, order, width, dtype, device):
    tokens = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    if order == "shuffled":
        tokens = tokens[torch.randperm(len(tokens))]
    tokens = tokens.to(device)
    dout = torch.randint(-8, 8, (len(tokens), width)).to(dtype).to(device)
    expected = exact_sums(tokens, dout, len(counts))
    assert torch.equal(ops.embedding_backward(dout, tokens, len(counts)), expected)
    dwte, dwpe = ops.encoder_backward(dout[None], tokens[None], len(counts), len(tokens))
    assert torch.equal(dwte, expected)
    assert torch.equal(dwpe, dout)
    check_added(dout[None], tokens[None], len(counts))


def check_added(dout, tokens, vocabulary):
    there = torch.randint(-8, 8, (vocabulary, dout.shape[-1]), device=dout.device).to(dout.dtype)
    expected = exact_sums(tokens, dout, vocabulary, there)
    unused = torch.bincount(tokens.flatten(), minlength=vocabulary) == 0
    there[unused] = expected[unused] = float("nan")
    dwpe = ops.encoder_backward_(dout, tokens, there, tokens.shape[1] + 2)
    assert_equal(there, expected, equal_nan=True)
    assert torch.equal(dwpe, ops.encoder_backward(dout, tokens, vocabulary, tokens.shape[1] + 2)[1])


all_orders = pytest.mark.parametrize("order", ["runs", "shuffled"])

# On CUDA each window of 64 tokens has a partial sum of a long run, and these are added in groups of 64. With these
# counts, the last group of a run ends near the window in which the next token's run begins.
AROUND_A_GROUP = [m * 64 * 64 + d for m in (1, 2, 3) for d in (-65, -64, -63, -1, 0, 1, 4, 63, 64, 65)]


@all_orders
@pytest.mark.parametrize("dominant", [2, 3, 5, 8])
@all_dtypes
def test_dominant_tokens(dtype, dominant, order, device):
    if device.type == "cpu" and dominant in (3, 5):
        pytest.skip("a CPU has no windows, and the sums of each token are the same for any number of tokens")
    for i, width in enumerate((8, 5, 136)):  # whole packs, single elements, several slabs
        counts = [AROUND_A_GROUP[(7 * i + 11 * k + dominant) % len(AROUND_A_GROUP)] for k in range(dominant)]
        check_counts([*counts, 0, 1, 3], order, width, dtype, device)


# The CUDA backward sorts by the low bit first, which puts 4 tokens in the order 0, 2, 1, 3.
TWO_RUNS = [[4100, 0, 200, 0], *([n, other, other, n] for n in AROUND_A_GROUP for other in (65, 200, 4096 + 64))]


@pytest.mark.parametrize("counts", TWO_RUNS, ids=str)
def test_last_group_of_a_run_ends_where_the_next_run_begins(counts, device):
    check_counts(counts, "runs", 8, torch.float32, device)


@all_orders
def test_more_than_2_20_of_a_token(order, device):
    check_counts([2**20 + 1, 70, 2**20 + 4000, 2**12 + 4], order, 4, torch.float32, device)


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(
        st.one_of(st.integers(0, 200), st.integers(4000, 4200), st.sampled_from(AROUND_A_GROUP)), min_size=1, max_size=8
    ),
    order=st.sampled_from(["runs", "shuffled"]),
    width=st.sampled_from([1, 4, 8, 40]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_run_lengths(device, counts, order, width, dtype):
    torch.manual_seed(sum(counts))
    check_counts(counts, order, width, dtype, device)


@pytest.mark.parametrize("width", [64, 65, 768])
@pytest.mark.parametrize("count", [8, 33, 48, 64, 65, 96, 128])
@pytest.mark.parametrize("where", ["first", "anywhere"])
def test_as_exact_as_torch_where_one_token_is_frequent(where, count, width, device):
    """A frequent token's gradient must not be a single running sum."""
    for seed in range(5):
        torch.manual_seed(seed)
        place = torch.arange(128) if where == "first" else torch.randperm(128)
        tokens = torch.where(place < count, 7, place)[None].to(device)
        wte = randn(128, width, dtype=torch.float32, device=device)
        dout = randn(1, 128, width, dtype=torch.float32, device=device)
        functions = (partial(f, tokens) for f in (ops.embedding, F.embedding, F.embedding))
        assert_as_exact_with_gradients(*functions, (wte,), dout, ("dweight",))


@pytest.mark.parametrize("width", [64, 65])
@pytest.mark.parametrize("batch", [64, 128, 129, 4000])
def test_as_exact_as_torch_over_a_batch(batch, width, device):
    for seed in range(5):
        torch.manual_seed(seed)
        check(
            *inputs(batch, 3, width, torch.float32, device, vocabulary=5),
            randn(batch, 3, width, dtype=torch.float32, device=device),
        )


# ---- a model of the CUDA backward's arrival protocol -----------------------------------------------------------------


def cuda_constant(name):
    folder = Path(__file__).parents[2] / "csrc" / "cuda"
    source = (folder / "embedding/order.cuh").read_text() + (folder / "embedding/sums.cuh").read_text()
    value = re.search(rf"constexpr int {name} = ([^;]+);", source)[1]
    return int(value) if value.isdigit() else 2 * cuda_constant(re.fullmatch(r"2 \* (\w+)", value)[1])


def rows_of_partials(counts, batch, length, window, batch_piece):
    """Return, for each sum that several warps compute, the rows in which the warps store their partial sums.

    encoder_backward_bins_kernel (embedding/order.cuh) gives the items their places in long_runs. row_at in
    sum_long_runs and sum_over_batch (embedding/sums.cuh) gives the rows.
    """
    long_runs = {}
    place = 0
    for token, count in enumerate(counts):
        begin = place + 1  # a token's first item is the run's head
        last = begin + count - 1
        if count > window:
            for at in range(begin, last + 1):
                if at == begin or at % window == 0:
                    index = 2 * (at // window) + (at == begin)
                    assert index not in long_runs, "two runs in one place"
                    long_runs[index] = (begin, last, token)
        place = last + 1
    windows = -(-place // window)
    sums = {}
    for index, (first, last, token) in long_runs.items():
        first_window = first // window
        parts = last // window - first_window + 1
        rows = [2 * (first_window + part) + (part == 0) for part in range(parts)]
        part = index // 2 - first_window
        assert rows[part] == index
        assert sums.setdefault(("token", token), rows) == rows
    assert {token for _, token in sums} == {token for token, count in enumerate(counts) if count > window}
    pieces = -(-batch // batch_piece)
    if pieces > 1:
        for t in range(length):
            sums["position", t] = [2 * windows + part * length + t for part in range(pieces)]
    return sums


class Arrivals:
    """Simulates add_parts (csrc/cuda/embedding/sums.cuh) for all parts of all sums. One warp acts at a time.

    An action is everything that a warp does up to and including its next increment of a counter, because other warps
    read what it has written only after the increment. A partial sum is the set of its parts.
    """

    def __init__(self, sums, group, counter_of=lambda row: row):
        self.sums, self.group, self.counter_of = sums, group, counter_of
        self.partials, self.counters, self.owners, self.results = {}, {}, {}, {}
        # the number of actions that each working warp has done
        self.actions = {(name, part): 0 for name, rows in sums.items() for part in range(len(rows))}

    def copy(self):
        other = Arrivals({}, self.group, self.counter_of)
        other.sums, other.owners = self.sums, self.owners  # all orders of actions have the same owners
        for name in ("partials", "counters", "results", "actions"):
            setattr(other, name, dict(getattr(self, name)))
        return other

    def state(self):
        return tuple(frozenset(d.items()) for d in (self.partials, self.counters, self.results, self.actions))

    def last_to_arrive(self, row, count, what):
        counter = self.counter_of(row)
        assert self.owners.setdefault(counter, what) == what, f"{what} shares a counter with {self.owners[counter]}"
        before = self.counters.get(counter, 0)
        assert before < count, "more arrivals than parts"
        self.counters[counter] = before + 1
        return before == count - 1

    def act(self, warp):
        name, part = warp
        rows, group = self.sums[name], self.group
        parts, first = len(rows), part // group * group
        count = min(group, parts - first)
        done = self.actions.pop(warp)
        if done == 0:
            self.partials[rows[part]] = frozenset([(name, part)])
            if self.last_to_arrive(rows[first], count, (name, "group", first)):
                self.actions[warp] = 1
            return
        added = [self.partials[rows[i]] for i in (range(first, first + count), range(0, parts, group))[done - 1]]
        total = frozenset().union(*added)
        assert len(total) == sum(map(len, added)), "a part is added twice"
        if done == 1 and parts > group:
            self.partials[rows[first]] = total
            if self.last_to_arrive(rows[1], -(-parts // group), (name, "groups")):
                self.actions[warp] = 2
            return
        assert name not in self.results, "a sum is written twice"
        self.results[name] = total

    def check_results(self):
        assert self.results == {name: {(name, part) for part in range(len(rows))} for name, rows in self.sums.items()}

    def explore(self):
        """Try every order in which the warps can act, and return the number of different states."""
        seen, waiting = set(), [self]
        while waiting:
            arrivals = waiting.pop()
            if not arrivals.actions:
                arrivals.check_results()
            for warp in arrivals.actions:
                following = arrivals.copy()
                following.act(warp)
                if (state := following.state()) not in seen:
                    seen.add(state)
                    waiting.append(following)
        return len(seen)

    def run(self, generator):
        while self.actions:
            warps = list(self.actions)
            generator.shuffle(warps)
            for warp in warps:
                self.act(warp)
        self.check_results()


def test_arrivals_in_every_order():
    layouts = [(counts, 2) for counts in itertools.product(range(8), repeat=2)]
    layouts += [(counts, 3) for counts in [(3, 0, 3), (5, 3, 3), (3, 5, 4), (8, 6), (6, 8)]]
    states = 0
    for counts, group in layouts:
        sums = rows_of_partials(counts, batch=1, length=0, window=2, batch_piece=2)
        states += Arrivals(sums, group).explore()
    for batch in range(11):
        sums = rows_of_partials((3,), batch=batch, length=1, window=2, batch_piece=2)
        states += Arrivals(sums, 2).explore()
    assert states > 10000


def test_arrivals_with_the_constants_of_the_kernel():
    window, group, batch_piece = (cuda_constant(name) for name in ("kWindow", "kGroup", "kBatchPiece"))
    generator = random.Random(0)
    layouts = [[4100, 200], *([count, 200, 65, count] for count in AROUND_A_GROUP)]
    layouts += [[generator.choice([*AROUND_A_GROUP, 0, 1, 64, 65, 200]) for _ in range(8)] for _ in range(50)]
    for counts in layouts:
        for batch in (1, batch_piece * group + 1):
            sums = rows_of_partials(counts, batch, 2, window, batch_piece)
            assert sums
            Arrivals(sums, group).run(generator)


@settings(max_examples=200, deadline=None)
@given(
    counts=st.lists(st.integers(0, 100), min_size=1, max_size=8),
    window=st.integers(2, 8),
    group=st.integers(2, 5),
    batch=st.integers(0, 60),
    length=st.integers(1, 3),
    generator=st.randoms(use_true_random=False),
)
def test_arrivals_of_any_layout(counts, window, group, batch, length, generator):
    Arrivals(rows_of_partials(counts, batch, length, window, 4), group).run(generator)


def test_arrivals_detect_a_shared_counter():
    """One counter per window would be shared by two groups of partial sums."""
    sums = rows_of_partials((4100, 200), 1, 0, cuda_constant("kWindow"), cuda_constant("kBatchPiece"))
    with pytest.raises(AssertionError, match="shares a counter"):
        Arrivals(sums, cuda_constant("kGroup"), counter_of=lambda row: row // 2).run(random.Random(0))


def test_untouched_rows_are_zero(device):
    tokens = torch.tensor([[1, 3, 3]], device=device)
    dout = torch.ones(1, 3, 5, device=device)
    for _ in range(3):
        junk = torch.full((100, 5), float("nan"), device=device)
        del junk  # the allocator uses this memory for the next tensor of this size
        dwte, dwpe = ops.encoder_backward(dout, tokens, 6, 20)
        assert dwte[:, 0].tolist() == [0, 1, 0, 2, 0, 0]
        assert dwpe[:, 0].tolist() == [1] * 3 + [0] * 17


@all_dtypes
def test_special_and_extreme_values(dtype, device):
    info = torch.finfo(dtype)
    values = torch.tensor([0.0, -0.0, info.max, -info.max, info.smallest_normal / 4, torch.inf, -torch.inf, torch.nan])
    wte = values.to(dtype).to(device).repeat(3, 1)
    wpe = wte.roll(1, dims=1)[:2].contiguous()
    tokens = torch.tensor([[0, 2], [1, 1]], device=device)
    check(tokens, wte, wpe, ops.encoder(tokens, wte, wpe))


@all_dtypes
def test_adding_to_a_gradient(dtype, device):
    dout, there = randn(3, 5, 7, dtype=dtype, device=device), randn(20, 7, dtype=dtype, device=device)
    tokens = torch.randint(15, (3, 5), device=device)
    dwte, dwpe = ops.encoder_backward(dout, tokens, 20, 6)
    for own in (there.clone(), as_view(there, "transposed"), as_view(there, "sliced"), as_view(there, "misaligned")):
        assert torch.equal(ops.encoder_backward_(dout, tokens, own, 6), dwpe)
        torch.testing.assert_close(own, there + dwte, **tolerance(dtype))
        assert torch.equal(own[15:], there[15:])
    own = there.clone()
    assert ops.encoder_backward_(dout[:, :0], tokens[:, :0], own, 6).eq(0).all()
    assert torch.equal(own, there)

    def added():
        own = there.clone()
        return ops.encoder_backward_(dout, tokens, own, 6), own

    assert_same_bits(added)
    with pytest.raises(RuntimeError, match="has no derivative"):
        ops.encoder_backward_(dout.clone().requires_grad_(), tokens, own, 6)
    with raises("encoder_backward_", r"dwte must have shape \(20, 7\)"):
        ops.encoder_backward_(dout, tokens, randn(20, 6, dtype=dtype, device=device), 6)


def test_padding_of_the_vocabulary(device):
    tokens, wte, wpe = inputs(3, 4, 8, torch.float32, device, vocabulary=10)
    wte = torch.cat([wte, torch.ones(6, 8, device=device)])
    dout = randn(3, 4, 8, dtype=torch.float32, device=device)
    for op, weights in (
        (lambda *args: ops.encoder(tokens, *args), (wte, wpe)),
        (lambda *args: ops.embedding(tokens, *args), (wte,)),
    ):

        def padded(*weights, op=op):
            return op(*weights, 10)

        assert torch.equal(padded(*weights), op(*weights))
        found = gradients(padded, weights, dout)
        assert_equal(found, gradients(op, weights, dout))
        assert not found[0][10:].any()
        compiled = torch.compile(padded, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*weights), padded(*weights))


@all_index_dtypes
@pytest.mark.parametrize(
    "bounds", [(0, 0, 13), (0, 7, 13), (0, 5, 5, 12, 13), (0, 13)], ids=["empty", "two", "four", "one"]
)
@all_dtypes
def test_shards(bounds, index, dtype, device):
    """The sum of the shards' results has the bits of the whole table's. dout are integers, whose sums are exact."""
    tokens, wte, wpe = inputs(70, 9, 24, dtype, device, index=index)
    dout = torch.randint(-2, 3, (70, 9, 24)).to(dtype).to(device)
    dwte, dwpe = ops.encoder_backward(dout, tokens, 13, 11)
    there = randn(13, 24, dtype=dtype, device=device)
    expected = there.clone()
    ops.encoder_backward_(dout, tokens, expected, 11)
    sums = [0, 0]
    for first, end in itertools.pairwise(bounds):
        shard = wte[first:end]
        sums[0] += ops.encoder(tokens, shard, wpe, 13, first)
        sums[1] += ops.embedding(tokens, shard, 13, first)
        assert_equal(ops.encoder_backward(dout, tokens, end - first, 11, first), (dwte[first:end], dwpe))
        assert torch.equal(ops.embedding_backward(dout, tokens, end - first, first), dwte[first:end])
        own = there[first:end].clone()
        assert torch.equal(ops.encoder_backward_(dout, tokens, own, 11, first), dwpe)
        assert torch.equal(own, expected[first:end])
    assert_equal(sums, [ops.encoder(tokens, wte, wpe), ops.embedding(tokens, wte)])


@pytest.mark.parametrize("vocabulary", [1000, 70000])
def test_shards_of_long_sums(vocabulary, device):
    dout = torch.randint(-8, 8, (9000, 8)).float().to(device)
    tokens = torch.randint(vocabulary, (9000,))
    tokens = torch.where(torch.rand(9000) < 0.5, vocabulary - 1, tokens).to(device)
    expected = exact_sums(tokens, dout, vocabulary)
    for first, end in ((0, vocabulary // 2), (vocabulary // 2, vocabulary), (vocabulary - 1, vocabulary)):
        assert torch.equal(ops.embedding_backward(dout, tokens, end - first, first), expected[first:end])


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_bad_input(device):
    tokens, wte, wpe = inputs(2, 3, 8, torch.float32, device)
    dout = ops.encoder(tokens, wte, wpe)
    refused(ops.encoder, (tokens[0], wte, wpe), "tokens must have 2 dimensions", r"\(3\)")
    refused(ops.encoder, (tokens, wte[0], wpe), "wte must have 2 dimensions", r"\(8\)")
    refused(ops.encoder, (tokens, wte, wpe[:2]), "tokens of length 3", "there are 2")
    refused(ops.encoder_backward, (dout[:, :2], tokens, 13, 5), r"dout must have shape \(2, 3, 8\)", r"\(2, 2, 8\)")
    refused(ops.encoder_backward, (dout, tokens, 13, 2), "tokens of length 3", "there are 2")
    refused(ops.encoder_backward, (dout, tokens, -1, 5), "vocab_size must not be negative", "-1")
    for bad in (-2, 0, 14):
        message = r"vocab_size must be from 1 to 13 \(the rows of {}\), or -1 for all of them"
        refused(ops.encoder, (tokens, wte, wpe, bad), message.format("wte"), f"got {bad}")
        refused(ops.embedding, (tokens, wte, bad), message.format("weight"), f"got {bad}")
    refused(ops.embedding, (tokens, wte[0]), "weight must have 2 dimensions")
    refused(ops.encoder, (tokens, wte, wpe, 20, -2), "first_token must not be negative", "got -2")
    refused(ops.embedding, (tokens, wte, 0, 4), "vocab_size must be at least 1", "got 0")
    refused(ops.embedding_backward, (dout, tokens, 13, -2), "first_token must not be negative", "got -2")
    refused(ops.encoder, (tokens, wte.requires_grad_(), wpe, 20, 0), "a call with first_token has no derivative")
    wte.requires_grad_(False)
    refused(ops.embedding_backward, (dout[:1], tokens, 13), r"dout must have shape \(2, 3, 8\)")
    if device.type == "cuda":
        wrong = dout, tokens, 2**24 + 1, 5
        refused(ops.encoder_backward, wrong, "vocab_size must be at most 16777216 on this device", "16777217")


@all_index_dtypes
def test_tokens_outside_the_vocabulary(index, device, on_cpu):
    tokens, wte, wpe = inputs(64, 50, 8, torch.float32, device, index=index)
    dout = ops.encoder(tokens, wte, wpe)
    for value in (-1, 13, torch.iinfo(index).max, torch.iinfo(index).min):
        bad = tokens.clone()
        bad[2, 17] = value
        bad[40, 3] = -7  # a second wrong token, which must not be reported even if a thread finds it first
        refused(ops.encoder, (bad, wte, wpe), "", rf"token {value} at position \(2, 17\)", "vocabulary of 13")
        with raises("encoder_backward: ", rf"token {value} at position \(2, 17\)", "vocabulary of 13"):
            ops.encoder_backward(dout, bad, 13, 52)
        refused(
            ops.encoder, (bad, wte[5:], wpe, 13, 5), "", rf"token {value} at position \(2, 17\)", "vocabulary of 13"
        )
        refused(ops.embedding, (bad, wte), "", f"token {value} at position 117 ", "vocabulary of 13")
        refused(ops.embedding_backward, (dout, bad, 13), "", f"token {value} at position 117 ", "vocabulary of 13")
    with raises("vocabulary of 0"):
        ops.embedding(tokens, wte[:0])
    tokens = tokens % 11
    tokens[2, 17] = 11  # In a call with vocab_size 11, row 11 of the 13 rows is padding.
    refused(ops.encoder, (tokens, wte, wpe, 11), "", r"token 11 at position \(2, 17\)", "vocabulary of 11")
    refused(ops.embedding, (tokens, wte, 11), "", "token 11 at position 117 ", "vocabulary of 11")
    assert torch.equal(ops.encoder(tokens, wte, wpe, 12), ops.encoder(tokens, wte, wpe))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("encoder", "tokens, weight, weight"),
        ("encoder", "tokens, padded, weight, 50257"),
        ("embedding", "tokens, weight"),
        ("embedding", "tokens, padded, 50257"),
        ("encoder_backward", "dout, tokens, 50257, 20"),
        ("embedding_backward", "dout, tokens, 50257"),
    ],
)
def test_tokens_outside_the_vocabulary_on_cuda(name, arguments, on_cuda):
    """The call is made in another process, because the device cannot be used after a device-side assertion."""
    done = run_python(f"""
import torch, gptkernels
ops = torch.ops.gptkernels
tokens = torch.zeros(2, 20, dtype=torch.int64)
tokens[0, 17] = 50300
tokens, weight, dout = tokens.cuda(), torch.zeros(50257, 8).cuda(), torch.zeros(2, 20, 8).cuda()
padded = torch.zeros(50304, 8).cuda()
try:
    ops.{name}({arguments})
    torch.cuda.synchronize()
except Exception as error:
    print(error)
    raise SystemExit(7)
""")
    assert done.returncode == 7, done.stderr
    printed = done.stdout + done.stderr
    assert "device-side assert" in printed
    assert name in printed


@pytest.mark.large
def test_more_than_2_31_elements(device):
    batch, length, width = 2**31 // (1024 * 768) + 2, 1024, 768
    tokens, wte, wpe = inputs(batch, length, width, torch.bfloat16, device, vocabulary=50257)
    out = ops.encoder(tokens, wte, wpe)
    for part in (slice(0, 1), slice(batch - 1, batch)):
        assert torch.equal(out[part], torchs(tokens[part], wte, wpe))
    dwte, dwpe = ops.encoder_backward(out, tokens, 50257, length + 2)
    torch.testing.assert_close(dwpe[:length].float(), out.float().sum(0), rtol=1e-2, atol=1.0)
    for token in (tokens[0, 0], tokens[-1, -1]):
        torch.testing.assert_close(dwte[token].float(), out[tokens == token].float().sum(0), rtol=1e-2, atol=1.0)
