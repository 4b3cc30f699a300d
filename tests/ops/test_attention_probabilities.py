import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import gptkernels  # noqa: F401
from helpers import all_dtypes, assert_as_exact_as_torch, double, gradients, randn, refused, tolerance

ops = torch.ops.gptkernels


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


def inputs(size, dtype, device):
    b, t, nh, hs = size
    return randn(b, t, 3 * nh * hs, dtype=dtype, device=device), randn(b, t, nh * hs, dtype=dtype, device=device)


@pytest.mark.parametrize("size", [(0, 5, 2, 3), (2, 0, 2, 3), (0, 0, 2, 3)])
@all_dtypes
def test_empty(size, dtype, device):
    b, t, nh, hs = size
    qkv, dout = inputs(size, dtype, device)
    out, probs = ops.attention_probabilities(qkv, nh)
    assert out.shape == (b, t, nh * hs)
    assert probs.shape == (b, nh, t, t)
    assert gradients(lambda x: ours(x, nh), (qkv,), dout)[0].shape == qkv.shape


@all_dtypes
def test_probabilities(dtype, device):
    qkv, _ = inputs((2, 33, 3, 8), dtype, device)
    found = ops.attention_probabilities(qkv, 3)[1]
    assert_as_exact_as_torch(found, probabilities(qkv, 3), probabilities(double(qkv), 3))
    assert (found.triu(1) == 0).all()


@all_dtypes
def test_is_causal(dtype, device):
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


def test_probabilities_are_not_differentiable(device):
    qkv = inputs((1, 3, 1, 2), torch.float32, device)[0].requires_grad_()
    out, probs = ops.attention_probabilities(qkv, 1)
    assert out.requires_grad
    assert not probs.requires_grad


def test_flops(device):
    """Each product counted once; the products themselves, in torch ops, count the same."""
    qkv = inputs((2, 9, 3, 8), torch.float32, device)[0].requires_grad_()
    with FlopCounterMode(display=False) as ours_counted:
        ours(qkv, 3).sum().backward()
    with FlopCounterMode(display=False) as torchs_counted:
        formula(qkv, 3).sum().backward()
    assert ours_counted.get_total_flops() == torchs_counted.get_total_flops() == 6 * 2 * 2 * 9 * 9 * 24


def test_bad_input(device):
    op, backward = ops.attention_probabilities, ops.attention_probabilities_backward
    qkv, dout = inputs((2, 5, 2, 3), torch.float32, device)
    refused(op, (qkv, 4), r"qkv must have shape \(B, T, 3 \* C\)", "num_heads", r"\(2, 5, 18\)")
    refused(op, (qkv[0], 2), r"qkv must have shape \(B, T, 3 \* C\)", r"\(5, 18\)")
    refused(op, (qkv[..., :0], 2), r"qkv must have shape \(B, T, 3 \* C\)", r"\(2, 5, 0\)")
    refused(op, (qkv, 0), "num_heads must be at least 1, got 0")
    refused(op, (qkv.long(), 2), "qkv must be float64", "int64")
    _, probs = op(qkv, 2)
    refused(backward, (dout[:, :4], qkv, probs, 2), r"dout must have shape \(2, 5, 6\)", r"\(2, 4, 6\)")
    refused(backward, (dout, qkv, probs[:, :1], 2), r"probabilities must have shape \(2, 2, 5, 5\)", r"\(2, 1, 5, 5\)")
    refused(backward, (dout, qkv, probs.double(), 2), "probabilities must have the dtype of qkv", "float32", "float64")


def test_tensors_on_different_devices(device):
    if device.type == "cpu":
        pytest.skip("one device only")
    qkv, dout = inputs((2, 5, 2, 3), torch.float32, device)
    _, probs = ops.attention_probabilities(qkv, 2)
    refused(ops.attention_probabilities_backward, (dout.cpu(), qkv, probs, 2), "dout is on cpu", "qkv is on cuda")


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
