from functools import partial

import pytest
import torch
import torch.nn.functional as F

from gptkernels import functional as G
from gptkernels.testing.cases.norm import NOTHING_ELSE
from gptkernels.testing.cases.norm import residual_layernorm_formula as exact
from helpers import (
    all_dtypes,
    assert_as_exact_as_torch,
    assert_equal,
    assert_same_bits,
    check_call,
    double,
    gradients,
    low_dtypes,
    numbers,
    raises,
    randn,
    refused,
    tolerance,
)

ops = torch.ops.gptkernels


def torchs(x, residual, weight, bias):
    total = x + residual
    return F.layer_norm(total, total.shape[-1:], weight, bias), total


def inputs(rows, width, dtype, device):
    return [randn(*shape, dtype=dtype, device=device) for shape in ((rows, width), (rows, width), (width,), (width,))]


@all_dtypes
def test_normalizes_the_rounded_sum(dtype, device):
    """The rows of x are large and constant, so that rounding the sum removes most digits of the residual."""
    x = torch.tensor([[300.0], [-7e4], [2e4]], dtype=torch.float64).expand(3, 33).to(dtype).to(device)
    x = x * 2.0**20 if dtype in (torch.float32, torch.float64) else x.clamp(-400, 400)
    check_call("residual_layernorm", dtype, device, {"x.rows": 3, "width": 33, "has weight": False}, x=x)


def test_has_the_bits_of_layernorm(device):
    for dtype in (torch.float32, torch.bfloat16):
        for width in (7, 768, 1600, 50257):
            x, residual, weight, bias = inputs(5, width, dtype, device)
            out, total, mean, rstd = ops.residual_layernorm(x, residual, weight, bias)
            assert_equal((out, mean, rstd), ops.layernorm(x + residual, weight, bias))
            assert mean.dtype == rstd.dtype == torch.float32
            mask = [True] * 3
            plain = ops.layernorm_backward(x, total, weight, mean, rstd, mask)
            assert_equal(ops.residual_layernorm_backward(x, None, total, weight, mean, rstd, mask), plain)


@all_dtypes
def test_denormal_and_large_values(dtype, device):
    for scale in (torch.finfo(dtype).smallest_normal / 4, torch.finfo(dtype).max ** 0.45):
        x, residual = ((torch.randn(5, 127, dtype=torch.float64) * scale).to(dtype).to(device) for _ in range(2))
        choices = {"x.rows": 5, "width": 127, **NOTHING_ELSE}
        check_call("residual_layernorm", dtype, device, choices, x=x, residual=residual)


def test_x_and_residual_may_be_the_same_tensor(device):
    x, _, weight, bias = inputs(5, 33, torch.float64, device)
    x.requires_grad_()
    dx, expected = (
        torch.autograd.grad(out.square().sum() + total.sum(), x)[0]
        for out, total, *_ in (f(x, x, weight, bias) for f in (ops.residual_layernorm, torchs))
    )
    torch.testing.assert_close(dx, expected)


# ---- x_bias ----------------------------------------------------------------------------------------------------------


def test_zero_x_bias_changes_no_bits(device):
    """Only the forward has the same bits: the backward that computes x_bias's gradient may round dx differently."""
    for dtype in (torch.float32, torch.bfloat16):
        for width in (7, 768, 1600, 50257):
            args = inputs(40, width, dtype, device)
            found = ops.residual_layernorm(*args)
            assert_equal(found, ops.residual_layernorm(*args, 1e-5, torch.zeros_like(args[2])))
            out, total, mean, rstd = found
            backward = out, args[0], total, args[2], mean, rstd
            plain = ops.residual_layernorm_backward(*backward, [True] * 3)
            dx, _, _, dx_bias = ops.residual_layernorm_bias_backward(*backward, [True] * 4)
            if dtype == torch.float32:  # in 16 bits, the sum of the rounded dx differs from dx_bias
                torch.testing.assert_close(dx_bias, plain[0].double().sum(0).to(dtype), **tolerance(dtype))
            torch.testing.assert_close(dx, plain[0], **tolerance(dtype))
            (*none, alone) = ops.residual_layernorm_bias_backward(*backward, [False, False, False, True])
            assert [t.numel() for t in none] == [0, 0, 0]
            assert torch.equal(alone, dx_bias)
            assert_same_bits(lambda args=backward: ops.residual_layernorm_bias_backward(*args, [True] * 4))


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("has_x_bias", [False, True], ids=["no x_bias", "x_bias"])
def test_autocast_follows_layer_norm(has_x_bias, low, device):
    *args, x_bias = biased_inputs(5, 33, torch.float32, device)
    x, residual = (t.bfloat16() if low else t for t in args[:2])
    with torch.autocast(device.type, torch.bfloat16):
        out, total, *_ = ops.residual_layernorm(x, residual, *args[2:], 1e-5, x_bias if has_x_bias else None)
        expected, expected_total = torchs(x + x_bias if has_x_bias else x, residual, *args[2:])
    assert out.dtype == torch.float32
    if not has_x_bias:
        assert total.dtype == (expected_total.dtype if device.type == "cuda" else torch.float32)
    torch.testing.assert_close(out, expected.float(), rtol=1e-2, atol=5e-2)
    torch.testing.assert_close(total.float(), expected_total.float(), rtol=1e-2, atol=5e-2)


def test_bad_input(device):
    x, residual, weight, bias = inputs(5, 8, torch.float32, device)
    refused(ops.residual_layernorm, (x.sum(), x.sum(), None, None), "x", "at least 1 dimension")
    refused(
        ops.residual_layernorm, (x, residual, weight, bias, 1e-5, bias[:7]), r"x_bias must have shape \(8\)", r"\(7\)"
    )
    with pytest.raises(ValueError, match="x_bias must have shape"):
        G.residual_layer_norm(x, residual, (8,), weight, bias, x_bias=bias[:7])
    _, total, mean, rstd = ops.residual_layernorm(x, residual, weight, bias)
    saved = total, weight, mean, rstd, [True] * 3
    refused(ops.residual_layernorm_backward, (x, x[:4], *saved), "dsum must have shape", r"\(4, 8\)")


# ---- dropout ---------------------------------------------------------------------------------------------------------


def biased_inputs(rows, width, dtype, device):
    return *inputs(rows, width, dtype, device), randn(width, dtype=dtype, device=device)


@all_dtypes
def test_dropout_has_the_bits_of_the_plain_op(dtype, device):
    x, residual, weight, bias = inputs(50, 768, dtype, device)
    out, total, mean, rstd = ops.residual_layernorm(x, residual, weight, bias, 1e-5, None, 0.4, *numbers(device))
    kept = ops.dropout(torch.ones_like(x), 0.4, *numbers(device)) != 0
    assert torch.equal(total[~kept], residual[~kept])
    assert_equal((out, mean, rstd), ops.layernorm(total, weight, bias))
    # On CUDA, two kernels compute the two backwards. The compiler may contract their multiplications and additions
    # differently.
    close = partial(torch.testing.assert_close, **tolerance(dtype) if device.type == "cuda" else {"rtol": 0, "atol": 0})
    args = x, residual, total, weight, mean, rstd
    dx, dweight, dbias, _, dresidual = ops.residual_layernorm_dropout_backward(*args, 0.4, *numbers(device), [True] * 5)
    plain = ops.residual_layernorm_backward(*args, [True] * 3)
    close([dresidual, dweight, dbias], list(plain))
    assert (dx[~kept] == 0).all()
    torch.testing.assert_close(dx[kept], (dresidual[kept].double() / 0.6).to(dtype), **tolerance(dtype))
    nothing = ops.residual_layernorm_dropout_backward(*args, 0.0, *numbers(device), [True] * 5)
    assert torch.equal(nothing[0], nothing[4])
    close(nothing[0], plain[0])


@pytest.mark.parametrize("mask", range(32))
def test_dropout_backward_output_mask(mask, device):
    x, residual, weight, bias = inputs(50, 40, torch.float32, device)
    out, total, mean, rstd = ops.residual_layernorm(x, residual, weight, bias, 1e-5, None, 0.4, *numbers(device))
    args = out, x, total, weight, mean, rstd, 0.4, *numbers(device)
    wanted = [bool(mask >> i & 1) for i in range(5)]
    every = ops.residual_layernorm_dropout_backward(*args, [True] * 5)
    for a, b, w in zip(ops.residual_layernorm_dropout_backward(*args, wanted), every, wanted, strict=True):
        assert torch.equal(a, b) if w else a.numel() == 0


def test_functional_dropout(device):
    x, residual, *_ = inputs(5, 33, torch.float32, device)

    def run(x, residual, shape=(33,), **options):
        torch.manual_seed(0)
        return G.residual_layer_norm(x, residual, shape, **options)

    assert_equal(run(x, residual, dropout_p=0.5, training=False), run(x, residual))
    assert torch.equal(run(x, residual, dropout_p=1.0)[1], residual)
    # The mask depends on an element's flat index, not on the number of normalized dimensions.
    flat = run(x.view(1, -1), residual.view(1, -1), (165,), dropout_p=0.5)[1]
    assert torch.equal(run(x, residual, (5, 33), dropout_p=0.5)[1].view(1, -1), flat)


def test_bad_dropout_input(device):
    args, (seed, offset) = inputs(5, 8, torch.float32, device), numbers(device)
    refused(ops.residual_layernorm, (*args, 1e-5, None, 1.5, seed, offset), r"dropout_p must be from 0 to 1, got 1\.5")
    refused(ops.residual_layernorm, (*args, 1e-5, None, 0.5), r"seed must be given for dropout_p 0\.5")
    refused(ops.residual_layernorm, (*args, 1e-5, None, 0.5, seed), r"offset must be given for dropout_p 0\.5")


# ---- x in 16 bits and a float32 residual -----------------------------------------------------------------------------


dropouts = pytest.mark.parametrize("p", [0.0, 0.2], ids=["no dropout", "dropout"])


def mixed_inputs(rows, width, dtype, device):
    x, *others = biased_inputs(rows, width, torch.float32, device)
    return x.to(dtype), *others


def dropout(p, device):
    return (p, *numbers(device)) if p else (0.0, None, None)


@dropouts
@low_dtypes
def test_mixed_op_rounds_the_float32_norm(dtype, p, device):
    x, *rest, x_bias = mixed_inputs(50, 768, dtype, device)
    drop = dropout(p, device)
    out, total, mean, _ = ops.residual_layernorm(x, *rest, 1e-5, x_bias, *drop)
    assert (out.dtype, total.dtype, mean.dtype) == (dtype, torch.float32, torch.float32)
    exact_out, exact_total, _, _ = ops.residual_layernorm(x.float(), *rest, 1e-5, x_bias, *drop)
    assert torch.equal(total, exact_total)
    torch.testing.assert_close(out, exact_out.to(dtype))


@dropouts
def test_mixed_second_derivatives(p, device):
    args, drop = mixed_inputs(5, 33, torch.bfloat16, device), dropout(p, device)
    found = []
    for first in (args[0], args[0].float()):
        leaves = [t.detach().requires_grad_() for t in (first, *args[1:])]
        out, total = ops.residual_layernorm(*leaves[:4], 1e-5, leaves[4], *drop)[:2]
        grads = torch.autograd.grad(out.float().square().sum() + total.pow(3).sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.float().square().sum() for g in grads), leaves))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0, atol=0.05 * b.abs().max().item())


def test_bad_mixed_input(device):
    op, backward = ops.residual_layernorm, ops.residual_layernorm_backward
    x, residual, weight, bias, x_bias = mixed_inputs(5, 8, torch.bfloat16, device)
    refused(op, (x, residual.double(), weight, bias), "residual must have the dtype of x", "bfloat16", "float64")
    refused(op, (x, residual, weight.bfloat16(), bias), "weight must have the dtype of residual", "float32", "bfloat16")
    with raises("residual_layernorm", "x_bias must have the dtype of residual", "float32", "bfloat16"):
        op(x, residual, weight, bias, 1e-5, x_bias.bfloat16())
    out, total, mean, rstd = op(x, residual, weight, bias)
    with raises("residual_layernorm_backward", "dout must have the dtype of sum", "float32", "bfloat16"):
        backward(out, None, total, weight, mean, rstd, [True] * 3)
    with raises("residual_layernorm_dropout_backward", "seed and offset must be given", "dtype of sum"):
        args = out.float(), None, total, weight, mean, rstd, 0.0, None, None, [True] * 5
        ops.residual_layernorm_dropout_backward(*args)


@pytest.mark.large
def test_more_than_2_31_elements(device):
    rows, width = 2**31 // 768 + 5, 768
    x = torch.randn(rows, width, dtype=torch.bfloat16, device=device)
    out, total, mean, rstd = ops.residual_layernorm(x, x, None, None)
    dx = ops.residual_layernorm_backward(x, x, total, None, mean, rstd, [True, False, False])[0]
    for part in (slice(0, 5), slice(rows - 5, rows)):
        args = (x[part], x[part], None, None)
        for a, b, c in zip((out[part], total[part]), torchs(*args), exact(*(double(t) for t in args)), strict=True):
            assert_as_exact_as_torch(a, b, c)
        expected = gradients(torchs, args, (x[part], x[part]))[0]
        torch.testing.assert_close(dx[part], expected, rtol=2e-2, atol=2e-2)
