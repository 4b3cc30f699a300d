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


def ours(x, weight, bias, eps=1e-5):
    return ops.layernorm(x, weight, bias, eps)[0]


def torchs(x, weight, bias, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def standardised(x, eps):
    """(x - mean) / sqrt(variance + eps). The mean's rounding, large where x is far from 0, is subtracted too."""
    centred = x - x.mean(-1, keepdim=True)
    centred = centred - centred.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)


def exact(x, weight, bias, eps=1e-5):
    """The formula, in float64."""
    out = standardised(x, eps)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def inputs(rows, width, dtype, device, weight=True, bias=True):
    x = randn(rows, width, dtype=dtype, device=device)
    return (
        x,
        randn(width, dtype=dtype, device=device) if weight else None,
        randn(width, dtype=dtype, device=device) if bias else None,
    )


def check(args, dout):
    """Forward and all gradients against float64 and beside torch."""
    assert_as_exact_with_gradients(ours, torchs, exact, args, dout, ("dx", "dweight", "dbias"))


@all_dtypes
@all_widths
@all_rows
def test_matches_float64(rows, width, dtype, device):
    check(inputs(rows, width, dtype, device), randn(rows, width, dtype=dtype, device=device))


@pytest.mark.parametrize(("weight", "bias"), [(True, False), (False, True), (False, False)])
@all_dtypes
def test_weight_and_bias_may_be_absent(weight, bias, dtype, device):
    check(inputs(5, 768, dtype, device, weight, bias), randn(5, 768, dtype=dtype, device=device))


@pytest.mark.parametrize("rows", [64, 1000, 5000])
@all_dtypes
def test_many_rows(rows, dtype, device):
    check(inputs(rows, 96, dtype, device), randn(rows, 96, dtype=dtype, device=device))


@pytest.mark.parametrize(
    ("rows", "width"), [(3000, 1100), (700, 1280), (9001, 1600), (301, 2304), (300, 8192), (3, 40000)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_wherever_a_row_is_kept(rows, width, dtype, device):
    """One warp's registers, several warps', shared memory with rows following each other, nowhere."""
    rows = min(rows, 1100) if device.type == "cpu" else rows  # all of a CPU's groups of rows, some one row larger
    check(inputs(rows, width, dtype, device), randn(rows, width, dtype=dtype, device=device))


@all_views
@all_dtypes
def test_views(view, dtype, device):
    x, weight, bias = inputs(6, 40, dtype, device)
    dout = randn(6, 40, dtype=dtype, device=device)
    check((as_view(x, view), as_view(weight[None], view)[0], as_view(bias[None], view)[0]), as_view(dout, view))


def test_leading_shapes(device):
    for shape in [(8,), (2, 8), (2, 3, 8), (2, 0, 8), (1, 2, 1, 2, 8)]:
        x = randn(*shape, dtype=torch.float32, device=device)
        out, mean, rstd = ops.layernorm(x, None, None)
        assert out.shape == shape
        assert mean.shape == rstd.shape == shape[:-1]
        torch.testing.assert_close(out, F.layer_norm(x, (8,)))


def test_statistics(device):
    x = randn(5, 768, dtype=torch.bfloat16, device=device)
    _, mean, rstd = ops.layernorm(x, None, None, 1e-3)
    assert mean.dtype == rstd.dtype == torch.float32
    torch.testing.assert_close(mean.double(), x.double().mean(-1))
    torch.testing.assert_close(rstd.double(), (x.double().var(-1, correction=0) + 1e-3).rsqrt())


@all_dtypes
def test_large_offset_keeps_the_variance(dtype, device):
    """E[x^2] - E[x]^2 would lose every digit here."""
    x = (randn(5, 768, dtype=torch.float64, device="cpu") * 4 + 1000).to(dtype).to(device)
    assert_as_exact_as_torch(ours(x, None, None), torchs(x, None, None), exact(double(x), None, None))


@pytest.mark.parametrize("offset", [1e3, 1e6, 1e14])
def test_gradients_at_a_large_offset(offset, device):
    """In float64, where the formula too must not lose its digits to the mean's rounding."""
    x, weight, bias = inputs(5, 96, torch.float64, device)
    check((x * 10 + offset, weight, bias), randn(5, 96, dtype=torch.float64, device=device))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@all_dtypes
def test_infinities_and_nan_stay_in_their_row(value, dtype, device):
    x, weight, bias = inputs(5, 33, dtype, device)
    clean = ours(x, weight, bias)
    x[2, 7] = value
    out = ours(x, weight, bias)
    assert out[2].isnan().all()
    keep = [0, 1, 3, 4]
    assert torch.equal(out[keep], clean[keep])


@all_dtypes
def test_extremes(dtype, device):
    tiny = torch.finfo(dtype).smallest_normal / 4
    for scale in (tiny, torch.finfo(dtype).max ** 0.45):
        x = (torch.randn(5, 127, dtype=torch.float64) * scale).to(dtype).to(device)
        assert_as_exact_as_torch(ours(x, None, None), torchs(x, None, None), exact(double(x), None, None))


@all_dtypes
def test_a_constant_gradient(dtype, device):
    """All elements of a row change alike: the gradient is 0, and of a short row with an exact mean exactly so."""
    x = torch.tensor([[-1.0, -2.0, 3.0], [4.0, -5.0, 1.0]], dtype=dtype, device=device, requires_grad=True)
    out = ops.layernorm(x, None, None, 1e-5)[0]
    out.backward(torch.full_like(out, 1.28125))
    assert not x.grad.any()


@all_dtypes
def test_deterministic(dtype, device):
    x, weight, bias = inputs(1000, 96, dtype, device)
    out, mean, rstd = ops.layernorm(x, weight, bias)
    assert_same_bits(lambda: ops.layernorm(x, weight, bias))
    assert_same_bits(lambda: ops.layernorm_backward(out, x, weight, mean, rstd, [True] * 3))


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_the_gradients_that_are_wanted(mask, device):
    args = inputs(5, 33, torch.float32, device)
    leaves = [t.requires_grad_(wanted) for t, wanted in zip(args, mask, strict=True)]
    ours(*leaves).sum().backward()
    expected = gradients(torchs, args, torch.ones(5, 33, device=device))
    for leaf, wanted, grad in zip(leaves, mask, expected, strict=True):
        assert (leaf.grad is not None) == wanted
        if wanted:
            torch.testing.assert_close(leaf.grad, grad)


def test_gradcheck(device):
    for rows, width in [(3, 7), (1, 1), (2, 33)]:
        args = [t.requires_grad_() for t in inputs(rows, width, torch.float64, device)]
        assert torch.autograd.gradcheck(ours, args)
        assert torch.autograd.gradgradcheck(ours, args)
    x = args[0]
    assert torch.autograd.gradgradcheck(lambda x: ours(x, None, None), (x,))


@registered_dtypes
def test_opcheck(dtype, device):
    x, weight, bias = (t.requires_grad_() for t in inputs(4, 7, dtype, device))
    torch.library.opcheck(ops.layernorm, (x, weight, bias))
    torch.library.opcheck(ops.layernorm, (x, None, None, 1e-3))
    _, mean, rstd = ops.layernorm(x.detach(), weight.detach(), bias.detach())
    dout = randn(4, 7, dtype=dtype, device=device, requires_grad=True)
    for mask in ([True, True, True], [True, False, False]):
        torch.library.opcheck(ops.layernorm_backward, (dout, x, weight, mean, rstd, mask))


def test_compile(device):
    args = [t.requires_grad_() for t in inputs(5, 33, torch.float32, device)]
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), ours(*args))
    dout = randn(5, 33, dtype=torch.float32, device=device)
    for a, b in zip(gradients(compiled, args, dout), gradients(ours, args, dout), strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_follows_layer_norm(device):
    x, weight, bias = inputs(5, 33, torch.float32, device)
    with torch.autocast(device.type, torch.bfloat16):
        for args in [(x, weight, bias), (x.bfloat16(), weight, bias), (x.bfloat16(), None, None)]:
            expected = torchs(*args)
            if device.type == "cuda" or args[1] is None:  # on the CPU torch keeps x's dtype beside wider weights
                assert ours(*args).dtype == expected.dtype
            torch.testing.assert_close(ours(*args).float(), expected.float(), rtol=1e-2, atol=1e-2)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 40), width=st.integers(8, 700), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_shape(device, rows, width, dtype):
    torch.manual_seed(rows + width)  # a failing example must fail again
    args = inputs(rows, width, dtype, device)
    dout = randn(rows, width, dtype=dtype, device=device)
    torch.testing.assert_close(ours(*args), torchs(*args))
    expected = gradients(exact, [double(t) for t in args], double(dout))
    for a, b in zip(gradients(ours, args, dout), expected, strict=True):
        torch.testing.assert_close(a, b.to(dtype), **tolerance(dtype))


def test_bad_input(device):
    x, weight, bias = inputs(5, 8, torch.float32, device)
    with raises("layernorm", "x", "at least 1 dimension"):
        ops.layernorm(x.sum(), None, None)
    with raises("layernorm", "x must be float64", "int64"):
        ops.layernorm(x.long(), None, None)
    with raises("layernorm", r"weight must have shape \(8\)", r"\(7\)"):
        ops.layernorm(x, weight[:7], bias)
    with raises("layernorm", r"bias must have shape \(8\)", r"\(1, 8\)"):
        ops.layernorm(x, weight, bias[None])
    with raises("layernorm", "weight must have the dtype of x", "float32", "float64"):
        ops.layernorm(x, weight.double(), bias)
    _, mean, rstd = ops.layernorm(x, weight, bias)
    with raises("layernorm_backward", "dout must have shape", r"\(4, 8\)"):
        ops.layernorm_backward(x[:4], x, weight, mean, rstd, [True] * 3)
    with raises("layernorm_backward", "mean must be float32", "float64"):
        ops.layernorm_backward(x, x, weight, mean.double(), rstd, [True] * 3)


def test_tensors_on_different_devices(device):
    if device.type == "cpu":
        pytest.skip("one device only")
    x, weight, bias = inputs(5, 8, torch.float32, device)
    with raises("layernorm", "weight is on cpu", "x is on cuda"):
        ops.layernorm(x, weight.cpu(), bias)


@pytest.mark.large
def test_more_than_2_31_elements(device):
    rows, width = 2**31 // 768 + 5, 768
    x = torch.randn(rows, width, dtype=torch.bfloat16, device=device)
    out, mean, rstd = ops.layernorm(x, None, None)
    for part in (slice(0, 5), slice(rows - 5, rows)):
        assert_as_exact_as_torch(out[part], torchs(x[part], None, None), exact(double(x[part]), None, None))
    dx, _, dbias = ops.layernorm_backward(x, x, None, mean, rstd, [True, False, True])
    expected = gradients(torchs, (x[-5:], None, None), x[-5:])[0]
    torch.testing.assert_close(dx[-5:], expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(dbias.float(), x.float().sum(0), rtol=1e-2, atol=100.0)
