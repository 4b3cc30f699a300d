"""Tests of float8: quantization bit by bit, the errors of matmuls relative to float64, modules, and models."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import gptkernels
from gptkernels import functional, nn
from gptkernels.models import GPT2, GPT2Config
from gptkernels.rules.fp8 import ALIGNMENT, CALLS, is_history, new_history
from gptkernels.testing.cases.fp8 import DTYPES, E4M3, E5M2, LARGEST, composed_norm, rounded, values
from gptkernels.testing.checks import hold_to_the_rule
from gptkernels.trainer.config import FP8_ALIGNMENT
from helpers import assert_equal, assert_raises, call_of, low_dtypes, numbers, randn, two_dtypes, with_dtypes

ops = torch.ops.gptkernels
both_formats = pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])
all_dtypes = with_dtypes(*DTYPES)


def bits(t):
    return t.view(torch.uint8)


def expected_scale(amax, fp8):
    """Return the smallest power of two s from 2^-126 to 2^126 with amax / s <= LARGEST[fp8], or 1 if amax is 0."""
    if amax == 0:
        return 1.0
    exponent = math.ceil(math.log2(amax / LARGEST[fp8]))
    exponent += (amax / 2.0**exponent > LARGEST[fp8]) - (amax / 2.0 ** (exponent - 1) <= LARGEST[fp8])
    return 2.0 ** min(max(exponent, -126), 126)


def assert_same_bytes(a, b):
    """Assert that the bytes of float8 numbers are equal, except for the signs of NaN."""
    assert ((a == b) | ((a & 127 == 127) & (b & 127 == 127))).all()


def check_quantized(x, history, fp8, amax):
    q, q_t, scale = ops.fp8_quantize(x, history, fp8, True)
    assert q.dtype == q_t.dtype == fp8
    assert q.shape == x.shape
    assert scale.item() == expected_scale(amax, fp8)
    expected = rounded(x.cpu().double() / scale.item(), fp8)
    assert_same_bytes(bits(q).cpu(), expected)
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    padded = torch.zeros(x.shape[-1], math.ceil(rows / 16) * 16, dtype=torch.uint8)
    padded[:, :rows] = expected.reshape(rows, x.shape[-1]).t()
    assert q_t.shape == padded.shape
    assert_same_bytes(bits(q_t).cpu(), padded)
    assert ops.fp8_quantize(x, None, fp8)[1].numel() == 0


# ---- quantization ----------------------------------------------------------------------------------------------------


@both_formats
def test_every_float8_number_and_every_tie(fp8, device):
    grid = values(fp8)
    grid = grid[grid.isfinite()].unique()
    ties = (grid[1:] + grid[:-1]) / 2
    near = [torch.nextafter(ties.float(), torch.tensor(end)) for end in (torch.inf, -torch.inf)]
    x = torch.cat([grid, ties, *(t.double() for t in near), -torch.zeros(1)])
    for power in (0, -3, 5, -90):
        scaled = (x * 2.0**power).float()
        check_quantized(scaled[None].to(device), None, fp8, scaled.abs().max().item())


@both_formats
@all_dtypes
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 5), (17, 16), (128, 128), (129, 136), (5, 7, 24), (300, 40), (256, 1000), (16,), (1000, 1)]
)
def test_quantized_shapes(shape, dtype, fp8, device):
    x = randn(*shape, dtype=dtype, device=device)
    check_quantized(x, None, fp8, x.abs().max().item())


@both_formats
def test_quantization_of_no_elements(fp8, device):
    for shape in [(0, 16), (16, 0), (0, 0)]:
        history = new_history(device)
        q, q_t, scale = ops.fp8_quantize(torch.empty(shape, device=device), history, fp8, True)
        assert q.shape == shape
        assert q_t.shape == (shape[1], 0 if not shape[0] else 16)
        assert scale.item() == 1
        assert not history.any()


@both_formats
@all_dtypes
def test_quantized_special_values(dtype, fp8, device):
    """NaN and infinities become NaN and do not affect the scale. Zeros keep their sign."""
    x = randn(40, 48, dtype=dtype, device=device)
    amax = x.abs().max().item()
    x[1, 2], x[3, 4], x[5, 6], x[7, 8], x[9, 10] = math.nan, math.inf, -math.inf, 0.0, -0.0
    check_quantized(x, None, fp8, min(amax, x[x.isfinite()].abs().max().item()))
    for value in (0.0, torch.finfo(dtype).smallest_normal / 4, torch.finfo(dtype).max):
        check_quantized(torch.full((3, 16), -value, dtype=dtype, device=device), None, fp8, value)


@both_formats
def test_scale_is_that_of_the_last_16_calls(fp8, device):
    """The largest amax of the 16 calls before a call determines its scale. The first call's own amax determines the
    first call's scale.
    """
    torch.manual_seed(0)
    history = new_history(device)
    sizes = [3.0, 0.5, 1000.0, *(torch.rand(40) * 10).tolist(), 1e-3, 1e6, 7.0]
    seen = []
    for size in sizes:
        x = randn(130, 72, dtype=torch.bfloat16, device=device, scale=size)
        amax = x.abs().max().item()
        check_quantized(x, history, fp8, max(seen[-CALLS:], default=amax))
        seen.append(amax)
        kept = history.view(torch.float32).tolist()
        expected = ([0.0] * CALLS + seen)[-CALLS:]
        assert kept == [*expected, 0.0, 0.0]


def test_history_of_zeros_counts_as_empty(device):
    """After calls with only zeros, such as a gradient of 0, the next call's own amax determines its scale."""
    history = new_history(device)
    ops.fp8_quantize(torch.zeros(5, 16, device=device), history, E5M2)
    check_quantized(torch.full((5, 16), 3e-8, device=device), history, E5M2, torch.tensor(3e-8).item())


def test_large_values_saturate_at_the_history_scale(device):
    history = new_history(device)
    ops.fp8_quantize(torch.ones(5, 16, device=device), history, E4M3)
    q, _, scale = ops.fp8_quantize(torch.full((5, 16), -3e38, device=device), history, E4M3)
    assert (q.float() == -448).all()
    assert scale.item() == 2.0**-8


# ---- layer norms with quantized output -------------------------------------------------------------------------------


def norm_inputs(shape, dtype, device, residual):
    vectors = [randn(shape[-1], dtype=dtype, device=device) for _ in range(3)]
    x, stream = (randn(*shape, dtype=dtype, device=device) for _ in range(2))
    return (x, stream, *vectors) if residual else (x, None, *vectors[:2], None)


def assert_same_outputs(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert_equal(*(bits(t) if t.element_size() == 1 else t for t in (a, b)))


NORM_SHAPES = [(1, 16), (3, 24), (17, 40), (2, 33, 768), (100, 776), (40, 1280), (33, 1600), (20, 2048), (9000, 768)]


@all_dtypes
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
def test_norm_has_the_bits_of_its_parts(shape, residual, dtype, device):
    """In the first loop, the history is empty in the first call, and values saturate in the last call."""
    if device.type == "cpu" and len(shape) == 2 and shape[0] > 1000:
        pytest.skip("takes seconds on a CPU")
    ours, parts = new_history(device), new_history(device)
    for size in (0.1, 1.0, 1.0, 30.0):
        x, stream, weight, bias, x_bias = norm_inputs(shape, dtype, device, residual)
        bias = size * bias
        found = ops.fp8_layernorm(x, stream, weight, bias, ours, True, 1e-5, x_bias)
        assert_same_outputs(found, composed_norm(x, stream, weight, bias, parts, x_bias))
        assert torch.equal(ours, parts)
    x, stream, weight, bias, x_bias = norm_inputs(shape, dtype, device, residual)
    for some in ((weight, None, None), (None, bias, x_bias), (None, None, None)):
        found = ops.fp8_layernorm(x, stream, *some[:2], None, True, 1e-5, some[2])
        assert_same_outputs(found, composed_norm(x, stream, *some[:2], None, some[2]))


def test_norm_without_the_transposed_copy(device):
    x, stream, weight, bias, x_bias = norm_inputs((40, 64), torch.bfloat16, device, True)
    for history in (None, new_history(device)):
        q, q_t, *rest = ops.fp8_layernorm(x, stream, weight, bias, history, False, 1e-5, x_bias)
        expected = ops.fp8_layernorm(x, stream, weight, bias, None, True, 1e-5, x_bias)
        assert q_t.numel() == 0
        assert_same_outputs((q, *rest), (expected[0], *expected[2:]))


def test_norm_with_nan(device):
    x, stream, weight, bias, x_bias = norm_inputs((40, 64), torch.bfloat16, device, True)
    x[3, 5] = math.nan
    ours, parts = new_history(device), new_history(device)
    for _ in range(2):
        found = ops.fp8_layernorm(x, stream, weight, bias, ours, True, 1e-5, x_bias)
        expected = composed_norm(x, stream, weight, bias, parts, x_bias)
        assert found[0].float()[3].isnan().all()
        for a, b in zip(found[:2], expected[:2], strict=True):
            assert_same_bytes(bits(a), bits(b))
        assert_equal([found[2], ours], [expected[2], parts])


def test_norm_of_zeros_has_scale_1(device):
    x, stream, weight, *_ = norm_inputs((3, 64), torch.bfloat16, device, True)
    zero = torch.zeros_like(weight)
    q, q_t, scale, *_ = ops.fp8_layernorm(x, stream, zero, zero, None, True)
    assert not q.float().any()
    assert not q_t.float().any()
    assert scale.item() == 1


@all_dtypes
def test_norm_with_dropout(dtype, device):
    x, stream, weight, bias, x_bias = norm_inputs((40, 64), dtype, device, True)
    dropout = 0.2, *numbers(device, 5, 7)
    found = ops.fp8_layernorm(x, stream, weight, bias, None, True, 1e-5, x_bias, *dropout)
    out, sum, *statistics = ops.residual_layernorm(x, stream, weight, bias, 1e-5, x_bias, *dropout)
    assert_same_outputs(found, (*ops.fp8_quantize(out, None, E4M3, True), sum, *statistics))


# ---- matmuls ---------------------------------------------------------------------------------------------------------


def operand(rows, inner, fp8, device):
    q, _, scale = ops.fp8_quantize(randn(rows, inner, dtype=torch.float32, device=device), None, fp8)
    return q, scale


def sums_error(inner, fast, device):
    """Return a bound on the error of a matmul's sums, relative to the sum of the terms' magnitudes.

    A tensor-core instruction adds 32 terms to a sum with 14 bits of precision. Without fast accumulation, the sum of at
    most four instructions is then added in float32.
    """
    if device.type == "cpu":
        return inner * 2.0**-24
    return max(inner // 32, 1) * 2.0**-13 if fast else 2.0**-11


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("a_format", "b_format"), [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@all_dtypes
def test_matmul(dtype, a_format, b_format, fast, device):
    for rows, columns, inner in [(1, 16, 16), (5, 48, 32), (16, 16, 256), (200, 272, 768), (256, 128, 4096)]:
        (a, scale_a), (b, scale_b) = operand(rows, inner, a_format, device), operand(columns, inner, b_format, device)
        for bias in (None, randn(columns, dtype=dtype, device=device)):
            out = ops.fp8_matmul(a, b, scale_a, scale_b, bias, dtype, fast)
            assert out.dtype == dtype
            wide_a, wide_b = a.double() * scale_a, b.double() * scale_b
            exact = wide_a @ wide_b.T + (0 if bias is None else bias.double())
            magnitude = wide_a.abs() @ wide_b.abs().T
            allowed = sums_error(inner, fast, device) * magnitude
            allowed += torch.finfo(dtype).eps * (exact.abs() + allowed) + 2.0**-24
            assert ((out.double() - exact).abs() <= allowed).all()


@all_dtypes
def test_dweight_in_place(dtype, device):
    """The bits are those of fp8_matmul. An accumulation adds before it rounds."""
    for rows, outer, inner in [(1, 16, 32), (40, 48, 16), (300, 272, 64), (0, 16, 16), (5, 0, 16)]:
        dout, dout_t, dout_scale = ops.fp8_quantize(randn(rows, outer, dtype=dtype, device=device), None, E5M2, True)
        _, x_t, x_scale = ops.fp8_quantize(randn(rows, inner, dtype=dtype, device=device), None, E4M3, True)
        dweight = torch.empty(outer, inner, dtype=dtype, device=device)
        ops.fp8_linear_dweight_(dout, x_t, dout_scale, x_scale, dweight, False)
        assert torch.equal(dweight, ops.fp8_matmul(dout_t, x_t, dout_scale, x_scale, None, dtype))
        before = randn(outer, inner, dtype=torch.float32, device=device)
        found = before.clone()
        ops.fp8_linear_dweight_(dout, x_t, dout_scale, x_scale, found, True)
        wide = ops.fp8_matmul(dout_t, x_t, dout_scale, x_scale, None, torch.float32)
        torch.testing.assert_close(found, before + wide, rtol=1e-6, atol=1e-5)


@all_dtypes
def test_matmul_of_no_elements(dtype, device):
    one = torch.ones((), device=device)
    bias = randn(32, dtype=dtype, device=device)

    def empty(*shape):
        return torch.empty(shape, device=device).to(E4M3)

    assert ops.fp8_matmul(empty(0, 16), empty(32, 16), one, one, bias, dtype).shape == (0, 32)
    assert torch.equal(ops.fp8_matmul(empty(5, 0), empty(32, 0), one, one, bias, dtype), bias.expand(5, 32))
    assert not ops.fp8_matmul(empty(5, 0), empty(32, 0), one, one, None, dtype).any()


def test_matmul_keeps_nan_in_its_row(device):
    x = randn(5, 32, dtype=torch.float32, device=device)
    x[2, 3] = math.inf
    q, _, scale = ops.fp8_quantize(x, None, E4M3)
    w, weight_scale = operand(16, 32, E4M3, device)
    out = ops.fp8_matmul(q, w, scale, weight_scale, None, torch.float32)
    assert out[2].isnan().all()
    assert out[[0, 1, 3, 4]].isfinite().all()


# ---- layers ----------------------------------------------------------------------------------------------------------


def inputs(rows, inner, width, dtype, device):
    return (
        randn(rows, inner, dtype=dtype, device=device),
        randn(width, inner, dtype=dtype, device=device, scale=inner**-0.5),
        randn(width, dtype=dtype, device=device),
    )


@all_dtypes
@pytest.mark.parametrize(("rows", "inner", "width"), [(1, 16, 32), (40, 64, 48), (100, 256, 272), (1000, 48, 80)])
def test_linear_and_gradients(rows, inner, width, dtype, device):
    choices = {"x.rows": rows, "inner / 16": inner // 16, "outer / 16": width // 16}
    hold_to_the_rule(call_of("fp8_linear", dtype, device, **choices))


def composed_mlp(x, fc, fc_bias, proj, proj_bias, history=None, hidden=None, dhidden=None, dout=None):
    pre = functional.fp8_linear(x, fc, fc_bias, history, dhidden)
    return functional.fp8_linear(functional.gelu(pre, approximate="tanh"), proj, proj_bias, hidden, dout)


def with_gradients(function, args, dout, *histories):
    leaves = [t if t is None else t.clone().requires_grad_() for t in args]
    out = function(*leaves, *histories)
    out.backward(dout)
    return [out, *(t.grad for t in leaves if t is not None)]


@all_dtypes
@pytest.mark.parametrize("bias", [True, False])
def test_mlp_has_the_bits_of_its_parts(bias, dtype, device):
    x, fc, fc_bias = inputs(75, 32, 128, dtype, device)
    proj, proj_bias = inputs(1, 128, 48, dtype, device)[1:]
    args = [x.view(3, 25, 32), fc, fc_bias if bias else None, proj, proj_bias if bias else None]
    dout = randn(3, 25, 48, dtype=dtype, device=device)
    assert_equal(*(with_gradients(function, args, dout) for function in (functional.fp8_mlp, composed_mlp)))


SHAPES = [
    (1, 16, 32), (16, 16, 32), (48, 48, 96), (208, 256, 1056), (1040, 768, 288), (2000, 1280, 320), (9008, 768, 3072),
]  # fmt: skip


@low_dtypes
@pytest.mark.parametrize(("rows", "inner", "hidden"), SHAPES)
def test_matmul_and_gelu_in_one_kernel(rows, inner, hidden, dtype, device, monkeypatch):
    """The results of ``fp8_mlp`` are bitwise identical to those of ``composed_mlp``, except dfc_bias.

    The operands of the two matmuls that are fused with GELU are small whole numbers times a power of two, so sums of
    their products are exact in any order. The histories are empty in the first call, and values saturate in the third.
    """
    if device.type == "cpu" and rows > 1040:
        pytest.skip("takes seconds on a CPU")
    monkeypatch.setenv("GPTKERNELS_MATMUL", "own")

    def whole(*shape, share):
        some = torch.rand(shape, device=device) < share
        return torch.randint(-1, 2, shape, device=device).to(dtype) * some

    fc, proj = whole(hidden, inner, share=1.0) / 16, whole(inner, hidden, share=0.2) / 8
    biases = [randn(n, dtype=dtype, device=device) for n in (hidden, inner)]
    histories = [[new_history(device) for _ in range(4)] for _ in range(2)]
    for size in (1.0, 0.5, 16.0, 1.0):
        x, dout = whole(rows, inner, share=0.5) * size, whole(rows, inner, share=0.5) * size / 1024
        args = x, fc, biases[0], proj, biases[1]
        found, expected = (
            with_gradients(function, args, dout, *scales)
            for function, scales in zip((functional.fp8_mlp, composed_mlp), histories, strict=True)
        )
        torch.testing.assert_close(found.pop(3), expected.pop(3))  # dfc_bias is summed in another order
        assert_equal(found, expected)
        assert_equal(*histories)


def test_linear_saves_float8_tensors(device):
    kept = []
    x, weight, bias = (t.requires_grad_() for t in inputs(64, 32, 64, torch.bfloat16, device))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        functional.fp8_linear(x, weight, bias)
    assert {t.dtype for t in kept if t.dim()} == {E4M3}
    assert sum(t.nbytes for t in kept if t.dim()) == x.numel() + weight.numel()


def test_bad_input(device):
    assert FP8_ALIGNMENT == ALIGNMENT
    x, weight, bias = inputs(5, 32, 48, torch.float32, device)
    one = torch.ones((), device=device)
    q, w = x.to(E4M3), weight.to(E4M3)
    shifted = q.flatten()[1:33].view(1, 32)
    back, few = weight.t().contiguous(), new_history(device)[:4]
    dout, x_t, zeros = x.to(E5M2), x.new_zeros(48, 16).to(E4M3), x.new_zeros(32, 48)

    def dweight(dout=dout, x_t=x_t, out=zeros):
        ops.fp8_linear_dweight_(dout, x_t, one, one, out, True)

    for call, message in [
        (lambda: ops.fp8_quantize(x.double(), None, E4M3), "x must be float32, bfloat16 or float16, got float64"),
        (lambda: ops.fp8_quantize(x, None, torch.float16), "dtype must be float8_e4m3fn or float8_e5m2, got float16"),
        (lambda: ops.fp8_quantize(x, bias, E4M3), "history must be int32"),
        (lambda: ops.fp8_quantize(x, new_history(device)[:4], E4M3), r"history must have shape \(18\)"),
        (lambda: ops.fp8_layernorm(x.double(), None, None, None, None), "x must be float32, bfloat16 or float16"),
        (lambda: ops.fp8_layernorm(x, None, bias, None, None), r"weight must have shape \(32\)"),
        (lambda: ops.fp8_layernorm(x, x, None, None, few), r"history must have shape \(18\)"),
        (lambda: ops.fp8_layernorm(x, None, None, None, None, x_bias=x[0]), "x_bias and dropout_p are of an addition"),
        (lambda: ops.fp8_matmul(x, w, one, one, None, torch.float32), "a must be float8"),
        (lambda: ops.fp8_matmul(q, w[:40], one, one, None, torch.float32), "multiple of 16 .*got 40"),
        (lambda: ops.fp8_matmul(q[:, :8], w[:, :8], one, one, None, torch.float32), "multiple of 16 .*got 8"),
        (lambda: ops.fp8_matmul(shifted, w, one, one, None, torch.float32), "multiple of 16 bytes"),
        (lambda: ops.fp8_matmul(q, w, bias, one, None, torch.float32), r"scale_a must have shape \(\)"),
        (lambda: ops.fp8_matmul(q, w, one, one, None, torch.float64), "dtype must be float32, bfloat16 or float16"),
        (lambda: ops.fp8_matmul(x.to(E5M2), weight.to(E5M2), one, one, None, torch.float32), "one of a and b"),
        (lambda: dweight(q), "dout must be float8_e5m2, got float8_e4m3fn"),
        (lambda: dweight(dout[:, :8]), "last dimension of dout must be a multiple of 16 .*got 8"),
        (lambda: dweight(x_t=x_t[:, :8]), r"x_t must have shape \(48, 16\), got \(48, 8\)"),
        (lambda: dweight(x_t=x_t.to(E5M2)), "x_t must be float8_e4m3fn, got float8_e5m2"),
        (lambda: dweight(out=zeros[:, :32]), r"dweight must have shape \(32, 48\), got \(32, 32\)"),
        (lambda: dweight(out=zeros.view(48, 32).t()), "dweight must be contiguous"),
        (lambda: dweight(out=zeros.half()), "dweight must be float32, got float16"),
        (lambda: functional.fp8_linear(x, weight[:40]), "out_features of weight must be a multiple of 16 .*got 40"),
        (lambda: functional.fp8_linear(x[:, :24], weight[:, :24]), "in_features of weight .*got 24"),
        (lambda: functional.fp8_linear(x, weight, bias[:3]), r"bias must have shape \(48\)"),
        (lambda: functional.fp8_linear(x, weight, bias, None, few), r"dout_history must have shape \(18\)"),
        (lambda: functional.fp8_mlp(x, weight, bias, back, *[None] * 3, few), "dhidden_history must have shape"),
        (lambda: functional.fp8_mlp(x, weight, bias, back, *[None] * 4, few), "dout_history must have shape"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call()
    if device.type != "cpu":  # otherwise a history on CUDA would make torch run the backward on CUDA
        with pytest.raises(RuntimeError, match="dout_history is on cuda:0 but x is on cpu"):
            functional.fp8_linear(x.cpu(), weight.cpu(), None, None, new_history(device))
    assert_raises(ValueError, "in_features must be a multiple of 16 for fp8, got 40", nn.Linear, 40, 32, fp8=True)
    options = {"n_embd": 24, "n_head": 2, "fp8": True}
    assert_raises(ValueError, "n_embd must be a multiple of 16 for fp8, got 24", GPT2Config, **options)


# ---- modules and training --------------------------------------------------------------------------------------------

SMALL = {"block_size": 32, "vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 64}


def small_model(device, dtype=torch.float32, **options):
    torch.manual_seed(3)
    return GPT2(GPT2Config(**SMALL, **options)).to(device, dtype)


def batches(count, device, size=8):
    """Yield learnable batches: a token follows from the previous one with probability 0.8, and is random otherwise."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        tokens = torch.randint(64, (size, 33), generator=generator)
        for i in range(1, 33):
            follows = (5 * tokens[:, i - 1] + 7) % 64
            tokens[:, i] = torch.where(torch.rand(size, generator=generator) < 0.8, follows, tokens[:, i])
        yield tokens[:, :-1].to(device), tokens[:, 1:].to(device)


def train(model, steps, device):
    master_weights = model.lm_head.weight.dtype != torch.float32
    optimizer = gptkernels.optim.AdamW(model.parameters(), lr=3e-3, master_weights=master_weights)
    losses = []
    for tokens, targets in batches(steps, device):
        loss = model(tokens, targets, return_logits=False)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_linear_module(device):
    layer = nn.Linear(32, 48, fp8=True, device=device)
    assert repr(layer) == "Linear(in_features=32, out_features=48, bias=True, fp8=True)"
    x = randn(5, 32, dtype=torch.float32, device=device, requires_grad=True)
    out = layer(x)
    assert torch.equal(out, functional.fp8_linear(x, layer.weight, layer.bias))
    out.sum().backward()
    assert layer.fp8_history[CALLS - 1].view(torch.float32).item() == x.abs().max().item()
    assert layer.fp8_dout_history[CALLS - 1].view(torch.float32).item() == 1.0
    before = copy.deepcopy(layer.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    layer.eval()
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in before.items())
    assert layer.bfloat16().fp8_history.dtype == torch.int32


def test_small_models_learn_as_in_bfloat16(device):
    heads = {"fp8_head": True}, {"fp8_head": True, "fp8_logits": True}
    options = {}, {"fp8": True}, *({"fp8": True, **head} for head in heads)
    losses = [train(small_model(device, torch.bfloat16, **some), 100, device) for some in options]
    plain, *others = (sum(of[-10:]) / 10 for of in losses)
    assert plain < 0.6 * losses[0][0]
    for some, eight in zip(losses[1:], others, strict=True):
        assert abs(eight - plain) < 0.01 * plain
        assert some != losses[0]


def test_state_dict_carries_the_scales(device):
    model = small_model(device, fp8=True)
    train(model, 3, device)
    state = copy.deepcopy(model.state_dict())
    histories = [name for name in state if name.endswith("history")]
    assert len(histories) == 2 * 4 * SMALL["n_layer"]
    assert all(state[name].count_nonzero() == 3 for name in histories)
    other = small_model(device, fp8=True)
    other.load_state_dict(state)
    tokens, targets = next(batches(1, device))
    for m in (model, other):
        m.zero_grad()
        m(tokens, targets, return_logits=False)[1].backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    # A model without float8 ignores the histories in a state. A float8 model clears its histories if a state has none.
    plain = small_model(device)
    plain.load_state_dict(state)
    other.load_state_dict(plain.state_dict())
    assert not any(other.state_dict()[name].any() for name in histories)


def test_history_of_a_file_is_checked(device):
    history = new_history(device)
    ops.fp8_quantize(torch.ones(5, 16, device=device), history, E4M3)
    assert is_history(history)
    for i, value in ((0, -1), (3, 0x7F800000), (CALLS, 1), (CALLS + 1, 1)):
        damaged = history.clone()
        damaged[i] = value
        assert not is_history(damaged)
    assert not is_history(history[1:])
    assert not is_history(history.float())


@pytest.mark.parametrize("options", [{"fp8": True}, {"fp8_head": True}], ids=str)
def test_files_keep_the_parameters_alone(options, device, tmp_path):
    model = small_model(device, **options)
    train(model, 2, device)
    for name in ("model.safetensors", "model.bin"):
        model.save_checkpoint(tmp_path / name)
        read = GPT2.from_checkpoint(tmp_path / name)
        for a, b in zip(model.parameters(), read.parameters(), strict=True):
            assert torch.equal(a.cpu()[: SMALL["vocab_size"]], b[: SMALL["vocab_size"]])


@two_dtypes
@pytest.mark.parametrize("options", [{}, {"dropout": 0.1}, {"activation": "gelu"}], ids=["node", "dropout", "parts"])
def test_recomputed_layers_have_the_scales_of_the_first_time(options, dtype, device):
    states = []
    for recompute in (False, True):
        model = small_model(device, dtype, fp8=True, **options)
        model.transformer.recompute_blocks = recompute
        torch.manual_seed(4)
        states.append(diverging(model, device))
    assert_equal(*(state.values() for state in states))


def diverging(model, device):
    """Train with a learning rate so large that the scales change from call to call, and return the state dict.

    Each training step calls the forward twice, and then the backward of the sum of both losses twice.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for tokens, targets in batches(4, device):
        loss = sum(model(tokens[half], targets[half], return_logits=False)[1] for half in (slice(4), slice(4, 8)))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_two_calls_before_a_backward(device):
    layer = nn.Linear(32, 32, fp8=True, device=device)
    x = randn(16, 32, dtype=torch.float32, device=device, requires_grad=True)
    (layer(x) + layer(2 * x)).sum().backward()
    assert x.grad.isfinite().all()
    assert layer.fp8_history.count_nonzero() == layer.fp8_dout_history.count_nonzero() == 2


def test_linear_module_under_autocast(device):
    layer = nn.Linear(32, 48, fp8=True, device=device)
    x = randn(5, 32, dtype=torch.float32, device=device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    weight = layer.weight.detach().bfloat16()
    assert torch.equal(out, functional.fp8_linear(x.detach().bfloat16(), weight, layer.bias.detach().bfloat16()))


def test_compiled_model_updates_the_histories(device):
    eager, compiled = small_model(device, fp8=True), small_model(device, fp8=True)
    call = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for tokens, targets in batches(3, device):
        losses = []
        for model, function in ((eager, eager), (compiled, call)):
            model.zero_grad()
            loss = function(tokens, targets, return_logits=False)[1]
            loss.backward()
            losses.append(loss)
        torch.testing.assert_close(*losses)
        for (name, a), (_, b) in zip(eager.named_buffers(), compiled.named_buffers(), strict=True):
            assert torch.equal(a, b), name
        for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def test_linear_has_no_second_and_no_forward_derivative(device):
    x, weight, _ = inputs(5, 32, 48, torch.float32, device)
    x.requires_grad_()
    out = functional.fp8_linear(x, weight)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: functional.fp8_linear(x, weight), (x.detach(),), (x.detach(),))


@pytest.mark.parametrize("options", [{"fp8": True}, {"fp8": True, "fp8_head": True}], ids=str)
def test_graphed_steps_are_eager_steps(options, device, on_cuda):
    runs = []
    for capture in (False, True):
        model = small_model(device, torch.bfloat16, **options)
        optimizer = gptkernels.optim.AdamW(model.parameters(), lr=3e-3, master_weights=True)
        step = gptkernels.graphed_step(
            lambda tokens, targets, model=model: model(tokens, targets, return_logits=False)[1],
            optimizer,
            capture=capture,
        )
        losses = [step(batch).loss.item() for batch in batches(20, device)]
        runs.append((losses, [t.detach().clone() for t in (*model.parameters(), *model.buffers())]))
    assert runs[0][0] == runs[1][0]
    assert_equal(runs[0][1], runs[1][1])
