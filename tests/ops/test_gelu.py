import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import gptkernels  # noqa: F401
from gptkernels.testing.cases.elementwise import gelu_formula as exact
from helpers import all_dtypes, assert_as_exact_as_torch, assert_as_exact_with_gradients, double, randn, refused

ops = torch.ops.gptkernels

all_forms = pytest.mark.parametrize("approximate", ["tanh", "none"])


def ours(x, approximate):
    return ops.gelu(x, approximate=approximate)


def torchs(x, approximate):
    return F.gelu(x, approximate=approximate)


def check(x, dout, approximate):
    functions = (partial(f, approximate=approximate) for f in (ours, torchs, exact))
    assert_as_exact_with_gradients(*functions, (x,), dout, ("dx",))


@all_forms
@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 9, 255, 2049])
def test_dout_and_x_of_different_alignment(size, approximate, device):
    dout = randn(size + 3, dtype=torch.bfloat16, device=device)
    x = randn(size + 3, dtype=torch.bfloat16, device=device)
    for i in range(4):
        check(x[i : i + size], dout[3 - i : 3 - i + size], approximate)


def test_any_number_of_dimensions(device):
    for shape in [(), (8,), (2, 0, 8), (1, 2, 1, 2, 8)]:
        x = randn(*shape, dtype=torch.float32, device=device)
        assert ops.gelu(x).shape == ops.gelu_backward(x, x).shape == shape
        torch.testing.assert_close(ops.gelu(x), torchs(x, "tanh"))


def test_tanh_is_the_default(device):
    x = randn(100, dtype=torch.float32, device=device)
    assert torch.equal(ops.gelu(x), ours(x, "tanh"))
    assert torch.equal(ops.gelu_backward(x, x), ops.gelu_backward(x, x, approximate="tanh"))


@all_forms
def test_relative_error_where_gelu_is_nearly_0(approximate, device):
    """In float32, 1 + tanh(u) and 1 + erf(u), which torch's kernels compute, are 0 for x below about -5.6."""
    x = torch.linspace(-9, -1, 10001, device=device)
    expected = exact(x.double(), approximate)
    worst = ((ours(x, approximate) - expected) / expected).abs().max()
    assert worst < 64 * torch.finfo(torch.float32).eps
    assert ((torchs(x, approximate) - expected) / expected).abs().max() > 0.5


@all_forms
@all_dtypes
def test_infinities_and_nan(approximate, dtype, device):
    """At infinities, results are compared with the formula, because torch's vectorized kernels vary with the CPU."""
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0], dtype=dtype, device=device)
    for values in (x, x.repeat(11), x[:1]):  # whole SIMD vectors, and the elements that remain
        out = ours(values, approximate)
        assert out[0] == math.inf
        assert torch.equal(out[:6].isnan(), torch.tensor([0, 1, 1, 0, 0, 0], device=device).bool()[: len(out)])
        check(values, torch.ones_like(values), approximate)


@all_forms
@all_dtypes
def test_huge_and_tiny_values(approximate, dtype, device):
    """For huge x, GELU is x or 0, and its derivative is 1 or 0. (torch's float32 derivative is NaN beyond 1e19.)"""
    info = torch.finfo(dtype)
    huge = torch.tensor([40.0, 1e4, info.max / 4, info.max], dtype=dtype, device=device)
    assert torch.equal(ours(huge, approximate), huge)
    assert torch.equal(ours(-huge, approximate), torch.zeros_like(huge))
    one = torch.ones_like(huge)
    assert torch.equal(ops.gelu_backward(one, huge, approximate=approximate), one)
    assert torch.equal(ops.gelu_backward(one, -huge, approximate=approximate), 0 * one)
    tiny = torch.tensor([info.smallest_normal, info.smallest_normal / 4], dtype=dtype, device=device)
    for x in (tiny, -tiny):
        assert_as_exact_as_torch(ours(x, approximate), torchs(x, approximate), exact(double(x), approximate))


def test_bad_input(device):
    x = randn(5, 8, dtype=torch.float32, device=device)
    refused(ops.gelu, (x,), "approximate must be 'tanh' or 'none'", "'erf'", approximate="erf")
    refused(ops.gelu_backward, (x, x), "approximate must be 'tanh' or 'none'", "''", approximate="")


@pytest.mark.large
def test_more_than_2_31_elements(device):
    size = 2**31 + 13
    x = torch.randn(size, dtype=torch.bfloat16, device=device)
    out = ours(x, "tanh")
    dx = ops.gelu_backward(x, x, approximate="tanh")
    for part in (slice(0, 100), slice(2**31 - 50, size)):
        assert_as_exact_as_torch(out[part], torchs(x[part], "tanh"), exact(double(x[part]), "tanh"))
        assert torch.equal(dx[part], ops.gelu_backward(x[part].clone(), x[part].clone(), approximate="tanh"))
