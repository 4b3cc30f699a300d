"""Tests of ``normal_``. ``normal_numbers`` of the table of operators computes the same bits with NumPy."""

import math

import mpmath
import numpy as np
import pytest
import torch

from gptkernels.testing.cases.normal import normal_numbers, normal_quantile
from helpers import DTYPES, all_dtypes, assert_same_bits, refused

ops = torch.ops.gptkernels


def draw(*shape, dtype=torch.float64, device="cpu", mean=0.0, std=1.0, seed=1, stream=2, **place):
    x = torch.empty(shape, dtype=dtype, device=device)
    ops.normal_(x, mean, std, seed, stream, **place)
    return x


# ---- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "stream", "first"), [(0, 0, 0), (-1, 2**63 - 1, 1), (2**62 + 5, -7, 2**40 - 3)])
def test_bits_are_numpys(seed, stream, first, device):
    found = draw(20_001, device=device, seed=seed, stream=stream, first_index=first)
    expected = torch.from_numpy(normal_numbers(seed, stream, np.arange(20_001) + first))
    assert torch.equal(found.cpu(), expected)
    scaled = draw(20_001, device=device, mean=0.3, std=0.02, seed=seed, stream=stream, first_index=first)
    assert torch.equal(scaled.cpu(), 0.3 + 0.02 * expected)


@all_dtypes
def test_dtypes_differ_by_rounding_only(dtype, device):
    found, exact = (draw(10_001, dtype=d, device=device, std=0.02) for d in (dtype, torch.float64))
    assert torch.equal(found, exact if dtype == torch.float64 else exact.float().to(dtype))


def test_quantile_is_exact():
    """The largest error of the quantiles is about 5 ulps, from the smallest probability, 2^-54, to the largest."""
    random = np.random.default_rng(0)
    p = np.concatenate([2.0**-54 * (2 * np.arange(20) + 1), 2 ** random.uniform(-54, -1, 300), random.random(300) / 2])
    p = np.concatenate([p, [0.075, np.nextafter(0.075, 0), math.exp(-25), 0.5 - 2**-53, 0.5 - 2**-54]])
    with mpmath.workdps(50):
        for probability, found in zip(p, normal_quantile(p), strict=True):
            exact = mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * mpmath.mpf(float(probability)))
            assert abs(mpmath.mpf(float(found)) - exact) < 6 * np.spacing(found)


# ---- the distribution ------------------------------------------------------------------------------------------------


def test_distribution(device):
    """Moments, the share of numbers in the tails, and the Kolmogorov-Smirnov statistic are within 5 deviations."""
    n = 2**21
    x = draw(n, device=device)
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(x.pow(power).mean() - mean) < 5 * math.sqrt(variance / n)
    for bound in (1, 2, 3, 4, 4.5):
        p = math.erfc(bound / math.sqrt(2)) / 2
        for tail in (x > bound, x < -bound):
            assert abs(tail.sum() - n * p) < 5 * math.sqrt(n * p)
    distribution = torch.special.ndtr(x.sort().values)
    steps = torch.arange(n + 1, device=device) / n
    distance = max((distribution - steps[:-1]).abs().max(), (distribution - steps[1:]).abs().max())
    assert distance < 2.2 / math.sqrt(n)  # exceeded with probability 2 exp(-2 * 2.2^2) = 1.3e-4


def test_streams_seeds_and_neighbours_are_independent(device):
    n = 2**19
    x = draw(n + 1000, device=device)
    others = [x[step:][:n] for step in (1, 2, 3, 64, 768, 1000)]
    others += [draw(n, device=device, stream=s) for s in (1, 3, 2 + 2**32)]
    others += [draw(n, device=device, seed=s) for s in (0, 2, 1 + 2**32)]
    for other in others:
        for power in (1, 2):
            pair = torch.stack([x[:n].pow(power), other.pow(power)])
            assert abs(torch.corrcoef(pair)[0, 1]) < 5 / math.sqrt(n)


# ---- parts -----------------------------------------------------------------------------------------------------------


@all_dtypes
def test_parts_are_parts_of_the_whole(dtype, device):
    whole = draw(30, 21, dtype=dtype, device=device)
    options = {"dtype": dtype, "device": device, "row_stride": 21}
    for rows in (slice(0, 11), slice(11, 30)):
        for columns in (slice(0, 21), slice(0, 4), slice(5, 20), slice(20, 21)):
            expected = whole[rows, columns]
            assert torch.equal(draw(*expected.shape, first_index=21 * rows.start + columns.start, **options), expected)
    assert torch.equal(draw(5, 6, 21, dtype=dtype, device=device), whole.view(5, 6, 21))
    assert torch.equal(draw(dtype=dtype, device=device, first_index=50), whole.flatten()[50])


def test_views_are_filled(device):
    whole = draw(8, 6, device=device)
    x = torch.zeros(6, 8, device=device, dtype=torch.float64).mT
    ops.normal_(x, 0.0, 1.0, 1, 2)
    assert torch.equal(x, whole)
    packed = torch.zeros(12, 6, device=device, dtype=torch.float64)
    for i, first in enumerate((2, 10, 18)):  # rows 2 and 3 of each of three matrices (8, 6)
        ops.normal_(packed[4 * i : 4 * i + 2], 0.0, 1.0, 1, 2, 6 * first)
    assert torch.equal(packed.view(3, 4, 6)[:, :2], draw(24, 6, device=device).view(3, 8, 6)[:, 2:4])
    assert not packed.view(3, 4, 6)[:, 2:].any()


def test_bits_do_not_depend_on_threads(device):
    assert_same_bits(lambda: [draw(300_007, dtype=dtype, device=device) for dtype in DTYPES])


def test_errors(device):
    x = torch.empty(4, 6, device=device)
    refused(ops.normal_, (x.int(), 0.0, 1.0, 0, 0), "x must be .*float64, float32, bfloat16 or float16")
    refused(ops.normal_, (x, 0.0, -1.0, 0, 0), "std must be at least 0, got -1")
    refused(ops.normal_, (x, 0.0, float("nan"), 0, 0), "std must be at least 0, got nan")
    refused(ops.normal_, (x, 0.0, 1.0, 0, 0, -1), "first_index must be at least 0, got -1")
    refused(ops.normal_, (x, 0.0, 1.0, 0, 0, 0, 5), r"row_stride must be -1 or at least the number of columns \(6\)")
    refused(ops.normal_, (x[:1].expand(4, 6), 0.0, 1.0, 0, 0), "several of its elements share memory")
    refused(ops.normal_, (x.requires_grad_(), 0.0, 1.0, 0, 0), "has no derivative")
