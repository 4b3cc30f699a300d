import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gptkernels  # noqa: F401
from helpers import (
    all_dtypes,
    all_rows,
    all_views,
    all_widths,
    as_view,
    assert_as_exact_as_torch,
    assert_as_exact_with_gradients,
    assert_same_bits,
    double,
    gradients,
    raises,
    randn,
    registered_dtypes,
    tolerance,
)

ops = torch.ops.gptkernels


def ours(x):
    return ops.softmax(x)


def torchs(x):
    return torch.softmax(x, -1)


def exact(x):
    """The formula, in float64."""
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


def check(x, dout):
    formula = exact if x.numel() else lambda x: x
    assert_as_exact_with_gradients(ours, torchs, formula, (x,), dout, ("dx",))


@all_dtypes
@all_widths
@all_rows
def test_matches_float64(rows, width, dtype, device):
    x, dout = (randn(rows, width, dtype=dtype, device=device) for _ in range(2))
    check(3 * x, dout)


KEPT = [8, 64, 100, 120, 250, 256, 520, 1000, 1536, 2304, 8200, 33000, 65536, 70001, 110000, 150000, 262144, 1000003]


@pytest.mark.parametrize("width", KEPT)
@all_dtypes
def test_wherever_a_row_is_kept(width, dtype, device):
    x, dout = (randn(3, width, dtype=dtype, device=device) for _ in range(2))
    check(3 * x, dout)


@all_views
@all_dtypes
def test_views(view, dtype, device):
    x, dout = (randn(6, 40, dtype=dtype, device=device) for _ in range(2))
    check(as_view(x, view), as_view(dout, view))


def test_leading_shapes(device):
    for shape in [(8,), (2, 8), (2, 3, 8), (2, 0, 8), (2, 0), (1, 2, 1, 2, 8)]:
        x = randn(*shape, dtype=torch.float32, device=device)
        torch.testing.assert_close(ours(x), torchs(x))


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


@all_dtypes
def test_deterministic(dtype, device):
    x, dout = (randn(300, 500, dtype=dtype, device=device) for _ in range(2))
    out = ours(x)
    assert_same_bits(lambda: ours(x))
    assert_same_bits(lambda: ops.softmax_backward(dout, out))


def test_gradcheck(device):
    for shape in [(5,), (2, 1), (2, 3, 7)]:
        x = randn(*shape, dtype=torch.float64, device=device, requires_grad=True)
        assert torch.autograd.gradcheck(ours, (x,))
        assert torch.autograd.gradgradcheck(ours, (x,))


@registered_dtypes
def test_opcheck(dtype, device):
    x, dout = (randn(2, 7, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    torch.library.opcheck(ops.softmax, (x,))
    torch.library.opcheck(ops.softmax_backward, (dout, x))


def test_compile(device):
    x, dout = (randn(5, 33, dtype=torch.float32, device=device) for _ in range(2))
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), ours(x))
    torch.testing.assert_close(gradients(compiled, (x,), dout), gradients(ours, (x,), dout))


def test_autocast_follows_softmax(device):
    x = randn(5, 33, dtype=torch.bfloat16, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        assert ours(x).dtype == torchs(x).dtype
        assert ours(x.float()).dtype == torch.float32


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 40), width=st.integers(1, 700), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_shape(device, rows, width, dtype):
    torch.manual_seed(rows + width)  # a failing example must fail again
    x, dout = (randn(rows, width, dtype=dtype, device=device) for _ in range(2))
    torch.testing.assert_close(ours(x), torchs(x), **tolerance(dtype))
    torch.testing.assert_close(gradients(ours, (x,), dout), gradients(torchs, (x,), dout), **tolerance(dtype))


def test_bad_input(device):
    x = torch.randn(5, 8, device=device)
    with raises("softmax", "x", "at least 1 dimension"):
        ours(x.sum())
    with raises("softmax", "x must be float64", "int64"):
        ours(x.long())
    with raises("softmax_backward", r"dout must have shape \(5, 8\)", r"\(4, 8\)"):
        ops.softmax_backward(x[:4], x)
    with raises("softmax_backward", "dout must have the dtype of out", "float32", "float64"):
        ops.softmax_backward(x.double(), x)


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
