"""Compares squared_relu with its formula, which torch computes in float64 and in the dtype of x.

The following command needs examples/adding_an_op/python and tests in PYTHONPATH, and the built libraries in LIBRARY. In
the source tree (tests/ops/test_squared_relu.py), the lines that load the libraries and import the rules are not needed.

python -m pytest -p conftest examples/adding_an_op/tests --device cpu
"""

import os

import pytest
import torch

import gptkernels  # noqa: F401

for library in os.environ["LIBRARY"].split(os.pathsep):
    torch.ops.load_library(library)

import squared_relu  # noqa: F401, E402

from helpers import (  # noqa: E402
    all_dtypes,
    all_rows,
    all_views,
    all_widths,
    as_view,
    assert_as_exact_with_gradients,
    assert_same_bits,
    raises,
    randn,
)

ops = torch.ops.gptkernels


def formula(x):
    return x.relu().square()


def check(x, dout):
    assert_as_exact_with_gradients(ops.squared_relu, formula, formula, (x,), dout, ("dx",))


@all_dtypes
@all_widths
@all_rows
def test_matches_float64(rows, width, dtype, device):
    check(*(randn(rows, width, dtype=dtype, device=device) for _ in range(2)))


@all_views
@all_dtypes
def test_views(view, dtype, device):
    check(*(as_view(randn(6, 40, dtype=dtype, device=device), view) for _ in range(2)))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@all_dtypes
def test_infinities_and_nan(value, dtype, device):
    x = randn(3, 7, dtype=dtype, device=device)
    x[1, 2] = value
    torch.testing.assert_close(ops.squared_relu(x), formula(x), equal_nan=True)


@all_dtypes
def test_deterministic(dtype, device):
    x = randn(100, 333, dtype=dtype, device=device)
    assert_same_bits(lambda: ops.squared_relu(x))


def test_derivatives(device):
    x = randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(ops.squared_relu, (x,), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(ops.squared_relu, (x,), check_fwd_over_rev=True)


@all_dtypes
def test_opcheck(dtype, device):
    x, dout = (randn(3, 4, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    torch.library.opcheck(ops.squared_relu, (x,))
    torch.library.opcheck(ops.squared_relu_backward, (dout, x))


def test_bad_input(device):
    x = torch.ones(3, device=device)
    with raises("gptkernels::squared_relu: x must be float64", "int64"):
        ops.squared_relu(x.long())
    with raises("squared_relu_backward", r"dout must have shape \(3\)", r"\(2\)"):
        ops.squared_relu_backward(x[:2], x)
