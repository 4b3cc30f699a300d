"""Tests of ``dropout``, and tests that apply to every function with dropout."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gptkernels import functional as G
from helpers import (
    DTYPES,
    all_dtypes,
    assert_equal,
    assert_raises,
    assert_uniform,
    chi_square,
    numbers,
    philox,
    randn,
    refused,
)

ops = torch.ops.gptkernels


# ---- the mask --------------------------------------------------------------------------------------------------------


def bits_of(seed, offset, element):
    group, slot = divmod(element, 8)
    key = (seed ^ (offset >> 32 << 32)) & (2**64 - 1)
    words = philox(key, (group & 0xFFFFFFFF, group >> 32, 0xFFFFFFFF, offset & 0xFFFFFFFF))
    return words[slot // 2] >> (16 * (slot % 2)) & 0xFFFF


@pytest.mark.parametrize("p", [0.0, 1e-6, 0.1, 0.5, 0.999, 1 - 1e-6, 1.0])
def test_mask_is_philoxs(p, device):
    for seed, offset in ((0, 0), (2**63 - 1, 2**40 + 3), (-5, -1)):
        mask = ops.dropout_mask(1003, p, *numbers(device, seed, offset))
        assert mask.dtype == torch.bool
        expected = torch.tensor([bits_of(seed, offset, i) for i in range(1003)]) >= round(p * 65536)
        assert torch.equal(mask.cpu(), expected)


def test_mask_depends_only_on_the_position(device):
    drawn = numbers(device)
    mask = ops.dropout_mask(3000, 0.3, *drawn)

    def kept(x):
        return ops.dropout(x, 0.3, *drawn) != 0

    for size in (0, 1, 7, 8, 9, 1023, 1024, 1025, 2049):
        assert torch.equal(ops.dropout_mask(size, 0.3, *drawn), mask[:size])
        for dtype in DTYPES:
            ones = torch.ones(size + 1, dtype=dtype, device=device)
            assert torch.equal(kept(ones[:size]), mask[:size])
            assert torch.equal(kept(ones[1:]), mask[:size])
    ones = torch.ones(3, 10, 100, device=device)
    assert torch.equal(kept(ones).flatten(), mask)
    assert torch.equal(kept(ones.mT).flatten(), mask)


def test_mask_is_uniform_and_independent(device):
    """The compared elements are up to 1024 apart, or belong to other seeds or offsets, or to attention's mask."""

    def bins(seed, offset):
        masks = [ops.dropout_mask(600_000, i / 16, *numbers(device, seed, offset)) for i in range(16)]
        return sum(mask.long() for mask in masks) - 1

    first = bins(1, 2)
    pairs = {f"{step} apart": (first[step:], first[:-step]) for step in (1, 2, 3, 4, 8, 64, 768, 1024)}
    pairs |= {"seeds": (first, bins(2, 2)), "offsets": (first, bins(1, 3)), "high": (first, bins(1, 2 + 2**32))}
    attention = [ops.attention_dropout_mask(2, 3, 250, 400, i / 16, *numbers(device, 1, 2)) for i in range(16)]
    pairs["attention"] = (first, (sum(mask.long() for mask in attention) - 1).flatten())
    assert_uniform(first, pairs)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_dropped_share(p, device):
    size, calls = 50_000, 40
    found = torch.stack([(G.dropout(torch.ones(size, device=device), p) == 0).sum() for _ in range(calls)]).double()
    variance = size * p * (1 - p)
    assert abs(found.mean().item() - size * p) < 5 * (variance / calls) ** 0.5
    # The standard deviation of the sample variance is sqrt(2 / (calls - 1)) times the variance.
    assert abs(found.var().item() / variance - 1) < 5 * (2 / (calls - 1)) ** 0.5


def test_calls_are_independent(device):
    ones = torch.ones(400_000, device=device)
    a, b = ((G.dropout(ones, 0.5) != 0).long() for _ in range(2))
    counts = (2 * a + b).bincount(minlength=4).double()
    # exceeded with probability 1e-4 by chi-square with 3 degrees of freedom
    assert chi_square(counts) < 21.1


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@all_dtypes
def test_dropped_infinities_and_nan_become_nan(value, dtype, device):
    x = torch.full((50,), value, dtype=dtype, device=device)
    out = ops.dropout(x, 0.5, *numbers(device))
    kept = ops.dropout_mask(50, 0.5, *numbers(device))
    torch.testing.assert_close(out, torch.where(kept, x, float("nan")), equal_nan=True)


# ---- parts of a larger tensor ----------------------------------------------------------------------------------------

PARTS = [(0, 7), (7, 30), (30, 41)]


@all_dtypes
def test_parts_have_the_mask_of_the_whole(dtype, device):
    drawn = 0.4, *numbers(device, offset=2**32 + 5)
    x, dout = (randn(41, 40, dtype=dtype, device=device) for _ in range(2))
    out, mask, dx = ops.dropout(x, *drawn), ops.dropout_mask(x.numel(), *drawn), ops.dropout(dout, *drawn)
    for begin, end in PARTS:
        first = 40 * begin
        assert torch.equal(ops.dropout_mask(40 * (end - begin), *drawn, first), mask[first : 40 * end])
        part = x[begin:end].requires_grad_()
        found = ops.dropout(part, *drawn, first)
        assert torch.equal(found, out[begin:end])
        assert torch.equal(torch.autograd.grad(found, part, dout[begin:end])[0], dx[begin:end])


def test_mask_beyond_2_to_the_35(device):
    """The number of a group of 8 elements has more than 32 bits from element 2^35 on."""
    drawn = 0.5, *numbers(device)
    for first in (2**35 - 16, 2**35, 2**62):
        expected = [bits_of(12345, 6789, first + i) >= 2**15 for i in range(50)]
        assert ops.dropout_mask(50, *drawn, first).tolist() == expected


@all_dtypes
@pytest.mark.parametrize("x_dtype", [None, torch.bfloat16], ids=["", "mixed"])
def test_parts_of_residual_layernorm(dtype, x_dtype, device):
    if x_dtype and dtype != torch.float32:
        pytest.skip("only a float32 residual may have another dtype than x")
    drawn = 0.4, *numbers(device)
    residual, dsum = (randn(41, 40, dtype=dtype, device=device) for _ in range(2))
    x, dout = (randn(41, 40, dtype=x_dtype or dtype, device=device) for _ in range(2))

    def results(rows, *first):
        leaves = [t[rows].requires_grad_() for t in (x, residual)]
        out, total, _, _ = ops.residual_layernorm(*leaves, None, None, 1e-5, None, *drawn, *first)
        alone = torch.autograd.grad(total, leaves, dsum[rows], retain_graph=True)
        return out, total, *torch.autograd.grad((out, total), leaves, (dout[rows], dsum[rows])), *alone

    whole = results(slice(None))
    for begin, end in PARTS:
        assert_equal(results(slice(begin, end), 40 * begin), [t[begin:end] for t in whole])


def test_second_derivatives_of_a_part(device):
    x, residual = (randn(3, 8, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    drawn = 0.5, *numbers(device), 16

    def function(x, residual):
        return ops.residual_layernorm(x, residual, None, None, 1e-5, None, *drawn)[:2]

    torch.autograd.gradcheck(function, (x, residual), check_forward_ad=True)
    torch.autograd.gradgradcheck(function, (x, residual))


def test_parts_of_fp8_layernorm(device):
    drawn = 0.4, *numbers(device)
    x, residual = (randn(41, 48, dtype=torch.bfloat16, device=device) for _ in range(2))

    def sums(rows, *first):
        return ops.fp8_layernorm(x[rows], residual[rows], None, None, None, False, 1e-5, None, *drawn, *first)[3]

    for begin, end in PARTS:
        assert torch.equal(sums(slice(begin, end), 48 * begin), sums(slice(None))[begin:end])


@pytest.mark.parametrize("first", [-8, 4])
def test_bad_first_index(first, device):
    x, drawn = torch.ones(8, device=device), (0.5, *numbers(device))
    message = f"first_index must be a multiple of 8, got {first}"
    refused(ops.dropout, (x, *drawn, first), message)
    refused(ops.dropout_mask, (8, *drawn, first), message)
    refused(ops.residual_layernorm, (x, x, None, None, 1e-5, None, *drawn, first), message)


# ---- functions with dropout ------------------------------------------------------------------------------------------


FUNCTIONS = {
    "dropout": G.dropout,
    "residual_layer_norm": lambda x, p: torch.stack(G.residual_layer_norm(x, 2 * x, x.shape[-1:], dropout_p=p)),
    "causal_attention": lambda x, p: G.causal_attention(x, 2, dropout_p=p),
    "scaled_dot_product_attention": lambda x, p: G.scaled_dot_product_attention(x, x, x, None, p),
}
all_functions = pytest.mark.parametrize("name", FUNCTIONS)


def seeded(seed, function, *args):
    torch.manual_seed(seed)
    return function(*args)


@all_functions
def test_masks_are_drawn_from_torchs_generator(name, device):
    x = randn(2, 20, 96, dtype=torch.float32, device=device)

    def twice(x):
        return FUNCTIONS[name](x, 0.5), FUNCTIONS[name](x, 0.5)

    first, second = seeded(1, twice, x)
    assert not torch.equal(first, second)
    assert_equal(seeded(1, twice, x), (first, second))
    assert not torch.equal(seeded(2, twice, x)[0], first)


@pytest.mark.parametrize("reentrant", [False, True])
@all_functions
def test_recomputation_draws_the_same_mask(name, reentrant, device):
    x = randn(2, 20, 96, dtype=torch.float32, device=device, requires_grad=True)
    (expected,) = torch.autograd.grad(seeded(3, FUNCTIONS[name], x, 0.5).square().sum(), x)
    torch.manual_seed(3)
    out = checkpoint(FUNCTIONS[name], x, 0.5, use_reentrant=reentrant)
    torch.rand(5, device=device)  # draws between the calls have no effect
    out.square().sum().backward()
    assert torch.equal(x.grad, expected)


@all_functions
def test_compiled_functions_draw_eagers_mask(name, device):
    def function(x):
        return FUNCTIONS[name](x, 0.5) + FUNCTIONS[name](x, 0.25)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (5, 9):
        x = randn(rows, 20, 96, dtype=torch.float32, device=device, requires_grad=True)
        outs = [seeded(1, f, x) for f in (function, compiled)]
        dout = torch.randn_like(outs[0])
        assert_equal(*([out, *torch.autograd.grad(out, x, dout)] for out in outs))


@all_functions
def test_bad_probabilities(name, device):
    x = randn(2, 20, 96, dtype=torch.float32, device=device)
    for p in (-0.1, 1.5, float("nan")):
        assert_raises(ValueError, rf"{name}: (dropout_)?p must be from 0 to 1, got", FUNCTIONS[name], x, p)


def test_inductor_draws_one_mask_for_forward_and_backward(device):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: G.dropout(x, 0.5), fullgraph=True)
    x = torch.ones(4000, device=device, requires_grad=True)
    outs = [compiled(x) for _ in range(2)]
    assert not torch.equal(*outs)
    for out in outs:
        assert torch.equal(torch.autograd.grad(out, x, torch.ones_like(x))[0], out)


@pytest.mark.parametrize(
    ("name", "sizes"), [("dropout", [1, 1]), ("residual_layer_norm", [1, 1, 50, 50, 50 * 96])], ids=["", "residual"]
)
def test_the_graph_stores_no_mask(name, sizes, device):
    """Autograd saves only the seed and the offset, and for the norm also the sum and its statistics."""
    saved = []
    x = randn(50, 96, dtype=torch.float32, device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        FUNCTIONS[name](x, 0.5)
    assert sorted(t.numel() for t in saved) == sizes


@pytest.mark.parametrize("name", ["dropout", "residual_layer_norm"])
def test_vmap_draws_masks_as_its_option_randomness_says(name, device):
    def function(x):
        return G.dropout(x, 0.5) if name == "dropout" else G.residual_layer_norm(x, x * 0, (33,), dropout_p=0.5)[1]

    x = torch.ones(3, 5, 33, device=device)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(function)(x)
    same = torch.vmap(function, randomness="same")(x)
    assert torch.equal(same[0], same[1])
    assert 0 < (same == 0).sum() < same.numel()
    different = torch.vmap(function, randomness="different")(x)
    assert not torch.equal(different[0], different[1])
    for dims in ((0, 0), (0, None)):
        gradient = torch.vmap(torch.func.grad(lambda x, y: function(x * y).sum()), dims, randomness="same")
        found = gradient(x, x if dims[1] == 0 else x[0])
        assert torch.equal(found[0], found[1])
        assert set(found.unique().tolist()) == {0.0, 2.0}


def test_functional(device):
    x = randn(5, 33, dtype=torch.float32, device=device)
    assert G.dropout(x, 0.5, training=False) is x
    assert G.dropout(x, 0.0) is x
    assert torch.equal(G.dropout(x, 1.0), x * 0)
    assert_raises(ValueError, "dropout: p must be from 0 to 1", G.dropout, x, 1.5, training=False)
    assert_raises(ValueError, "dropout: the option inplace is not supported", G.dropout, x, 0.5, inplace=True)


def test_bad_input(device):
    x, (seed, offset) = randn(5, 8, dtype=torch.float32, device=device), numbers(device)
    refused(ops.dropout, (x, 1.5, seed, offset), r"p must be from 0 to 1, got 1\.5")
    refused(ops.dropout, (x, 0.0, seed.int(), offset), "seed must be int64, got int32")
    refused(ops.dropout, (x, 0.0, seed, offset[None]), r"offset must have shape \(\), got \(1\)")
    refused(ops.dropout_mask, (-1, 0.5, seed, offset), "size must be at least 0, got -1")


@pytest.mark.large
def test_more_than_2_31_elements(device):
    size = 2**31 + 1000
    x = torch.ones(size, dtype=torch.bfloat16, device=device)
    out = ops.dropout(x, 0.5, *numbers(device))
    for i in (0, 2**31 - 8, 2**31 - 1, 2**31, 2**31 + 77, size - 1):
        assert out[i].item() == (2.0 if bits_of(12345, 6789, i) >= 32768 else 0.0)
