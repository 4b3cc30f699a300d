import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
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

all_forms = pytest.mark.parametrize("approximate", ["tanh", "none"])


def ours(x, approximate):
    return ops.gelu(x, approximate=approximate)


def torchs(x, approximate):
    return F.gelu(x, approximate=approximate)


def exact(x, approximate):
    """The formula, in float64, by functions that do not cancel."""
    if approximate == "none":
        return x * 0.5 * torch.erfc(-x * math.sqrt(0.5))
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def check(x, dout, approximate):
    """Forward and gradient against float64 and beside torch."""
    functions = (partial(f, approximate=approximate) for f in (ours, torchs, exact))
    assert_as_exact_with_gradients(*functions, (x,), dout, ("dx",))


@all_forms
@all_dtypes
@all_widths
@all_rows
def test_matches_float64(rows, width, dtype, approximate, device):
    check(*(randn(rows, width, dtype=dtype, device=device) for _ in range(2)), approximate)


@all_forms
@all_views
@all_dtypes
def test_views(view, dtype, approximate, device):
    check(*(as_view(randn(6, 41, dtype=dtype, device=device), view) for _ in range(2)), approximate)


@all_forms
@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 9, 255, 2049])
def test_out_and_in_of_different_alignment(size, approximate, device):
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
def test_no_digits_are_lost_where_the_tail_is_small(approximate, device):
    """x / 2 * (1 + tanh(u)), and 1 + erf(u), are 0 from -5.6 on in float32."""
    x = torch.linspace(-9, -1, 10001, device=device)
    expected = exact(x.double(), approximate)
    worst = ((ours(x, approximate) - expected) / expected).abs().max()
    assert worst < 64 * torch.finfo(torch.float32).eps
    assert ((torchs(x, approximate) - expected) / expected).abs().max() > 0.5


@all_forms
@all_dtypes
def test_infinities_and_nan_are_the_formulas(approximate, dtype, device):
    """Torch's vectorised kernels may answer something else at infinities, and not the same on every processor."""
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0], dtype=dtype, device=device)
    for values in (x, x.repeat(11), x[:1]):  # in vectors and in what is left of them
        out = ours(values, approximate)
        assert out[0] == math.inf
        assert torch.equal(out[:6].isnan(), torch.tensor([0, 1, 1, 0, 0, 0], device=device).bool()[: len(out)])
        check(values, torch.ones_like(values), approximate)


@all_forms
@all_dtypes
def test_huge_and_tiny_values(approximate, dtype, device):
    """Where torch's own derivative overflows to NaN (beyond 1e19 in float32) ours is 1 and 0."""
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


@all_forms
@all_dtypes
def test_deterministic(approximate, dtype, device):
    x = randn(100_003, dtype=dtype, device=device)
    assert_same_bits(lambda: ours(x, approximate))
    assert_same_bits(lambda: ops.gelu_backward(x, x, approximate=approximate))


@all_forms
def test_gradcheck(approximate, device):
    x = randn(3, 7, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ours(x, approximate), (x,))
    assert torch.autograd.gradgradcheck(lambda x: ours(x, approximate), (x,))


@all_forms
@registered_dtypes
def test_opcheck(approximate, dtype, device):
    x, dout = (randn(4, 7, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    torch.library.opcheck(ops.gelu, (x,), {"approximate": approximate})
    torch.library.opcheck(ops.gelu_backward, (dout, x), {"approximate": approximate})


@all_forms
def test_compile(approximate, device):
    x, dout = (randn(5, 33, dtype=torch.float32, device=device, requires_grad=True) for _ in range(2))
    compiled = torch.compile(lambda x: ours(x, approximate), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), ours(x, approximate))
    torch.testing.assert_close(
        gradients(compiled, (x,), dout), gradients(lambda x: ours(x, approximate), (x,), dout), rtol=0, atol=0
    )


def test_autocast_leaves_gelu_alone(device):
    with torch.autocast(device.type, torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            x = randn(5, 33, dtype=dtype, device=device)
            assert ours(x, "tanh").dtype == torchs(x, "tanh").dtype == dtype


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 40),
    width=st.integers(0, 700),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    approximate=st.sampled_from(["tanh", "none"]),
)
def test_any_shape(device, rows, width, dtype, approximate):
    torch.manual_seed(rows + width)  # a failing example must fail again
    x, dout = (randn(rows, width, dtype=dtype, device=device) for _ in range(2))
    torch.testing.assert_close(ours(x, approximate), torchs(x, approximate), **tolerance(dtype))
    (a,), (b,) = (gradients(lambda x, f=f: f(x, approximate), (x,), dout) for f in (ours, torchs))
    torch.testing.assert_close(a, b, **tolerance(dtype))


def test_bad_input(device):
    x = randn(5, 8, dtype=torch.float32, device=device)
    with raises("gelu:", "x must be float64", "int64"):
        ops.gelu(x.long())
    with raises("gelu:", "approximate must be 'tanh' or 'none'", "'erf'"):
        ops.gelu(x, approximate="erf")
    with raises("gelu_backward", "approximate must be 'tanh' or 'none'", "''"):
        ops.gelu_backward(x, x, approximate="")
    with raises("gelu_backward", r"dout must have shape \(5, 8\)", r"\(8\)"):
        ops.gelu_backward(x[0], x)
    with raises("gelu_backward", "dout must have the dtype of x", "float32", "float64"):
        ops.gelu_backward(x.double(), x)


def test_tensors_on_different_devices(device):
    if device.type == "cpu":
        pytest.skip("one device only")
    x = randn(5, 8, dtype=torch.float32, device=device)
    with raises("gelu_backward", "dout is on cpu", "x is on cuda"):
        ops.gelu_backward(x.cpu(), x)


@pytest.mark.large
def test_more_than_2_31_elements(device):
    size = 2**31 + 13
    x = torch.randn(size, dtype=torch.bfloat16, device=device)
    out = ours(x, "tanh")
    dx = ops.gelu_backward(x, x, approximate="tanh")
    for part in (slice(0, 100), slice(2**31 - 50, size)):
        assert_as_exact_as_torch(out[part], torchs(x[part], "tanh"), exact(double(x[part]), "tanh"))
        assert torch.equal(dx[part], ops.gelu_backward(x[part].clone(), x[part].clone(), approximate="tanh"))
