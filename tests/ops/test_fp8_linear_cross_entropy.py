"""Tests that fp8_linear_cross_entropy has linear_cross_entropy's loss, and gradients near float64's."""

import math

import pytest
import torch
import torch.nn.functional as F
from test_fp8 import SMALL, batches, small_model

from gptkernels import functional
from gptkernels.models import GPT2Config
from gptkernels.rules.fused_classifier_statistics import FP8_DLOGIT
from gptkernels.testing.cases.fp8 import DTYPES, E4M3, E5M2, rounded
from helpers import assert_equal, raises, with_dtypes

ops = torch.ops.gptkernels
IGNORED = -1
every_dtype = with_dtypes(*DTYPES)
both_reductions = pytest.mark.parametrize("reduction", ["mean", "sum"])


def problem(rows, inner, width, vocab_size, dtype, device):
    """Return x (N, C), weight (Vp, C) and targets (N), of which some are ignored.

    The elements of x are -1, 0 and 1, and the weight's are whole numbers divided by 8, so that the logits are exact in
    16 bits.
    """
    x = torch.randint(-1, 2, (rows, inner)).to(dtype) * (torch.rand(rows, inner) < 8 / inner)
    weight = torch.randint(-8, 9, (width, inner)).to(dtype) / 8
    targets = torch.randint(vocab_size, (rows,))
    targets[2::5] = IGNORED
    return x.to(device), weight.to(device), targets.to(device)


def gradients(function, x, weight, targets, dloss=1.0, **options):
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight)]
    loss = function(*leaves, targets, **options)
    return loss.detach(), *torch.autograd.grad(loss, leaves, torch.full_like(loss, dloss))


def dlogits_of(x, weight, targets, vocab_size):
    logits = (x.double() @ weight.double().T)[:, :vocab_size]
    kept = targets != IGNORED
    found = logits.softmax(-1) - F.one_hot(targets.where(kept, 0), vocab_size)
    return F.pad(found * kept[:, None], (0, len(weight) - vocab_size))


def dequantized(x):
    q, _, scale = ops.fp8_quantize(x, None, E4M3)
    return q.double() * scale


def round_dlogits(dlogits):
    """Return dlogits rounded to E5M2, and by how much each rounded number may change if dlogits has a relative error of
    up to 2^-18, which a computation in float32 may have.
    """

    def read(d):
        return rounded(d.cpu() / FP8_DLOGIT, E5M2).view(E5M2).double().to(d.device) * FP8_DLOGIT

    most = 2.0**-18
    return read(dlogits), (read(dlogits * (1 + most)) - read(dlogits * (1 - most))).abs()


def sums_errors(a, b, device):
    """Return bounds on the errors of the sums in a @ b^T.

    A tensor core truncates each term 13 bits below the largest term of an instruction. In a row of ``a``, one element
    is near -1 and the others are small, so the bound depends on the largest term, not on the sum of the magnitudes.
    """
    if device.type == "cpu":
        return a.shape[1] * 2.0**-24 * a.abs() @ b.abs().T
    return a.shape[1] * 2.0**-13 * a.abs().amax(1)[:, None] * b.abs().amax(1)


def assert_gradients(dx, dweight, x, weight, targets, vocab_size, factor, shards=1):
    """Compare with the gradients of the rounded tensors. dx may be a sum of a rounded part for each shard."""
    d, d_error = round_dlogits(dlogits_of(x, weight, targets, vocab_size))
    for found, a, a_error, b, parts in (
        (dx, d, d_error, dequantized(weight.T.contiguous()), shards),
        (dweight, d.T, d_error.T, dequantized(x.T.contiguous()), 1),
    ):
        pairs = zip(a.chunk(parts, 1), b.chunk(parts, 1), strict=True)
        products = factor * torch.stack([some @ others.T for some, others in pairs])
        exact = products.sum(0)
        allowed = factor * a_error @ b.abs().T + factor * sums_errors(a, b, x.device)
        allowed = allowed + torch.finfo(x.dtype).eps * (products.abs().sum(0) + allowed) + 2.0**-24
        error = (found.double() - exact).abs()
        assert found.dtype == x.dtype
        assert (error <= allowed).all()
        assert error.norm() <= (2.0**-10 + torch.finfo(x.dtype).eps) * products.norm() + 2.0**-24


SHAPES = [  # N, C, Vp, V, chunk_size
    (1, 16, 16, 16, None), (5, 32, 64, 50, None), (48, 32, 64, 64, 16), (70, 48, 112, 100, 17),
    (300, 64, 1040, 1000, 128), (257, 768, 512, 500, 64), (33, 32, 4112, 4100, None),
]  # fmt: skip


@every_dtype
@both_reductions
@pytest.mark.parametrize(("rows", "inner", "width", "vocab_size", "chunk_size"), SHAPES)
def test_loss_and_gradients(rows, inner, width, vocab_size, chunk_size, reduction, dtype, device):
    x, weight, targets = problem(rows, inner, width, vocab_size, dtype, device)
    options = {"vocab_size": vocab_size, "ignore_index": IGNORED, "reduction": reduction, "chunk_size": chunk_size}
    loss, dx, dweight = gradients(functional.fp8_linear_cross_entropy, x, weight, targets, **options)
    plain, plain_dx, plain_dweight = gradients(functional.linear_cross_entropy, x, weight, targets, **options)
    # If a chunk is no multiple of 16 rows, the two functions may use different matmul algorithms for the logits.
    aligned = chunk_size is None or chunk_size % 16 == 0
    torch.testing.assert_close(loss, plain, rtol=0 if aligned else 1e-6, atol=0)
    factor = 1.0 if reduction == "sum" else 1.0 / (targets != IGNORED).sum().item()
    assert_gradients(dx, dweight, x, weight, targets, vocab_size, factor)
    for found, plain_found in ((dx, plain_dx), (dweight, plain_dweight)):
        assert (found - plain_found).abs().max() <= 0.2 * plain_found.abs().max()


@every_dtype
@both_reductions
@pytest.mark.parametrize(("rows", "inner", "width", "vocab_size", "chunk_size"), SHAPES)
def test_float8_logits(rows, inner, width, vocab_size, chunk_size, reduction, dtype, device):
    """x and weight are rounded to float8 for the logits, except in a call that needs no gradients."""
    x, _, targets = problem(rows, inner, width, vocab_size, dtype, device)
    weight = (torch.randint(-40, 41, (width, inner)).to(dtype) / 8).to(device)  # exact sums in float32
    options = {"vocab_size": vocab_size, "ignore_index": IGNORED, "reduction": reduction, "chunk_size": chunk_size}
    function = functional.fp8_linear_cross_entropy
    found = gradients(function, x, weight, targets, fp8_logits=True, **options)
    near = [dequantized(t).to(dtype) for t in (x, weight)]
    assert not torch.equal(near[1], weight)
    assert_equal(found, gradients(function, *near, targets, **options))
    plain = functional.linear_cross_entropy(x, weight, targets, **options)
    assert torch.equal(function(x, weight, targets, fp8_logits=True, **options), plain)


@every_dtype
def test_gradients_of_logits_are_rounded_once(dtype, device):
    """x and weight are the identity times 4, so dx and dweight are 4 times the logits' gradients rounded to E5M2."""
    eye = 4 * torch.eye(32, dtype=dtype, device=device)
    targets = torch.arange(32, device=device).flip(0)
    targets[7] = IGNORED
    options = {"reduction": "sum", "ignore_index": IGNORED}
    _, dx, dweight = gradients(functional.fp8_linear_cross_entropy, eye, eye, targets, **options)
    d, _ = round_dlogits(dlogits_of(eye, eye, targets, 32))
    assert torch.equal(dx.double(), 4 * d)
    assert torch.equal(dweight.double(), 4 * d.T)


@both_reductions
@every_dtype
def test_ignored_rows_and_padded_columns(dtype, reduction, device):
    x, weight, targets = problem(40, 32, 64, 50, dtype, device)
    options = {"vocab_size": 50, "ignore_index": IGNORED, "reduction": reduction, "chunk_size": 16}
    _, dx, dweight = gradients(functional.fp8_linear_cross_entropy, x, weight, targets, **options)
    assert not dx[targets == IGNORED].any()
    assert dx[targets != IGNORED].any(1).all()
    assert not dweight[50:].any()
    none = torch.full_like(targets, IGNORED, dtype=torch.int32)
    loss, dx, dweight = gradients(functional.fp8_linear_cross_entropy, x, weight, none, **options)
    assert loss.isnan() if reduction == "mean" else loss == 0
    assert not dx.any()
    assert not dweight.any()


@both_reductions
@every_dtype
def test_no_rows(dtype, reduction, device):
    x, weight, targets = problem(0, 32, 64, 50, dtype, device)
    loss, dx, dweight = gradients(functional.fp8_linear_cross_entropy, x, weight, targets, reduction=reduction)
    assert loss.isnan() if reduction == "mean" else loss == 0
    assert dx.shape == x.shape
    assert dweight.shape == weight.shape
    assert not dweight.any()


@every_dtype
def test_nan_and_infinity_stay_in_their_row(dtype, device):
    """NaN and infinity do not affect the scales, so that the gradients of x's other rows are unchanged."""
    x, weight, targets = problem(40, 32, 64, 50, dtype, device)
    targets[3] = 7
    options = {"vocab_size": 50, "ignore_index": IGNORED, "chunk_size": 16}
    _, plain_dx, _ = gradients(functional.fp8_linear_cross_entropy, x, weight, targets, **options)
    for bad in (math.nan, math.inf):
        x[3, 5] = bad
        loss, dx, dweight = gradients(functional.fp8_linear_cross_entropy, x, weight, targets, **options)
        assert loss.isnan()
        assert dx[3].isnan().all()
        others = torch.arange(40, device=device) != 3
        assert torch.equal(dx[others], plain_dx[others])
        assert dweight[:50].isnan().all()


def test_float16_gradients_do_not_underflow(device):
    """The gradients are multiplied by dloss before they are rounded to float16, where they would underflow."""
    x, weight, targets = (
        t.half() if t.is_floating_point() else t for t in problem(2000, 32, 1008, 1000, torch.float32, device)
    )
    options = {"vocab_size": 1000, "ignore_index": IGNORED}
    small = gradients(functional.fp8_linear_cross_entropy, x, weight, targets, **options)
    large = gradients(functional.fp8_linear_cross_entropy, x, weight, targets, **options, dloss=2.0**16)
    for unscaled, found in zip(small[1:], large[1:], strict=True):
        scaled = found.float() / 2.0**16
        torch.testing.assert_close(scaled, unscaled.float(), rtol=0, atol=2.0**-24)  # float16's smallest denormal
        assert (scaled != unscaled).any()


@every_dtype
def test_only_wanted_gradients_are_computed(dtype, device):
    x, weight, targets = problem(40, 32, 64, 50, dtype, device)
    options = 50, IGNORED, "mean", 16, False
    every = ops.fp8_linear_cross_entropy_with_gradients(x, weight, targets, *options, [True, True])
    for mask in ([True, False], [False, True], [False, False]):
        loss, *found = ops.fp8_linear_cross_entropy_with_gradients(x, weight, targets, *options, mask)
        assert torch.equal(loss, every[0])
        for gradient, expected, wanted in zip(found, every[1:], mask, strict=True):
            assert torch.equal(gradient, expected) if wanted else gradient.numel() == 0
    for wanted in (0, 1):
        leaves = [t.clone().requires_grad_(i == wanted) for i, t in enumerate((x, weight))]
        loss = functional.fp8_linear_cross_entropy(*leaves, targets, vocab_size=50, ignore_index=IGNORED, chunk_size=16)
        loss.backward()
        assert torch.equal(leaves[wanted].grad, every[1 + wanted].to(dtype))
        assert leaves[1 - wanted].grad is None


def test_no_second_and_no_forward_derivative(device):
    x, weight, targets = problem(5, 32, 48, 48, torch.float32, device)
    targets = targets.clamp(0)
    x.requires_grad_()
    loss = functional.fp8_linear_cross_entropy(x, weight, targets)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: functional.fp8_linear_cross_entropy(x, weight, targets), (x.detach(),), (x.detach(),))
    with pytest.raises(RuntimeError, match="fp8_linear_cross_entropy_with_gradients has no derivative"):
        ops.fp8_linear_cross_entropy_with_gradients(x, weight, targets, -1, -100, "mean", -1, False, [True, True])


def test_bad_input(device):
    x, weight, targets = problem(5, 32, 48, 48, torch.float32, device)
    call = functional.fp8_linear_cross_entropy
    few, wide = {"x": x[:, :24], "weight": weight[:, :24]}, {"x": x.double(), "weight": weight.double()}
    for error, change, message in [
        (ValueError, {"reduction": "none"}, "fp8_linear_cross_entropy: reduction must be 'mean' or 'sum', got 'none'"),
        (ValueError, {"chunk_size": 0}, "fp8_linear_cross_entropy: chunk_size must be at least 1, got 0"),
        (ValueError, {"targets": targets[:3]}, r"fp8_linear_cross_entropy: targets must have shape \(5,\)"),
        (ValueError, {"weight": weight[:, :16]}, r"fp8_linear_cross_entropy: weight must have shape \(Vp, C\)"),
        (RuntimeError, {"weight": weight[:40]}, "the first dimension of weight must be a multiple of 16 .*got 40"),
        (RuntimeError, few, "the last dimension of x must be a multiple of 16 .*got 24"),
        (RuntimeError, {"vocab_size": 49}, "vocab_size must be from 1 to 48"),
        (RuntimeError, {"weight": weight.bfloat16()}, "weight must have the dtype of x"),
        (RuntimeError, wide, "x must be float32, bfloat16 or float16, got float64"),
    ]:
        with pytest.raises(error, match=message):
            call(**({"x": x, "weight": weight, "targets": targets} | change))
    with raises("fp8_linear_cross_entropy_with_gradients: reduction must be 'mean' or 'sum', got 'none'"):
        ops.fp8_linear_cross_entropy_with_gradients(x, weight, targets, -1, -100, "none", -1, False, [True, True])
    for sizes, message in (
        ({"n_embd": 24}, "n_embd must be a multiple of 16 for fp8_head, got 24"),
        ({"padded_vocab_size": 72}, "padded_vocab_size must be a multiple of 16 for fp8_head, got 72"),
    ):
        with pytest.raises(ValueError, match=message):
            GPT2Config(**SMALL | sizes, fp8_head=True)
    with pytest.raises(ValueError, match="fp8_logits needs fp8_head"):
        GPT2Config(**SMALL, fp8_logits=True)


# ---- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [False, True])
@every_dtype
def test_model_in_training(fp8, dtype, device):
    models = [small_model(device, dtype, fp8=fp8, fp8_head=head) for head in (False, True)]
    (tokens, targets), (others, _) = batches(2, device)
    targets = targets.clone()
    targets[0, :5] = IGNORED
    for model in models:
        model(others, targets, return_logits=False, ignore_index=IGNORED)[
            1
        ].backward()  # so that the amax histories of float8 layers are not empty
        model.zero_grad()
    losses = [m(tokens, targets, return_logits=False, ignore_index=IGNORED)[1] for m in models]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for (name, a), (_, b) in zip(*(m.named_parameters() for m in models), strict=True):
        a, b = a.grad.double(), b.grad.double()
        assert not torch.equal(a, b), name
        if not fp8 or name == "transformer.wte.weight":  # float8 layers round the gradients again
            assert (a - b).norm() < 0.1 * a.norm(), name


@every_dtype
def test_fp8_head_has_no_effect_outside_training(dtype, device):
    models = [small_model(device, dtype, fp8_head=head) for head in (False, True)]
    tokens, targets = next(batches(1, device))
    with torch.no_grad():
        assert_equal(*(m(tokens, targets, return_logits=False)[1] for m in models))
    for training, return_logits in ((True, True), (False, True), (False, False)):
        for model in models:
            model.train(training).zero_grad()
            model(tokens, targets, return_logits=return_logits)[1].backward()
        assert_equal(*([p.grad for p in m.parameters()] for m in models))
    assert models[0].state_dict().keys() == models[1].state_dict().keys()


def test_tied_weights(device):
    tied, apart = (small_model(device, fp8_head=True) for _ in range(2))
    # A module with a hook is called separately.
    apart.transformer.wte.register_forward_hook(lambda *_: None)
    tokens, targets = next(batches(1, device))
    for model in (tied, apart):
        model(tokens, targets, return_logits=False)[1].backward()
    torch.testing.assert_close(tied.lm_head.weight.grad, apart.lm_head.weight.grad)


def test_model_with_float8_logits(device):
    models = [small_model(device, fp8_head=True, fp8_logits=logits) for logits in (False, True)]
    batch = next(batches(1, device))
    plain, eight = (m(*batch, return_logits=False)[1] for m in models)
    assert plain != eight
    torch.testing.assert_close(plain, eight, rtol=0.01, atol=0)
    assert torch.equal(*(m.eval()(*batch, return_logits=False)[1] for m in models))
