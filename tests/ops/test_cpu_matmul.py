"""Tests of our float32 matmuls on the CPU, which the fixture ``own`` forces.

By default the operators use BLAS, except for some sizes on AMD processors with AVX-512 (csrc/cpu/matmul.cpp).
"""

import pytest
import torch
import torch.nn.functional as F

import gptkernels  # noqa: F401
from gptkernels.testing.cases.products import mlp_formula
from helpers import as_view, assert_as_exact_with_gradients, assert_same_bits, gradients, randn

ops = torch.ops.gptkernels

# (N, K, M). A tile has up to 24 rows. A panel has up to 512 terms and 64 columns, with sums in parts of 256 terms. In
# these sizes a tile or a panel is not full, or there are several tiles, panels or parts.
SIZES = [
    (1, 1, 1), (24, 16, 64), (25, 65, 67), (100, 513, 130), (70, 1030, 16), (300, 128, 512), (1025, 40, 50),
    (33, 2000, 129),
]  # fmt: skip
all_sizes = pytest.mark.parametrize(("rows", "inner", "width"), SIZES)


@pytest.fixture(autouse=True)
def own(monkeypatch, on_cpu):
    monkeypatch.setenv("GPTKERNELS_MATMUL", "own")


def matrix(rows, columns, transposed=False, scale=1.0):
    values = randn(rows, columns, dtype=torch.float32, device="cpu", scale=scale)
    return values.t().contiguous().t() if transposed else values


@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
@all_sizes
def test_linear(rows, inner, width, transposed):
    weight, bias, dout = matrix(width, inner, transposed, inner**-0.5), matrix(1, width)[0], matrix(rows, width)
    names = ("dx", "dweight", "dbias")
    for x in (matrix(rows, inner), matrix(rows, inner, True), as_view(matrix(rows, inner), "misaligned")):
        for b in (bias, None):
            assert_as_exact_with_gradients(ops.linear, F.linear, F.linear, (x, weight, b), dout, names)
        assert_same_bits(lambda x=x: ops.linear(x, weight, bias))
        assert_same_bits(lambda x=x: ops.linear_backward(dout, x, weight, [True, True, True]))


def mlp_inputs(rows, width, hidden, transposed=False):
    return (
        matrix(rows, width),
        matrix(hidden, width, transposed, width**-0.5),
        matrix(1, hidden)[0],
        matrix(width, hidden, transposed, hidden**-0.5),
        matrix(1, width)[0],
    )


@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
@all_sizes
def test_mlp(rows, inner, width, transposed):
    args, dout = mlp_inputs(rows, inner, width, transposed), matrix(rows, inner)

    def composed(x, fc_weight, fc_bias, proj_weight, proj_bias):
        return F.linear(F.gelu(F.linear(x, fc_weight, fc_bias), approximate="tanh"), proj_weight, proj_bias)

    names = ("dx", "dfc_weight", "dfc_bias", "dproj_weight", "dproj_bias")
    assert_as_exact_with_gradients(lambda *a: ops.mlp(*a)[0], composed, mlp_formula, args, dout, names)
    _, pre_gelu, post_gelu = ops.mlp(*args)
    assert torch.equal(post_gelu, ops.gelu(pre_gelu))
    assert_same_bits(lambda: ops.mlp(*args))
    saved = args[0], args[1], args[3], pre_gelu, post_gelu
    assert_same_bits(lambda: ops.mlp_backward(dout, *saved, [True] * 5))


def test_one_gradient_has_the_bits_that_it_has_among_all():
    args, dout = mlp_inputs(100, 65, 512), matrix(100, 65)
    _, pre_gelu, post_gelu = ops.mlp(*args)
    saved = args[0], args[1], args[3], pre_gelu, post_gelu
    every = ops.mlp_backward(dout, *saved, [True] * 5)
    for i in range(5):
        alone = ops.mlp_backward(dout, *saved, [j == i for j in range(5)])
        assert torch.equal(alone[i], every[i])


def test_elements_are_independent():
    x, weight = matrix(100, 600), matrix(150, 600)
    whole = ops.linear(x, weight, None)
    for rows, columns in [(1, 150), (7, 33), (49, 64), (100, 1)]:
        assert torch.equal(ops.linear(x[:rows], weight[:columns], None), whole[:rows, :columns])


def test_weight_gradient_is_accumulated_over_chunks():
    x, weight, targets = matrix(100, 65), matrix(129, 65, scale=0.1), torch.randint(0, 129, (100,))

    def ours(x, weight):
        return ops.linear_cross_entropy(x, weight, targets, -1, -100, "sum", 30)

    def torchs(x, weight):
        return F.cross_entropy(F.linear(x, weight), targets, reduction="sum")

    found, expected = (gradients(f, (x, weight), torch.tensor(1.0)) for f in (ours, torchs))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e38])
def test_special_values_stay_in_their_row(value):
    args = mlp_inputs(60, 70, 130)
    clean = ops.mlp(*args)[0]
    args[0][2, 7] = value
    out, pre_gelu, post_gelu = ops.mlp(*args)
    others = [i for i in range(60) if i != 2]
    assert torch.equal(out[others], clean[others])
    assert not torch.equal(out[2], clean[2])
    dx = ops.mlp_backward(clean, args[0], args[1], args[3], pre_gelu, post_gelu, [True] * 5)[0]
    assert dx[others].isfinite().all()


def test_environment_variable_selects_blas(monkeypatch):
    x, weight = matrix(100, 300), matrix(128, 300)
    own = ops.linear(x, weight, None)
    monkeypatch.setenv("GPTKERNELS_MATMUL", "blas")
    assert torch.equal(ops.linear(x, weight, None), F.linear(x, weight))
    torch.testing.assert_close(own, F.linear(x, weight), rtol=1e-5, atol=1e-4)
