import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import gptkernels  # noqa: F401
from helpers import (
    all_dtypes,
    all_rows,
    all_views,
    as_view,
    assert_as_exact_as_torch,
    assert_as_exact_with_gradients,
    assert_close_in_scale,
    assert_same_bits,
    double,
    gradients,
    raises,
    randn,
    registered_dtypes,
    tf32,
    tolerance,
)

ops = torch.ops.gptkernels
ours = ops.linear
torchs = F.linear

# (K, M): each awkward width on either side.
SIZES = [
    (1, 1), (1, 50257), (2, 3), (3, 2), (7, 17), (17, 768), (33, 127), (127, 33), (768, 7), (3, 1600), (1600, 33),
    (17, 4097), (4097, 3), (50257, 2), (64, 256),
]  # fmt: skip
all_sizes = pytest.mark.parametrize(("inner", "width"), SIZES)


def exact(x, weight, bias=None):
    """The formula, in float64. Its sums are pairwise: exacter than a BLAS's where they are long."""
    out = (x.unsqueeze(-2) * weight).sum(-1)
    return out if bias is None else out + bias


def inputs(rows, inner, width, dtype, device, bias=True):
    return (
        randn(rows, inner, dtype=dtype, device=device),
        randn(width, inner, dtype=dtype, device=device, scale=max(inner, 1) ** -0.5),
        randn(width, dtype=dtype, device=device) if bias else None,
    )


def check(args, dout):
    """Forward and all gradients against float64 and beside torch."""
    assert_as_exact_with_gradients(ours, torchs, exact, args, dout, ("dx", "dweight", "dbias"))


@all_dtypes
@all_sizes
@all_rows
def test_matches_float64(rows, inner, width, dtype, device):
    check(inputs(rows, inner, width, dtype, device), randn(rows, width, dtype=dtype, device=device))


@all_dtypes
def test_bias_may_be_absent(dtype, device):
    check(inputs(5, 33, 127, dtype, device, bias=False), randn(5, 127, dtype=dtype, device=device))


@pytest.mark.parametrize("rows", [64, 1000, 5000])
@all_dtypes
def test_many_rows(rows, dtype, device):
    check(inputs(rows, 48, 40, dtype, device), randn(rows, 40, dtype=dtype, device=device))


@all_dtypes
@all_rows
def test_no_columns(rows, dtype, device):
    """K == 0: out is the bias. M == 0: dx is zero."""
    for inner, width in [(0, 5), (5, 0), (0, 0)]:
        for bias in (True, False):
            check(inputs(rows, inner, width, dtype, device, bias), randn(rows, width, dtype=dtype, device=device))


@all_views
@all_dtypes
def test_views(view, dtype, device):
    x, weight, bias = inputs(24, 40, 16, dtype, device)
    dout = randn(24, 16, dtype=dtype, device=device)
    check((as_view(x, view), as_view(weight, view), as_view(bias[None], view)[0]), as_view(dout, view))


@all_dtypes
def test_rows_or_columns_that_lie_apart(dtype, device):
    """What a BLAS takes without a copy: slices of wider rows, and transposes of them."""
    wide = randn(24, 100, dtype=dtype, device=device)
    tall = randn(100, 24, dtype=dtype, device=device)
    for x in (wide[:, 30:70], tall[30:70].T, wide[:1, 30:70], wide[::3, 3:43]):
        for weight in (wide[:16, 50:90] / 8, tall[50:90, :16].T / 8):
            check((x, weight, wide[0, :16]), randn(x.shape[0], 16, dtype=dtype, device=device))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinities_and_nan_stay_in_their_rows_and_columns(value, device):
    """What is not finite stays in its row of x and of the result, and in its columns of the gradients."""
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


def test_leading_shapes(device):
    weight = randn(5, 8, dtype=torch.float32, device=device)
    for shape in [(8,), (2, 8), (2, 3, 8), (2, 0, 8), (1, 2, 1, 2, 8)]:
        x = randn(*shape, dtype=torch.float32, device=device).requires_grad_()
        out = ours(x, weight)
        assert out.shape == (*shape[:-1], 5)
        torch.testing.assert_close(out, F.linear(x, weight))
        out.sum().backward()
        torch.testing.assert_close(x.grad, weight.sum(0).expand(shape))
    x = randn(2, 3, 8, dtype=torch.float32, device=device).transpose(0, 1)
    torch.testing.assert_close(ours(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@all_dtypes
def test_infinities_and_nan_stay_in_their_row(value, dtype, device):
    x, weight, bias = inputs(5, 33, 16, dtype, device)
    clean = ours(x, weight, bias)
    x[2, 7] = value
    out = ours(x, weight, bias)
    assert not out[2].isfinite().any()
    keep = [0, 1, 3, 4]
    assert torch.equal(out[keep], clean[keep])


@all_dtypes
def test_extremes(dtype, device):
    """Denormals and sums near the largest number."""
    tiny, huge = torch.finfo(dtype).smallest_normal / 4, torch.finfo(dtype).max / 256
    for scale in (tiny, huge):
        x = (torch.rand(5, 64, dtype=torch.float64) * scale).to(dtype).to(device)
        weight = torch.eye(64, dtype=dtype, device=device)
        assert_as_exact_as_torch(ours(x, weight), torchs(x, weight), exact(double(x), double(weight)))


@all_dtypes
def test_deterministic(dtype, device):
    x, weight, bias = inputs(1000, 96, 40, dtype, device)
    dout = ours(x, weight, bias)
    assert_same_bits(lambda: ours(x, weight, bias), vary_threads=False)
    assert_same_bits(lambda: ops.linear_backward(dout, x, weight, [True] * 3), vary_threads=False)
    assert_same_bits(lambda: ops.linear_backward(dout, x, weight, [False, False, True]))


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, False), (False, False, True)])
@all_dtypes
def test_only_the_gradients_that_are_wanted(mask, dtype, device):
    args = inputs(5, 33, 17, dtype, device)
    leaves = [t.requires_grad_(wanted) for t, wanted in zip(args, mask, strict=True)]
    ours(*leaves).sum().backward()
    expected = gradients(torchs, args, torch.ones(5, 17, dtype=dtype, device=device))
    for leaf, wanted, grad in zip(leaves, mask, expected, strict=True):
        assert (leaf.grad is not None) == wanted
        if wanted:
            torch.testing.assert_close(leaf.grad, grad, **tolerance(dtype))


def test_gradcheck(device):
    for rows, inner, width in [(3, 7, 2), (1, 1, 1), (2, 5, 3)]:
        args = [t.requires_grad_() for t in inputs(rows, inner, width, torch.float64, device)]
        assert torch.autograd.gradcheck(ours, args)
        assert torch.autograd.gradgradcheck(ours, args)
    x, weight, _ = args
    assert torch.autograd.gradgradcheck(ours, (x, weight))
    x = randn(2, 2, 5, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradgradcheck(ours, (x, weight))


@registered_dtypes
def test_opcheck(dtype, device):
    x, weight, bias = (t.requires_grad_() for t in inputs(4, 7, 3, dtype, device))
    torch.library.opcheck(ops.linear, (x, weight, bias))
    torch.library.opcheck(ops.linear, (x, weight))
    dout = randn(4, 3, dtype=dtype, device=device, requires_grad=True)
    for mask in ([True, True, True], [False, True, False]):
        torch.library.opcheck(ops.linear_backward, (dout, x, weight, mask))


def test_compile(device):
    args = [t.requires_grad_() for t in inputs(5, 33, 17, torch.float32, device)]
    compiled = torch.compile(lambda *args: ours(*args), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), ours(*args))
    dout = randn(5, 17, dtype=torch.float32, device=device)
    for a, b in zip(gradients(compiled, args, dout), gradients(ours, args, dout), strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_follows_linear(device):
    x, weight, bias = inputs(5, 33, 17, torch.float32, device)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device.type, dtype):
            for args in [(x, weight, bias), (x.to(dtype), weight, bias), (x, weight, None)]:
                assert ours(*args).dtype == torchs(*args).dtype == dtype
                torch.testing.assert_close(ours(*args), torchs(*args))
                for a, b in zip(gradients(ours, args, x[:, :17].to(dtype)), args, strict=True):
                    assert a is None if b is None else a.dtype == b.dtype


def test_flops(device):
    x, weight, bias = (t.requires_grad_() for t in inputs(6, 8, 5, torch.float32, device))
    with FlopCounterMode(display=False) as ours_counted:
        ours(x.view(2, 3, 8), weight, bias).sum().backward()
    with FlopCounterMode(display=False) as torchs_counted:
        torchs(x.view(2, 3, 8), weight, bias).sum().backward()
    assert ours_counted.get_total_flops() == torchs_counted.get_total_flops() == 3 * 2 * 6 * 8 * 5
    with FlopCounterMode(display=False) as counted:
        ours(x.detach(), weight, bias).sum().backward()
    assert counted.get_total_flops() == 2 * 2 * 6 * 8 * 5


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 40),
    inner=st.integers(1, 200),
    width=st.integers(1, 200),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_shape(device, rows, inner, width, dtype):
    torch.manual_seed(rows + inner + width)  # a failing example must fail again
    args = inputs(rows, inner, width, dtype, device)
    dout = randn(rows, width, dtype=dtype, device=device)
    torch.testing.assert_close(ours(*args), torchs(*args), **tolerance(dtype))
    for a, b in zip(gradients(ours, args, dout), gradients(torchs, args, dout), strict=True):
        assert_close_in_scale(a, b, dtype)


def test_bad_input(device):
    x, weight, bias = inputs(5, 8, 3, torch.float32, device)
    with raises("linear", "x", "at least 1 dimension"):
        ours(x.sum(), weight)
    with raises("linear", "x must be float64", "int64"):
        ours(x.long(), weight)
    with raises("linear", r"weight must have shape \(out_features, 8\)", r"\(3, 7\)"):
        ours(x, weight[:, :7])
    with raises("linear", r"weight must have shape \(out_features, 8\)", r"\(8\)"):
        ours(x, weight[0])
    with raises("linear", r"bias must have shape \(3\)", r"\(2\)"):
        ours(x, weight, bias[:2])
    with raises("linear", "weight must have the dtype of x", "float32", "float64"):
        ours(x, weight.double())
    with raises("linear_backward", r"dout must have shape \(5, 3\)", r"\(4, 3\)"):
        ops.linear_backward(randn(4, 3, dtype=torch.float32, device=device), x, weight, [True] * 3)


def test_tensors_on_different_devices(device):
    if device.type == "cpu":
        pytest.skip("one device only")
    x, weight, bias = inputs(5, 8, 3, torch.float32, device)
    with raises("linear", "bias is on cpu", "x is on cuda"):
        ours(x, weight, bias.cpu())


def test_tf32_follows_torch(device):
    """float32 products use TF32 exactly where torch's own do."""
    if device.type == "cpu":
        pytest.skip("TF32 is CUDA's")
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


def test_cuda_graph(device):
    """Captured once, replayed with other values; nothing is allocated or synchronised in between."""
    if device.type == "cpu":
        pytest.skip("graphs are CUDA's")
    x, weight, bias = inputs(64, 48, 40, torch.bfloat16, device)
    dout = randn(64, 40, dtype=torch.bfloat16, device=device)

    def step():
        return ours(x, weight, bias), *ops.linear_backward(dout, x, weight, [True] * 3)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    x.copy_(randn(64, 48, dtype=torch.bfloat16, device=device))
    graph.replay()
    for a, b in zip(outs, step(), strict=True):
        assert torch.equal(a, b)


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
    """A weight (in, out), as Hugging Face's Conv1D has it, as a view: its gradient has the parameter's layout."""
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
