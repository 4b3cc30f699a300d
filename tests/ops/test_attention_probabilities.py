"""Tests of ``attention_probabilities`` that do not apply to ``attention`` (test_attention.py)."""

import math

import pytest
import torch

import gptkernels  # noqa: F401
from helpers import all_dtypes, assert_as_exact_as_torch, count_flops, double, gradients, randn, tolerance

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
    out = probabilities(qkv, num_heads, scale) @ heads(qkv, num_heads)[2]
    return out.transpose(1, 2).flatten(2)


def inputs(size, dtype, device):
    b, t, nh, hs = size
    return randn(b, t, 3 * nh * hs, dtype=dtype, device=device), randn(b, t, nh * hs, dtype=dtype, device=device)


@all_dtypes
def test_probabilities(dtype, device):
    qkv, _ = inputs((2, 33, 3, 8), dtype, device)
    found = ops.attention_probabilities(qkv, 3)[1]
    assert_as_exact_as_torch(found, probabilities(qkv, 3), probabilities(double(qkv), 3))
    assert (found.triu(1) == 0).all()


def test_flops_are_those_of_the_matmuls(device):
    qkv = inputs((2, 9, 3, 8), torch.float32, device)[0].requires_grad_()
    for function in (ours, formula):
        assert count_flops(lambda f=function: f(qkv, 3).sum().backward())[0] == 6 * 2 * 2 * 9 * 9 * 24


@pytest.mark.large
def test_more_than_2_31_elements(device):
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
