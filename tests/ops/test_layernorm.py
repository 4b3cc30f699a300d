import pytest
import torch
import torch.nn.functional as F

import gptkernels  # noqa: F401
from gptkernels.testing.cases.norm import layernorm_formula as exact
from helpers import (
    all_dtypes,
    assert_as_exact_as_torch,
    assert_as_exact_with_gradients,
    double,
    gradients,
    randn,
    refused,
)

ops = torch.ops.gptkernels


def ours(x, weight, bias, eps=1e-5):
    return ops.layernorm(x, weight, bias, eps)[0]


def torchs(x, weight, bias, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


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


@pytest.mark.parametrize(
    ("rows", "width"), [(3000, 1100), (700, 1280), (9001, 1600), (301, 2304), (300, 8192), (3, 40000)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_wherever_a_row_is_kept(rows, width, dtype, device):
    """One warp's registers, several warps', shared memory with rows following each other, nowhere."""
    rows = min(rows, 1100) if device.type == "cpu" else rows  # all of a CPU's groups of rows, some one row larger
    check(inputs(rows, width, dtype, device), randn(rows, width, dtype=dtype, device=device))


def test_statistics(device):
    x = randn(2, 5, 768, dtype=torch.bfloat16, device=device)
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


@all_dtypes
def test_extremes(dtype, device):
    tiny = torch.finfo(dtype).smallest_normal / 4
    for scale in (tiny, torch.finfo(dtype).max ** 0.45):
        x = (torch.randn(5, 127, dtype=torch.float64) * scale).to(dtype).to(device)
        assert_as_exact_as_torch(ours(x, None, None), torchs(x, None, None), exact(double(x), None, None))


@all_dtypes
def test_constant_gradient(dtype, device):
    """All elements of a row change alike: the gradient is 0, and of a short row with an exact mean exactly so."""
    x = torch.tensor([[-1.0, -2.0, 3.0], [4.0, -5.0, 1.0]], dtype=dtype, device=device, requires_grad=True)
    out = ops.layernorm(x, None, None, 1e-5)[0]
    out.backward(torch.full_like(out, 1.28125))
    assert not x.grad.any()


def test_autocast_follows_layer_norm(device):
    x, weight, bias = inputs(5, 33, torch.float32, device)
    with torch.autocast(device.type, torch.bfloat16):
        for args in [(x, weight, bias), (x.bfloat16(), weight, bias), (x.bfloat16(), None, None)]:
            expected = torchs(*args)
            if device.type == "cuda" or args[1] is None:  # on the CPU torch keeps x's dtype beside wider weights
                assert ours(*args).dtype == expected.dtype
            torch.testing.assert_close(ours(*args).float(), expected.float(), rtol=1e-2, atol=1e-2)


def test_bad_input(device):
    x, weight, bias = inputs(5, 8, torch.float32, device)
    refused(ops.layernorm, (x.sum(), None, None), "x", "at least 1 dimension")
    refused(ops.layernorm, (x.long(), None, None), "x must be float64", "int64")
    refused(ops.layernorm, (x, weight[:7], bias), r"weight must have shape \(8\)", r"\(7\)")
    refused(ops.layernorm, (x, weight, bias[None]), r"bias must have shape \(8\)", r"\(1, 8\)")
    refused(ops.layernorm, (x, weight.double(), bias), "weight must have the dtype of x", "float32", "float64")
    _, mean, rstd = ops.layernorm(x, weight, bias)
    refused(ops.layernorm_backward, (x[:4], x, weight, mean, rstd, [True] * 3), "dout must have shape", r"\(4, 8\)")
    refused(ops.layernorm_backward, (x, x, weight, mean.double(), rstd, [True] * 3), "mean must be float32", "float64")


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
