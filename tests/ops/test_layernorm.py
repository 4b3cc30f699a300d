from functools import partial

import pytest
import torch
import torch.nn.functional as F

import gptkernels  # noqa: F401
from gptkernels.testing.cases.norm import NOTHING_ELSE
from gptkernels.testing.cases.norm import layernorm_formula as exact
from helpers import (
    all_dtypes,
    assert_as_exact_as_torch,
    check_call,
    double,
    gradients,
    randn,
    refused,
    two_dtypes,
)

ops = torch.ops.gptkernels
check = partial(check_call, "layernorm")


def torchs(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias)


@pytest.mark.parametrize(
    ("rows", "width"), [(3000, 1100), (700, 1280), (9001, 1600), (301, 2304), (300, 8192), (3, 40000)]
)
@two_dtypes
def test_rows_in_each_kind_of_memory(rows, width, dtype, device):
    """The CUDA kernels keep a row in the registers of a warp or of several warps. Wider rows are read from global
    memory in each pass.
    """
    # On the CPU, groups of rows have partial sums of dweight and dbias. 1100 rows make the most groups, 64, some with
    # one row more than others.
    rows = min(rows, 1100) if device.type == "cpu" else rows
    check(dtype, device, {"x.rows": rows, "width": width})


def test_statistics(device):
    x = randn(2, 5, 768, dtype=torch.bfloat16, device=device)
    _, mean, rstd = ops.layernorm(x, None, None, 1e-3)
    assert mean.dtype == rstd.dtype == torch.float32
    torch.testing.assert_close(mean.double(), x.double().mean(-1))
    torch.testing.assert_close(rstd.double(), (x.double().var(-1, correction=0) + 1e-3).rsqrt())


@all_dtypes
def test_large_offset_keeps_the_variance(dtype, device):
    """The formula E[x^2] - E[x]^2 would lose all digits of the variance."""
    x = (randn(5, 768, dtype=torch.float64, device="cpu") * 4 + 1000).to(dtype).to(device)
    check(dtype, device, {"x.rows": 5, "width": 768, **NOTHING_ELSE}, x=x)


@pytest.mark.parametrize("offset", [1e3, 1e6, 1e14])
def test_gradients_at_a_large_offset(offset, device):
    x = randn(5, 96, dtype=torch.float64, device=device) * 10 + offset
    check(torch.float64, device, {"x.rows": 5, "width": 96}, x=x)


@all_dtypes
def test_denormal_and_large_values(dtype, device):
    for scale in (torch.finfo(dtype).smallest_normal / 4, torch.finfo(dtype).max ** 0.45):
        x = (torch.randn(5, 127, dtype=torch.float64) * scale).to(dtype).to(device)
        check(dtype, device, {"x.rows": 5, "width": 127, **NOTHING_ELSE}, x=x)


@all_dtypes
def test_gradient_of_a_constant_dout_is_0(dtype, device):
    """dx is exactly 0 for these short rows, whose means are exact."""
    x = torch.tensor([[-1.0, -2.0, 3.0], [4.0, -5.0, 1.0]], dtype=dtype, device=device, requires_grad=True)
    out = ops.layernorm(x, None, None, 1e-5)[0]
    out.backward(torch.full_like(out, 1.28125))
    assert not x.grad.any()


def test_autocast_follows_layer_norm(device):
    x, weight, bias = (randn(*shape, dtype=torch.float32, device=device) for shape in ((5, 33), (33,), (33,)))
    with torch.autocast(device.type, torch.bfloat16):
        for args in [(x, weight, bias), (x.bfloat16(), weight, bias), (x.bfloat16(), None, None)]:
            expected = torchs(*args)
            out = ops.layernorm(*args)[0]
            if device.type == "cuda" or args[1] is None:  # On the CPU, torch returns x's dtype if the weight is wider.
                assert out.dtype == expected.dtype
            torch.testing.assert_close(out.float(), expected.float(), rtol=1e-2, atol=1e-2)


def test_bad_input(device):
    x, weight, bias = (randn(*shape, dtype=torch.float32, device=device) for shape in ((5, 8), (8,), (8,)))
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
