import pytest
import torch

import gptkernels  # noqa: F401
from gptkernels.testing.cases.softmax import softmax_formula as exact
from helpers import all_dtypes, assert_as_exact_as_torch, double, gradients, randn, refused

ops = torch.ops.gptkernels


def ours(x):
    return ops.softmax(x)


def torchs(x):
    return torch.softmax(x, -1)


@pytest.mark.parametrize("width", [33, 768, 20001])
@all_dtypes
def test_infinities_and_nan(width, dtype, device):
    x = randn(7, width, dtype=dtype, device=device)
    x[0, :-1] = float("-inf")
    x[1, :] = float("-inf")
    x[2, 3] = float("inf")
    x[3, 3] = float("nan")
    x[4] = torch.finfo(dtype).max
    x[5] = torch.finfo(dtype).smallest_normal / 4
    x[6, 1] = torch.finfo(dtype).max
    assert_as_exact_as_torch(ours(x), torchs(x), exact(double(x)))


def test_bad_input(device):
    refused(ops.softmax, (torch.ones((), device=device),), "x", "at least 1 dimension")


@pytest.mark.large
def test_more_than_2_31_elements(device):
    rows, width = 2**31 // 768 + 5, 768
    x = torch.randn(rows, width, dtype=torch.bfloat16, device=device)
    out = ours(x)
    dx = ops.softmax_backward(x, out)
    for part in (slice(0, 5), slice(rows - 5, rows)):
        assert_as_exact_as_torch(out[part], torchs(x[part]), exact(double(x[part])))
        expected = gradients(torchs, (x[part],), x[part]) + gradients(exact, (double(x[part]),), double(x[part]))
        assert_as_exact_as_torch(dx[part], *expected, "dx")
