import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import gptkernels  # noqa: F401
from helpers import (
    all_dtypes,
    all_rows,
    all_views,
    all_widths,
    as_view,
    assert_as_exact_with_gradients,
    assert_same_bits,
    double,
    gradients,
    raises,
    randn,
    tolerance,
)

ops = torch.ops.gptkernels

all_index_dtypes = pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])


def torchs(tokens, wte, wpe):
    return F.embedding(tokens, wte) + wpe[: tokens.shape[-1]]


def inputs(batch, length, width, dtype, device, vocabulary=13, positions=None, index=torch.int64):
    positions = length + 2 if positions is None else positions
    return (
        torch.randint(vocabulary, (batch, length), dtype=index).to(device),
        randn(vocabulary, width, dtype=dtype, device=device),
        randn(positions, width, dtype=dtype, device=device),
    )


def check(tokens, wte, wpe, dout):
    """Forward and both gradients against float64 and beside torch, with positions and without."""
    functions = (partial(f, tokens) for f in (ops.encoder, torchs, torchs))
    dwte, _ = assert_as_exact_with_gradients(*functions, (wte, wpe), dout, ("dwte", "dwpe"))
    torch.testing.assert_close(ops.embedding(tokens, wte), F.embedding(tokens, wte), rtol=0, atol=0, equal_nan=True)
    (dweight,) = gradients(lambda weight: ops.embedding(tokens, weight), (wte,), dout)
    torch.testing.assert_close(dweight, dwte, rtol=0, atol=0, equal_nan=True)


@all_dtypes
@all_widths
@all_rows
def test_matches_float64(rows, width, dtype, device):
    check(*inputs(rows, 3, width, dtype, device), randn(rows, 3, width, dtype=dtype, device=device))


@all_index_dtypes
@pytest.mark.parametrize("shape", [(64, 1), (1, 1000), (40, 100), (3000, 2)], ids=str)
@all_dtypes
def test_many_tokens(shape, index, dtype, device):
    check(*inputs(*shape, 24, dtype, device, index=index), randn(*shape, 24, dtype=dtype, device=device))


@pytest.mark.parametrize("common", [0, 7, 999])
@all_dtypes
def test_one_token_almost_everywhere(common, dtype, device):
    tokens, wte, wpe = inputs(30, 50, 40, dtype, device, vocabulary=1000)
    tokens = torch.where(torch.rand(30, 50).to(device) < 0.9, common, tokens)
    check(tokens, wte, wpe, randn(30, 50, 40, dtype=dtype, device=device))
    check(torch.full_like(tokens, common), wte, wpe, randn(30, 50, 40, dtype=dtype, device=device))


@pytest.mark.parametrize("count", [1, 31, 32, 33, 63, 64, 65, 97, 129, 300])
def test_where_the_runs_of_a_token_begin_and_end(count, device):
    """The CUDA backward cuts the ordered tokens in units of 32 and 64: every way that runs can lie across them."""
    dout = torch.randint(-8, 8, (1, 400, 8)).float().to(device)  # sums of small integers are exact
    for before in (0, 1, 31, 32, 40, 66):
        tokens = torch.cat([torch.full((before,), 2), torch.full((count,), 5), torch.arange(6, 406)])[:400]
        tokens = tokens[torch.randperm(400)].to(device)
        dweight = ops.embedding_backward(dout[0], tokens, 500)
        assert torch.equal(dweight, torch.zeros(500, 8, device=device).index_add_(0, tokens, dout[0]))


@pytest.mark.parametrize("vocabulary", [1, 2, 300, 70000, 1000000])
@pytest.mark.parametrize("shape", [(1, 9000), (9000, 1), (140, 70)], ids=str)
def test_long_sums(shape, vocabulary, device):
    """Sums that CUDA adds up in pieces, groups of pieces and groups of groups, beside short ones."""
    dout = torch.randint(-8, 8, (*shape, 8)).float().to(device)
    common = torch.randint(vocabulary, shape)
    for share in (0.0, 0.5, 0.9, 1.0):
        tokens = torch.where(torch.rand(shape) < share, vocabulary - 1, common).to(device)
        dwte, dwpe = ops.encoder_backward(dout, tokens, vocabulary, shape[1] + 3)
        rows = dout.view(-1, 8)
        assert torch.equal(dwte, torch.zeros(vocabulary, 8, device=device).index_add_(0, tokens.flatten(), rows))
        assert torch.equal(dwpe[: shape[1]], dout.sum(0))
        assert not dwpe[shape[1] :].any()


@all_views
@all_dtypes
def test_views(view, dtype, device):
    tokens, wte, wpe = inputs(6, 4, 40, dtype, device)
    dout = as_view(randn(6, 4, 40, dtype=dtype, device=device), view)
    check(as_view(tokens, view), as_view(wte, view), as_view(wpe, view), dout)


def test_embedding_takes_tokens_of_any_shape(device):
    weight = randn(13, 8, dtype=torch.float32, device=device, requires_grad=True)
    for shape in [(), (5,), (0,), (2, 3), (2, 0, 3), (1, 2, 1, 3)]:
        tokens = torch.randint(13, shape).to(device)
        out = ops.embedding(tokens, weight)
        assert torch.equal(out, F.embedding(tokens, weight))
        (dweight,) = torch.autograd.grad(out.sum(), weight)
        assert torch.equal(dweight[:, 0], torch.bincount(tokens.flatten(), minlength=13).float())


def test_untouched_rows_are_zero(device):
    tokens = torch.tensor([[1, 3, 3]], device=device)
    dout = torch.ones(1, 3, 5, device=device)
    for _ in range(3):
        junk = torch.full((100, 5), float("nan"), device=device)
        del junk  # what the allocator hands out next
        dwte, dwpe = ops.encoder_backward(dout, tokens, 6, 20)
        assert dwte[:, 0].tolist() == [0, 1, 0, 2, 0, 0]
        assert dwpe[:, 0].tolist() == [1] * 3 + [0] * 17


@all_dtypes
def test_extremes(dtype, device):
    info = torch.finfo(dtype)
    values = torch.tensor([0.0, -0.0, info.max, -info.max, info.smallest_normal / 4, torch.inf, -torch.inf, torch.nan])
    wte = values.to(dtype).to(device).repeat(3, 1)
    wpe = wte.roll(1, dims=1)[:2].contiguous()
    tokens = torch.tensor([[0, 2], [1, 1]], device=device)
    check(tokens, wte, wpe, ops.encoder(tokens, wte, wpe))


@all_dtypes
def test_deterministic(dtype, device):
    tokens, wte, wpe = inputs(64, 100, 40, dtype, device, vocabulary=50)
    dout = randn(64, 100, 40, dtype=dtype, device=device)
    assert_same_bits(lambda: ops.encoder(tokens, wte, wpe))
    assert_same_bits(lambda: ops.encoder_backward(dout, tokens, 50, 120))
    assert_same_bits(lambda: ops.embedding_backward(dout, tokens, 50))


def test_gradcheck(device):
    tokens, wte, wpe = inputs(3, 4, 5, torch.float64, device)
    wte.requires_grad_()
    wpe.requires_grad_()
    assert torch.autograd.gradcheck(lambda *weights: ops.encoder(tokens, *weights), (wte, wpe))
    assert torch.autograd.gradgradcheck(lambda *weights: ops.encoder(tokens, *weights), (wte, wpe))
    assert torch.autograd.gradcheck(lambda weight: ops.embedding(tokens, weight), (wte,))
    assert torch.autograd.gradgradcheck(lambda weight: ops.embedding(tokens, weight), (wte,))


@all_index_dtypes
@all_dtypes
def test_opcheck(dtype, index, device):
    tokens, wte, wpe = inputs(2, 3, 7, dtype, device, index=index)
    wte.requires_grad_()
    wpe.requires_grad_()
    dout = randn(2, 3, 7, dtype=dtype, device=device, requires_grad=True)
    torch.library.opcheck(ops.encoder, (tokens, wte, wpe))
    torch.library.opcheck(ops.encoder_backward, (dout, tokens, 13, 5))
    torch.library.opcheck(ops.embedding, (tokens, wte))
    torch.library.opcheck(ops.embedding_backward, (dout, tokens, 13))


def test_compile(device):
    tokens, wte, wpe = inputs(4, 6, 33, torch.float32, device)
    dout = randn(4, 6, 33, dtype=torch.float32, device=device)
    for function, weights in [(ops.encoder, (wte, wpe)), (ops.embedding, (wte,))]:
        eager = lambda *weights, function=function: function(tokens, *weights)  # noqa: E731
        compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*weights), eager(*weights))
        for a, b in zip(gradients(compiled, weights, dout), gradients(eager, weights, dout), strict=True):
            assert torch.equal(a, b)


def test_autocast_leaves_embeddings_alone(device):
    args = inputs(4, 6, 33, torch.float32, device)
    with torch.autocast(device.type, torch.bfloat16):
        assert torchs(*args).dtype == ops.encoder(*args).dtype == torch.float32
        assert ops.embedding(*args[:2]).dtype == F.embedding(*args[:2]).dtype == torch.float32


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(0, 40),
    length=st.integers(1, 40),
    width=st.integers(1, 300),
    vocabulary=st.integers(1, 200),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_shape(device, batch, length, width, vocabulary, dtype):
    torch.manual_seed(batch + length + width + vocabulary)  # a failing example must fail again
    tokens, wte, wpe = inputs(batch, length, width, dtype, device, vocabulary)
    dout = randn(batch, length, width, dtype=dtype, device=device)
    assert torch.equal(ops.encoder(tokens, wte, wpe), torchs(tokens, wte, wpe))
    doubles = gradients(lambda *weights: torchs(tokens, *weights), (double(wte), double(wpe)), double(dout))
    ours = gradients(lambda *weights: ops.encoder(tokens, *weights), (wte, wpe), dout)
    for a, b in zip(ours, doubles, strict=True):
        torch.testing.assert_close(a, b.to(dtype), **tolerance(dtype))


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_bad_input(device):
    tokens, wte, wpe = inputs(2, 3, 8, torch.float32, device)
    dout = ops.encoder(tokens, wte, wpe)
    with raises("encoder", "tokens must be int64 or int32", "float32"):
        ops.encoder(tokens.float(), wte, wpe)
    with raises("encoder", "tokens must have 2 dimensions", r"\(3\)"):
        ops.encoder(tokens[0], wte, wpe)
    with raises("encoder", "wte must be float64", "int64"):
        ops.encoder(tokens, wte.long(), wpe)
    with raises("encoder", "wte must have 2 dimensions", r"\(8\)"):
        ops.encoder(tokens, wte[0], wpe)
    with raises("encoder", r"wpe must have shape \(5, 8\)", r"\(5, 7\)"):
        ops.encoder(tokens, wte, wpe[:, :7])
    with raises("encoder", "wpe must have the dtype of wte", "float32", "float64"):
        ops.encoder(tokens, wte, wpe.double())
    with raises("encoder", "tokens of length 3", "there are 2"):
        ops.encoder(tokens, wte, wpe[:2])
    with raises("encoder_backward", r"dout must have shape \(2, 3, 8\)", r"\(2, 2, 8\)"):
        ops.encoder_backward(dout[:, :2], tokens, 13, 5)
    with raises("encoder_backward", "tokens of length 3", "there are 2"):
        ops.encoder_backward(dout, tokens, 13, 2)
    with raises("encoder_backward", "vocab_size must not be negative", "-1"):
        ops.encoder_backward(dout, tokens, -1, 5)
    with raises("embedding", "weight must have 2 dimensions"):
        ops.embedding(tokens, wte[0])
    with raises("embedding_backward", r"dout must have shape \(2, 3, 8\)"):
        ops.embedding_backward(dout[:1], tokens, 13)
    if device.type == "cuda":
        with raises("encoder_backward", "vocab_size must be at most 16777216 on this device", "16777217"):
            ops.encoder_backward(dout, tokens, 2**24 + 1, 5)


@all_index_dtypes
def test_tokens_outside_the_vocabulary(index, device):
    if device.type != "cpu":
        pytest.skip("on CUDA a device-side assertion, which ends the process's context: see the next test")
    tokens, wte, wpe = inputs(64, 50, 8, torch.float32, device, index=index)
    dout = ops.encoder(tokens, wte, wpe)
    for value in (-1, 13, torch.iinfo(index).max, torch.iinfo(index).min):
        bad = tokens.clone()
        bad[2, 17] = value
        bad[40, 3] = -7  # a later one, for another thread to find
        with raises("encoder: ", rf"token {value} at position \(2, 17\)", "vocabulary of 13"):
            ops.encoder(bad, wte, wpe)
        with raises("encoder_backward: ", rf"token {value} at position \(2, 17\)", "vocabulary of 13"):
            ops.encoder_backward(dout, bad, 13, 52)
        with raises("embedding: ", f"token {value} at position 117 ", "vocabulary of 13"):
            ops.embedding(bad, wte)
        with raises("embedding_backward: ", f"token {value} at position 117 ", "vocabulary of 13"):
            ops.embedding_backward(dout, bad, 13)
    with raises("vocabulary of 0"):
        ops.embedding(tokens, wte[:0])


@pytest.mark.parametrize("name", ["encoder", "encoder_backward", "embedding", "embedding_backward"])
def test_device_side_assertion(name, device):
    if device.type != "cuda":
        pytest.skip("CUDA only")
    script = f"""
import torch, gptkernels
ops = torch.ops.gptkernels
tokens = torch.zeros(2, 20, dtype=torch.int64)
tokens[0, 17] = 50300
tokens, weight, dout = tokens.cuda(), torch.zeros(50257, 8).cuda(), torch.zeros(2, 20, 8).cuda()
try:
    ops.{name}(*{{
        "encoder": (tokens, weight, weight),
        "embedding": (tokens, weight),
        "encoder_backward": (dout, tokens, 50257, 20),
        "embedding_backward": (dout, tokens, 50257),
    }}["{name}"])
    torch.cuda.synchronize()
except Exception as error:
    print(error)
    raise SystemExit(7)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    said = done.stdout + done.stderr
    assert "device-side assert" in said
    assert name in said


def test_tensors_on_different_devices(device):
    if device.type == "cpu":
        pytest.skip("one device only")
    tokens, wte, wpe = inputs(2, 3, 8, torch.float32, device)
    with raises("encoder", "tokens is on cpu", "wte is on cuda"):
        ops.encoder(tokens.cpu(), wte, wpe)
    with raises("encoder", "wpe is on cpu", "wte is on cuda"):
        ops.encoder(tokens, wte, wpe.cpu())


@pytest.mark.large
def test_more_than_2_31_elements(device):
    batch, length, width = 2**31 // (1024 * 768) + 2, 1024, 768
    tokens, wte, wpe = inputs(batch, length, width, torch.bfloat16, device, vocabulary=50257)
    out = ops.encoder(tokens, wte, wpe)
    for part in (slice(0, 1), slice(batch - 1, batch)):
        assert torch.equal(out[part], torchs(tokens[part], wte, wpe))
    dwte, dwpe = ops.encoder_backward(out, tokens, 50257, length + 2)
    torch.testing.assert_close(dwpe[:length].float(), out.float().sum(0), rtol=1e-2, atol=1.0)
    for token in (tokens[0, 0], tokens[-1, -1]):
        torch.testing.assert_close(dwte[token].float(), out[tokens == token].float().sum(0), rtol=1e-2, atol=1.0)
