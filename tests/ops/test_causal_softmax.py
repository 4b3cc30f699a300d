import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gptkernels  # noqa: F401
from helpers import (
    all_dtypes,
    all_views,
    as_view,
    assert_as_exact_as_torch,
    assert_same_bits,
    double,
    gradients,
    raises,
    randn,
    registered_dtypes,
    tolerance,
)

ops = torch.ops.gptkernels


def masked(scores):
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))


def ours(scores, scale=1.0):
    return ops.causal_softmax(scores, scale)


def torchs(scores, scale=1.0):
    return torch.softmax(masked(scores * scale), -1)


def exact(scores, scale=1.0):
    """The formula, in float64."""
    shifted = masked(scores * scale)
    weights = torch.exp(shifted - shifted.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


def check(scores, dout, scale=1.0):
    assert_as_exact_as_torch(ours(scores, scale), torchs(scores, scale), exact(double(scores), scale))
    found = [gradients(lambda s, f=f: f(s, scale), (s,), g)[0] for f, s, g in functions(scores, dout)]
    assert_as_exact_as_torch(*found, "dscores")
    assert (found[0].triu(1) == 0).all()


def functions(scores, dout):
    return (ours, scores, dout), (torchs, scores, dout), (exact, double(scores), double(dout))


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 17, 33, 64, 127, 250, 768])
@pytest.mark.parametrize("matrices", [0, 1, 5])
@all_dtypes
def test_matches_float64(matrices, tokens, dtype, device):
    scores = randn(matrices, tokens, tokens, dtype=dtype, device=device, scale=3)
    check(scores, randn(matrices, tokens, tokens, dtype=dtype, device=device), 0.125)


@pytest.mark.parametrize("tokens", [1600, 2051])
@all_dtypes
def test_wide_matrices(tokens, dtype, device):
    check(*(randn(tokens, tokens, dtype=dtype, device=device) for _ in range(2)))


@all_views
@all_dtypes
def test_views(view, dtype, device):
    scores, dout = (randn(3, 2, 40, 40, dtype=dtype, device=device) for _ in range(2))
    check(as_view(scores, view), as_view(dout, view), -2.0)


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-37, 30.0])
@all_dtypes
def test_any_scale(scale, dtype, device):
    scores, dout = (randn(2, 33, 33, dtype=dtype, device=device) for _ in range(2))
    if abs(scale) <= 1 and dtype != torch.float16:
        scores[1] *= torch.finfo(torch.bfloat16).max / 8  # the differences of what the scale makes small overflow
    assert_as_exact_as_torch(ours(scores, scale), torchs(scores, scale), exact(double(scores), scale))
    check(scores[:1], dout[:1], scale)


@all_dtypes
def test_what_is_above_the_diagonal_plays_no_part(dtype, device):
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
    # torch spreads a row's NaN above the diagonal, where ours is 0 whatever the row holds.
    assert_as_exact_as_torch(ours(scores), torchs(scores).tril(), exact(double(scores)).tril())


@all_dtypes
def test_rows_sum_to_one(dtype, device):
    scores = randn(2, 300, 300, dtype=dtype, device=device, scale=10)
    sums = ours(scores, 0.5).double().sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=300 * torch.finfo(dtype).eps)


def test_empty(device):
    for shape in [(0, 0), (3, 0, 0), (0, 5, 5), (2, 0, 4, 4)]:
        assert ours(torch.empty(shape, device=device)).shape == shape


@all_dtypes
def test_deterministic(dtype, device):
    scores, dout = (randn(8, 130, 130, dtype=dtype, device=device) for _ in range(2))
    out = ours(scores)
    assert_same_bits(lambda: ours(scores))
    assert_same_bits(lambda: ops.causal_softmax_backward(dout, out))


def test_gradcheck(device):
    for shape in [(5, 5), (2, 1, 1), (2, 3, 3)]:
        scores = randn(*shape, dtype=torch.float64, device=device, requires_grad=True)
        assert torch.autograd.gradcheck(lambda s: ours(s, 0.7), (scores,))
        assert torch.autograd.gradgradcheck(lambda s: ours(s, 0.7), (scores,))


@registered_dtypes
def test_opcheck(dtype, device):
    scores, dout, out = (randn(2, 7, 7, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    torch.library.opcheck(ops.causal_softmax, (scores, 0.5))
    torch.library.opcheck(ops.causal_softmax, (scores,))
    torch.library.opcheck(ops.causal_softmax_backward, (dout, out, 0.5))


def test_compile(device):
    scores, dout = (randn(2, 9, 9, dtype=torch.float32, device=device) for _ in range(2))
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(scores, 0.5), ours(scores, 0.5))
    for a, b in zip(gradients(compiled, (scores,), dout), gradients(ours, (scores,), dout), strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_follows_softmax(device):
    scores = randn(2, 9, 9, dtype=torch.bfloat16, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        assert ours(scores).dtype == torch.softmax(scores, -1).dtype
        assert ours(scores.float()).dtype == torch.float32


@settings(max_examples=40, deadline=None)
@given(matrices=st.integers(0, 4), tokens=st.integers(1, 200), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_shape(device, matrices, tokens, dtype):
    torch.manual_seed(matrices + tokens)  # a failing example must fail again
    scores, dout = (randn(matrices, tokens, tokens, dtype=dtype, device=device) for _ in range(2))
    torch.testing.assert_close(ours(scores), torchs(scores), **tolerance(dtype))
    for a, b in zip(gradients(ours, (scores,), dout), gradients(torchs, (scores,), dout), strict=True):
        torch.testing.assert_close(a, b, **tolerance(dtype))


def test_bad_input(device):
    with raises("causal_softmax", "scores", "at least 2 dimensions", r"\(4\)"):
        ours(torch.randn(4, device=device))
    with raises("causal_softmax", r"scores must have shape \(\.\.\., T, T\)", r"\(2, 4, 5\)"):
        ours(torch.randn(2, 4, 5, device=device))
    with raises("causal_softmax", "scores must be float64", "int64"):
        ours(torch.ones(4, 4, dtype=torch.int64, device=device))
    out = torch.rand(2, 4, 4, device=device)
    with raises("causal_softmax_backward", r"dout must have shape \(2, 4, 4\)", r"\(1, 4, 4\)"):
        ops.causal_softmax_backward(out[:1], out)
    with raises("causal_softmax_backward", "dout must have the dtype of out", "float32", "float64"):
        ops.causal_softmax_backward(out.double(), out)


@pytest.mark.large
def test_more_than_2_31_elements(device):
    matrices, tokens = 2**31 // 1024**2 + 3, 1024
    scores = torch.randn(matrices, tokens, tokens, dtype=torch.bfloat16, device=device)
    out = ours(scores)
    dscores = ops.causal_softmax_backward(scores, out)
    for i in (0, matrices - 1):
        assert_as_exact_as_torch(out[i], torchs(scores[i]), exact(double(scores[i])))
        expected = [gradients(f, (s,), g)[0] for f, s, g in functions(scores[i], scores[i])]
        assert_as_exact_as_torch(dscores[i], *expected[1:], "dscores")
