"""Tests of AdamW with `rounding_seed`, which rounds bfloat16 parameters and moments up or down at random."""

import numpy as np
import pytest
import torch
from test_adamw import OPTIONS, SHAPES

from gptkernels.optim import AdamW
from helpers import philox, raises, randn

ops = torch.ops.gptkernels
STATES = pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])


def step(tensors, number=1, seed=7, **options):
    lists = [[t.clone() for t in part] for part in tensors]
    steps = [torch.full((), float(number), device=p.device) for p in lists[0]]
    ops.adamw_(*lists, steps, lr=torch.tensor(1e-3, dtype=torch.float64), **{**OPTIONS, **options}, rounding_seed=seed)
    return lists


def made(sizes, device, state_dtype=torch.bfloat16):
    params, grads, first, second = (
        [randn(*shape, dtype=torch.bfloat16, device=device) for shape in sizes] for _ in range(4)
    )
    return params, grads, [t.to(state_dtype) for t in first], [t.abs().to(state_dtype) for t in second]


def in_float32(tensors):
    """Return the step's results on float32 copies. Rounded to bfloat16, they must be the results on the originals."""
    lists = [[t.float() for t in part] for part in tensors]
    steps = [torch.ones((), device=p.device) for p in lists[0]]
    ops.adamw_(*lists, steps, lr=torch.tensor(1e-3, dtype=torch.float64), **OPTIONS)
    return lists


def expected_bits(exact, seed, number, tensor, array):
    """Round to bfloat16: add a random 16-bit number to the bits of a float32 value, and keep the upper 16 bits.

    ``array`` is 0 for parameters, 1 for first moments and 2 for second moments.
    """
    values = exact.flatten().cpu().numpy().view(np.uint32)
    groups = -(-len(values) // 8)
    counters = np.zeros((groups, 4), np.uint64)
    counters[:, 0], counters[:, 1], counters[:, 2], counters[:, 3] = np.arange(groups), array << 30, tensor, number
    words = np.stack(philox(seed, counters.T), 1).astype(np.uint32)
    random = np.stack([words & 0xFFFF, words >> 16], 2).reshape(-1)[: len(values)]
    return ((values + random) >> 16).astype(np.uint16)


@STATES
def test_rounding_adds_philoxs_bits(state_dtype, device):
    """The bits are Philox's for the seed, the step, the tensor and the element.

    On CUDA, divisions and roots are approximate for 16-bit results, so a few elements are rounded differently.
    """
    tensors = made([*SHAPES, (100_003,)], device, state_dtype)
    seed = 0x123456789ABC
    found, exact = step(tensors, seed=seed), in_float32(tensors)
    for array, part in enumerate((0, 2, 3)):
        number = 0
        for place, (ours, wanted) in enumerate(zip(found[part], exact[part], strict=True)):
            if ours.dtype == torch.float32:
                torch.testing.assert_close(ours, wanted)
                continue
            bits = ours.flatten().view(torch.int16).cpu().numpy().view(np.uint16)
            differ = (bits != expected_bits(wanted, seed, 1, place, array)).sum()
            number += differ
        assert number == 0 if device.type == "cpu" else number < 100_000 // 500


@STATES
def test_mean_is_exact(state_dtype, device):
    """2^20 equal elements are rounded to two neighbouring bfloat16 numbers, and their mean is nearly exact."""
    n = 2**20
    low = torch.bfloat16
    tensors = [
        [torch.full((n,), value, dtype=dtype, device=device)]
        for value, dtype in ((1.0, low), (0.5, low), (0.3, state_dtype), (0.2, state_dtype))
    ]
    found, exact = step(tensors), in_float32([[t[:1] for t in part] for part in tensors])
    for part in (0, 2, 3) if state_dtype == torch.bfloat16 else (0,):
        truth = exact[part][0].double().item()
        values, counts = found[part][0].double().unique(return_counts=True)
        assert len(values) == 2
        assert values[0] < truth < values[1]
        gap = (values[1] - values[0]).item()
        assert gap == 2 ** (np.floor(np.log2(truth)) - 7)
        share = (truth - values[0].item()) / gap
        sigma = (share * (1 - share) / n) ** 0.5
        assert abs(counts[1].item() / n - share) < 6 * sigma + 2**-16


def test_seeds_steps_and_tensors_have_different_bits(device):
    one, two = made([(4096,)], device), made([(4096,)], device)
    twice = tuple(a + a for a in one)
    first = step(twice)
    assert torch.equal(first[0][0], step(twice)[0][0])
    assert not torch.equal(first[0][0], first[0][1])
    assert not torch.equal(first[0][0], step(twice, seed=8)[0][0])
    # With both betas 0 there is no bias correction, so steps 1 and 2 differ only in their random bits.
    plain = {"beta1": 0.0, "beta2": 0.0, "weight_decay": 0.0}
    assert not torch.equal(step(two, 1, **plain)[0][0], step(two, 2, **plain)[0][0])
    moments = step((one[0], one[1], [one[3][0]], [one[3][0]]), beta1=0.5, beta2=0.5)
    assert not torch.equal(moments[2][0], moments[3][0])


@STATES
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 7, 8, 511, 2049, 32769])
def test_bits_do_not_depend_on_alignment(size, offset, state_dtype, device):
    """The CUDA kernel updates aligned tensors in packs."""
    tensors = made([(size,)], device, state_dtype)
    moved = tuple([torch.cat([t.new_zeros(offset), t])[offset:] for t in part] for part in tensors)
    lists = [[part[0].as_strided((size,), (1,), part[0].storage_offset())] for part in moved]
    steps = [torch.ones((), device=device)]
    ops.adamw_(*lists, steps, lr=torch.tensor(1e-3, dtype=torch.float64), **OPTIONS, rounding_seed=7)
    for part, expected in zip(lists, step(tensors), strict=True):
        assert torch.equal(part[0], expected[0])


def test_nonfinite_and_exact_values_stay(device):
    special = torch.tensor([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 2.0**-133], dtype=torch.bfloat16, device=device)
    zeros = torch.zeros_like(special)
    for seed in range(20):
        found = step(([special], [zeros], [zeros], [zeros]), seed=seed, weight_decay=0.0)[0][0]
        assert torch.equal(found.view(torch.int16)[1:], special.view(torch.int16)[1:])
        assert found[0].isnan()


def test_opcheck(device):
    lists = made([(3, 5), (4,)], device)
    steps = [torch.ones((), device=device) for _ in lists[0]]
    lr = torch.tensor(1e-3, dtype=torch.float64)
    torch.library.opcheck(ops.adamw_, (*lists, steps), {"lr": lr, **OPTIONS, "rounding_seed": 3})


def test_bad_input(device):
    lists = made([(3,)], device)
    steps, lr = [torch.ones((), device=device)], torch.tensor(1e-3)
    masters = [t.float() for t in lists[0]]
    with raises("rounding_seed and master_params exclude each other"):
        ops.adamw_(*lists, steps, lr=lr, **OPTIONS, master_params=masters, rounding_seed=1)
    with raises(r"rounding_seed is for bfloat16 parameters, params\[0\] is float32"):
        ops.adamw_(*[[t.float() for t in part] for part in lists], steps, lr=lr, **OPTIONS, rounding_seed=1)
    with pytest.raises(ValueError, match="master_weights and rounding_seed exclude each other"):
        AdamW([torch.nn.Parameter(masters[0])], master_weights=True, rounding_seed=1)


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def trained(steps, device, **options):
    """Train 2^14 bfloat16 parameters that start at 1, with steps smaller than half of bfloat16's spacing at 1."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.ones(2**14, dtype=torch.bfloat16, device=device))
    optimizer = AdamW([parameter], lr=2e-4, weight_decay=0.0, **options)
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return parameter.detach(), optimizer


def test_small_updates_are_not_lost(device):
    nearest, _ = trained(100, device)
    assert nearest.eq(1).all()
    rounded, optimizer = trained(100, device, rounding_seed=3)
    assert rounded.double().mean().item() == pytest.approx(0.98, abs=5e-4)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


def test_seed_and_state_dict_repeat_a_run(device):
    whole, _ = trained(8, device, rounding_seed=3)
    assert torch.equal(whole, trained(8, device, rounding_seed=3)[0])
    assert not torch.equal(whole, trained(8, device, rounding_seed=4)[0])
    half, optimizer = trained(5, device, rounding_seed=3)
    parameter = torch.nn.Parameter(half)
    other = AdamW([parameter], rounding_seed=9)
    other.load_state_dict(optimizer.state_dict())
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        other.step()
    assert torch.equal(parameter, whole)


def test_float32_parameters_are_unchanged(device):
    results = []
    for seed in (None, 5):
        torch.manual_seed(1)
        wide = torch.nn.Parameter(torch.randn(50, device=device))
        low = torch.nn.Parameter(torch.randn(50, device=device).bfloat16())
        optimizer = AdamW([wide, low], rounding_seed=seed)
        for parameter in (wide, low):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        results.append(wide.detach())
    assert torch.equal(*results)
