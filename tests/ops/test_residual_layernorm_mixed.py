"""residual_layernorm with x of 16 bits beside a float32 residual: out has x's dtype, all else is float32."""

from functools import partial

import pytest
import torch
from test_residual_layernorm import dropped, exact, gradients, torch_errors, torchs

from helpers import (
    all_rows,
    all_views,
    as_view,
    assert_as_exact_as_torch,
    assert_same_bits,
    double,
    numbers,
    raises,
    randn,
)

ops = torch.ops.gptkernels
narrow = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
dropouts = pytest.mark.parametrize("p", [0.0, 0.2], ids=["no dropout", "dropout"])


def dropout(p, device):
    return (p, *numbers(device)) if p else (0.0, None, None)


def ours(x, residual, weight, bias, x_bias=None, drop=(0.0, None, None)):
    return ops.residual_layernorm(x, residual, weight, bias, 1e-5, x_bias, *drop)[:2]


def theirs(x, residual, weight, bias, x_bias=None, drop=(0.0, None, None)):
    """Torch's steps in float32, and the norm rounded."""
    wide = x.to(residual.dtype)
    out, total = torchs(_added(wide, x_bias, drop), residual, weight, bias)
    return out.to(x.dtype), total


def formula(x, residual, weight, bias, x_bias=None, drop=(0.0, None, None)):
    return exact(_added(x, x_bias, drop), residual, weight, bias, dtype=torch.float32)


def _added(x, x_bias, drop):
    if drop[0] > 0:
        return dropped(x, x_bias, *drop)
    return x if x_bias is None else x + x_bias


def inputs(rows, width, dtype, device, biased=True, affine=True):
    vectors = [randn(width, dtype=torch.float32, device=device) for _ in range(3)]
    return (
        randn(rows, width, dtype=dtype, device=device),
        randn(rows, width, dtype=torch.float32, device=device),
        *(vectors[:2] if affine else (None, None)),
        *(vectors[2:] if biased else ()),
    )


def grads_of(rows, width, dtype, device):
    return [randn(rows, width, dtype=d, device=device) for d in (dtype, torch.float32)]


def check(args, douts, drop):
    """Both outputs and all gradients against float64 and beside torch."""
    functions = [partial(f, drop=drop) for f in (ours, theirs, formula)]
    doubles = [double(t) for t in args]
    every = args, args, doubles
    for name, a, b, c in zip(
        ("out", "sum"), *(f(*given) for f, given in zip(functions, every, strict=True)), strict=True
    ):
        assert_as_exact_as_torch(a, b, c, name)
    errors = torch_errors(*functions[1:], args, douts)
    douts = douts, douts, [double(t) for t in douts]
    found = (gradients(f, given, d) for f, given, d in zip(functions, every, douts, strict=True))
    for name, a, b, c, error in zip(("dx", "dresidual", "dweight", "dbias", "dx_bias"), *found, errors, strict=False):
        assert (a is None) == (b is None)
        if a is not None:
            assert_as_exact_as_torch(a, b, c, name, error)


@dropouts
@narrow
@pytest.mark.parametrize("width", [1, 7, 8, 12, 33, 96, 127, 768, 1600, 4097, 8192])
@all_rows
def test_matches_float64(rows, width, dtype, p, device):
    check(inputs(rows, width, dtype, device), grads_of(rows, width, dtype, device), dropout(p, device))


@dropouts
@narrow
@pytest.mark.parametrize("width", [96, 512, 768, 1024, 1600, 4096])
def test_many_rows(width, dtype, p, device):
    rows = 400_000 // width
    douts = grads_of(rows, width, dtype, device)
    check(inputs(rows, width, dtype, device), douts, dropout(p, device))
    check(inputs(rows, width, dtype, device, biased=False, affine=False), (douts[0], None), dropout(p, device))


@pytest.mark.parametrize("used", ["out", "sum"])
@dropouts
@narrow
def test_one_output_may_be_unused(dtype, p, used, device):
    dout, dsum = grads_of(300, 96, dtype, device)
    check(inputs(300, 96, dtype, device), (dout, None) if used == "out" else (None, dsum), dropout(p, device))


@all_views
@narrow
def test_views(view, dtype, device):
    x, residual, *vectors = inputs(6, 40, dtype, device)
    douts = [as_view(t, view) for t in grads_of(6, 40, dtype, device)]
    check((as_view(x, view), as_view(residual, view), *vectors), douts, dropout(0.3, device))


@dropouts
@narrow
def test_is_the_float32_op_with_its_norm_rounded(dtype, p, device):
    x, *rest, x_bias = inputs(50, 768, dtype, device)
    drop = dropout(p, device)
    out, total, mean, _ = ops.residual_layernorm(x, *rest, 1e-5, x_bias, *drop)
    assert (out.dtype, total.dtype, mean.dtype) == (dtype, torch.float32, torch.float32)
    wide, wide_total, _, _ = ops.residual_layernorm(x.float(), *rest, 1e-5, x_bias, *drop)
    assert torch.equal(total, wide_total)
    torch.testing.assert_close(out, wide.to(dtype))


@pytest.mark.parametrize("wanted", range(5))
@dropouts
def test_only_the_gradients_that_are_wanted(wanted, p, device):
    drop, douts = dropout(p, device), grads_of(50, 40, torch.bfloat16, device)
    args = inputs(50, 40, torch.bfloat16, device)
    every = gradients(partial(ours, drop=drop), args, douts)
    leaves = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(args)]
    torch.autograd.backward(ours(*leaves, drop=drop), douts)
    for i, (leaf, grad) in enumerate(zip(leaves, every, strict=True)):
        assert (leaf.grad is not None) == (i == wanted)
        if i == wanted:
            assert torch.equal(leaf.grad, grad)
            assert grad.dtype == args[i].dtype


@dropouts
def test_deterministic(p, device):
    args, drop = inputs(1000, 96, torch.bfloat16, device), dropout(p, device)
    x, residual, weight, bias, x_bias = args
    out, total, mean, rstd = ops.residual_layernorm(x, residual, weight, bias, 1e-5, x_bias, *drop)
    assert_same_bits(lambda: ops.residual_layernorm(x, residual, weight, bias, 1e-5, x_bias, *drop))
    given = out, residual, total, weight, mean, rstd, *drop, [True] * 5
    assert_same_bits(lambda: ops.residual_layernorm_dropout_backward(*given))


@dropouts
def test_second_derivatives(p, device):
    """Those of the float32 op, within the rounding of what has 16 bits."""
    args, drop = inputs(5, 33, torch.bfloat16, device), dropout(p, device)
    found = []
    for first in (args[0], args[0].float()):
        leaves = [t.detach().requires_grad_() for t in (first, *args[1:])]
        out, total = ours(*leaves, drop=drop)
        grads = torch.autograd.grad(out.float().square().sum() + total.pow(3).sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.float().square().sum() for g in grads), leaves))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0, atol=0.05 * b.abs().max().item())


@dropouts
def test_opcheck(p, device):
    dtype = torch.bfloat16  # float16 is registered alike
    x, residual, weight, bias, x_bias = (t.requires_grad_() for t in inputs(4, 8, dtype, device))
    drop = dropout(p, device)
    torch.library.opcheck(ops.residual_layernorm, (x, residual, weight, bias, 1e-5, x_bias, *drop))
    _, total, mean, rstd = ops.residual_layernorm(x.detach(), residual.detach(), weight, bias, 1e-5, None, *drop)
    dout, dsum = (t.requires_grad_() for t in grads_of(4, 8, dtype, device))
    for mask in ([True] * 5, [True] + [False] * 4, [False, True, True, True, False], [False] * 4 + [True]):
        args = dout, dsum, total.detach().requires_grad_(), weight, mean.detach(), rstd.detach(), *drop, mask
        torch.library.opcheck(ops.residual_layernorm_dropout_backward, args)


def test_bad_input(device):
    x, residual, weight, bias, x_bias = inputs(5, 8, torch.bfloat16, device)
    with raises("residual_layernorm", "residual must have the dtype of x", "bfloat16", "float64"):
        ops.residual_layernorm(x, residual.double(), weight, bias)
    with raises("residual_layernorm", "weight must have the dtype of residual", "float32", "bfloat16"):
        ops.residual_layernorm(x, residual, weight.bfloat16(), bias)
    with raises("residual_layernorm", "x_bias must have the dtype of residual", "float32", "bfloat16"):
        ops.residual_layernorm(x, residual, weight, bias, 1e-5, x_bias.bfloat16())
    out, total, mean, rstd = ops.residual_layernorm(x, residual, weight, bias)
    with raises("residual_layernorm_backward", "dout must have the dtype of sum", "float32", "bfloat16"):
        ops.residual_layernorm_backward(out, None, total, weight, mean, rstd, [True] * 3)
    with raises("residual_layernorm_dropout_backward", "seed and offset must be given", "dtype of sum"):
        args = out.float(), None, total, weight, mean, rstd, 0.0, None, None, [True] * 5
        ops.residual_layernorm_dropout_backward(*args)
