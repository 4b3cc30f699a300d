import pytest
import torch
import torch.nn.functional as F

import gptkernels  # noqa: F401
from helpers import (
    all_dtypes,
    all_rows,
    assert_as_exact_as_torch,
    assert_as_exact_with_gradients,
    count_flops,
    double,
    low_dtypes,
    randn,
    refused,
    tf32,
    tolerance,
    wide,
)

ops = torch.ops.gptkernels
ours = ops.linear
torchs = F.linear


def exact(x, weight, bias=None):
    """torch's pairwise sums have smaller rounding errors than the sums of a BLAS."""
    out = (x.unsqueeze(-2) * weight).sum(-1)
    return out if bias is None else out + bias


def inputs(rows, inner, width, dtype, device, bias=True):
    return (
        randn(rows, inner, dtype=dtype, device=device),
        randn(width, inner, dtype=dtype, device=device, scale=max(inner, 1) ** -0.5),
        randn(width, dtype=dtype, device=device) if bias else None,
    )


def check(args, dout):
    assert_as_exact_with_gradients(ours, torchs, exact, args, dout, ("dx", "dweight", "dbias"))


@all_dtypes
@all_rows
def test_no_columns(rows, dtype, device):
    for inner, width in [(0, 5), (5, 0), (0, 0)]:
        for bias in (True, False):
            check(inputs(rows, inner, width, dtype, device, bias), randn(rows, width, dtype=dtype, device=device))


@pytest.mark.parametrize("wide_sum", [False, True], ids=["", "wide sum"])
@all_dtypes
def test_dweight_in_place(wide_sum, dtype, device):
    dout, x = (randn(2, 19, width, dtype=dtype, device=device) for width in (21, 33))
    before = randn(21, 33, dtype=wide(dtype) if wide_sum else dtype, device=device)
    for accumulate in (False, True):
        found = before.clone()
        ops.linear_dweight_(dout, x, found, accumulate)
        product = double(dout).flatten(0, 1).T @ double(x).flatten(0, 1)
        torchs = (dout.flatten(0, 1).T @ x.flatten(0, 1)).to(before.dtype)
        if accumulate:
            product, torchs = product + double(before), torchs + before
        assert_as_exact_as_torch(found, torchs, product)
    ops.linear_dweight_(dout[:0], x[:0], before, False)
    assert not before.any()


def test_bad_input_of_dweight_in_place(device):
    dout, x = (randn(5, width, dtype=torch.bfloat16, device=device) for width in (3, 4))
    dweight = torch.zeros(3, 4, device=device)
    refused(ops.linear_dweight_, (dout[1:], x, dweight, False), r"dout must have shape \(5, 3\)", r"\(4, 3\)")
    refused(ops.linear_dweight_, (dout, x, dweight.double(), False), "dweight must be float32", "float64")
    refused(ops.linear_dweight_, (dout, x, dweight.T, False), r"dweight must have shape \(3, 4\)", r"\(4, 3\)")
    refused(ops.linear_dweight_, (dout, x, torch.zeros(4, 3, device=device).T, False), "dweight must be contiguous")


@all_dtypes
def test_slices_and_transposes(dtype, device):
    """A BLAS can read these slices and transposes without a copy."""
    wide = randn(24, 100, dtype=dtype, device=device)
    tall = randn(100, 24, dtype=dtype, device=device)
    for x in (wide[:, 30:70], tall[30:70].T, wide[:1, 30:70], wide[::3, 3:43]):
        for weight in (wide[:16, 50:90] / 8, tall[50:90, :16].T / 8):
            check((x, weight, wide[0, :16]), randn(x.shape[0], 16, dtype=dtype, device=device))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinities_and_nan_stay_in_their_rows_and_columns(value, device):
    x, weight, bias = inputs(300, 520, 264, torch.bfloat16, device)
    dout = randn(300, 264, dtype=torch.bfloat16, device=device)
    clean = ops.linear(x, weight, bias), *ops.linear_backward(dout, x, weight, [True] * 3)
    x[2, 7] = value
    dout[5, 9] = value
    found = ops.linear(x, weight, bias), *ops.linear_backward(dout, x, weight, [True] * 3)
    for at, a, b in zip([(2,), (5,), (9,), (9,)], found, clean, strict=True):
        assert not a[at].isfinite().any()
        keep = torch.ones_like(a, dtype=torch.bool)
        keep[at] = False
        if a.dim() == 2 and a.shape == weight.shape:
            keep[:, 7] = False
        assert torch.equal(a[keep], b[keep])


@all_dtypes
def test_denormal_and_large_values(dtype, device):
    tiny, huge = torch.finfo(dtype).smallest_normal / 4, torch.finfo(dtype).max / 256
    for scale in (tiny, huge):
        x = (torch.rand(5, 64, dtype=torch.float64) * scale).to(dtype).to(device)
        weight = torch.eye(64, dtype=dtype, device=device)
        assert_as_exact_as_torch(ours(x, weight), torchs(x, weight), exact(double(x), double(weight)))


def test_flops_without_dx(device):
    x, weight, bias = (t.requires_grad_() for t in inputs(6, 8, 5, torch.float32, device))
    assert count_flops(lambda: ours(x.detach(), weight, bias).sum().backward())[0] == 2 * 2 * 6 * 8 * 5


def test_bad_input(device):
    x, weight, _ = inputs(5, 8, 3, torch.float32, device)
    refused(ops.linear, (x.sum(), weight), "x", "at least 1 dimension")
    refused(ops.linear, (x, weight[:, :7]), r"weight must have shape \(out_features, 8\)", r"\(3, 7\)")


def test_tf32_is_used_only_if_torch_allows_it(device, on_cuda):
    x, weight, bias = inputs(64, 512, 64, torch.float32, device)
    error = {}
    for allowed in (False, True, False):
        with tf32(allowed):
            for b in (None, bias):
                out = ours(x, weight, b)
                error[allowed, b is None] = (out - exact(double(x), double(weight), double(b))).abs().max().item()
                assert_as_exact_as_torch(out, torchs(x, weight, b), exact(double(x), double(weight), double(b)))
    for without_bias in (True, False):
        assert error[True, without_bias] > 20 * error[False, without_bias]


@pytest.mark.large
def test_more_than_2_31_elements(device):
    rows, inner, width = 2**31 // 768 + 5, 768, 8
    x = torch.randn(rows, inner, dtype=torch.bfloat16, device=device)
    weight = torch.randn(width, inner, dtype=torch.bfloat16, device=device) / inner**0.5
    bias = torch.randn(width, dtype=torch.bfloat16, device=device)
    out = ours(x, weight, bias)
    dx, dweight, dbias = ops.linear_backward(out, x, weight, [True] * 3)
    for part in (slice(0, 5), slice(rows - 5, rows)):
        torch.testing.assert_close(out[part], torchs(x[part], weight, bias), **tolerance(torch.bfloat16))
        torch.testing.assert_close(dx[part], out[part] @ weight, **tolerance(torch.bfloat16))
    torch.testing.assert_close(dbias.float(), out.float().sum(0), rtol=1e-2, atol=1.0)
    torch.testing.assert_close(dweight, out.T @ x, rtol=2e-2, atol=100.0)


@all_dtypes
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_transposed_weight_and_its_gradient_are_not_copied(rows, dtype, device):
    """The weight is the transpose of a tensor (in, out), as in Hugging Face's Conv1D."""
    x = randn(rows, 24, dtype=dtype, device=device)
    weight = randn(24, 40, dtype=dtype, device=device, scale=0.2)
    bias, dout = randn(40, dtype=dtype, device=device), randn(rows, 40, dtype=dtype, device=device)

    def transposed(function):
        return lambda x, weight, bias: function(x, weight.t(), bias)

    names = "dx", "dweight", "dbias"
    assert_as_exact_with_gradients(
        transposed(ours), transposed(torchs), transposed(exact), (x, weight, bias), dout, names
    )
    found = ops.linear_backward(dout, x, weight.t(), [True] * 3)[1]
    assert found.stride() == weight.t().stride()
    torch.library.opcheck(ops.linear_backward, (dout, x, weight.t(), [True] * 3))


@pytest.mark.parametrize("inner", [7, 33, 48, 79, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_memory_between_rows_has_no_effect(inner, dtype, device):
    """On CPUs with AMX, oneDNN multiplies elements after the end of a row by 0, which gives NaN if they are NaN."""
    torch.manual_seed(0)
    wide = torch.full((47, inner + 32), float("nan"), dtype=dtype, device=device)
    x, weight = wide[:, :inner], torch.randn(16, inner, device=device).to(dtype)
    x.copy_(torch.randn(47, inner))
    dout = torch.full((47, 40), float("nan"), dtype=dtype, device=device)[:, :16].copy_(torch.randn(47, 16))
    assert ops.linear(x, weight).isfinite().all()
    assert all(grad.isfinite().all() for grad in ops.linear_backward(dout, x, weight, [True, True, True]))


@pytest.mark.parametrize(
    ("inner", "width", "offset"),
    [
        (512, 512, 0), (511, 512, 0), (349, 256, 0), (370, 256, 0), (53, 4, 0), (768, 8, 1), (768, 512, 1),
        (3072, 40, 0), (769, 512, 0), (776, 9, 0), (4224, 9, 0), (512, 9, 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rows", [6, 4096])
@low_dtypes
def test_bias_is_added_before_sums_are_rounded(rows, inner, width, offset, dtype, device):
    """The bias cancels most of each sum, so a rounding before the addition would have a much larger error.

    In the sizes that are no multiples of 8, and with a bias that is not aligned, cuBLASLt may have no kernel for the
    matmul with its epilogue. In 769, 776 and 4224 terms, some algorithms would omit the last ones.
    """
    mean = randn(1, inner, dtype=torch.float32, device=device)
    x = (mean + 0.02 * randn(rows, inner, dtype=torch.float32, device=device)).to(dtype)
    weight = randn(width, inner, dtype=dtype, device=device, scale=30 * inner**-0.5)
    bias = torch.empty(width + offset, dtype=dtype, device=device)[offset:]
    bias.copy_(-(mean @ weight.float().T)[0])
    wanted = F.linear(x.double(), weight.double(), bias.double())
    allowed = torch.finfo(dtype).eps * wanted.abs().max()
    assert (ops.linear(x, weight, bias) - wanted).abs().max() <= allowed
    pre_gelu = ops.mlp(x, weight, bias, randn(8, width, dtype=dtype, device=device), None)[1]
    assert (pre_gelu - wanted).abs().max() <= allowed
