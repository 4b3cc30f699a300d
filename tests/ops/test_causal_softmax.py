from functools import partial

import pytest
import torch

import gptkernels  # noqa: F401
from gptkernels.testing.cases.softmax import causal_softmax_formula as exact
from gptkernels.testing.cases.softmax import torchs_causal_softmax as torchs
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


def ours(scores, scale=1.0):
    return ops.causal_softmax(scores, scale)


def check(scores, dout, scale=1.0):
    (dscores,) = assert_as_exact_with_gradients(
        *(partial(f, scale=scale) for f in (ours, torchs, exact)), (scores,), dout, ("dscores",)
    )
    assert (dscores.triu(1) == 0).all()


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-37, 30.0])
@all_dtypes
def test_any_scale(scale, dtype, device):
    scores, dout = (randn(2, 33, 33, dtype=dtype, device=device) for _ in range(2))
    if abs(scale) <= 1 and dtype != torch.float16:
        scores[1] *= torch.finfo(torch.bfloat16).max / 8  # differences of scores overflow before they are scaled
    assert_as_exact_as_torch(ours(scores, scale), torchs(scores, scale), exact(double(scores), scale))
    check(scores[:1], dout[:1], scale)


@all_dtypes
def test_ignores_values_above_the_diagonal(dtype, device):
    for tokens in (7, 40, 129):
        scores, dout = (randn(2, tokens, tokens, dtype=dtype, device=device) for _ in range(2))
        above = torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)
        out = ours(scores)
        assert (out[:, above] == 0).all()
        for value in (float("nan"), float("inf"), torch.finfo(dtype).max):
            assert torch.equal(ours(scores.masked_fill(above, value)), out)
            dscores = ops.causal_softmax_backward(dout.masked_fill(above, value), out)
            assert torch.equal(dscores, ops.causal_softmax_backward(dout, out))


@all_dtypes
def test_infinities_and_nan(dtype, device):
    scores = randn(6, 33, 33, dtype=dtype, device=device)
    scores[0, 5, 3] = float("-inf")
    scores[1, 5, :] = float("-inf")
    scores[2, 5, 3] = float("inf")
    scores[3, 5, 3] = float("nan")
    scores[4] = torch.finfo(dtype).max
    scores[5] = torch.finfo(dtype).smallest_normal / 4
    # In a row with NaN, torch's result is NaN above the diagonal, too, while our result is 0 there.
    assert_as_exact_as_torch(ours(scores), torchs(scores).tril(), exact(double(scores)).tril())


def test_bad_input(device):
    refused(ops.causal_softmax, (torch.randn(4, device=device),), "scores", "at least 2 dimensions", r"\(4\)")
    wrong = torch.randn(2, 4, 5, device=device)
    refused(ops.causal_softmax, (wrong,), r"scores must have shape \(\.\.\., T, T\)", r"\(2, 4, 5\)")


@pytest.mark.large
def test_more_than_2_31_elements(device):
    matrices, tokens = 2**31 // 1024**2 + 3, 1024
    scores = torch.randn(matrices, tokens, tokens, dtype=torch.bfloat16, device=device)
    out = ours(scores)
    dscores = ops.causal_softmax_backward(scores, out)
    for i in (0, matrices - 1):
        assert_as_exact_as_torch(out[i], torchs(scores[i]), exact(double(scores[i])))
        expected = [gradients(f, (s,), s)[0] for f, s in ((torchs, scores[i]), (exact, double(scores[i])))]
        assert_as_exact_as_torch(dscores[i], *expected, "dscores")
