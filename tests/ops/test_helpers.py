"""Tests that the rule of exactness refuses wrong results and accepts correct results."""

import math

import pytest
import torch

from gptkernels.testing.exactness import assert_norm_as_exact_as_torch, assert_product
from helpers import all_dtypes, assert_as_exact_as_torch, with_dtypes

dtypes_below_float64 = with_dtypes(torch.float32, torch.bfloat16, torch.float16)


def compare(ours, torchs, exact, dtype, **options):
    double = [torch.tensor(t, dtype=torch.float64) for t in (ours, torchs, exact)]
    assert_as_exact_as_torch(double[0].to(dtype), double[1].to(dtype), double[2], **options)


def refused(*args, **options):
    with pytest.raises(AssertionError):
        compare(*args, **options)


@pytest.mark.parametrize("torchs", [math.inf, -math.inf, math.nan, 1.0])
@pytest.mark.parametrize("exact", [math.inf, -math.inf, math.nan])
@all_dtypes
def test_special_values_must_be_the_formulas(exact, torchs, dtype):
    compare([exact, 1.0], [torchs, 1.0], [exact, 1.0], dtype)
    for wrong in {math.inf, -math.inf, 0.0, torch.finfo(dtype).max} - {exact}:
        refused([wrong, 1.0], [torchs, 1.0], [exact, 1.0], dtype)
    if not math.isnan(exact):
        refused([math.nan, 1.0], [torchs, 1.0], [exact, 1.0], dtype)


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@all_dtypes
def test_finite_formula_requires_a_finite_result(special, dtype):
    """Where the formula is finite, an infinity or NaN of torch's does not raise the allowed error."""
    for torchs in (special, 2.0):
        refused([special, 1.0], [torchs, 1.0], [2.0, 1.0], dtype)
    compare([2.0, 1.0], [special, 1.0], [2.0, 1.0], dtype)
    refused([2.0, 1.1], [special, 1.0], [2.0, 1.0], dtype)


@dtypes_below_float64
def test_result_must_overflow_where_the_formula_does(dtype):
    largest = torch.finfo(dtype).max
    for sign in (1, -1):
        compare([sign * math.inf], [sign * math.inf], [sign * 2 * largest], dtype)
        compare([sign * math.inf], [0.0], [sign * 2 * largest], dtype)
        refused([sign * largest], [sign * math.inf], [sign * 2 * largest], dtype)  # a saturated result
        refused(
            [sign * largest], [sign * largest], [sign * 2 * largest], dtype
        )  # torch's saturated result does not matter
        refused([sign * math.inf], [sign * math.inf], [sign * largest * 0.9], dtype)  # a result that overflows too soon
        refused([-sign * math.inf], [sign * math.inf], [sign * 2 * largest], dtype)
        refused([math.nan], [math.nan], [sign * 2 * largest], dtype)


@dtypes_below_float64
def test_rounding_to_either_side_of_the_overflow_boundary(dtype):
    info = torch.finfo(dtype)
    boundary = info.max * (1 + info.eps / 4)  # half a unit in the last place above the largest number
    for exact in (boundary * (1 - info.eps / 16), boundary * (1 + info.eps / 16)):
        for ours in (info.max, math.inf):
            compare([ours], [info.max], [exact], dtype)
            refused([-ours], [info.max], [exact], dtype)


@dtypes_below_float64
def test_overflow_does_not_raise_the_allowed_error(dtype):
    info = torch.finfo(dtype)
    for huge in (2 * info.max, 1e300):
        compare([math.inf, info.max / 4], [math.inf, info.max / 4], [huge, info.max / 4], dtype)
        refused([math.inf, info.max / 3], [math.inf, info.max / 4], [huge, info.max / 4], dtype)


@all_dtypes
def test_error_may_be_twice_torchs(dtype):
    eps = max(torch.finfo(dtype).eps, 1e-12)
    compare([1 + 4 * eps], [1 + 2 * eps], [1.0], dtype)
    refused([1 + 8 * eps], [1 + 2 * eps], [1.0], dtype)
    refused([1 + 8 * eps], [1.0], [1.0], dtype)
    compare([1 + 8 * eps], [1.0], [1.0], dtype, torch_error=4 * eps)


@all_dtypes
def test_denormals(dtype):
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    compare([smallest, 0.0], [0.0, 0.0], [smallest, 0.0], dtype)
    compare([0.0], [smallest], [smallest], dtype)  # one rounding
    if dtype != torch.float64:  # for float64, an error of 1e-13 is allowed
        refused([0.0], [4 * smallest], [4 * smallest], dtype)


@all_dtypes
def test_shape_and_dtype(dtype):
    one = torch.ones(3, dtype=dtype)
    with pytest.raises(AssertionError, match="shape"):
        assert_as_exact_as_torch(one, one, torch.ones(4, dtype=torch.float64))
    with pytest.raises(AssertionError, match="dtype"):
        assert_as_exact_as_torch(one.to(torch.int32), one, one.double())
    empty = torch.ones(0, dtype=dtype)
    assert_as_exact_as_torch(empty, empty, empty.double())


# ---- the bound of products -------------------------------------------------------------------------------------------


def operands(rows, inner, columns, dtype, values="normal"):
    a, b = torch.randn(rows, inner), torch.randn(inner, columns)
    if values == "constant":
        a, b = a[:1, :1].expand_as(a), b[:1, :1].expand_as(b)
    elif values == "positive":
        a, b = a.abs(), b.abs()
    elif values == "wide":
        a, b = a.pow(5), b.pow(5)
    return a.to(dtype), b.to(dtype)


@pytest.mark.parametrize("values", ["normal", "constant", "positive", "wide"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 1, 2000), (40, 7, 50), (1, 5000, 1), (30, 2**17, 20)], ids=str)
@all_dtypes
def test_torchs_products_are_within_the_bound(sizes, values, dtype):
    a, b = operands(*sizes, dtype, values)
    assert_product(a @ b, a, b)
    wide = torch.promote_types(dtype, torch.float32)
    bias = torch.randn(sizes[2]).to(dtype)
    assert_product((a.to(wide) @ b.to(wide) + bias).to(dtype), a, b, bias)


@pytest.mark.parametrize(("terms", "missing"), [(16385, 1), (24645, 5), (2**17 + 1, 8), (300, 1)])
@all_dtypes
def test_missing_terms_are_found(terms, missing, dtype):
    a, b = operands(40, terms, 60, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    right, wrong = ((a[:, :k].to(wide) @ b[:k].to(wide)).to(dtype) for k in (terms, terms - missing))
    assert_product(right, a, b)
    with pytest.raises(AssertionError, match="dweight: Freivalds"):
        assert_product(wrong, a, b, name="dweight")
    exact = a.double() @ b.double()
    assert_norm_as_exact_as_torch(right, right, exact)
    if dtype != torch.float64 and (
        dtype != torch.bfloat16 or missing / terms > 1e-4
    ):  # These differences exceed the rounding errors.
        with pytest.raises(AssertionError, match="root mean square"):
            assert_norm_as_exact_as_torch(wrong, right, exact)
