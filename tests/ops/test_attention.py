import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from gptkernels import functional as G
from gptkernels.testing.cases.attention import ATTENTION_SIZES, seen_keys
from gptkernels.testing.checks import hold_to_the_rule
from gptkernels.testing.exactness import assert_norm_as_exact_as_torch
from helpers import (
    all_dtypes,
    all_views,
    as_view,
    assert_as_exact_as_torch,
    assert_as_exact_with_gradients,
    assert_equal,
    assert_same_bits,
    assert_uniform,
    call_of,
    count_flops,
    double,
    gradients,
    low_dtypes,
    numbers,
    philox,
    raises,
    randn,
    refused,
    tf32,
    tolerance,
    two_dtypes,
    warmed_up_and_captured,
    wide,
    with_dtypes,
)

ops = torch.ops.gptkernels
QKV = ("dquery", "dkey", "dvalue")


def unpack(qkv, num_heads):
    return qkv.unflatten(2, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind()


def packed(qkv, num_heads, *args):
    return ops.attention(qkv, num_heads, *args)[0]


def visible(q, k, mask=None, causal=False, offset=0, begin=None, end=None):
    seen = seen_keys(q.shape[2], k.shape[2], causal, offset, mask, begin, end, q.device)
    return seen.expand(*q.shape[:3], k.shape[2])


def formula(q, k, v, *, scale=None, keep=None, p=0.0, **options):
    """``options`` are those of ``visible``. With ``keep``, probabilities are multiplied by it and divided by 1 - p."""
    seen = visible(q, k, **options)
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    mask = options.get("mask")
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.to(scores.dtype).masked_fill(mask == -math.inf, 0)
    some = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen & some, -math.inf).masked_fill(~some, 0)
    probabilities = scores.softmax(-1) * some
    if keep is not None:
        probabilities = probabilities * keep / (1 - p)
    return probabilities @ v, scores.logsumexp(-1).masked_fill(~some[..., 0], -math.inf)


def torchs(q, k, v, *, scale=None, **options):
    """torch's output may be NaN for a query that sees no key. Such a query sees all keys here, and its output is set to
    0.
    """
    if scale is not None and scale <= 0:  # torch's fused kernels are wrong for these scales
        return formula(q, k, v, scale=scale, **options)[0]
    if options == {"causal": True} and q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    seen = visible(q, k, **options)
    some = seen.any(-1, keepdim=True)
    mask = options.get("mask")
    if mask is None or mask.dtype == torch.bool:
        shown = seen | ~some
    else:
        shown = mask.masked_fill(mask == -math.inf, 0).expand(seen.shape).masked_fill(~seen & some, -math.inf)
    out = F.scaled_dot_product_attention(q, k, v, shown, scale=scale, enable_gqa=True)
    return torch.where(some, out, 0)


def ours(q, k, v, *, scale=None, mask=None, causal=False, offset=0, begin=None, end=None, dropout=(0.0, None, None)):
    p, *drawn = dropout
    return ops.scaled_dot_product_attention(q, k, v, mask, p, causal, scale, offset, begin, end, *drawn)


def out_of(function, **options):
    return lambda *t: function(*t, **options)[0]


def all_results(q, k, v, dout, **options):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, logsumexp = ours(*leaves, **options)
    return [out, logsumexp, *torch.autograd.grad(out, leaves, dout)]


def tensors(b, heads, key_heads, rows, columns, size, dtype, device):
    shapes = [(b, heads, rows, size), (b, key_heads, columns, size), (b, key_heads, columns, size)]
    return [randn(*shape, dtype=dtype, device=device) for shape in (*shapes, shapes[0])]


def check(q, k, v, dout, few_keys=False, **options):
    """Check that out and its gradients are as exact as torch's, and that logsumexp is close to the float64 formula.

    Over few keys, the rounding errors of the scores (sums of HS terms) do not average out in logsumexp. With
    ``few_keys``, logsumexp is therefore only compared with a tolerance.
    """
    functions = out_of(ours, **options), partial(torchs, **options), out_of(formula, **options)
    assert_as_exact_with_gradients(*functions, (q, k, v), dout, QKV)
    found = ours(q, k, v, **options)[1]
    exact = formula(*map(double, (q, k, v)), **options)[1]
    assert found.dtype == wide(q.dtype)
    if few_keys:
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-5)
    else:
        assert_as_exact_as_torch(found, exact.to(found.dtype), exact, "logsumexp")


def check_norms(*inputs, **options):
    """Check the root mean square errors of out and of its gradients. ``inputs`` are query, key, value and dout."""
    results = []
    for function in (out_of(ours, **options), partial(torchs, **options), out_of(formula, **options)):
        *qkv, dout = inputs if len(results) < 2 else map(double, inputs)
        results.append((function(*qkv), *gradients(function, qkv, dout)))
    for name, *each in zip(("out", *QKV), *results, strict=True):
        assert_norm_as_exact_as_torch(*each, name)


def check_gradients(ours, formula, inputs, douts):
    def gradients_of(function, inputs):
        leaves = [t.detach().requires_grad_() for t in inputs]
        outs = function(*leaves)
        return torch.autograd.grad(outs, leaves, [d.to(out.dtype) for d, out in zip(douts, outs, strict=True)])

    found = gradients_of(ours, inputs), gradients_of(formula, inputs), gradients_of(formula, map(double, inputs))
    for name, *each in zip(QKV, *found, strict=True):
        assert_as_exact_as_torch(*each, name)


def check_dropped(q, k, v, dout, dropout, **options):
    keep = ops.attention_dropout_mask(*q.shape[:3], k.shape[2], *dropout)
    dropped = out_of(formula, **options, keep=keep, p=dropout[0])
    functions = out_of(ours, **options, dropout=dropout), lambda *t: dropped(*t).to(q.dtype), dropped
    assert_as_exact_with_gradients(*functions, (q, k, v), dout, QKV)


def check_with_logsumexp(q, k, v, *douts, **options):
    check_gradients(partial(ours, **options), partial(formula, **options), (q, k, v), douts)


# ---- packed ----------------------------------------------------------------------------------------------------------


def packed_inputs(size, dtype, device):
    b, t, nh, hs = size
    return randn(b, t, 3 * nh * hs, dtype=dtype, device=device), randn(b, t, nh * hs, dtype=dtype, device=device)


@two_dtypes
def test_long_sequence(dtype, device):
    tokens = 4097 if device.type == "cuda" else 1025  # A CPU has one kernel, with tiles of 64 keys.
    hold_to_the_rule(call_of("attention", dtype, device, batch=1, tokens=tokens, heads=1, head=64))


@all_dtypes
@pytest.mark.parametrize(("size", "p"), [*((size, 0.0) for size in ATTENTION_SIZES), ((2, 130, 3, 16), 0.2)], ids=str)
def test_packed_and_separate_arguments_give_the_same_bits(size, p, dtype, device):
    qkv, dout = packed_inputs(size, dtype, device)
    dropout = (p, *numbers(device)) if p else (0.0, None, None)
    out, logsumexp = ops.attention(qkv, size[2], None, *dropout)
    separate, same = ours(*unpack(qkv, size[2]), causal=True, dropout=dropout)
    assert_equal([out, logsumexp], [separate.transpose(1, 2).flatten(2), same])
    (dqkv,) = gradients(lambda x: packed(x, size[2], None, *dropout), (qkv,), dout)
    separate_dout = dout.unflatten(2, (size[2], -1)).transpose(1, 2)
    found = gradients(out_of(ours, causal=True, dropout=dropout), unpack(qkv, size[2]), separate_dout)
    assert_equal(unpack(dqkv, size[2]), found)


# Both ops have the arguments (qkv, num_heads). Their second results differ: logsumexp, or the probabilities.
both_ops = pytest.mark.parametrize("op", [ops.attention, ops.attention_probabilities], ids=["", "probabilities"])


@pytest.mark.parametrize("size", [(0, 5, 2, 3), (2, 0, 2, 3), (0, 0, 2, 3)])
@all_dtypes
@both_ops
def test_no_sequences_or_no_tokens(op, size, dtype, device):
    b, t, nh, hs = size
    qkv, dout = packed_inputs(size, dtype, device)
    out, saved = op(qkv, nh)
    assert out.shape == (b, t, nh * hs)
    assert saved.shape == ((b, nh, t) if op is ops.attention else (b, nh, t, t))
    assert gradients(lambda x: op(x, nh)[0], (qkv,), dout)[0].shape == qkv.shape


# attention_probabilities has 20 tokens only: torch's matmul on a CPU with AMX spreads a NaN to other rows of longer
# sequences in bfloat16 (docs/notes/linear.md).
@all_dtypes
@pytest.mark.parametrize(
    ("op", "tokens", "first"),
    [(ops.attention, 100, 70), (ops.attention_probabilities, 20, 12)],
    ids=["", "probabilities"],
)
def test_later_tokens_change_no_bit_of_earlier_ones(op, tokens, first, dtype, device):
    qkv, _ = packed_inputs((2, tokens, 2, 8), dtype, device)
    out = op(qkv, 2)[0]
    changed = qkv.clone()
    changed[:, first:] += 1
    assert torch.equal(op(changed, 2)[0][:, :first], out[:, :first])
    # Only q and k get NaN. A NaN in v would be multiplied by a probability of 0, which gives NaN.
    changed[:, first:, :32] = math.nan
    out_nan = op(changed, 2)[0]
    assert torch.equal(out_nan[:, :first], out[:, :first])
    assert out_nan[:, first:].isnan().all()


@both_ops
def test_second_result_of_packed_ops_is_not_differentiable(op, device):
    qkv = packed_inputs((1, 3, 1, 2), torch.float32, device)[0].requires_grad_()
    out, saved = op(qkv, 1)
    assert out.requires_grad
    assert not saved.requires_grad


# ---- query, key and value --------------------------------------------------------------------------------------------

# (B, NH, KH, Tq, Tk, HS, causal, offset)
SHAPES = [
    (2, 4, 2, 65, 65, 16, True, 0),  # grouped heads
    (1, 6, 1, 130, 130, 64, True, 0),
    (2, 6, 2, 1, 77, 64, False, 0),  # decoding
    (1, 2, 2, 1, 1000, 128, False, 0),
    (2, 2, 1, 1, 200, 64, True, 199),
    (1, 3, 3, 70, 200, 33, False, 0),  # the numbers of queries and keys differ
    (2, 2, 2, 200, 70, 64, False, 0),
    (1, 2, 2, 100, 64, 8, True, 0),
    (1, 2, 2, 64, 150, 64, True, 0),
    (1, 4, 2, 64, 200, 64, True, 136),  # the queries are the last 64 tokens of a sequence
    (2, 2, 2, 37, 129, 80, True, 92),
    (1, 2, 2, 100, 100, 64, True, -30),  # the first 30 queries see no key
    (1, 1, 1, 20, 20, 64, True, -40),  # no query sees a key
    (1, 2, 2, 20, 130, 64, True, 2**40),  # every query sees every key
]


@all_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(shape, dtype, device):
    *sizes, causal, offset = shape
    check(*tensors(*sizes, dtype, device), causal=causal, offset=offset)


# (NH, KH, Tq, Tk, HS, causal, offset): head sizes that need two panels of 64 channels, and numbers of queries near
# multiples of 64 and 128, the rows of the kernels' tiles. No sequence has a single key, for which the formula's
# gradients of query and key are 0 while the kernels' have rounding errors. (ATTENTION_SIZES may have one: its test
# compares the gradient of the packed qkv as one tensor, whose value gradient allows for these errors.)
WIDE = [
    *((2, 1, rows, rows, 128, causal, 0) for rows in (63, 64, 65, 127, 128, 129, 257) for causal in (True, False)),
    (4, 2, 1000, 1000, 128, True, 0),
    (4, 2, 1000, 1000, 128, False, 0),
    *((2, 2, 130, 130, size, True, 0) for size in (72, 88, 104, 112, 120)),
    (6, 2, 70, 300, 128, True, 230),  # the queries are the last 70 tokens of a sequence
    (2, 1, 300, 70, 96, False, 0),
    (2, 1, 70, 300, 80, True, 0),  # keys that no query sees
    (2, 2, 200, 200, 128, True, -70),  # queries that see no key
    (2, 1, 20, 150, 128, True, -20),  # no query sees a key
]


@low_dtypes
@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_wide_heads(shape, dtype, device):
    *sizes, causal, offset = shape
    check(*tensors(1, *sizes, dtype, device), causal=causal, offset=offset)


@low_dtypes
def test_wide_heads_in_strided_views(dtype, device):
    """Query and dout have tokens before heads and gaps between rows. Key and value are slices of one tensor."""
    size = 128
    q = randn(2, 150, 4, size + 16, dtype=dtype, device=device)[..., 8:-8].transpose(1, 2)
    kv = randn(2, 2, 2, 160, size, dtype=dtype, device=device)
    k, v = kv[:, 0], kv[:, 1]
    dout = randn(2, 150, 4, 2 * size, dtype=dtype, device=device)[..., :size].transpose(1, 2)
    dlogsumexp = randn(2, 4, 150, dtype=torch.float32, device=device)
    check_with_logsumexp(q, k, v, dout, dlogsumexp, causal=True, offset=3)


@with_dtypes(torch.float32, torch.bfloat16, torch.float16)
@pytest.mark.parametrize(("size", "few"), [((40, 385, 4, 128), 6), ((1025, 2, 64, 8), 2)], ids=str)
def test_sequences_are_independent_in_large_batches(size, few, dtype, device):
    """One batch has more tiles than the GPU has SMs. The other has 1025 * 64 heads, more than 65535, the largest y
    dimension of a CUDA grid.
    """
    qkv, dout = packed_inputs(size, dtype, device)

    def results(qkv, dout):
        return packed(qkv, size[2]), *gradients(lambda x: packed(x, size[2]), (qkv,), dout)

    whole = results(qkv, dout)
    for part in (slice(0, few), slice(size[0] - few, size[0])):
        assert_equal(results(qkv[part], dout[part]), [t[part] for t in whole])


# ---- many heads ------------------------------------------------------------------------------------------------------


def many_heads(device):
    """Return the number of the GPU's SMs, or 3 on a CPU.

    If the number of heads (B * NH) is a multiple of this, attention/sm90/backward_one_pass.cu computes the backward in
    16 bits. It supports heads of up to 64 channels and 1024 queries, but no masks, dropout or grouped heads.
    """
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


# (B, NH, KH, Tq, Tk, HS, causal, offset): an H200 has several tiles for each SM, and the last tile of a head is not
# full.
RAGGED = [
    (5, 12, 12, 700, 700, 64, False, 0), (16, 12, 12, 560, 560, 64, True, 0), (16, 6, 6, 700, 700, 64, True, 0),
    (7, 25, 25, 700, 700, 64, True, 0), (8, 25, 25, 853, 502, 64, False, 0), (40, 12, 12, 257, 1030, 40, False, 0),
    (33, 8, 2, 321, 321, 128, True, 0), (12, 12, 12, 961, 961, 72, False, 0), (9, 16, 16, 577, 900, 64, True, 323),
]  # fmt: skip


@low_dtypes
@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_tiles_that_are_not_full_on_every_sm(shape, dtype, device):
    one_kernel_on_a_cpu(device, dtype == torch.float16)
    b, heads, key_heads, *sizes, causal, offset = shape
    if device.type == "cpu":
        b, heads = 1, heads // key_heads
        key_heads = 1
    check(*tensors(b, heads, key_heads, *sizes, dtype, device), causal=causal, offset=offset)


# (Tq, Tk, HS, causal, offset)
MANY_HEADS = [
    (1, 1, 64, True, 0), (2, 1, 8, True, 0), (3, 200, 64, True, 7), (64, 64, 40, True, 0), (65, 65, 64, True, 0),
    (128, 128, 64, True, 0), (130, 130, 16, True, 0), (300, 300, 64, True, 0), (127, 200, 64, True, 73),
    (200, 127, 64, True, 0), (70, 300, 64, True, 2**29), (100, 400, 32, True, 129), (1, 70, 64, False, 0),
    (64, 128, 64, False, 0), (200, 77, 56, False, 0), (333, 400, 64, False, 0), (1024, 1024, 64, True, 0),
    (1000, 900, 64, False, 0),
]  # fmt: skip


@low_dtypes
@pytest.mark.parametrize("shape", MANY_HEADS, ids=str)
def test_many_heads(shape, dtype, device):
    rows, columns, size, causal, offset = shape
    heads = many_heads(device)
    batches = 2 if rows < 500 else 1  # with 2 sequences, each thread block computes two heads in turn
    check(*tensors(batches, heads, heads, rows, columns, size, dtype, device), True, causal=causal, offset=offset)


@all_views
def test_many_heads_in_views(view, device):
    choices = {"batch": 2, "tokens": 150, "heads": many_heads(device), "head": 16, "view": view}
    hold_to_the_rule(call_of("attention", torch.bfloat16, device, **choices), view)


def test_many_heads_gradient_of_logsumexp(device):
    heads = many_heads(device)
    inputs = tensors(1, heads, heads, 150, 150, 32, torch.bfloat16, device)
    check_with_logsumexp(*inputs, torch.randn(1, heads, 150, device=device), causal=True)


def test_many_heads_are_independent(device):
    """A head's results do not depend on which head its thread block computed before it.

    Sequences in reverse order give the same bits in reverse order. A NaN in one head's queries changes no bit of other
    heads.
    """
    heads = many_heads(device)
    inputs = tensors(3, heads, heads, 200, 200, 64, torch.bfloat16, device)
    found = all_results(*inputs, causal=True)
    assert_same_bits(lambda: all_results(*inputs, causal=True))
    flipped = all_results(*(t.flip(0) for t in inputs), causal=True)
    with_nan = [t.clone() for t in inputs]
    with_nan[0][0, 1, 50, 3] = math.nan
    others = all_results(*with_nan, causal=True)
    for a, b, c in zip(found, flipped, others, strict=True):
        assert torch.equal(a, b.flip(0))
        assert torch.equal(a[1:], c[1:])
        assert torch.equal(a[0, 2:], c[0, 2:])
        assert c[0, 1].isnan().any()


def test_many_heads_in_a_cuda_graph(device, on_cuda):
    heads = many_heads(device)
    qkv, dout = packed_inputs((1, 300, heads, 64), torch.bfloat16, device)
    out, logsumexp = ops.attention(qkv, heads)
    graph, found = warmed_up_and_captured(lambda: ops.attention_backward(dout, qkv, out, logsumexp, heads))
    for _ in range(3):
        dout.copy_(torch.randn_like(dout))
        graph.replay()
        assert torch.equal(found, ops.attention_backward(dout, qkv, out, logsumexp, heads))


# ---- masks -----------------------------------------------------------------------------------------------------------


def masks(b, heads, rows, columns, device):
    lengths = torch.randint(0, columns + 1, (b,), device=device)
    lengths[0] = 0
    right = (torch.arange(columns, device=device) < lengths.view(-1, 1)).view(b, 1, 1, columns)
    yield right
    yield right.flip(3)  # padding on the left
    yield right & right.new_ones(rows, columns).tril(columns - rows)
    yield torch.rand(b, heads, rows, columns, device=device) < 0.7
    yield torch.rand(columns, device=device) < 0.5
    yield torch.rand(rows, 1, device=device) < 0.5
    yield torch.rand(heads, 1, columns, device=device) < 0.5
    yield (torch.rand(b, 1, columns, rows, device=device) < 0.5).transpose(2, 3)
    yield torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    yield torch.zeros((), dtype=torch.bool, device=device)


@pytest.mark.parametrize("additive", [False, True], ids=["bool", "additive"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@all_dtypes
def test_masks_of_every_shape(causal, additive, dtype, device):
    b, heads, rows, columns = 2, 2, 70, 140
    inputs = tensors(b, heads, heads, rows, columns, 16, dtype, device)
    for mask in masks(b, heads, rows, columns, device):
        if additive:
            bias = randn(*mask.shape, dtype=dtype, device=device)
            mask = bias.masked_fill(~mask, -math.inf)
        check(*inputs, mask=mask, causal=causal, offset=columns - rows if causal else 0)


@all_dtypes
def test_key_begin_and_end(dtype, device):
    """begin may be negative and end may exceed Tk. The six sequences have padding on the left, on the right, on both
    sides, nowhere or everywhere.
    """
    inputs = tensors(6, 2, 1, 70, 140, 32, dtype, device)
    begin = torch.tensor([0, 17, 64, 0, 90, -5], dtype=torch.int32, device=device)
    end = torch.tensor([100, 140, 130, 140, 80, 1000], dtype=torch.int32, device=device)
    for causal in (False, True):
        check(*inputs, begin=begin, end=end, causal=causal, offset=70 if causal else 0)
        check(*inputs, end=end, causal=causal)
        check(*inputs, begin=begin, causal=causal)


@all_dtypes
@pytest.mark.parametrize(("rows", "causal"), [(300, False), (300, True), (5, False)], ids=str)
def test_padding_changes_no_bit(rows, causal, dtype, device):
    q, k, v, dout = tensors(6, 4, 2, rows, 300, 64, dtype, device)
    begin = torch.tensor([0, 130, 0, 64, 250, 299], dtype=torch.int32, device=device)
    end = torch.tensor([300, 300, 17, 201, 240, 300], dtype=torch.int32, device=device)
    bounds = {"begin": begin, "end": end, "causal": causal}
    # begin is at most 280 in this check, because the sequence with begin 299 has a single key: torch's gradients of
    # query and key are exactly 0 for it, which would allow no rounding errors.
    check(q, k, v, dout, **bounds | {"begin": begin.clamp(max=280)})
    hidden = ~visible(q, k, begin=begin, end=end)[:, :2, 0, :, None]
    poisoned = [t.masked_fill(hidden, math.nan) for t in (k, v)]
    for dropout in ((0.0, None, None), (0.3, *numbers(device))):
        found = all_results(q, *poisoned, dout, **bounds, dropout=dropout)
        assert_equal(found, all_results(q, k, v, dout, **bounds, dropout=dropout))
        assert all((t[hidden.expand_as(t)] == 0).all() for t in found[3:])


@all_dtypes
def test_query_of_one_key_has_no_gradient(dtype, device, on_cpu):
    """A query that sees one key has probability 1 for it and gradient 0.

    The backward computes probability * (dprobability - delta). On the CPU the result is exactly 0, because dprobability
    and delta are sums of dout * value over the channels in the same order. CUDA's kernels add the terms in different
    orders.
    """
    q, k, v, dout = tensors(2, 3, 3, 70, 70, 128, dtype, device)
    dq = gradients(out_of(ours, causal=True), (q, k, v), dout)[0]
    assert not dq[:, :, 0].any()
    assert dq[:, :, 1:].any(-1).all()
    alone = gradients(out_of(ours, causal=True, end=torch.ones(2, dtype=torch.int32)), (q, k, v), dout)
    assert not any(t.any() for t in alone[:2])


@pytest.mark.parametrize("scale", [0.125, 1.0])
@with_dtypes(torch.float64, torch.float32)
def test_probability_of_a_dominant_key_is_1(scale, dtype, device, on_cpu):
    """The key with the largest score, 1000 or more, has probability 1 in the forward and the backward.

    A kernel that multiplies score and logsumexp by a rounded log2(e) has an error proportional to the score. The CPU's
    kernels avoid this error. CUDA's kernels multiply logsumexp by log2(e) and round the product.
    """
    v = randn(1, 1, 300, 64, dtype=dtype, device=device)
    q, k = torch.zeros_like(v), torch.zeros_like(v)
    q[..., 0] = torch.arange(300) * 7 + 1000
    k[0, 0, 5, 0] = 8
    out, logsumexp = ours(q, k, v, scale=scale)
    assert torch.equal(out, v[:, :, 5:6].expand_as(v))
    assert torch.equal(logsumexp, q[..., 0] * 8 * scale)
    dv = gradients(out_of(ours, scale=scale), (q, k, v), torch.ones_like(v))[2]
    wanted = k[..., :1].expand_as(dv) / 8 * 300
    torch.testing.assert_close(dv, wanted, rtol=8 * torch.finfo(dtype).eps, atol=0)


@all_dtypes
def test_additive_mask_is_not_rounded_if_scores_are_0(dtype, device, on_cpu):
    """The test runs on the CPU only, because CUDA's kernels round mask * log2(e)."""
    _, k, v, _ = tensors(1, 2, 2, 100, 100, 16, dtype, device)
    mask = randn(1, 2, 100, 100, dtype=dtype, device=device, scale=30)
    exact = mask.double().softmax(-1) @ v.double()
    assert_as_exact_as_torch(ours(torch.zeros_like(k), k, v, mask=mask)[0], mask.softmax(-1) @ v, exact)


@all_dtypes
def test_queries_that_see_no_key(dtype, device):
    q, k, v, dout = tensors(2, 2, 2, 70, 70, 16, dtype, device)
    mask = torch.rand(2, 1, 70, 70, device=device) < 0.9
    mask[:, :, ::3] = False
    for shown in (mask, torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(~mask, -math.inf)):
        out, logsumexp = ours(q, k, v, mask=shown)
        assert (out[:, :, ::3] == 0).all()
        assert (logsumexp[:, :, ::3] == -math.inf).all()
        assert logsumexp[:, :, 1::3].isfinite().all()
        found = gradients(lambda *t, m=shown: ours(*t, mask=m), (q, k, v), (dout, torch.ones_like(logsumexp)))
        assert all(t.isfinite().all() for t in found)
        assert (found[0][:, :, ::3] == 0).all()


# ---- masks of many blocks --------------------------------------------------------------------------------------------
#
# sm_90's kernels divide a mask into blocks of 64 queries and 64 keys. They skip a block that hides all its keys, and do
# not read the mask in a block that hides none.


def block_masks(b, heads, rows, columns, device):
    i, j = (torch.arange(n, device=device) for n in (rows, columns))
    lengths = torch.linspace(max(columns // 3, 1), columns, b, device=device).int().view(b, 1, 1, 1)
    right, left = j < lengths, j >= columns - lengths
    causal = j <= i.view(-1, 1) + columns - rows
    blocks = torch.rand(1, heads, rows // 64 + 1, columns // 64 + 1, device=device) < 0.4
    blocks = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :rows, :columns]
    yield "right", right
    yield "left", left
    yield "causal and right", causal & right
    yield "causal and left", causal & left
    yield "window", causal & (j > i.view(-1, 1) + columns - rows - 70)
    yield "blocks", blocks
    yield "blocks with holes", blocks & (torch.rand(b, 1, rows, columns, device=device) < 0.95)


def added(mask, hidden, dtype):
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, hidden)


def some_key(mask):
    return mask | ~mask.any(-1, keepdim=True)


def one_kernel_on_a_cpu(device, other):
    if device.type == "cpu" and other:
        pytest.skip("on a CPU masks have the same kernel for all head sizes and 16-bit dtypes")


@low_dtypes
@pytest.mark.parametrize(
    ("rows", "size"),
    [(1, 64), (63, 64), (64, 64), (65, 40), (127, 64), (129, 64), (200, 64), (64, 128), (129, 128), (200, 80)],
)
def test_masks_of_blocks(rows, size, dtype, device):
    one_kernel_on_a_cpu(device, rows > 64 and (size > 64 or dtype == torch.float16))
    columns = rows if rows > 1 else 130
    inputs = tensors(2, 4, 2, rows, columns, size, dtype, device)
    for _name, mask in block_masks(2, 4, rows, columns, device):
        check(*inputs, few_keys=True, mask=mask)
        check(*inputs, few_keys=True, mask=added(mask, -math.inf, dtype))
        check(
            *inputs,
            few_keys=True,
            mask=added(some_key(mask), torch.finfo(dtype).min, dtype),
            causal=True,
            offset=columns - rows,
        )


@low_dtypes
@pytest.mark.parametrize(("rows", "size"), [(1000, 64), (1024, 128)])
def test_masks_of_many_blocks(rows, size, dtype, device):
    one_kernel_on_a_cpu(device, size > 64 or dtype == torch.float16)
    batches = 1 if device.type == "cpu" else 2  # the CPU takes seconds for one sequence
    inputs = tensors(batches, 2, 1, rows, rows, size, dtype, device)
    for name, mask in block_masks(batches, 2, rows, rows, device):
        if name in ("causal and left", "blocks with holes"):
            check(*inputs, few_keys=True, mask=mask)
        if name in ("left", "window", "blocks with holes"):
            check(*inputs, few_keys=True, mask=added(some_key(mask), torch.finfo(dtype).min, dtype))


@low_dtypes
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("half", [0, 64])
def test_masks_that_hide_most_of_half_a_tile(half, size, dtype, device):
    """64 of each 128 queries see only one to three blocks of 64 keys. In the transposed mask, 64 of each 128 keys are
    seen by only one to three blocks of 64 queries.
    """
    one_kernel_on_a_cpu(device, size > 64 or dtype == torch.float16)
    rows = 1024
    heads = (1, 1) if device.type == "cpu" else (4, 2)  # the CPU takes a second for one head
    inputs = tensors(1, *heads, rows, rows, size, dtype, device)
    position = torch.arange(rows, device=device)
    little = position % 128 // 64 * 64 == half
    for shown in ((0, 14, 15), (0, 7, 15), (8, 9), (3,)):
        far = torch.isin(position // 64, torch.tensor(shown, device=device))
        mask = ~little.view(-1, 1) | far
        check(*inputs, few_keys=True, mask=mask.view(1, 1, rows, rows))
        check(*inputs, few_keys=True, mask=mask.T.reshape(1, 1, rows, rows))


@low_dtypes
def test_block_masks_of_more_or_fewer_keys_than_queries(dtype, device):
    for rows, columns, size in ((300, 70, 40), (70, 300, 64), (20, 700, 64), (257, 129, 120)):
        inputs = tensors(2, 2, 2, rows, columns, size, dtype, device)
        for _name, mask in block_masks(2, 2, rows, columns, device):
            check(*inputs, few_keys=True, mask=mask)
            check(*inputs, few_keys=True, mask=mask, causal=True, offset=10)


@low_dtypes
@pytest.mark.parametrize("size", [64, 96])
def test_masks_with_values(size, dtype, device):
    """The masks' values differ by position, head or element. Some masks also hide whole blocks of 64 queries and 64
    keys, and parts of other blocks.
    """
    one_kernel_on_a_cpu(device, size > 64 or dtype == torch.float16)
    rows = 300
    inputs = tensors(2, 4, 2, rows, rows, size, dtype, device)
    i, j = torch.arange(rows, device=device).view(-1, 1), torch.arange(rows, device=device)
    slopes = 2.0 ** -torch.arange(1, 5, device=device).view(4, 1, 1)
    alibi = (-slopes * (i - j).abs()).to(dtype)
    *_, (_, holes) = block_masks(2, 4, rows, rows, device)
    low = -6e4 if dtype == torch.float16 else -1e30
    for mask in (
        alibi,
        alibi.masked_fill(j > i, -math.inf),
        randn(2, 4, rows, rows, dtype=dtype, device=device).masked_fill(~some_key(holes), torch.finfo(dtype).min),
        randn(rows, dtype=dtype, device=device),
        added(some_key(holes), low, dtype),
        randn(rows, 1, dtype=dtype, device=device),
    ):
        check(*inputs, few_keys=True, mask=mask)
    check(*inputs, few_keys=True, mask=alibi, causal=True)


@low_dtypes
@pytest.mark.parametrize("deviation", [3, 10, 30])
@pytest.mark.parametrize(("rows", "size"), [(193, 64), (321, 40), (1000, 64), (193, 128)])
def test_additive_masks_of_large_deviation(rows, size, deviation, dtype, device):
    """A tile's rows beyond the last query have no logsumexp to subtract, so that exp(score + mask) could overflow."""
    one_kernel_on_a_cpu(device, size > 64 or dtype == torch.float16 or deviation < 30)
    mask = randn(rows, rows, dtype=dtype, device=device, scale=deviation)
    heads = (1, 2, 1) if device.type == "cpu" else (2, 4, 2)
    check(*tensors(*heads, rows, rows, size, dtype, device), few_keys=True, mask=mask)


@low_dtypes
def test_masks_of_any_strides(dtype, device):
    rows = 200
    inputs = tensors(2, 2, 2, rows, rows, 64, dtype, device)
    wide = torch.rand(2, 2, rows + 3, rows + 5, device=device) < 0.7
    wide[:, :, :, 67:133] = False
    values = randn(2, 2, rows + 3, rows + 5, dtype=dtype, device=device).masked_fill(~wide, -math.inf)
    for whole in (wide, values):
        for mask in (
            whole[:, :, :rows, 1 : rows + 1],  # misaligned rows
            whole[:, :, 1 : rows + 1, :rows].mT,
            whole[:1, :, 3:, 5:].expand(2, 2, rows, rows),
            whole[:, :1, :1, :rows].expand(2, 2, rows, rows),
            whole[:, :, :rows, 2:3].expand(2, 2, rows, rows),
            whole.reshape(-1)[7 : 7 + 4 * rows * rows].view(2, 2, rows, rows),
        ):
            check(*inputs, few_keys=True, mask=mask)
            check(*inputs, few_keys=True, mask=mask, causal=True)


@low_dtypes
def test_nan_and_infinity_in_a_mask_stay_in_their_row(dtype, device):
    rows = 150
    q, k, v, _ = tensors(1, 2, 2, rows, rows, 64, dtype, device)
    mask = torch.zeros(rows, rows, dtype=dtype, device=device)
    mask[3, 7] = mask[100, 149] = math.nan
    mask[5, 80] = math.inf
    mask[70] = torch.finfo(dtype).min
    mask[70, 3] = math.nan
    out = ours(q, k, v, mask=mask)[0]
    bad = torch.tensor([3, 5, 70, 100], device=device)
    assert out[:, :, bad].isnan().all()
    good = torch.ones(rows, dtype=torch.bool, device=device)
    good[bad] = False
    expected = formula(q.double(), k.double(), v.double(), mask=double(mask))[0]
    torch.testing.assert_close(out[:, :, good].double(), expected[:, :, good], **tolerance(dtype))


def check_lowest(q, k, v, dout, **options):
    exact = formula(*map(double, (q, k, v)), **options)
    out, logsumexp = ours(q, k, v, **options)
    assert_as_exact_as_torch(out, formula(q, k, v, **options)[0], exact[0])
    torch.testing.assert_close(logsumexp.double(), exact[1], rtol=1e-5, atol=1e-2)
    dlogsumexp = randn(*logsumexp.shape, dtype=logsumexp.dtype, device=q.device)
    dlogsumexp = dlogsumexp.masked_fill(exact[1] < torch.finfo(q.dtype).min / 2, 0)
    check_with_logsumexp(q, k, v, dout, dlogsumexp, **options)


@all_dtypes
@pytest.mark.parametrize(("rows", "size"), [(3, 64), (4, 7), (40, 7), (65, 64), (90, 32), (300, 64), (200, 128)])
def test_rows_of_lowest_values(rows, size, dtype, device):
    """A query whose whole row of the mask has the dtype's lowest value sees all keys alike.

    Hugging Face's additive masks have such rows for padding on the left. Adding a score to the lowest value does not
    change it, so the formula returns the mean of all values. (In float16 some bits of the score remain.) The logsumexp
    of these rows is not differentiated: exp(score - logsumexp) should be 1 / Tk, but is 1, because the logsumexp is
    rounded to the lowest value.
    """
    lowest = torch.finfo(dtype).min
    batches = 2 if rows > 64 else 64  # the largest of few errors would depend on chance
    q, k, v, dout = tensors(batches, 4, 2, rows, rows, size, dtype, device)
    seen = dict(block_masks(batches, 4, rows, rows, device))["causal and left"]
    mask = added(seen, lowest, dtype)
    third = torch.arange(rows, device=device).view(-1, 1) % 3 == 1
    some_hidden = mask.masked_fill(third.T, -math.inf)
    whole_rows = mask.new_zeros(rows, 1).masked_fill(third, lowest)
    for of, causal in ((mask, False), (mask, True), (some_hidden, False), (whole_rows, True)):
        check_lowest(q, k, v, dout, causal=causal, mask=of)


def test_rows_of_lowest_values_in_tf32(device):
    rows = 200
    seen = dict(block_masks(8, 4, rows, rows, device))["causal and left"]
    mask = added(seen, torch.finfo(torch.float32).min, torch.float32)
    with tf32(True):
        check_lowest(*tensors(8, 4, 2, rows, rows, 64, torch.float32, device), mask=mask)


@low_dtypes
@pytest.mark.parametrize("form", ["lowest", "-inf", "lowest beside values"])
@pytest.mark.parametrize(
    ("rows", "columns", "key_heads", "size"),
    [(300, 300, 2, 64), (100, 328, 1, 64), (330, 200, 4, 40), (257, 257, 2, 128)],
)
def test_additive_masks_of_padding_on_the_left(rows, columns, key_heads, size, form, dtype, device):
    """The padding is a part of a block of 64 keys, whole blocks, or all keys. A query in the padding sees no key, or
    only keys for which the mask has the dtype's lowest value.
    """
    one_kernel_on_a_cpu(device, size > 64 and dtype == torch.float16)
    begin = torch.tensor([0, 1, 37, 64, 100, 128, columns - 1, columns], device=device)
    heads = max(key_heads, 2) if device.type == "cpu" else 4  # the CPU's kernel computes one head at a time
    inputs = tensors(len(begin), heads, key_heads, rows, columns, size, dtype, device)
    i, j = torch.arange(rows, device=device).view(-1, 1), torch.arange(columns, device=device)
    seen = (j <= i + columns - rows) & (j >= begin.view(-1, 1, 1, 1))
    if form == "-inf":
        check(*inputs, few_keys=True, mask=added(seen, -math.inf, dtype))
        return
    mask = added(seen, torch.finfo(dtype).min, dtype)
    if form == "lowest beside values":
        mask = torch.where(seen, randn(1, heads, rows, columns, dtype=dtype, device=device), mask)
    check_lowest(*inputs, mask=mask)


@low_dtypes
@pytest.mark.parametrize("form", ["bool", "-inf", "lowest"])
@pytest.mark.parametrize("size", [64, 128])
def test_masks_and_dropout(size, form, dtype, device):
    one_kernel_on_a_cpu(device, size > 64 or dtype == torch.float16)
    rows, dropout = 200, (0.3, *numbers(device))
    inputs = tensors(2, 4, 2, rows, rows, size, dtype, device)
    for name, mask in block_masks(2, 4, rows, rows, device):
        if form != "bool":
            hidden = -math.inf if form == "-inf" else torch.finfo(dtype).min
            lowest_alone = name == "causal and left"
            mask = added(some_key(mask) if form == "lowest" and not lowest_alone else mask, hidden, dtype)
        check_dropped(*inputs, dropout, mask=mask)


@low_dtypes
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("form", ["bool", "lowest"])
def test_masked_sequences_are_independent(form, size, dtype, device):
    """A sequence in a batch with more tiles than the GPU has SMs has the same bits as in a smaller batch."""
    one_kernel_on_a_cpu(device, size > 64 or dtype == torch.float16)
    inputs = tensors(20, 4, 2, 300, 300, size, dtype, device)
    mask = torch.rand(20, 1, 300, 300, device=device) < 0.5
    mask[:, :, 64:128, 64:192] = False
    mask[:, :, 128:192] = True
    if form == "lowest":
        position = torch.arange(300, device=device)
        begin = torch.arange(20, device=device).view(-1, 1, 1, 1) * 15
        mask = added((position <= position.view(-1, 1)) & (position >= begin), torch.finfo(dtype).min, dtype)

    def run(part):
        return all_results(*(t[part] for t in inputs), mask=mask[part])

    everything = run(slice(0, 20))
    for part in (slice(0, 20), slice(3, 17)):
        assert_equal(run(part), [t[part] for t in everything])


@all_dtypes
@pytest.mark.parametrize(
    "shape", [(2, 4, 2, 5, 0, 16), (0, 4, 2, 5, 5, 8), (2, 0, 0, 5, 5, 8), (2, 4, 2, 0, 5, 8), (2, 4, 2, 0, 0, 8)]
)
def test_no_keys_or_no_queries(shape, dtype, device):
    q, k, v, dout = tensors(*shape, dtype, device)
    out, logsumexp, *found = all_results(q, k, v, dout)
    assert logsumexp.shape == q.shape[:3]
    assert (logsumexp == -math.inf).all()
    assert_equal([out, *found], [torch.zeros_like(t) for t in (q, q, k, v)])


@all_dtypes
def test_logsumexp_is_differentiable(dtype, device):
    q, k, v, dout = tensors(2, 4, 2, 70, 90, 16, dtype, device)
    dlogsumexp = torch.randn(2, 4, 70, device=device, dtype=wide(dtype))
    options = {"causal": True, "offset": 20}
    check_with_logsumexp(q, k, v, dout, dlogsumexp, **options)
    alone = gradients(lambda *t: ours(*t, **options)[1], (q, k, v), dlogsumexp)
    assert_equal(alone, gradients(partial(ours, **options), (q, k, v), (torch.zeros_like(dout), dlogsumexp)))
    assert (alone[2] == 0).all()


@pytest.mark.parametrize("shape", [(1, 2, 5, 7), (2, 1, 5, 7), (2, 3, 1, 70), (3, 2, 70, 1)], ids=str)
@two_dtypes
def test_strides_of_dimensions_of_size_1_have_no_effect(shape, dtype, device):
    b, heads, rows, columns = shape
    given = tensors(b, heads, heads, rows, columns, 64, dtype, device)

    def odd(t):
        strides = [7 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)]
        return t.as_strided(t.shape, strides)

    assert_equal(all_results(*map(odd, given)), all_results(*given))


@two_dtypes
def test_layouts_of_results(dtype, device):
    """out has the memory layout (B, T, NH, HS), so that a model reshapes it to (B, T, C) without a copy.

    Gradients have the strides of query, key and value, or the layout (B, T, NH, HS) if these are slices of a packed
    tensor.
    """
    b, heads, rows, size = 2, 3, 70, 16
    for transposed in (False, True):
        shape = (b, rows, heads, size) if transposed else (b, heads, rows, size)
        q, k, v = (randn(*shape, dtype=dtype, device=device) for _ in range(3))
        if transposed:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = ours(q, k, v, causal=True)[0]
        assert out.transpose(1, 2).is_contiguous()
        for gradient in gradients(out_of(ours, causal=True), (q, k, v), out):
            assert gradient.stride() == q.stride()
    qkv = randn(b, rows, 3 * heads * size, dtype=dtype, device=device)
    for gradient in gradients(out_of(ours, causal=True), unpack(qkv, heads), out):
        assert gradient.transpose(1, 2).is_contiguous()


# ---- numbers ---------------------------------------------------------------------------------------------------------


@all_dtypes
def test_large_scores(dtype, device):
    q, k, v, dout = tensors(2, 2, 2, 70, 70, 16, dtype, device)
    check(q * 8, k, v, dout, causal=True)


@both_ops
def test_unscaled_scores_may_exceed_float16(op, device):
    qkv = torch.full((1, 4, 3 * 64), 40.0, dtype=torch.float16, device=device)
    qkv[..., 128:] = torch.arange(4.0, device=device).view(1, 4, 1)
    expected = qkv[..., 128:].float().cumsum(1) / torch.arange(1.0, 5.0, device=device).view(1, 4, 1)
    torch.testing.assert_close(op(qkv, 1)[0].float(), expected, **tolerance(torch.float16))


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 66])
def test_backward_computes_the_forwards_scores(tokens, device):
    """Summed in another order, the scores (about 90 to 110) would differ by several ulps from those in logsumexp. All
    keys are equal, so that query n sees n keys with probability 1 / n, except for the rounding error of its logsumexp.
    """
    dtype = torch.float32
    eps = torch.finfo(dtype).eps
    n = torch.arange(1, tokens + 1, dtype=torch.float64, device=device)
    probabilities = (1 / n)[:, None].expand(tokens, tokens).tril()
    for value in torch.linspace(3, 3.3, 7).tolist():
        q = torch.full((2, 3, tokens, 80), value, dtype=dtype, device=device)
        dout = randn(2, 3, tokens, 80, dtype=dtype, device=device)
        dvalue = gradients(out_of(ours, scale=0.125, causal=True), (q, q, q), dout)[2]
        logsumexp = 0.125 * 80 * double(q[0, 0, 0, 0]) ** 2 + math.log(tokens)
        allowed = (logsumexp / 2 + 8) * eps * (probabilities.mT @ double(dout).abs())
        assert ((double(dvalue) - probabilities.mT @ double(dout)).abs() <= allowed).all()


@pytest.mark.parametrize("size", [160, 256])
def test_wide_float32_heads_with_large_scores(size, device):
    """A score is a sum of many large terms. Its absolute rounding error is a relative error of the probability."""
    check(*tensors(4, 4, 4, 150, 200, size, torch.float32, device), few_keys=True, causal=True, offset=1, scale=1.0)


@all_dtypes
def test_one_key(dtype, device):
    """A single key has probability 1 whatever its score is, so that the score's gradient is 0."""
    q, k, v, dout = tensors(2, 3, 3, 1, 1, 64, dtype, device)
    q = q * 4
    out, found = ours(q, k, v)[0], gradients(out_of(ours), (q, k, v), dout)
    assert not any(t.any() for t in found[:2])
    torch.testing.assert_close(out, v, rtol=0 if device.type == "cpu" else 2 * torch.finfo(dtype).eps, atol=0)
    torch.testing.assert_close(found[2], dout, rtol=16 * torch.finfo(dtype).eps, atol=0)


@all_dtypes
def test_huge_scores(dtype, device):
    size = 64
    q = torch.zeros(1, 1, 3, size, dtype=dtype, device=device)
    k = torch.zeros(1, 1, 130, size, dtype=dtype, device=device)
    v = randn(1, 1, 130, size, dtype=dtype, device=device)
    q[..., 0] = torch.tensor([200.0, -200.0, 200.0], dtype=dtype)
    k[..., 0] = torch.linspace(-200, 200, 130).to(dtype)
    out, logsumexp = ours(q, k, v, scale=1.0)
    torch.testing.assert_close(out[0, 0], v[0, 0, [129, 0, 129]], rtol=2 * torch.finfo(dtype).eps, atol=0)
    torch.testing.assert_close(logsumexp.double(), torch.full((1, 1, 3), 40000.0, device=device).double())


@pytest.mark.parametrize("factor", [3, 50])
@pytest.mark.parametrize("sizes", [(27, 5, 79, 40), (45, 2, 550, 64), (5, 2, 300, 128), (3, 2, 200, 160)], ids=str)
@low_dtypes
def test_queries_with_one_dominant_key(sizes, factor, dtype, device):
    """If one key has nearly all of a query's weight, out is this key's value, and the query's gradient is nearly 0.

    Query, key and value of the last quarter of the tokens are multiplied by ``factor``. The dominant probability must
    not have a rounding error of the 16-bit dtype: torch's kernels compute it relative to the largest score, so that it
    is 1 before the division by the sum.
    """
    b, heads, tokens, size = sizes
    if device.type == "cpu":
        b = min(b, 5)  # the CPU takes seconds for many sequences, which have the same kernel
    inputs = tensors(b, heads, heads, tokens, tokens, size, dtype, device)
    for t in inputs[:3]:
        t[:, :, tokens * 3 // 4 :] *= factor
    check_norms(*inputs, causal=True, scale=1.0)


@pytest.mark.parametrize("size", [8, 32, 64, 100, 160])
@with_dtypes(torch.float32)
def test_float32_queries_with_one_dominant_key(size, dtype, device):
    """In g v' - delta, numbers cancel that are up to 1e5 times as large as the gradient of the scores.

    The key, the value and dout of the last 8 tokens are multiplied by 32. The rows of dout are not aligned.
    """
    q, k, v, dout = tensors(4, 3, 3, 515, 515, size, dtype, device)
    for t in (k, v, dout):
        t[:, :, -8:] *= 32
    check_norms(q, k, v, as_view(dout, "misaligned"), causal=True, scale=1.0)


@pytest.mark.parametrize("size", [8, 64, 128])
@with_dtypes(torch.float32, torch.bfloat16, torch.float16)
def test_strides_of_dout_change_no_bit(size, dtype, device):
    """On CUDA, rows of dout that are not aligned would select other kernels, which round scores differently."""
    *qkv, dout = tensors(2, 3, 3, 200, 200, size, dtype, device)
    wide = torch.empty(*dout.shape[:3], size + 3, dtype=dtype, device=device)
    expected = gradients(out_of(ours, causal=True), qkv, dout)
    for view in (wide[..., 1:-2].copy_(dout), as_view(dout, "misaligned")):
        assert all(map(torch.equal, gradients(out_of(ours, causal=True), qkv, view), expected))
    row = dout[:1, :, :1].expand_as(dout)
    views = row, row.contiguous()
    found, expected = (gradients(out_of(ours, causal=True), qkv, view) for view in views)
    assert all(map(torch.equal, found, expected))

    packed = torch.cat([t.transpose(1, 2).flatten(2) for t in qkv], -1)
    dout = dout.transpose(1, 2).flatten(2)
    views = as_view(dout, "misaligned"), dout
    found, expected = (gradients(lambda qkv: ops.attention(qkv, 3)[0], [packed], view) for view in views)
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("size", [64, 128])
@with_dtypes(torch.float32)
def test_many_equal_scores(size, dtype, device):
    """All keys are 0. The rounding errors of a sum of equal probabilities do not average out."""
    q, k, v, dout = tensors(2, 3, 3, 1241, 1241, size, dtype, device)
    check_norms(q * 10, k * 0, v, dout)


@pytest.mark.parametrize("keys", [50, 130, 700])
@pytest.mark.parametrize("size", [64, 128, 160])
@all_dtypes
def test_scores_beyond_the_whole_numbers_of_float32(size, keys, dtype, device):
    large = 6e4 if dtype == torch.float16 else 1e12
    q = torch.zeros(1, 2, 5, size, dtype=dtype, device=device)
    k = torch.zeros(1, 2, keys, size, dtype=dtype, device=device)
    v = randn(1, 2, keys, size, dtype=dtype, device=device)
    q[..., 0] = torch.tensor([large, -large, large, 0.5 * large, 1.0])
    k[..., 0] = torch.linspace(-large, large, keys)
    largest = [keys - 1, 0, keys - 1, keys - 1, keys - 1]
    for scale in (1.0, 0.7, 1 / 3):
        out, logsumexp = ours(q, k, v, scale=scale)
        torch.testing.assert_close(out, v[:, :, largest], rtol=2 * torch.finfo(dtype).eps, atol=0)
        exact = (q[..., 0].double() * k[:, :, largest, 0].double() * scale).to(logsumexp.dtype)
        torch.testing.assert_close(logsumexp, exact, rtol=1e-6, atol=0)


@two_dtypes
def test_nan_and_infinity_in_a_query_stay_in_their_row(dtype, device):
    q, k, v, _ = tensors(1, 1, 1, 70, 70, 16, dtype, device)
    expected = ours(q, k, v)[0]
    q[0, 0, 5, 3] = math.nan
    q[0, 0, 66] = math.inf
    out = ours(q, k, v)[0]
    assert out[0, 0, [5, 66]].isnan().all()
    rest = [i for i in range(70) if i not in (5, 66)]
    assert torch.equal(out[0, 0, rest], expected[0, 0, rest])


# Head sizes for which kernels are compiled, and head sizes that kernels pad to the next compiled size.
@pytest.mark.parametrize("size", [8, 24, 32, 40, 72, 80, 96, 128, 136, 160, 256])
@low_dtypes
def test_every_head_size_with_all_options(size, dtype, device):
    """Each call has grouped heads, an offset, bounds, dropout and a gradient of logsumexp. Two also have masks."""
    q, k, v, dout = tensors(2, 4, 2, 77, 150, size, dtype, device)
    bool_mask = torch.rand(2, 1, 77, 150, device=device) < 0.8
    additive = randn(4, 77, 150, dtype=dtype, device=device).masked_fill(bool_mask[0] & bool_mask[1], -math.inf)
    bounds = [torch.tensor(n, dtype=torch.int32, device=device) for n in ([0, 19], [131, 150])]
    dropout = (0.25, *numbers(device))
    keep = ops.attention_dropout_mask(2, 4, 77, 150, *dropout)
    dlogsumexp = randn(2, 4, 77, dtype=torch.float32, device=device)
    for mask in (None, bool_mask, additive):
        options = {"causal": True, "offset": 73, "begin": bounds[0], "end": bounds[1], "mask": mask}
        sees = visible(q, k, **options).any(-1)

        def exact(*t, o=options, s=sees):
            out, logsumexp = formula(*t, **o, keep=keep, p=dropout[0])
            return out, torch.where(s, logsumexp, 0).float()

        out, logsumexp = ours(q, k, v, **options, dropout=dropout)
        expected = exact(*map(double, (q, k, v)))
        assert_as_exact_as_torch(out, exact(q, k, v)[0], expected[0])
        assert (logsumexp[~sees] == -math.inf).all()
        torch.testing.assert_close(logsumexp[sees], expected[1][sees])
        check_gradients(lambda *t, o=options: ours(*t, **o, dropout=dropout), exact, (q, k, v), (dout, dlogsumexp))


@two_dtypes
def test_tiles_of_queries_of_several_heads(dtype, device):
    """A tile of few queries, as in decoding, contains the queries of several heads, which have different masks."""
    for heads, key_heads, rows, columns, size in [(8, 1, 16, 700, 64), (6, 2, 5, 1030, 40), (2, 2, 3, 300, 128)]:
        q, k, v, _ = tensors(2, heads, key_heads, rows, columns, size, dtype, device)
        mask = torch.rand(2, heads, rows, columns, device=device) < 0.6
        begin, end = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([200, 0], [columns, columns // 2]))
        chunk = {"causal": True, "offset": columns - rows}
        for options in ({}, chunk, {**chunk, "begin": begin, "end": end}, {"mask": mask}):
            out, logsumexp = ours(q, k, v, **options)
            exact = formula(*map(double, (q, k, v)), **options)
            assert_as_exact_as_torch(out, torchs(q, k, v, **options), exact[0])
            assert_as_exact_as_torch(logsumexp, exact[1].to(logsumexp.dtype), exact[1], "logsumexp")


@pytest.mark.parametrize("size", [8, 32, 40, 64, 80, 128, 160])
def test_tf32_is_used_only_if_torch_allows_it(size, device):
    """Our errors are compared with torch's, which are larger if torch allows TF32."""
    # The largest errors of small tensors would depend on chance.
    q, k, v, dout = tensors(8, 4, 2, 150, 200, size, torch.float32, device)
    few = q[:, :, :5]
    exact = out_of(formula, causal=True, offset=50)
    for allowed in (False, True):
        with tf32(allowed):
            functions = out_of(ours, causal=True, offset=50), exact, exact
            assert_as_exact_with_gradients(*functions, (q, k, v), dout, QKV)
            # torch may use float32 for a matmul with few rows, so all rows are computed.
            in_torch = formula(q, k, v)[0][:, :, : few.shape[2]]
            exact_few = formula(*map(double, (few, k, v)))[0]
            assert_as_exact_as_torch(ours(few, k, v)[0], in_torch, exact_few, "out of few queries")


@all_dtypes
@pytest.mark.parametrize("sizes", [(2, 6, 3, 130, 130, 16), (1, 1, 1, 700, 700, 64), (3, 2, 2, 5, 300, 33)], ids=str)
def test_deterministic_with_dropout(sizes, dtype, device):
    q, k, v, dout = tensors(*sizes, dtype, device)
    options = None, 0.2, True, None, 0, None, None, *numbers(device)
    out, logsumexp = ops.scaled_dot_product_attention(q, k, v, *options)
    saved = dout, logsumexp, q, k, v, out, logsumexp
    assert_same_bits(lambda: ops.scaled_dot_product_attention(q, k, v, *options))
    assert_same_bits(lambda: ops.scaled_dot_product_attention_backward(*saved, *options))


BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@with_dtypes(torch.float32, torch.bfloat16, torch.float16)
def test_as_exact_as_each_of_torchs_backends(backend, dtype, device):
    q, k, v, dout = tensors(2, 3, 3, 257, 257, 64, dtype, device)

    def backends(*t):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*t, is_causal=True)

    try:
        gradients(backends, (q, k, v), dout)
    except RuntimeError as error:
        pytest.skip(f"the backend does not support this call: {str(error).splitlines()[0]}")
    functions = out_of(ours, causal=True), backends, out_of(formula, causal=True)
    assert_as_exact_with_gradients(*functions, (q, k, v), dout, QKV)


# ---- dropout ---------------------------------------------------------------------------------------------------------


def dropout_bits(seed, offset, head, i, j):
    counter = (j // 16 * 4 + j % 8 // 2, i // 16 * 8 + i % 8, head, offset & 0xFFFFFFFF)
    words = philox((seed ^ (offset >> 32 << 32)) & (2**64 - 1), counter)
    slot = i // 8 % 2 * 4 + j // 8 % 2 * 2 + j % 2
    return words[slot // 2] >> (16 * (slot % 2)) & 0xFFFF


def test_philox_gives_the_known_answers_of_random123():
    assert philox(0, (0, 0, 0, 0)) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert philox(2**64 - 1, [2**32 - 1] * 4) == [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999, 1.0])
def test_dropout_mask_is_philoxs(p, device):
    for seed, offset in ((0, 0), (2**63 - 1, 2**40 + 3), (-5, -1)):
        mask = ops.attention_dropout_mask(2, 3, 37, 43, p, *numbers(device, seed, offset))
        assert mask.dtype == torch.bool
        expected = [
            [[dropout_bits(seed, offset, head, i, j) for j in range(43)] for i in range(37)] for head in range(6)
        ]
        assert torch.equal(mask.cpu().view(6, 37, 43), torch.tensor(expected) >= round(p * 65536))


def test_dropout_mask_does_not_depend_on_sizes(device):
    """An element's Philox counter contains only the head's number b * NH + h, the query, the key and the offset."""
    large = ops.attention_dropout_mask(1, 4, 300, 400, 0.3, *numbers(device))
    for heads, rows, columns in ((4, 64, 64), (2, 1, 400), (3, 129, 17)):
        small = ops.attention_dropout_mask(1, heads, rows, columns, 0.3, *numbers(device))
        assert torch.equal(small, large[:, :heads, :rows, :columns])
    assert torch.equal(ops.attention_dropout_mask(2, 2, 300, 400, 0.3, *numbers(device)).view(large.shape), large)


@all_dtypes
def test_dropout_of_parts(dtype, device):
    """A part of the heads and queries, with the keys that it sees, drops what it drops in the whole."""
    drawn = (0.4, *numbers(device))
    q, k, v, dout = tensors(2, 6, 3, 150, 150, 64, dtype, device)
    mask = ops.attention_dropout_mask(2, 6, 150, 150, *drawn)
    out, logsumexp, *expected = all_results(q, k, v, dout, causal=True, dropout=drawn)
    close = partial(torch.testing.assert_close, **tolerance(dtype))
    for head, heads in ((0, 4), (4, 2)):
        shared = slice(None), slice(head // 2, (head + heads) // 2)
        sums = [torch.zeros_like(k[shared], dtype=torch.float64) for _ in range(2)]
        for query, queries in ((0, 64), (64, 16), (80, 70)):
            part = slice(None), slice(head, head + heads), slice(query, query + queries)
            place = head, 6, query
            assert torch.equal(ops.attention_dropout_mask(2, heads, queries, 150, *drawn, *place), mask[part])
            inputs = q[part], k[shared], v[shared], dout[part]
            found = all_results(*inputs, causal=True, offset=query, dropout=(*drawn, *place))
            # A query's sums are rounded differently in another tile. On the CPU, the first 64 queries are one tile.
            same = assert_equal if device.type == "cpu" and query == 0 else close
            same(found[:3], [out[part], logsumexp[part], expected[0][part]])
            sums = [sum + gradient.double() for sum, gradient in zip(sums, found[3:], strict=True)]
        close([sum.to(dtype) for sum in sums], [gradient[shared] for gradient in expected[1:]])


def test_dropout_of_parts_of_packed_heads(device):
    drawn = (0.4, *numbers(device))
    qkv, dout = (randn(2, 70, width, dtype=torch.float32, device=device) for width in (3 * 4 * 32, 4 * 32))
    whole = packed(qkv, 4, None, *drawn), *gradients(lambda t: packed(t, 4, None, *drawn), (qkv,), dout)
    out, dqkv = whole[0].unflatten(2, (4, 32)), whole[1].unflatten(2, (3, 4, 32))
    same = assert_equal if device.type == "cpu" else partial(torch.testing.assert_close, **tolerance(qkv.dtype))
    for head, heads in ((0, 1), (1, 3)):
        part = slice(head, head + heads)
        own = qkv.unflatten(2, (3, 4, 32))[:, :, :, part].flatten(2)
        own_dout = dout.unflatten(2, (4, 32))[:, :, part].flatten(2)

        def function(t, heads=heads, head=head):
            return packed(t, heads, None, *drawn, head, 4)

        found = function(own), *gradients(function, (own,), own_dout)
        same(list(found), [out[:, :, part].flatten(2), dqkv[:, :, :, part].flatten(2)])


def test_second_derivatives_of_a_part(device):
    q, k, v, _ = tensors(2, 2, 1, 3, 20, 4, torch.float64, device)
    options = {"causal": True, "offset": 17, "dropout": (0.5, *numbers(device), 1, 4, 16)}
    inputs = [t.requires_grad_() for t in (q, k, v)]
    torch.autograd.gradcheck(out_of(ours, **options), inputs, check_forward_ad=True)
    torch.autograd.gradgradcheck(out_of(ours, **options), inputs)
    qkv = randn(2, 5, 24, dtype=torch.float64, device=device, requires_grad=True)
    torch.autograd.gradgradcheck(lambda t: packed(t, 2, None, 0.5, *numbers(device), 1, 4), (qkv,))


def test_dropout_is_uniform_and_independent(device):
    """Compared elements are up to 64 rows or columns apart, or of different heads, sequences, seeds or offsets."""

    def bins(seed, offset):
        masks = [ops.attention_dropout_mask(2, 3, 400, 500, i / 16, *numbers(device, seed, offset)) for i in range(16)]
        return sum(mask.long() for mask in masks) - 1

    first = bins(1, 2)
    pairs = {f"{step} rows": (first[..., step:, :], first[..., :-step, :]) for step in (1, 8, 16, 64)}
    pairs |= {f"{step} columns": (first[..., step:], first[..., :-step]) for step in (1, 2, 8, 16, 64)}
    pairs |= {"heads": (first[:, 1:], first[:, :-1]), "batches": (first[1:], first[:-1])}
    pairs |= {"seeds": (first, bins(2, 2)), "offsets": (first, bins(1, 3)), "high": (first, bins(1, 2 + 2**32))}
    assert_uniform(first, pairs)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@all_dtypes
def test_dropout_matches_its_mask(p, dtype, device):
    dropout = (p, *numbers(device))
    for sizes, options in [
        ((2, 4, 2, 70, 150, 16), {}),
        ((1, 2, 2, 200, 200, 64), {"causal": True}),
        ((4, 2, 2, 65, 140, 33), {"begin": torch.tensor([37, 0, 20, 5], dtype=torch.int32, device=device),
                                  "causal": True, "offset": 75}),
        ((2, 4, 2, 150, 270, 64), {"causal": True, "offset": 120}),  # 150 and 270 are no multiples of 64 or 128
        ((1, 2, 1, 333, 130, 40), {}),
        ((1, 2, 1, 140, 200, 128), {"causal": True, "offset": 60}),
        ((1, 2, 2, 130, 70, 96), {}),
    ]:  # fmt: skip
        q, k, v, dout = tensors(*sizes, dtype, device)
        check_dropped(q, k, v, dout, dropout, **options)
        # Dropout does not change logsumexp. On CUDA, other kernels may compute a call without dropout, and round
        # differently.
        dropped, plain = ours(q, k, v, **options, dropout=dropout)[1], ours(q, k, v, **options)[1]
        torch.testing.assert_close(dropped, plain, rtol=0 if device.type == "cpu" else 1e-6, atol=0)


@pytest.mark.parametrize("p", [0.3, 2.0**-20])
@all_dtypes
def test_dropout_with_a_gradient_of_logsumexp(dtype, p, device):
    """Dropout applies to the gradient through out, not to the gradient through logsumexp.

    The probability 2^-20 rounds to 0 / 65536, so that no element is dropped.
    """
    q, k, v, dout = tensors(2, 4, 2, 150, 150, 64, dtype, device)
    dlogsumexp = torch.randn(2, 4, 150, device=device, dtype=wide(dtype))
    dropout = (p, *numbers(device))
    keep = ops.attention_dropout_mask(2, 4, 150, 150, *dropout)
    assert keep.all() == (p < 0.3)
    check_gradients(
        lambda *t: ours(*t, causal=True, dropout=dropout),
        lambda *t: formula(*t, causal=True, keep=keep, p=p),
        (q, k, v),
        (dout, dlogsumexp),
    )


@two_dtypes
def test_everything_dropped(dtype, device):
    q, k, v, dout = tensors(1, 2, 2, 70, 70, 16, dtype, device)
    dropout = (1.0, *numbers(device))
    found = ours(q, k, v, dropout=dropout)[0], *gradients(out_of(ours, dropout=dropout), (q, k, v), dout)
    assert not any(t.any() for t in found)


def test_packed_and_separate_functions_draw_the_same_mask(device):
    qkv = packed_inputs((2, 65, 2, 16), torch.float32, device)[0]
    torch.manual_seed(1)
    expected = G.causal_attention(qkv, 2, dropout_p=0.5).unflatten(2, (2, 16)).transpose(1, 2)
    torch.manual_seed(1)
    assert torch.equal(G.scaled_dot_product_attention(*unpack(qkv, 2), None, 0.5, True), expected)


# ---- torch's machinery -----------------------------------------------------------------------------------------------


def gradcheck_options(device):
    bias = randn(1, 2, 1, 5, dtype=torch.float64, device=device)
    bias[..., 2] = -math.inf
    allowed = torch.tensor([[True, False, True, True, False], [False] * 5, [True] * 5], device=device)
    bounds = {name: torch.tensor([n], dtype=torch.int32, device=device) for name, n in (("begin", 1), ("end", 4))}
    return [
        {"causal": True, "offset": 1},
        {"causal": True, "offset": -1},
        {"mask": bias, "scale": 0.7},
        {"mask": allowed},
        bounds,
        {"dropout": (0.4, *numbers(device))},
    ]


@pytest.mark.parametrize("i", range(6))
def test_gradcheck_with_options(i, device):
    options = gradcheck_options(device)[i]
    q, k, v, _ = (t.requires_grad_() for t in tensors(1, 2, 1, 3, 5, 2, torch.float64, device))

    def finite(q, k, v):
        out, logsumexp = ours(q, k, v, **options)
        return out, logsumexp.masked_fill(logsumexp == -math.inf, 0)

    assert torch.autograd.gradcheck(finite, (q, k, v))
    assert torch.autograd.gradgradcheck(finite, (q, k, v))
    assert torch.autograd.gradgradcheck(lambda *t: finite(*t)[0], (q, k, v))
    assert torch.autograd.gradgradcheck(lambda *t: finite(*t)[1], (q, k, v))


def test_opcheck_with_all_options_and_transposed_arguments(device):
    plain = tensors(2, 4, 2, 5, 7, 3, torch.float32, device)
    q, k, v, dout = (t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in plain)
    op, backward = ops.scaled_dot_product_attention, ops.scaled_dot_product_attention_backward
    bounds = [torch.tensor([0, 3], dtype=torch.int32, device=device), None]
    options = torch.rand(5, 7, device=device) < 0.5, 0.5, False, 0.3, 0, *bounds, *numbers(device)
    torch.library.opcheck(op, (q, k, v, *options))
    out, logsumexp = op(*(t.detach() for t in (q, k, v)), *options)
    torch.library.opcheck(backward, (dout, None, q, k, v, out, logsumexp, *options))


def test_compiled_decoder_supports_any_length_of_its_cache(device):
    q, k, v, _ = tensors(2, 4, 2, 9, 33, 8, torch.float32, device)

    def chunk(q, k, v):
        offset = k.shape[2] - q.shape[2]
        return G.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, query_offset=offset)

    torch._dynamo.reset()
    compiled = torch.compile(chunk, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (9, 17, 33):
        args = (q, k[:, :, :length], v[:, :, :length])
        torch.testing.assert_close(compiled(*args), chunk(*args))


@low_dtypes
def test_autocast_casts_an_additive_mask(dtype, device):
    qkv, _ = packed_inputs((2, 9, 3, 8), torch.float32, device)
    bias = randn(9, 9, dtype=torch.float32, device=device)
    with torch.autocast(device.type, dtype):
        expected = F.scaled_dot_product_attention(*unpack(qkv, 3), bias)
        found = G.scaled_dot_product_attention(*unpack(qkv, 3), bias)
        assert packed(qkv, 3).dtype == dtype
    torch.testing.assert_close(found, expected, **tolerance(dtype))


def test_flops_are_those_of_torchs_fused_kernels(device):
    q, k, v, dout = (t.requires_grad_() for t in tensors(2, 4, 2, 9, 13, 8, torch.float32, device))
    shapes = q.shape, (2, 4, 13, 8), (2, 4, 13, 8)
    flops, (out, _) = count_flops(ours, q, k, v)
    assert flops == sdpa_flop_count(*shapes)
    assert count_flops(out.backward, dout)[0] == sdpa_backward_flop_count(dout.shape, *shapes)
    qkv = packed_inputs((2, 9, 3, 8), torch.float32, device)[0].requires_grad_()
    assert count_flops(lambda: packed(qkv, 3).sum().backward())[0] == 7 * 2 * 2 * 9 * 9 * 24


# ---- functional ------------------------------------------------------------------------------------------------------


def spy_on_torch(monkeypatch):
    calls, real = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or real(*a, **k))
    return calls, real


def test_functional_matches_torch(monkeypatch, device):
    calls, real = spy_on_torch(monkeypatch)
    f, d = torch.float32, device
    cases = [
        ((2, 3, 9, 8), (2, 3, 11, 8), {}),
        ((2, 3, 9, 8), (2, 3, 11, 8), {"attn_mask": torch.rand(9, 11, device=d) < 0.7}),
        ((2, 3, 9, 8), (2, 3, 11, 8), {"attn_mask": randn(2, 1, 9, 11, dtype=f, device=d), "scale": 0.2}),
        ((3, 9, 8), (3, 11, 8), {"attn_mask": randn(3, 9, 11, dtype=f, device=d)}),
        ((3, 9, 8), (3, 9, 8), {"is_causal": True}),
        ((2, 5, 3, 9, 8), (2, 5, 3, 11, 8), {"attn_mask": randn(5, 1, 9, 11, dtype=f, device=d)}),
        ((2, 5, 3, 9, 8), (2, 5, 3, 11, 8), {"attn_mask": randn(2, 1, 1, 1, 11, dtype=f, device=d)}),
        ((2, 5, 3, 9, 8), (2, 5, 3, 11, 8), {"attn_mask": torch.rand(11, device=d) < 0.9}),
        ((2, 4, 9, 8), (2, 2, 11, 8), {"enable_gqa": True}),
        ((4, 9, 8), (2, 11, 8), {"enable_gqa": True}),
    ]
    for shape, other, options in cases:
        q, k, v = (randn(*s, dtype=f, device=d) for s in (shape, other, other))
        found = G.scaled_dot_product_attention(q, k, v, **options)
        assert not calls, (shape, options)
        torch.testing.assert_close(found, real(q, k, v, **options))
        out, logsumexp = G.scaled_dot_product_attention(q, k, v, **options, return_logsumexp=True)
        assert torch.equal(out, found)
        assert logsumexp.shape == shape[:-1]


def test_functional_falls_back_to_torch(monkeypatch, device):
    calls, real = spy_on_torch(monkeypatch)
    f, d = torch.float32, device
    grad_mask = randn(32, 64, dtype=f, device=d).requires_grad_()
    cases = [
        ((2, 3, 9, 8), (2, 3, 11, 8), (2, 3, 11, 5), {}, "head sizes"),
        ((2, 3, 9, 300), (2, 3, 11, 300), (2, 3, 11, 300), {}, "300 is not from 1 to 256"),
        ((2, 3, 9, 8), (1, 3, 11, 8), (1, 3, 11, 8), {}, "differ"),
        ((2, 3, 9, 8), (2, 1, 11, 8), (2, 1, 11, 8), {}, "differ"),
        ((9, 8), (11, 8), (11, 8), {}, "dimensions"),
        ((2, 3, 32, 8), (2, 3, 64, 8), (2, 3, 64, 8), {"attn_mask": grad_mask}, "requires grad"),
    ]
    for q_shape, k_shape, v_shape, options, reason in cases:
        q, k, v = (randn(*s, dtype=f, device=d) for s in (q_shape, k_shape, v_shape))
        calls.clear()
        found = G.scaled_dot_product_attention(q, k, v, **options)
        assert calls, reason
        torch.testing.assert_close(found, real(q, k, v, **options))
        bound = torch.zeros(2, dtype=torch.int32, device=d)
        for name, value in (("query_offset", 3), ("key_begin", bound), ("key_end", bound), ("return_logsumexp", True)):
            with pytest.raises(ValueError, match=f"{name} is not supported here: .*{reason}"):
                G.scaled_dot_product_attention(q, k, v, **options, **{name: value})
    if device.type == "cpu":  # on CUDA torch's backward fails ("LSE is not correctly aligned")
        out = G.scaled_dot_product_attention(q, k, v, grad_mask)
        assert torch.autograd.grad(out.sum(), grad_mask)[0].shape == grad_mask.shape
    qkv = randn(2, 5, 3 * 600, dtype=f, device=d)
    torch.testing.assert_close(
        G.causal_attention(qkv, 2), real(*unpack(qkv, 2), is_causal=True).transpose(1, 2).flatten(2)
    )


def test_functional_offsets_and_bounds(device):
    q, k, v, _ = tensors(2, 2, 2, 9, 20, 8, torch.float32, device)
    end = torch.tensor([20, 13], device=device)
    found = G.scaled_dot_product_attention(q, k, v, is_causal=True, query_offset=11, key_end=end)
    torch.testing.assert_close(found, formula(q, k, v, causal=True, offset=11, end=end)[0])
    q, k, v = (t.unflatten(0, (1, 2)) for t in (q, k, v))
    torch.testing.assert_close(
        G.scaled_dot_product_attention(q, k, v, is_causal=True, query_offset=11, key_end=end), found[None]
    )


# ---- bad input -------------------------------------------------------------------------------------------------------


@both_ops
def test_bad_packed_input(op, device):
    qkv, _ = packed_inputs((2, 5, 2, 3), torch.float32, device)
    refused(op, (qkv, 4), r"qkv must have shape \(B, T, 3 \* C\)", "num_heads", r"\(2, 5, 18\)")
    refused(op, (qkv[0], 2), r"qkv must have shape \(B, T, 3 \* C\)", r"\(5, 18\)")
    refused(op, (qkv[..., :0], 2), r"qkv must have shape \(B, T, 3 \* C\)", r"\(2, 5, 0\)")
    refused(op, (qkv, 0), "num_heads must be at least 1, got 0")


def test_bad_options(device):
    qkv, _ = packed_inputs((2, 5, 2, 3), torch.float32, device)
    with raises("attention", "head size must be from 1 to 256, got 257"):
        ops.attention(randn(1, 2, 3 * 257, dtype=torch.float32, device=device), 1)
    refused(ops.attention, (qkv, 2, None, 1.5), "dropout_p must be from 0 to 1, got 1.5")
    refused(ops.attention, (qkv, 2, None, 0.5), "seed must be given for dropout_p 0.5")
    refused(ops.attention, (qkv, 2, None, 0.5, numbers(device)[0]), "offset must be given for dropout_p 0.5")
    refused(ops.attention_dropout_mask, (1, 1, 1, -1, 0.5, *numbers(device)), "keys must be at least 0, got -1")
    place = "first_head and total_heads must satisfy 0 <= first_head <= total_heads - 2, got {} and {}"
    for head, total in ((-1, 4), (3, 4), (1, None)):
        drawn = (0.5, *numbers(device), head, total)
        refused(ops.attention, (qkv, 2, None, *drawn), place.format(head, total or 2))
        refused(ops.attention_dropout_mask, (1, 2, 1, 1, *drawn), place.format(head, total or 2))
    for query in (-16, 8):
        drawn = (0.5, *numbers(device), 0, None, query)
        refused(ops.attention_dropout_mask, (1, 2, 1, 1, *drawn), f"first_query must be a multiple of 16, got {query}")


def test_bad_input(device):
    q, k, v, dout = tensors(2, 4, 2, 5, 7, 3, torch.float32, device)
    name, op = "scaled_dot_product_attention", ops.scaled_dot_product_attention
    refused(op, (q[0], k, v), r"query must have shape \(B, NH, Tq, HS\), got \(4, 5, 3\)")
    refused(op, (q[:, 1:], k, v), r"heads of query \(3\) must be a multiple of those of key \(2\)")
    with raises(name, r"attn_mask must be broadcastable to \(2, 4, 5, 7\), got shape \(5, 6\)"):
        op(q, k, v, torch.ones(5, 6, dtype=torch.bool, device=device))
    with raises(name, r"attn_mask must be broadcastable", r"\(1, 1, 1, 1, 1\)"):
        op(q, k, v, torch.ones(1, 1, 1, 1, 1, dtype=torch.bool, device=device))
    with raises(name, "attn_mask must be bool or have the dtype of query", "int64"):
        op(q, k, v, torch.ones(5, 7, dtype=torch.long, device=device))
    refused(op, (q, k, v), "key_end must be int32, got int64", key_end=torch.ones(2, dtype=torch.long, device=device))
    with raises(name, r"key_begin must have shape \(2\), got \(3\)"):
        op(q, k, v, key_begin=torch.ones(3, dtype=torch.int32, device=device))
    refused(op, (q, k, v), "dropout_p must be from 0 to 1, got -1", dropout_p=-1.0)
    with raises(name, "attn_mask requires grad, but has no derivative"):
        op(q.clone().requires_grad_(), k, v, torch.ones(5, 7, device=device, requires_grad=True))
    out, logsumexp = op(q, k, v)
    backward = ops.scaled_dot_product_attention_backward
    with raises(f"{name}_backward", r"dlogsumexp must have shape \(2, 4, 5\)", r"\(2, 4, 4\)"):
        backward(dout, logsumexp[:, :, 1:], q, k, v, out, logsumexp)


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.large
def test_more_than_2_31_elements(device):
    b, t, nh, hs = 66, 4097, 16, 256
    qkv = torch.randn(b, t, 3 * nh * hs, device=device, dtype=torch.bfloat16)
    dout = torch.randn(b, t, nh * hs, device=device, dtype=torch.bfloat16)
    assert qkv.numel() > 2**31
    out, logsumexp = ops.attention(qkv, nh)
    dqkv = ops.attention_backward(dout, qkv, out, logsumexp, nh)
    for part in (slice(0, 1), slice(b - 1, b)):
        assert torch.equal(out[part], packed(qkv[part], nh))
        assert torch.equal(dqkv[part], gradients(lambda x: packed(x, nh), (qkv[part],), dout[part])[0])
        q, k, v = unpack(qkv[part], nh)
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        torch.testing.assert_close(out[part], expected, **tolerance(torch.bfloat16))


@pytest.mark.large
def test_mask_of_more_than_2_31_elements(device):
    q, k, v, _ = tensors(1, 2, 2, 33000, 33000, 64, torch.bfloat16, device)
    mask = torch.rand(1, 2, 33000, 33000, device=device) < 0.5
    assert mask.numel() > 2**31
    out = ours(q, k, v, mask=mask)[0]
    last = slice(32900, 33000)
    torch.testing.assert_close(
        out[:, :, last], torchs(q[:, :, last], k, v, mask=mask[:, :, last]), **tolerance(torch.bfloat16)
    )
