import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gptkernels import functional as G
from gptkernels.testing.cases.norm import residual_layernorm_formula as exact
from gptkernels.testing.checks import hold_to_the_rule
from helpers import (
    all_dtypes,
    assert_as_exact_as_torch,
    assert_same_bits,
    call_of,
    double,
    numbers,
    raises,
    randn,
    refused,
    tolerance,
)

ops = torch.ops.gptkernels


def ours(x, residual, weight, bias, eps=1e-5):
    return ops.residual_layernorm(x, residual, weight, bias, eps)[:2]


def torchs(x, residual, weight, bias, eps=1e-5):
    total = x + residual
    return F.layer_norm(total, total.shape[-1:], weight, bias, eps), total


def inputs(rows, width, dtype, device, weight=True, bias=True):
    return (
        randn(rows, width, dtype=dtype, device=device),
        randn(rows, width, dtype=dtype, device=device),
        randn(width, dtype=dtype, device=device) if weight else None,
        randn(width, dtype=dtype, device=device) if bias else None,
    )


def gradients(function, args, douts):
    """Gradients for the arguments that are tensors; a gradient of None leaves that output unused."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in args]
    used = [(out, dout) for out, dout in zip(function(*leaves), douts, strict=True) if dout is not None]
    wanted = [t for t in leaves if t is not None]
    found = iter(torch.autograd.grad([o for o, _ in used], wanted, [d for _, d in used], allow_unused=True))
    return [None if t is None else next(found) for t in leaves]


@all_dtypes
def test_normalises_the_rounded_sum(dtype, device):
    """The rows are constant but for what the sum's rounding leaves of the residual."""
    x = torch.tensor([[300.0], [-7e4], [2e4]], dtype=torch.float64).expand(3, 33).to(dtype).to(device)
    x = x * 2.0**20 if dtype in (torch.float32, torch.float64) else x.clamp(-400, 400)
    call = call_of("residual_layernorm", dtype, device, **{"x.rows": 3, "width": 33, "has weight": False})
    hold_to_the_rule(dataclasses.replace(call, args={**call.args, "x": x}))


def test_has_the_bits_of_layernorm(device):
    """To the bit: one kernel serves both ops."""
    for dtype in (torch.float32, torch.bfloat16):
        for width in (7, 768, 1600, 50257):
            x, residual, weight, bias = inputs(5, width, dtype, device)
            out, total, mean, rstd = ops.residual_layernorm(x, residual, weight, bias)
            for a, b in zip((out, mean, rstd), ops.layernorm(x + residual, weight, bias), strict=True):
                assert torch.equal(a, b)
            assert mean.dtype == rstd.dtype == torch.float32
            mask = [True] * 3
            plain = ops.layernorm_backward(x, total, weight, mean, rstd, mask)
            for a, b in zip(
                ops.residual_layernorm_backward(x, None, total, weight, mean, rstd, mask), plain, strict=True
            ):
                assert torch.equal(a, b)


@all_dtypes
def test_extremes(dtype, device):
    tiny = torch.finfo(dtype).smallest_normal / 4
    for scale in (tiny, torch.finfo(dtype).max ** 0.45):
        x, residual = ((torch.randn(5, 127, dtype=torch.float64) * scale).to(dtype).to(device) for _ in range(2))
        doubles = double(x), double(residual)
        for a, b, c in zip(
            ours(x, residual, None, None),
            torchs(x, residual, None, None),
            exact(*doubles, None, None),
            strict=True,
        ):
            assert_as_exact_as_torch(a, b, c)


def test_x_and_residual_may_be_the_same(device):
    x, _, weight, bias = inputs(5, 33, torch.float64, device)
    x.requires_grad_()
    out, total = ours(x, x, weight, bias)
    (dx,) = torch.autograd.grad(out.square().sum() + total.sum(), x)
    out, total = torchs(x, x, weight, bias)
    torch.testing.assert_close(dx, torch.autograd.grad(out.square().sum() + total.sum(), x)[0])


# ---- x_bias ---------------------------------------------------------------------------------------------------------


def ours_biased(x, residual, weight, bias, x_bias):
    return ops.residual_layernorm(x, residual, weight, bias, 1e-5, x_bias)[:2]


def exact_biased(x, residual, weight, bias, x_bias, dtype=torch.float64):
    return exact(x + x_bias, residual, weight, bias, dtype=dtype)


def test_bias_of_x_changes_no_other_bits(device):
    """A bias of zeros gives the bits of none, and its gradient's kernel those of the others."""
    for dtype in (torch.float32, torch.bfloat16):
        for width in (7, 768, 1600, 50257):
            args = inputs(40, width, dtype, device)
            found = ops.residual_layernorm(*args)
            for a, b in zip(found, ops.residual_layernorm(*args, 1e-5, torch.zeros_like(args[2])), strict=True):
                assert torch.equal(a, b)
            out, total, mean, rstd = found
            inputs_of_backward = out, args[0], total, args[2], mean, rstd
            plain = ops.residual_layernorm_backward(*inputs_of_backward, [True] * 3)
            *others, dx_bias = ops.residual_layernorm_bias_backward(*inputs_of_backward, [True] * 4)
            if dtype == torch.float32:  # a narrower dx is rounded, and what is summed is not
                torch.testing.assert_close(dx_bias, plain[0].double().sum(0).to(dtype), **tolerance(dtype))
            torch.testing.assert_close(others[0], plain[0], **tolerance(dtype))
            (*none, alone) = ops.residual_layernorm_bias_backward(*inputs_of_backward, [False, False, False, True])
            assert [t.numel() for t in none] == [0, 0, 0]
            assert torch.equal(alone, dx_bias)
            assert_same_bits(lambda args=inputs_of_backward: ops.residual_layernorm_bias_backward(*args, [True] * 4))


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("has_x_bias", [False, True], ids=["no x_bias", "x_bias"])
def test_autocast_follows_layer_norm(has_x_bias, low, device):
    *args, x_bias = biased_inputs(5, 33, torch.float32, device)
    x, residual = (t.bfloat16() if low else t for t in args[:2])
    with torch.autocast(device.type, torch.bfloat16):
        out, total = ours_biased(x, residual, *args[2:], x_bias if has_x_bias else None)
        expected, expected_total = torchs(x + x_bias if has_x_bias else x, residual, *args[2:])
    assert out.dtype == torch.float32
    if not has_x_bias:
        assert total.dtype == (expected_total.dtype if device.type == "cuda" else torch.float32)
    torch.testing.assert_close(out, expected.float(), rtol=1e-2, atol=5e-2)
    torch.testing.assert_close(total.float(), expected_total.float(), rtol=1e-2, atol=5e-2)


def test_bad_bias_of_x(device):
    x, residual, weight, bias = inputs(4, 8, torch.float32, device)
    refused(ops.residual_layernorm, (x, residual, weight, bias, 1e-5, bias[:7]), "x_bias must have shape", r"\(8\)")
    refused(ops.residual_layernorm, (x, residual, weight, bias, 1e-5, bias.double()), "x_bias must have the dtype of x")
    with pytest.raises(ValueError, match="x_bias must have shape"):
        G.residual_layer_norm(x, residual, (8,), weight, bias, x_bias=bias[:7])


def test_bad_input(device):
    op, backward = ops.residual_layernorm, ops.residual_layernorm_backward
    x, residual, weight, bias = inputs(5, 8, torch.float32, device)
    refused(op, (x.sum(), x.sum(), None, None), "x", "at least 1 dimension")
    refused(op, (x.long(), residual, None, None), "x must be float64", "int64")
    refused(op, (x, residual[:1], None, None), r"residual must have shape \(5, 8\)", r"\(1, 8\)")
    refused(op, (x, residual.bfloat16(), None, None), "residual must have the dtype of x", "float32", "bfloat16")
    refused(op, (x, residual, weight[:7], bias), r"weight must have shape \(8\)", r"\(7\)")
    refused(op, (x, residual, weight, bias[None]), r"bias must have shape \(8\)", r"\(1, 8\)")
    _, total, mean, rstd = op(x, residual, weight, bias)
    refused(backward, (x[:4], None, total, weight, mean, rstd, [True] * 3), "dout must have shape", r"\(4, 8\)")
    refused(backward, (x, x[:4], total, weight, mean, rstd, [True] * 3), "dsum must have shape", r"\(4, 8\)")
    refused(backward, (x, x, total, weight, mean, rstd.double(), [True] * 3), "rstd must be float32", "float64")


# ---- dropout ---------------------------------------------------------------------------------------------------------


def dropped(x, x_bias, p, seed, offset):
    """What the residual is added to, with the mask that the op shows."""
    x = x if x_bias is None else x + x_bias
    kept = ops.dropout_mask(x.numel(), p, seed, offset).view(x.shape)
    return x * kept / (1 - p) if p < 1 else x * 0


def biased_inputs(rows, width, dtype, device, **options):
    return *inputs(rows, width, dtype, device, **options), randn(width, dtype=dtype, device=device)


@all_dtypes
def test_dropout_has_the_bits_of_the_plain_op(dtype, device):
    """The same numbers give the same mask; what is dropped leaves the residual's bits."""
    x, residual, weight, bias = inputs(50, 768, dtype, device)
    out, total, mean, rstd = ops.residual_layernorm(x, residual, weight, bias, 1e-5, None, 0.4, *numbers(device))
    kept = ops.dropout(torch.ones_like(x), 0.4, *numbers(device)) != 0
    assert torch.equal(total[~kept], residual[~kept])
    for a, b in zip((out, mean, rstd), ops.layernorm(total, weight, bias), strict=True):
        assert torch.equal(a, b)
    # The same formulas in other kernels on CUDA, where the compiler may fuse other products and sums.
    close = partial(torch.testing.assert_close, **tolerance(dtype) if device.type == "cuda" else {"rtol": 0, "atol": 0})
    args = x, residual, total, weight, mean, rstd
    found = ops.residual_layernorm_dropout_backward(*args, 0.4, *numbers(device), [True] * 5)
    plain = ops.residual_layernorm_backward(*args, [True] * 3)
    dx, dresidual = found[0], found[4]
    for a, b in zip((dresidual, *found[1:3]), plain, strict=True):
        close(a, b)
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


def test_dropout_compile(device):
    args = [t.requires_grad_() for t in biased_inputs(5, 33, torch.float32, device)]
    douts = [randn(5, 33, dtype=torch.float32, device=device) for _ in range(2)]

    def function(x, residual, weight, bias, x_bias):
        return G.residual_layer_norm(x, residual, (33,), weight, bias, 1e-5, x_bias, 0.5)

    results = []
    for f in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(1)
        out = f(*args)
        results.append([*out, *torch.autograd.grad(out, args, douts)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_dropout_functional(device):
    x, residual, weight, bias = inputs(5, 33, torch.float32, device)

    def run(seed, **options):
        torch.manual_seed(seed)
        return torch.cat(G.residual_layer_norm(x, residual, (33,), weight, bias, **options))

    plain = run(0)
    assert torch.equal(run(0, dropout_p=0.5, training=False), plain)
    assert not torch.equal(run(0, dropout_p=0.5), plain)
    assert torch.equal(run(0, dropout_p=0.5), run(0, dropout_p=0.5))
    assert not torch.equal(run(0, dropout_p=0.5), run(1, dropout_p=0.5))
    assert torch.equal(run(0, dropout_p=1.0)[5:], residual)
    # Two normalised dimensions draw what one of their product draws.
    torch.manual_seed(0)
    flat = G.residual_layer_norm(x.view(1, -1), residual.view(1, -1), (165,), dropout_p=0.5)[1]
    torch.manual_seed(0)
    assert torch.equal(G.residual_layer_norm(x, residual, (5, 33), dropout_p=0.5)[1].view(1, -1), flat)
    with pytest.raises(ValueError, match=r"residual_layer_norm: dropout_p must be from 0 to 1, got -1\.0"):
        run(0, dropout_p=-1.0)


def test_dropout_under_activation_checkpointing(device):
    args = [t.requires_grad_() for t in inputs(5, 33, torch.float32, device)]

    def function(*args):
        return sum(t.square().sum() for t in G.residual_layer_norm(*args[:2], (33,), *args[2:], dropout_p=0.5))

    torch.manual_seed(1)
    expected = torch.autograd.grad(function(*args), args)
    torch.manual_seed(1)
    loss = checkpoint(function, *args, use_reentrant=False)
    torch.rand(5, device=device)  # what is drawn in between does not matter
    for a, b in zip(torch.autograd.grad(loss, args), expected, strict=True):
        assert torch.equal(a, b)


def test_dropout_stores_no_mask(device):
    args = [t.requires_grad_() for t in inputs(50, 33, torch.float32, device)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        G.residual_layer_norm(*args[:2], (33,), *args[2:], dropout_p=0.5)
    assert sorted(t.numel() for t in saved) == [1, 1, 33, 50, 50, 50 * 33]  # the last is the sum


def test_dropout_under_vmap(device):
    """As torch's: refused without a choice, one mask for all with "same", one for each with "different"."""
    x = torch.ones(3, 5, 33, device=device)

    def function(x):
        return G.residual_layer_norm(x, x * 0, (33,), dropout_p=0.5)[1]

    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(function)(x)
    same = torch.vmap(function, randomness="same")(x)
    assert torch.equal(same[0], same[1])
    different = torch.vmap(function, randomness="different")(x)
    assert not torch.equal(different[0], different[1])
    for dims in ((0, 0), (0, None)):
        gradient = torch.vmap(torch.func.grad(lambda x, y: function(x * y).sum()), dims, randomness="same")
        found = gradient(x, x if dims[1] == 0 else x[0])
        assert torch.equal(found[0], found[1])
        assert set(found.unique().tolist()) == {0.0, 2.0}


def test_dropout_bad_input(device):
    args, (seed, offset) = inputs(5, 8, torch.float32, device), numbers(device)
    refused(ops.residual_layernorm, (*args, 1e-5, None, 1.5, seed, offset), r"dropout_p must be from 0 to 1, got 1\.5")
    refused(ops.residual_layernorm, (*args, 1e-5, None, 0.5), r"seed must be given for dropout_p 0\.5")
    refused(ops.residual_layernorm, (*args, 1e-5, None, 0.5, seed), r"offset must be given for dropout_p 0\.5")
    refused(ops.residual_layernorm, (*args, 1e-5, None, 0.5, seed.float(), offset), "seed must be int64, got float32")
    out, total, mean, rstd = ops.residual_layernorm(*args, 1e-5, None, 0.5, seed, offset)
    with raises("residual_layernorm_dropout_backward", r"offset must have shape \(\), got \(1\)"):
        dropout = 0.5, seed, offset[None]
        ops.residual_layernorm_dropout_backward(out, out, total, args[2], mean, rstd, *dropout, [True] * 5)


# ---- x of 16 bits with a float32 residual ---------------------------------------------------------------------------


dropouts = pytest.mark.parametrize("p", [0.0, 0.2], ids=["no dropout", "dropout"])


def mixed_inputs(rows, width, dtype, device):
    """x has the dtype, all else is float32."""
    x, *others = biased_inputs(rows, width, torch.float32, device)
    return x.to(dtype), *others


def dropout(p, device):
    return (p, *numbers(device)) if p else (0.0, None, None)


@dropouts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_mixed_rounds_the_float32_norm(dtype, p, device):
    x, *rest, x_bias = mixed_inputs(50, 768, dtype, device)
    drop = dropout(p, device)
    out, total, mean, _ = ops.residual_layernorm(x, *rest, 1e-5, x_bias, *drop)
    assert (out.dtype, total.dtype, mean.dtype) == (dtype, torch.float32, torch.float32)
    wide, wide_total, _, _ = ops.residual_layernorm(x.float(), *rest, 1e-5, x_bias, *drop)
    assert torch.equal(total, wide_total)
    torch.testing.assert_close(out, wide.to(dtype))


@dropouts
def test_mixed_second_derivatives(p, device):
    """Those of the float32 op, within the rounding of what has 16 bits."""
    args, drop = mixed_inputs(5, 33, torch.bfloat16, device), dropout(p, device)
    found = []
    for first in (args[0], args[0].float()):
        leaves = [t.detach().requires_grad_() for t in (first, *args[1:])]
        out, total = ops.residual_layernorm(*leaves[:4], 1e-5, leaves[4], *drop)[:2]
        grads = torch.autograd.grad(out.float().square().sum() + total.pow(3).sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.float().square().sum() for g in grads), leaves))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0, atol=0.05 * b.abs().max().item())


def test_mixed_bad_input(device):
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
