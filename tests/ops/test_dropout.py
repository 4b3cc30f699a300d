import os
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gptkernels import functional as G
from gptkernels.testing.cases.elementwise import dropped
from helpers import (
    CHI_SQUARE_15,
    DTYPES,
    all_dtypes,
    assert_as_exact_with_gradients,
    chi_square,
    gradients,
    numbers,
    philox,
    randn,
    refused,
)

ops = torch.ops.gptkernels


def check(x, dout, p, seed, offset):
    functions = [lambda x: ops.dropout(x, p, seed, offset)] + [lambda x: dropped(x, p, seed, offset)] * 2
    assert_as_exact_with_gradients(*functions, (x,), dout, ("dx",))


# ---- the mask --------------------------------------------------------------------------------------------------------


def bits_of(seed, offset, element):
    """An element's 16 bits, as csrc/philox.h lays them out."""
    group, slot = divmod(element, 8)
    key = (seed ^ (offset >> 32 << 32)) & (2**64 - 1)
    words = philox(key, (group & 0xFFFFFFFF, group >> 32, 0xFFFFFFFF, offset & 0xFFFFFFFF))
    return words[slot // 2] >> (16 * (slot % 2)) & 0xFFFF


@pytest.mark.parametrize("p", [0.0, 1e-6, 0.1, 0.5, 0.999, 1 - 1e-6, 1.0])
def test_mask(p, device):
    for seed, offset in ((0, 0), (2**63 - 1, 2**40 + 3), (-5, -1)):
        mask = ops.dropout_mask(1003, p, *numbers(device, seed, offset))
        assert mask.dtype == torch.bool
        expected = torch.tensor([bits_of(seed, offset, i) for i in range(1003)]) >= round(p * 65536)
        assert torch.equal(mask.cpu(), expected)


def test_mask_depends_only_on_position(device):
    """Not on the shape, the dtype, the size, or how the memory is aligned."""
    drawn = numbers(device)
    mask = ops.dropout_mask(3000, 0.3, *drawn)
    for size in (0, 1, 7, 8, 9, 1023, 1024, 1025, 2049):
        assert torch.equal(ops.dropout_mask(size, 0.3, *drawn), mask[:size])
        for dtype in DTYPES:
            ones = torch.ones(size, dtype=dtype, device=device)
            assert torch.equal(ops.dropout(ones, 0.3, *drawn) != 0, mask[:size])
            assert torch.equal(
                ops.dropout(torch.ones(size + 1, dtype=dtype, device=device)[1:], 0.3, *drawn) != 0, mask[:size]
            )
    ones = torch.ones(3, 10, 100, device=device)
    assert torch.equal((ops.dropout(ones, 0.3, *drawn) != 0).flatten(), mask)
    assert torch.equal((ops.dropout(ones.mT, 0.3, *drawn) != 0).flatten(), mask)


def test_mask_is_uniform_and_independent(device):
    """16 bins of the random bits, and 4 x 4 bins of pairs: neighbours, seeds, offsets, and attention's mask."""

    def bins(seed, offset):
        masks = [ops.dropout_mask(600_000, i / 16, *numbers(device, seed, offset)) for i in range(16)]
        return sum(mask.long() for mask in masks) - 1

    first = bins(1, 2)
    assert chi_square(first.bincount(minlength=16).double()) < CHI_SQUARE_15
    pairs = {f"{step} apart": (first[step:], first[:-step]) for step in (1, 2, 3, 4, 8, 64, 768, 1024)}
    pairs |= {"seeds": (first, bins(2, 2)), "offsets": (first, bins(1, 3)), "high": (first, bins(1, 2 + 2**32))}
    attention = [ops.attention_dropout_mask(2, 3, 250, 400, i / 16, *numbers(device, 1, 2)) for i in range(16)]
    pairs["attention"] = (first, (sum(mask.long() for mask in attention) - 1).flatten())
    for name, (a, b) in pairs.items():
        counts = (a // 4 * 4 + b // 4).bincount(minlength=16).double()
        assert chi_square(counts) < CHI_SQUARE_15, name


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_dropped_share(p, device):
    """In all calls together and from call to call: binomial, within 5 standard deviations."""
    size, calls = 50_000, 40
    found = torch.stack([(G.dropout(torch.ones(size, device=device), p) == 0).sum() for _ in range(calls)]).double()
    variance = size * p * (1 - p)
    assert abs(found.mean().item() - size * p) < 5 * (variance / calls) ** 0.5
    # The sample variance's own standard deviation is sqrt(2 / (calls - 1)) of it.
    assert abs(found.var().item() / variance - 1) < 5 * (2 / (calls - 1)) ** 0.5


def test_calls_are_independent(device):
    """Two calls of a step, as two layers': what one keeps says nothing of the other."""
    ones = torch.ones(400_000, device=device)
    a, b = ((G.dropout(ones, 0.5) != 0).long() for _ in range(2))
    counts = (2 * a + b).bincount(minlength=4).double()
    assert chi_square(counts) < 21.1  # of 3 degrees of freedom, exceeded once in 10^4


# ---- against the formula ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@all_dtypes
def test_infinities_and_nan(value, dtype, device):
    """As in torch: 0 times them, where they are dropped, is NaN."""
    x = torch.full((50,), value, dtype=dtype, device=device)
    out = ops.dropout(x, 0.5, *numbers(device))
    kept = ops.dropout_mask(50, 0.5, *numbers(device))
    torch.testing.assert_close(out, torch.where(kept, x, float("nan")), equal_nan=True)


def test_every_cpu_capability_gives_the_same_mask(tmp_path):
    code = (
        "import sys, torch, gptkernels;"
        "ops = torch.ops.gptkernels; n = torch.tensor(5), torch.tensor(7);"
        "x = torch.randn(3, 1001, generator=torch.Generator().manual_seed(0));"
        "torch.save([ops.dropout_mask(10_000, 0.3, *n), ops.dropout(x, 0.3, *n),"
        " *ops.residual_layernorm(x, x, None, None, 1e-5, None, 0.3, *n)[:2]], sys.argv[1])"
    )
    found = []
    for capability in ("default", ""):  # "": the processor's most
        path = tmp_path / f"masks {capability}"
        environment = {**os.environ, "GPTKERNELS_CPU_CAPABILITY": capability}
        subprocess.run([sys.executable, "-c", code, path], check=True, env=environment)
        found.append(torch.load(path))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


# ---- torch's machinery -----------------------------------------------------------------------------------------------


def test_compile(device):
    """Fullgraph, with any length; the numbers are those that eager draws from the same seed."""

    def function(x):
        return G.dropout(x, 0.5) + G.dropout(x, 0.25)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (5, 9):
        x, dout = (randn(rows, 33, dtype=torch.float32, device=device) for _ in range(2))
        torch.manual_seed(1)
        expected, wanted = function(x), gradients(function, (x,), dout)
        torch.manual_seed(1)
        assert torch.equal(compiled(x), expected)
        assert torch.equal(gradients(compiled, (x,), dout)[0], wanted[0])


def test_inductor_draws_one_mask_for_both_directions(device):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: G.dropout(x, 0.5), fullgraph=True)
    x = torch.ones(4000, device=device, requires_grad=True)
    outs = [compiled(x) for _ in range(2)]
    assert not torch.equal(*outs)
    for out in outs:
        assert torch.equal(torch.autograd.grad(out, x, torch.ones_like(x))[0], out)


def test_draws_from_torchs_generator(device):
    """Reproducible by manual_seed, another mask each time, and the same once more under activation checkpointing."""
    x = torch.ones(500, device=device, requires_grad=True)

    def run(seed):
        torch.manual_seed(seed)
        return G.dropout(x, 0.5), G.dropout(x, 0.5)

    first, second = run(1)
    assert not torch.equal(first, second)
    assert torch.equal(run(1)[1], second)
    assert not torch.equal(run(2)[0], first)
    for reentrant in (False, True):
        x.grad = None
        out = checkpoint(lambda x: G.dropout(x, 0.5), x, use_reentrant=reentrant)
        torch.rand(5, device=device)  # what is drawn in between does not matter
        out.sum().backward()
        assert torch.equal(x.grad, out)


def test_stores_no_mask(device):
    """The graph holds the two numbers and no tensor of the size of x."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        G.dropout(torch.ones(1000, device=device, requires_grad=True), 0.5)
    assert [t.numel() for t in saved] == [1, 1]


def test_vmap(device):
    """As torch's: refused without a choice, one mask for all with "same", one for each with "different"."""
    x = torch.ones(3, 200, device=device)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda x: G.dropout(x, 0.5))(x)
    same = torch.vmap(lambda x: G.dropout(x, 0.5), randomness="same")(x)
    assert torch.equal(same[0], same[1])
    assert 0 < (same == 0).sum() < same.numel()
    different = torch.vmap(lambda x: G.dropout(x, 0.5), randomness="different")(x)
    assert not torch.equal(different[0], different[1])


# ---- functional ------------------------------------------------------------------------------------------------------


def test_functional(device):
    x = randn(5, 33, dtype=torch.float32, device=device)
    assert G.dropout(x, 0.5, training=False) is x
    assert G.dropout(x, 0.0) is x
    assert torch.equal(G.dropout(x, 1.0), x * 0)
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="dropout: p must be from 0 to 1"):
            G.dropout(x, p, training=False)
    with pytest.raises(ValueError, match="dropout: the option inplace is not supported"):
        G.dropout(x, 0.5, inplace=True)


def test_bad_input(device):
    x, (seed, offset) = randn(5, 8, dtype=torch.float32, device=device), numbers(device)
    refused(ops.dropout, (x.long(), 0.5, seed, offset), "x must be float64", "int64")
    refused(ops.dropout, (x, 1.5, seed, offset), r"p must be from 0 to 1, got 1\.5")
    for p in (0.0, 0.5):
        refused(ops.dropout, (x, p, seed.int(), offset), "seed must be int64, got int32")
        refused(ops.dropout, (x, p, seed, offset[None]), r"offset must have shape \(\), got \(1\)")
    refused(ops.dropout_mask, (-1, 0.5, seed, offset), "size must be at least 0, got -1")
    refused(ops.dropout_mask, (5, 0.5, seed.int(), offset), "seed must be int64")
    if device.type != "cpu":
        refused(ops.dropout, (x, 0.5, seed.cpu(), offset), "seed is on cpu but x is on cuda")


@pytest.mark.large
def test_more_than_2_31_elements(device):
    size = 2**31 + 1000
    x = torch.ones(size, dtype=torch.bfloat16, device=device)
    out = ops.dropout(x, 0.5, *numbers(device))
    for i in (0, 2**31 - 8, 2**31 - 1, 2**31, 2**31 + 77, size - 1):
        assert out[i].item() == (2.0 if bits_of(12345, 6789, i) >= 32768 else 0.0)
