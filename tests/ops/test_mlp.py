import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import gptkernels.functional as G
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
    tolerance,
)

ops = torch.ops.gptkernels
NAMES = ("dx", "dfc_weight", "dfc_bias", "dproj_weight", "dproj_bias")

# (C, F): each awkward width on either side; a multiple of 8 as F lets cuBLASLt fuse the GELU.
SIZES = [
    (1, 1), (2, 3), (3, 8), (7, 17), (8, 50257), (17, 7), (33, 127), (127, 33), (3, 768), (768, 7), (8, 1600),
    (1600, 8), (17, 4097), (4097, 3), (64, 256),
]  # fmt: skip
all_sizes = pytest.mark.parametrize(("width", "hidden"), SIZES)


def ours(*args):
    return ops.mlp(*args)[0]


def torchs(x, fc_weight, fc_bias, proj_weight, proj_bias):
    return F.linear(F.gelu(F.linear(x, fc_weight, fc_bias), approximate="tanh"), proj_weight, proj_bias)


def exact(x, fc_weight, fc_bias, proj_weight, proj_bias):
    """The formula, in float64."""
    u = x @ fc_weight.T + (0 if fc_bias is None else fc_bias)
    post = u * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (u + 0.044715 * u**3))  # which does not cancel
    return post @ proj_weight.T + (0 if proj_bias is None else proj_bias)


def inputs(rows, width, hidden, dtype, device, bias=True, out=None):
    out = width if out is None else out
    return (
        randn(rows, width, dtype=dtype, device=device),
        randn(hidden, width, dtype=dtype, device=device, scale=max(width, 1) ** -0.5),
        randn(hidden, dtype=dtype, device=device) if bias else None,
        randn(out, hidden, dtype=dtype, device=device, scale=max(hidden, 1) ** -0.5),
        randn(out, dtype=dtype, device=device) if bias else None,
    )


def check(args, dout):
    """Forward and all gradients against float64 and beside torch."""
    assert_as_exact_with_gradients(ours, torchs, exact, args, dout, NAMES)


@all_dtypes
@all_sizes
@all_rows
def test_matches_float64(rows, width, hidden, dtype, device):
    check(inputs(rows, width, hidden, dtype, device), randn(rows, width, dtype=dtype, device=device))


@pytest.mark.parametrize("hidden", [96, 100])
@all_dtypes
def test_bias_may_be_absent(hidden, dtype, device):
    check(inputs(5, 24, hidden, dtype, device, bias=False), randn(5, 24, dtype=dtype, device=device))
    x, fc_weight, fc_bias, proj_weight, proj_bias = inputs(5, 24, hidden, dtype, device)
    for args in [(x, fc_weight, fc_bias, proj_weight, None), (x, fc_weight, None, proj_weight, proj_bias)]:
        check(args, x)


@pytest.mark.parametrize(("rows", "hidden"), [(64, 48), (1000, 48), (1000, 36)])
@all_dtypes
def test_many_rows(rows, hidden, dtype, device):
    check(inputs(rows, 16, hidden, dtype, device), randn(rows, 16, dtype=dtype, device=device))


@all_dtypes
def test_another_width_comes_out(dtype, device):
    check(inputs(5, 24, 64, dtype, device, out=40), randn(5, 40, dtype=dtype, device=device))


@all_dtypes
def test_no_columns(dtype, device):
    for width, hidden in [(0, 8), (8, 0), (0, 0)]:
        check(inputs(5, width, hidden, dtype, device), randn(5, width, dtype=dtype, device=device))


@all_views
@all_dtypes
def test_views(view, dtype, device):
    x, fc_weight, fc_bias, proj_weight, proj_bias = inputs(24, 40, 16, dtype, device)
    args = (
        as_view(x, view), as_view(fc_weight, view), as_view(fc_bias[None], view)[0],
        as_view(proj_weight, view), as_view(proj_bias[None], view)[0],
    )  # fmt: skip
    check(args, as_view(randn(24, 40, dtype=dtype, device=device), view))


# (rows, C, F, C') for the kernels for sm_90a, whose tiles are 256 x 256, with two steps of 64 terms or more: less than
# a tile, parts of tiles at the end of each dimension, terms that no step divides, several tiles a block.
OWN_SIZES = [
    (1, 456, 8, 456),
    (130, 520, 200, 512),
    (300, 72, 520, 136),
    (257, 512, 256, 520),
    (600, 456, 1032, 776),
    (5000, 512, 2056, 512),
]


def with_weights(args, transposed):
    """The arguments, with both weights as ``torch.nn.Linear`` has them, or as views of Hugging Face's Conv1D's."""
    x, fc_weight, fc_bias, proj_weight, proj_bias = args
    if transposed:
        fc_weight, proj_weight = fc_weight.t().contiguous().t(), proj_weight.t().contiguous().t()
    return x, fc_weight, fc_bias, proj_weight, proj_bias


@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width", "hidden", "out"), OWN_SIZES)
def test_either_product(rows, width, hidden, out, dtype, transposed, product, device):
    if device.type == "cpu" and rows * width * hidden > 1e8:
        pytest.skip("slow on a CPU, which has one product")
    args = with_weights(inputs(rows, width, hidden, dtype, device, out=out), transposed)
    dout = randn(rows, out, dtype=dtype, device=device)
    check(args, dout)
    check((*args[:2], None, *args[3:]), dout)
    x, fc_weight, _, proj_weight, _ = args
    _, pre_gelu, post_gelu = ops.mlp(*args)
    assert_same_bits(lambda: ops.mlp(*args), vary_threads=False)
    assert_same_bits(
        lambda: ops.mlp_backward(dout, x, fc_weight, proj_weight, pre_gelu, post_gelu, [True] * 5), vary_threads=False
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_post_gelu_is_gelu_of_pre_gelu(dtype, product, device):
    """As in torch's composition, GELU is of the rounded pre_gelu (cuBLASLt's is of the unrounded one)."""
    if product == "cublas":
        pytest.skip("cuBLASLt's is not")
    _, pre_gelu, post_gelu = ops.mlp(*inputs(300, 520, 200, dtype, device))
    torch.testing.assert_close(post_gelu, ops.gelu(pre_gelu), rtol=0, atol=0)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e30])
def test_special_values_of_either_product(value, product, device):
    """What is not finite stays in its row, also of the gradients; rows beyond the last do not get in the sums."""
    dtype = torch.bfloat16
    args = inputs(130, 520, 200, dtype, device)
    x, fc_weight, _, proj_weight, _ = args
    clean, pre_gelu, post_gelu = ops.mlp(*args)
    dx = ops.mlp_backward(clean, x, fc_weight, proj_weight, pre_gelu, post_gelu, [True] * 5)[0]
    keep = [i for i in range(130) if i != 2]
    x[2, 7] = value
    out, pre_gelu, post_gelu = ops.mlp(*args)
    assert torch.equal(out[keep], clean[keep])
    dout = clean.clone()
    dout[2] = value
    found = ops.mlp_backward(dout, x, fc_weight, proj_weight, pre_gelu, post_gelu, [True] * 5)
    assert torch.equal(found[0][keep], dx[keep])
    assert not found[0][2].isfinite().any() or value == 1e30
    weight = proj_weight.clone()
    weight[3, 5] = float("inf")
    ones = torch.ones_like(pre_gelu)
    dfc_bias = ops.mlp_backward(clean.abs() + 1, x, fc_weight, weight, ones, ones, [True] * 5)[2]
    assert dfc_bias[5] == float("inf")
    assert dfc_bias.isfinite().sum() == 199


@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
def test_the_kernels_for_sm_90a_run(transposed, device, sm_90a):
    """GPT-2's products at the sizes where they are faster, by default and in a CUDA graph."""
    args = with_weights(inputs(4096, 768, 3072, torch.bfloat16, device), transposed)
    x, fc_weight, _, proj_weight, _ = args
    dout, pre_gelu, post_gelu = ops.mlp(*args)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ops.mlp(*args)
        ops.mlp_backward(dout, x, fc_weight, proj_weight, pre_gelu, post_gelu, [True] * 5)
    names = [event.key for event in profile.key_averages()]
    assert sum("matmul_wgmma_kernel" in name for name in names) == 2, names
    assert not any("gelu_" in name for name in names), names


def test_leading_shapes(device):
    _, *weights = inputs(1, 8, 16, torch.float32, device)
    for shape in [(8,), (2, 8), (2, 3, 8), (2, 0, 8), (1, 2, 1, 2, 8)]:
        x = randn(*shape, dtype=torch.float32, device=device)
        out, pre_gelu, post_gelu = ops.mlp(x, *weights)
        assert out.shape == shape
        assert pre_gelu.shape == post_gelu.shape == (*shape[:-1], 16)
        torch.testing.assert_close(out, torchs(x, *weights))


@pytest.mark.parametrize("hidden", [96, 100])
@all_dtypes
def test_hidden_values(hidden, dtype, device):
    """pre_gelu and post_gelu are what they say, and gradients flow through them too."""
    args = inputs(5, 24, hidden, dtype, device)
    x, fc_weight, fc_bias, *_ = args
    _, pre_gelu, post_gelu = ops.mlp(*args)
    pre = F.linear(x, fc_weight, fc_bias)
    assert_as_exact_as_torch(pre_gelu, pre, double(x) @ double(fc_weight).T + double(fc_bias))
    torch.testing.assert_close(post_gelu, F.gelu(pre, approximate="tanh"), **tolerance(dtype))

    def hidden_sum(x):
        _, pre, post = ops.mlp(x, *args[1:])
        return (pre + post).sum(-1)

    def expected_sum(x):
        pre = F.linear(x, fc_weight, fc_bias)
        return (pre + F.gelu(pre, approximate="tanh")).sum(-1)

    dout = randn(5, dtype=dtype, device=device)
    (a,), (b,) = gradients(hidden_sum, (x,), dout), gradients(expected_sum, (x,), dout)
    torch.testing.assert_close(a, b, **tolerance(dtype))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@all_dtypes
def test_infinities_and_nan_stay_in_their_row(value, dtype, device):
    args = inputs(5, 33, 16, dtype, device)
    clean = ours(*args)
    args[0][2, 7] = value
    out = ours(*args)
    assert not out[2].isfinite().any()
    keep = [0, 1, 3, 4]
    assert torch.equal(out[keep], clean[keep])


@all_dtypes
def test_extremes(dtype, device):
    """Where GELU is x or 0 to the last bit, and where it is a denormal's half."""
    tiny, huge = torch.finfo(dtype).smallest_normal / 4, torch.finfo(dtype).max / 256
    eye = torch.eye(64, dtype=dtype, device=device)
    for scale in (tiny, huge, 12.0):
        x = (torch.randn(5, 64, dtype=torch.float64).clamp(-2, 2) * scale).to(dtype).to(device)
        args = (x, eye, None, eye, None)
        assert_as_exact_as_torch(ours(*args), torchs(*args), F.gelu(double(x), approximate="tanh"))


@pytest.mark.parametrize("hidden", [96, 100])
@all_dtypes
def test_deterministic(hidden, dtype, device):
    args = inputs(1000, 24, hidden, dtype, device)
    x, fc_weight, _, proj_weight, _ = args
    dout, pre_gelu, post_gelu = ops.mlp(*args)
    assert_same_bits(lambda: ops.mlp(*args), vary_threads=False)
    assert_same_bits(
        lambda: ops.mlp_backward(dout, x, fc_weight, proj_weight, pre_gelu, post_gelu, [True] * 5), vary_threads=False
    )


@pytest.mark.parametrize("wanted", [{0}, {1}, {2}, {3}, {4}, {0, 3}, {1, 2, 4}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_gradients_that_are_wanted(wanted, dtype, device):
    args = inputs(5, 24, 16, dtype, device)
    leaves = [t.requires_grad_(i in wanted) for i, t in enumerate(args)]
    ours(*leaves).sum().backward()
    expected = gradients(torchs, args, torch.ones(5, 24, dtype=dtype, device=device))
    for i, (leaf, grad) in enumerate(zip(leaves, expected, strict=True)):
        assert (leaf.grad is not None) == (i in wanted)
        if i in wanted:
            torch.testing.assert_close(leaf.grad, grad, **tolerance(dtype))


def test_gradcheck(device):
    for rows, width, hidden in [(3, 2, 4), (1, 1, 1)]:
        args = [t.requires_grad_() for t in inputs(rows, width, hidden, torch.float64, device)]
        assert torch.autograd.gradcheck(ops.mlp, args)
        assert torch.autograd.gradgradcheck(ops.mlp, args)
    x, fc_weight, _, proj_weight, _ = args
    assert torch.autograd.gradgradcheck(lambda *t: ours(t[0], t[1], None, t[2], None), (x, fc_weight, proj_weight))


@pytest.mark.parametrize("hidden", [17, 256])
@all_dtypes
def test_a_gelu_that_is_computed_again(hidden, dtype, device):
    """Nothing of post_gelu's size is kept; the result has the same bits, and the gradients are as exact."""
    args, dout = inputs(70, 64, hidden, dtype, device), randn(70, 64, dtype=dtype, device=device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = G.mlp(*(t.requires_grad_() for t in args), recompute_gelu=True)
    assert sum(t.shape == (70, hidden) for t in kept) == 1
    args = tuple(t.detach() for t in args)
    assert torch.equal(out, ours(*args))
    assert_as_exact_with_gradients(lambda *t: G.mlp(*t, recompute_gelu=True), torchs, exact, args, dout, NAMES)


def test_derivatives_of_a_gelu_that_is_computed_again(device):
    def again(*args):
        return ops.mlp(*args, keep_post_gelu=False)

    args = [t.requires_grad_() for t in inputs(3, 2, 4, torch.float64, device)]
    assert torch.autograd.gradcheck(lambda *t: again(*t)[:2], args, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda *t: again(*t)[:2], args)
    out, pre_gelu, post_gelu = (t.detach() for t in again(*args))
    assert post_gelu.shape == (0,)
    torch.library.opcheck(ops.mlp, (*args, False))
    torch.library.opcheck(ops.mlp_backward, (out, args[0], args[1], args[3], pre_gelu, post_gelu, [True] * 5))
    x = randn(5, 3, 2, dtype=torch.float64, device=device)
    mapped = torch.vmap(torch.func.grad(lambda t: G.mlp(t, *args[1:], recompute_gelu=True).sum()))(x)
    assert torch.equal(mapped, torch.vmap(torch.func.grad(lambda t: G.mlp(t, *args[1:]).sum()))(x))


def test_opcheck(device):
    dtype = torch.bfloat16  # float32 is test_every_op_passes'
    args = [t.requires_grad_() for t in inputs(4, 8, 16, dtype, device)]
    torch.library.opcheck(ops.mlp, args)
    x, fc_weight, _, proj_weight, _ = args
    torch.library.opcheck(ops.mlp, (x, fc_weight, None, proj_weight, None))
    out, pre_gelu, post_gelu = (t.detach().requires_grad_() for t in ops.mlp(*args))
    for mask in ([True] * 5, [False, True, False, True, False]):
        torch.library.opcheck(ops.mlp_backward, (out, x, fc_weight, proj_weight, pre_gelu, post_gelu, mask))


def test_compile(device):
    args = [t.requires_grad_() for t in inputs(5, 24, 96, torch.float32, device)]
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), ours(*args))
    dout = randn(5, 24, dtype=torch.float32, device=device)
    for a, b in zip(gradients(compiled, args, dout), gradients(ours, args, dout), strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_follows_linear(device):
    args = inputs(5, 24, 96, torch.float32, device)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device.type, dtype):
            assert ours(*args).dtype == torchs(*args).dtype == dtype
            torch.testing.assert_close(ours(*args), torchs(*args), **tolerance(dtype))
            for a, b in zip(gradients(ours, args, args[0].to(dtype)), args, strict=True):
                assert a.dtype == b.dtype


def test_flops(device):
    args = [t.requires_grad_() for t in inputs(6, 8, 16, torch.float32, device)]
    with FlopCounterMode(display=False) as ours_counted:
        ours(*args).sum().backward()
    with FlopCounterMode(display=False) as torchs_counted:
        torchs(*args).sum().backward()
    assert ours_counted.get_total_flops() == torchs_counted.get_total_flops() == 3 * 2 * 2 * 6 * 8 * 16


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 40),
    width=st.integers(1, 100),
    hidden=st.integers(1, 200),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_shape(device, rows, width, hidden, dtype):
    torch.manual_seed(rows + width + hidden)  # a failing example must fail again
    args = inputs(rows, width, hidden, dtype, device)
    dout = randn(rows, width, dtype=dtype, device=device)
    torch.testing.assert_close(ours(*args), torchs(*args), **tolerance(dtype))
    expected = gradients(exact, [double(t) for t in args], double(dout))
    for a, b in zip(gradients(ours, args, dout), expected, strict=True):
        assert_close_in_scale(a, b, dtype)


def test_bad_input(device):
    x, fc_weight, fc_bias, proj_weight, proj_bias = inputs(5, 8, 12, torch.float32, device)
    with raises("mlp", "x", "at least 1 dimension"):
        ops.mlp(x.sum(), fc_weight, None, proj_weight, None)
    with raises("mlp", "x must be float64", "int64"):
        ops.mlp(x.long(), fc_weight, None, proj_weight, None)
    with raises("mlp", r"fc_weight must have shape \(hidden_features, 8\)", r"\(12, 7\)"):
        ops.mlp(x, fc_weight[:, :7], None, proj_weight, None)
    with raises("mlp", r"proj_weight must have shape \(out_features, 12\)", r"\(8, 11\)"):
        ops.mlp(x, fc_weight, None, proj_weight[:, :11], None)
    with raises("mlp", r"fc_bias must have shape \(12\)", r"\(11\)"):
        ops.mlp(x, fc_weight, fc_bias[:11], proj_weight, proj_bias)
    with raises("mlp", r"proj_bias must have shape \(8\)", r"\(7\)"):
        ops.mlp(x, fc_weight, fc_bias, proj_weight, proj_bias[:7])
    with raises("mlp", "proj_weight must have the dtype of x", "float32", "float64"):
        ops.mlp(x, fc_weight, None, proj_weight.double(), None)
    out, pre_gelu, post_gelu = ops.mlp(x, fc_weight, fc_bias, proj_weight, proj_bias)
    with raises("mlp_backward", r"pre_gelu must have shape \(5, 12\)", r"\(5, 8\)"):
        ops.mlp_backward(out, x, fc_weight, proj_weight, out, post_gelu, [True] * 5)
    with raises("mlp_backward", r"dout must have shape \(5, 8\)", r"\(4, 8\)"):
        ops.mlp_backward(out[:4], x, fc_weight, proj_weight, pre_gelu, post_gelu, [True] * 5)


def test_tensors_on_different_devices(device):
    if device.type == "cpu":
        pytest.skip("one device only")
    x, fc_weight, fc_bias, proj_weight, proj_bias = inputs(5, 8, 12, torch.float32, device)
    with raises("mlp", "fc_bias is on cpu", "x is on cuda"):
        ops.mlp(x, fc_weight, fc_bias.cpu(), proj_weight, proj_bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graph(dtype, device):
    """Captured once, replayed with other values; nothing is allocated or synchronised in between."""
    if device.type == "cpu":
        pytest.skip("graphs are CUDA's")
    args = inputs(64, 48, 96, dtype, device)
    x, fc_weight, _, proj_weight, _ = args
    dout = randn(64, 48, dtype=dtype, device=device)

    def step():
        out, pre_gelu, post_gelu = ops.mlp(*args)
        return out, *ops.mlp_backward(dout, x, fc_weight, proj_weight, pre_gelu, post_gelu, [True] * 5)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    x.copy_(randn(64, 48, dtype=dtype, device=device))
    graph.replay()
    for a, b in zip(outs, step(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.large
def test_more_than_2_31_elements(device):
    rows, width, hidden = 2**31 // 768 + 5, 8, 768
    args = inputs(rows, width, hidden, torch.bfloat16, device)
    x, fc_weight, _, proj_weight, _ = args
    out, pre_gelu, post_gelu = ops.mlp(*args)
    grads = ops.mlp_backward(out, x, fc_weight, proj_weight, pre_gelu, post_gelu, [True] * 5)
    for part in (slice(0, 5), slice(rows - 5, rows)):
        part_args = (x[part], *args[1:])
        torch.testing.assert_close(out[part], torchs(*part_args), **tolerance(torch.bfloat16))
        expected = gradients(torchs, part_args, out[part])[0]
        torch.testing.assert_close(grads[0][part], expected, **tolerance(torch.bfloat16))
    torch.testing.assert_close(grads[4].float(), out.float().sum(0), rtol=1e-2, atol=100.0)


@all_dtypes
def test_transposed_weights_and_their_gradients_are_not_copied(dtype, device):
    """Weights (in, out), as Hugging Face's Conv1D has them, as views: their gradients have the parameters' layout."""
    x, fc, fc_bias, proj, proj_bias = inputs(9, 24, 40, dtype, device)
    args = x, fc.t().contiguous(), fc_bias, proj.t().contiguous(), proj_bias
    dout = randn(9, 24, dtype=dtype, device=device)

    def transposed(function):
        return lambda x, fc, fc_bias, proj, proj_bias: function(x, fc.t(), fc_bias, proj.t(), proj_bias)

    assert_as_exact_with_gradients(transposed(ours), transposed(torchs), transposed(exact), args, dout, NAMES)
    views = args[1].t(), args[3].t()
    _, pre, post = ops.mlp(x, views[0], fc_bias, views[1], proj_bias)
    backward = dout, x, *views, pre, post, [True] * 5
    _, dfc, _, dproj, _ = ops.mlp_backward(*backward)
    assert dfc.stride() == views[0].stride()
    assert dproj.stride() == views[1].stride()
    torch.library.opcheck(ops.mlp_backward, backward)
