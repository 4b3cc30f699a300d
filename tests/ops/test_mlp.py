import pytest
import torch
import torch.nn.functional as F

import gptkernels.functional as G
from gptkernels.testing.cases.products import mlp_formula as exact
from helpers import (
    all_dtypes,
    assert_as_exact_as_torch,
    assert_as_exact_with_gradients,
    assert_same_bits,
    double,
    gradients,
    low_dtypes,
    randn,
    refused,
    tolerance,
)

ops = torch.ops.gptkernels
NAMES = ("dx", "dfc_weight", "dfc_bias", "dproj_weight", "dproj_bias")


def ours(*args):
    return ops.mlp(*args)[0]


def torchs(x, fc_weight, fc_bias, proj_weight, proj_bias):
    return F.linear(F.gelu(F.linear(x, fc_weight, fc_bias), approximate="tanh"), proj_weight, proj_bias)


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
    assert_as_exact_with_gradients(ours, torchs, exact, args, dout, NAMES)


@all_dtypes
def test_no_columns(dtype, device):
    for width, hidden in [(0, 8), (8, 0), (0, 0)]:
        check(inputs(5, width, hidden, dtype, device), randn(5, width, dtype=dtype, device=device))


# (rows, C, F, C'): the kernels for sm_90a have tiles of 256 x 256 and add 64 terms in an iteration. In these sizes a
# tile is not full, the number of terms is no multiple of 64, or a thread block has several tiles.
OWN_SIZES = [
    (1, 456, 8, 456), (130, 520, 200, 512), (300, 72, 520, 136), (257, 512, 256, 520), (600, 456, 1032, 776),
    (5000, 512, 2056, 512),
]  # fmt: skip


def with_weights(args, transposed):
    x, fc_weight, fc_bias, proj_weight, proj_bias = args
    if transposed:
        fc_weight, proj_weight = fc_weight.t().contiguous().t(), proj_weight.t().contiguous().t()
    return x, fc_weight, fc_bias, proj_weight, proj_bias


@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
@low_dtypes
@pytest.mark.parametrize(("rows", "width", "hidden", "out"), OWN_SIZES)
def test_own_matmuls_and_cublass(rows, width, hidden, out, dtype, transposed, product, device):
    if device.type == "cpu" and rows * width * hidden > 1e8:
        pytest.skip("slow on a CPU, where all sizes have the same kernel")
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


@low_dtypes
def test_post_gelu_is_gelu_of_the_rounded_pre_gelu(dtype, product, device):
    if product == "cublas":
        pytest.skip("cuBLASLt computes GELU before it rounds")
    _, pre_gelu, post_gelu = ops.mlp(*inputs(300, 520, 200, dtype, device))
    torch.testing.assert_close(post_gelu, ops.gelu(pre_gelu), rtol=0, atol=0)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e30])
def test_special_values_stay_in_their_row(value, product, device):
    """Rows of a tile beyond the last row must add no NaN to dfc_bias if the weight has an infinity."""
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
def test_gpt2_runs_our_kernels_by_default(transposed, device, sm_90a):
    args = with_weights(inputs(4096, 768, 3072, torch.bfloat16, device), transposed)
    x, fc_weight, _, proj_weight, _ = args
    dout, pre_gelu, post_gelu = ops.mlp(*args)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ops.mlp(*args)
        ops.mlp_backward(dout, x, fc_weight, proj_weight, pre_gelu, post_gelu, [True] * 5)
    names = [event.key for event in profile.key_averages()]
    assert sum("matmul_wgmma_kernel" in name for name in names) == 2, names
    assert not any("gelu_" in name for name in names), names


@pytest.mark.parametrize("hidden", [96, 100])
@all_dtypes
def test_pre_gelu_and_post_gelu_are_differentiable(hidden, dtype, device):
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


@all_dtypes
def test_denormal_and_large_values(dtype, device):
    """GELU is x or 0 for large x, and x / 2 for denormal x."""
    tiny, huge = torch.finfo(dtype).smallest_normal / 4, torch.finfo(dtype).max / 256
    eye = torch.eye(64, dtype=dtype, device=device)
    for scale in (tiny, huge, 12.0):
        x = (torch.randn(5, 64, dtype=torch.float64).clamp(-2, 2) * scale).to(dtype).to(device)
        args = (x, eye, None, eye, None)
        assert_as_exact_as_torch(ours(*args), torchs(*args), F.gelu(double(x), approximate="tanh"))


@pytest.mark.parametrize("hidden", [17, 256])
@all_dtypes
def test_recomputed_gelu(hidden, dtype, device):
    args, dout = inputs(70, 64, hidden, dtype, device), randn(70, 64, dtype=dtype, device=device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = G.mlp(*(t.requires_grad_() for t in args), recompute_gelu=True)
    assert sum(t.shape == (70, hidden) for t in kept) == 1
    args = tuple(t.detach() for t in args)
    assert torch.equal(out, ours(*args))
    assert_as_exact_with_gradients(lambda *t: G.mlp(*t, recompute_gelu=True), torchs, exact, args, dout, NAMES)


def test_derivatives_of_a_recomputed_gelu(device):
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


def test_bad_input(device):
    x, fc_weight, _, proj_weight, _ = inputs(5, 8, 12, torch.float32, device)
    refused(ops.mlp, (x.sum(), fc_weight, None, proj_weight, None), "x", "at least 1 dimension")
    wrong = x, fc_weight[:, :7], None, proj_weight, None
    refused(ops.mlp, wrong, r"fc_weight must have shape \(hidden_features, 8\)", r"\(12, 7\)")
    wrong = x, fc_weight, None, proj_weight[:, :11], None
    refused(ops.mlp, wrong, r"proj_weight must have shape \(out_features, 12\)", r"\(8, 11\)")


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
    """The weights are transposes of tensors (in, out), as in Hugging Face's Conv1D."""
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
