import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import gptkernels  # noqa: F401
from helpers import (
    all_dtypes,
    all_views,
    as_view,
    assert_as_exact_as_torch,
    assert_as_exact_with_gradients,
    assert_same_bits,
    double,
    gradients,
    raises,
    randn,
    tolerance,
)

ops = torch.ops.gptkernels

# (B, T, NH, HS): fewer batches than heads and the other way round, every awkward width as T or HS.
SIZES = [
    (1, 1, 1, 1), (2, 3, 1, 7), (1, 7, 2, 3), (3, 17, 2, 33), (5, 33, 3, 17), (2, 127, 3, 8), (7, 2, 3, 127),
    (1, 200, 12, 64), (2, 1, 4, 768), (1, 768, 1, 2), (1, 3, 1, 1600),
]  # fmt: skip
all_sizes = pytest.mark.parametrize("size", SIZES, ids=lambda s: "x".join(map(str, s)))


def ours(qkv, num_heads, scale=None):
    return ops.attention_probabilities(qkv, num_heads, scale)[0]


def heads(qkv, num_heads):
    b, t, c3 = qkv.shape
    return qkv.view(b, t, 3, num_heads, c3 // 3 // num_heads).permute(2, 0, 3, 1, 4)


def probabilities(qkv, num_heads, scale=None):
    q, k, _ = heads(qkv, num_heads)
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=qkv.device).triu(1)
    scores = q @ k.mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    return scores.masked_fill(future, -math.inf).softmax(-1)


def formula(qkv, num_heads, scale=None):
    """The formula step by step: in float64 the reference, in another dtype torch's kernels on the same path."""
    out = probabilities(qkv, num_heads, scale) @ heads(qkv, num_heads)[2]
    return out.transpose(1, 2).flatten(2)


def sdpa(qkv, num_heads):
    out = F.scaled_dot_product_attention(*heads(qkv, num_heads), is_causal=True)
    return out.transpose(1, 2).flatten(2)


def inputs(size, dtype, device):
    b, t, nh, hs = size
    return randn(b, t, 3 * nh * hs, dtype=dtype, device=device), randn(b, t, nh * hs, dtype=dtype, device=device)


def check(qkv, dout, num_heads, scale=None):
    """Forward and gradient against float64 and beside torch."""
    args = (num_heads, scale)
    assert_as_exact_with_gradients(
        lambda x: ours(x, *args),
        lambda x: formula(x.contiguous(), *args),
        lambda x: formula(x, *args),
        (qkv,),
        dout,
        ("dqkv",),
    )


@all_dtypes
@all_sizes
def test_matches_float64(size, dtype, device):
    check(*inputs(size, dtype, device), size[2])


@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0, -1.0])
@all_dtypes
def test_scale(scale, dtype, device):
    check(*inputs((2, 9, 3, 5), dtype, device), 3, scale)


@pytest.mark.parametrize("size", [(0, 5, 2, 3), (2, 0, 2, 3), (0, 0, 2, 3)])
@all_dtypes
def test_empty(size, dtype, device):
    b, t, nh, hs = size
    qkv, dout = inputs(size, dtype, device)
    out, probs = ops.attention_probabilities(qkv, nh)
    assert out.shape == (b, t, nh * hs)
    assert probs.shape == (b, nh, t, t)
    assert gradients(lambda x: ours(x, nh), (qkv,), dout)[0].shape == qkv.shape


@all_views
@all_dtypes
def test_views(view, dtype, device):
    qkv, dout = inputs((4, 9, 3, 8), dtype, device)
    check(as_view(qkv, view).expand(4, -1, -1), as_view(dout, view).expand(4, -1, -1), 3)


@all_dtypes
def test_probabilities(dtype, device):
    qkv, _ = inputs((2, 33, 3, 8), dtype, device)
    found = ops.attention_probabilities(qkv, 3)[1]
    assert_as_exact_as_torch(found, probabilities(qkv, 3), probabilities(double(qkv), 3))
    assert (found.triu(1) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_agrees_with_scaled_dot_product_attention(dtype, device):
    qkv, dout = inputs((2, 65, 4, 16), dtype, device)
    torch.testing.assert_close(ours(qkv, 4), sdpa(qkv, 4))
    (a,) = gradients(lambda x: ours(x, 4), (qkv,), dout)
    (b,) = gradients(lambda x: sdpa(x, 4), (qkv,), dout)
    torch.testing.assert_close(a, b)


@all_dtypes
def test_the_future_has_no_say(dtype, device):
    """Another token at t changes nothing before t, not even by a rounding, and not even when it is NaN."""
    qkv, _ = inputs((2, 20, 2, 8), dtype, device)
    out = ours(qkv, 2)
    changed = qkv.clone()
    changed[:, 12:] += 1
    assert torch.equal(ours(changed, 2)[:, :12], out[:, :12])
    changed[:, 12:, :32] = math.nan  # q and k; a NaN in v would meet a probability of 0
    out_nan = ours(changed, 2)
    assert torch.equal(out_nan[:, :12], out[:, :12])
    assert out_nan[:, 12:].isnan().all()


def test_scores_beyond_float16(device):
    """q k^T is larger than float16's largest number before it is scaled."""
    qkv = torch.full((1, 4, 3 * 64), 40.0, dtype=torch.float16, device=device)
    qkv[..., 128:] = torch.arange(4.0, device=device).view(1, 4, 1)
    expected = qkv[..., 128:].float().cumsum(1) / torch.arange(1.0, 5.0, device=device).view(1, 4, 1)
    torch.testing.assert_close(ours(qkv, 1).float(), expected, **tolerance(torch.float16))


@all_dtypes
def test_large_scores(dtype, device):
    """A softmax that is all but one-hot."""
    qkv, dout = inputs((2, 33, 2, 16), dtype, device)
    qkv[..., :64] *= 8
    check(qkv, dout, 2)


@all_dtypes
def test_deterministic(dtype, device):
    for size in [(2, 65, 3, 16), (5, 33, 2, 16)]:
        qkv, dout = inputs(size, dtype, device)
        _, probs = ops.attention_probabilities(qkv, size[2])
        assert_same_bits(lambda a=(qkv, size[2]): ops.attention_probabilities(*a), vary_threads=False)
        assert_same_bits(
            lambda a=(dout, qkv, probs, size[2]): ops.attention_probabilities_backward(*a), vary_threads=False
        )


def test_gradcheck(device):
    for b, t, nh, hs in [(1, 3, 2, 2), (2, 3, 1, 2), (1, 1, 1, 1)]:
        qkv = inputs((b, t, nh, hs), torch.float64, device)[0].requires_grad_()
        for scale in (None, 0.7):
            assert torch.autograd.gradcheck(lambda x, a=(nh, scale): ours(x, *a), (qkv,))
            assert torch.autograd.gradgradcheck(lambda x, a=(nh, scale): ours(x, *a), (qkv,))


def test_probabilities_are_not_differentiable(device):
    qkv = inputs((1, 3, 1, 2), torch.float32, device)[0].requires_grad_()
    out, probs = ops.attention_probabilities(qkv, 1)
    assert out.requires_grad
    assert not probs.requires_grad


def test_opcheck(device):
    dtype = torch.bfloat16  # float32 is test_every_op_passes'
    qkv, dout = (t.requires_grad_() for t in inputs((2, 5, 2, 3), dtype, device))
    torch.library.opcheck(ops.attention_probabilities, (qkv, 2))
    torch.library.opcheck(ops.attention_probabilities, (qkv, 2, 0.5))
    probs = ops.attention_probabilities(qkv.detach(), 2)[1]
    torch.library.opcheck(ops.attention_probabilities_backward, (dout, qkv, probs, 2))


def test_compile(device):
    qkv, dout = inputs((2, 9, 3, 8), torch.float32, device)
    compiled = torch.compile(lambda x: ours(x, 3), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(qkv), ours(qkv, 3))
    (a,) = gradients(compiled, (qkv,), dout)
    (b,) = gradients(lambda x: ours(x, 3), (qkv,), dout)
    torch.testing.assert_close(a, b)


def test_autocast_follows_scaled_dot_product_attention(device):
    qkv, dout = inputs((2, 9, 3, 8), torch.float32, device)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device.type, dtype):
            assert ours(qkv, 3).dtype == sdpa(qkv, 3).dtype == dtype
            torch.testing.assert_close(ours(qkv, 3), sdpa(qkv, 3), **tolerance(dtype))
            (grad,) = gradients(lambda x: ours(x, 3), (qkv,), dout.to(dtype))
            assert grad.dtype == torch.float32


def test_flops(device):
    """Each product counted once; the products themselves, in torch ops, count the same."""
    qkv = inputs((2, 9, 3, 8), torch.float32, device)[0].requires_grad_()
    with FlopCounterMode(display=False) as ours_counted:
        ours(qkv, 3).sum().backward()
    with FlopCounterMode(display=False) as torchs_counted:
        formula(qkv, 3).sum().backward()
    assert ours_counted.get_total_flops() == torchs_counted.get_total_flops() == 6 * 2 * 2 * 9 * 9 * 24


@settings(max_examples=30, deadline=None)
@given(
    b=st.integers(0, 5),
    t=st.integers(0, 40),
    nh=st.integers(1, 5),
    hs=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_shape(device, b, t, nh, hs, dtype):
    torch.manual_seed(b + t + nh + hs)  # a failing example must fail again
    qkv, dout = inputs((b, t, nh, hs), dtype, device)
    torch.testing.assert_close(ours(qkv, nh), formula(qkv, nh), **tolerance(dtype))
    (a,) = gradients(lambda x: ours(x, nh), (qkv,), dout)
    (c,) = gradients(lambda x: formula(x, nh), (qkv,), dout)
    torch.testing.assert_close(a, c, **tolerance(dtype))


def test_bad_input(device):
    qkv, dout = inputs((2, 5, 2, 3), torch.float32, device)
    with raises("attention_probabilities", r"qkv must have shape \(B, T, 3 \* C\)", "num_heads", r"\(2, 5, 18\)"):
        ops.attention_probabilities(qkv, 4)
    with raises("attention_probabilities", r"qkv must have shape \(B, T, 3 \* C\)", r"\(5, 18\)"):
        ops.attention_probabilities(qkv[0], 2)
    with raises("attention_probabilities", r"qkv must have shape \(B, T, 3 \* C\)", r"\(2, 5, 0\)"):
        ops.attention_probabilities(qkv[..., :0], 2)
    with raises("attention_probabilities", "num_heads must be at least 1, got 0"):
        ops.attention_probabilities(qkv, 0)
    with raises("attention_probabilities", "qkv must be float64", "int64"):
        ops.attention_probabilities(qkv.long(), 2)
    _, probs = ops.attention_probabilities(qkv, 2)
    with raises("attention_probabilities_backward", r"dout must have shape \(2, 5, 6\)", r"\(2, 4, 6\)"):
        ops.attention_probabilities_backward(dout[:, :4], qkv, probs, 2)
    with raises("attention_probabilities_backward", r"probabilities must have shape \(2, 2, 5, 5\)", r"\(2, 1, 5, 5\)"):
        ops.attention_probabilities_backward(dout, qkv, probs[:, :1], 2)
    with raises("attention_probabilities_backward", "probabilities must have the dtype of qkv", "float32", "float64"):
        ops.attention_probabilities_backward(dout, qkv, probs.double(), 2)


def test_tensors_on_different_devices(device):
    if device.type == "cpu":
        pytest.skip("one device only")
    qkv, dout = inputs((2, 5, 2, 3), torch.float32, device)
    _, probs = ops.attention_probabilities(qkv, 2)
    with raises("attention_probabilities_backward", "dout is on cpu", "qkv is on cuda"):
        ops.attention_probabilities_backward(dout.cpu(), qkv, probs, 2)


def test_cuda_graph(device):
    """Captured once, replayed with other values; nothing is allocated or synchronised in between."""
    if device.type == "cpu":
        pytest.skip("graphs are CUDA's")
    qkv, dout = inputs((2, 65, 3, 16), torch.bfloat16, device)

    def step():
        out, probs = ops.attention_probabilities(qkv, 3)
        return out, probs, ops.attention_probabilities_backward(dout, qkv, probs, 3)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    qkv.copy_(inputs((2, 65, 3, 16), torch.bfloat16, device)[0])
    graph.replay()
    for a, b in zip(outs, step(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.large
def test_more_than_2_31_elements(device):
    """The probabilities alone are that many."""
    b, t, nh, hs = 3, 8192, 12, 8
    qkv, dout = inputs((b, t, nh, hs), torch.bfloat16, device)
    out, probs = ops.attention_probabilities(qkv, nh)
    assert probs.numel() > 2**31
    dqkv = ops.attention_probabilities_backward(dout, qkv, probs, nh)
    del probs
    for part in (slice(0, 1), slice(b - 1, b)):
        torch.testing.assert_close(out[part], formula(qkv[part], nh), **tolerance(torch.bfloat16))
        (expected,) = gradients(lambda x: formula(x, nh), (qkv[part],), dout[part])
        torch.testing.assert_close(dqkv[part], expected, **tolerance(torch.bfloat16))
