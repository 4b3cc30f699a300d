"""Tests that gptkernels.functional's functions match torch's, with gradients, and refuse unsupported options."""

import functools

import pytest
import torch
import torch.nn.functional as F

import gptkernels.functional as G
from helpers import all_dtypes, as_view, assert_raises, check, randn, tolerance


def torch_mlp(x, fc_weight, fc_bias, proj_weight, proj_bias):
    return F.linear(F.gelu(F.linear(x, fc_weight, fc_bias), approximate="tanh"), proj_weight, proj_bias)


def torch_causal_softmax(scores, scale):
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return F.softmax((scores * scale).masked_fill(future, -torch.inf), -1)


def torch_causal_attention(qkv, num_heads, scale=None):
    (B, T, _), C = qkv.shape, qkv.shape[-1] // 3
    q, k, v = qkv.view(B, T, 3, num_heads, C // num_heads).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return out.transpose(1, 2).reshape(B, T, C)


@pytest.mark.parametrize(
    ("ours", "torchs", "shapes", "options"),
    [
        (G.gelu, F.gelu, [(5, 33)], {}),
        *((G.gelu, F.gelu, [(5, 33)], {"approximate": name}) for name in ("none", "tanh")),
        *((G.softmax, F.softmax, [(3, 4, 5)], {"dim": dim}) for dim in (0, 1, 2, -1, -2)),
        (G.softmax, F.softmax, [()], {"dim": 0}),
        (G.softmax, F.softmax, [(3, 5)], {"dim": -1, "dtype": torch.float32}),
        (G.causal_softmax, torch_causal_softmax, [(2, 3, 7, 7)], {"scale": 0.5}),
        (G.linear, F.linear, [(2, 3, 8), (5, 8)], {}),
        (G.linear, F.linear, [(2, 3, 8), (5, 8), (5,)], {}),
        (G.linear, F.linear, [(8,), (5, 8)], {}),
        (G.mlp, torch_mlp, [(2, 3, 8), (32, 8), (32,), (8, 32), (8,)], {}),
        (G.causal_attention, torch_causal_attention, [(2, 7, 24)], {"num_heads": 4}),
        (G.causal_attention, torch_causal_attention, [(2, 7, 24)], {"num_heads": 4, "scale": 0.1}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@all_dtypes
def test_functions_match_torch(ours, torchs, shapes, options, dtype, device):
    tensors = [randn(*shape, dtype=dtype, device=device, scale=0.3 if ours is G.mlp else 1.0) for shape in shapes]
    check(lambda *args: ours(*args, **options), lambda *args: torchs(*args, **options), *tensors)


@pytest.mark.parametrize("dims", [1, 2, 3])
@all_dtypes
def test_layer_norm_matches_torch(dims, dtype, device):
    x = randn(2, 3, 4, 8, dtype=dtype, device=device)
    shape = x.shape[-dims:]
    affine = [randn(*shape, dtype=dtype, device=device) for _ in range(2)]

    def on(module):
        return lambda x, *affine: module.layer_norm(x, shape, *affine, eps=1e-3)

    check(on(G), on(F), x, *affine)
    check(on(G), on(F), as_view(x, "sliced"))


def test_layer_norm_refuses_wrong_shapes(device):
    x = randn(5, 8, dtype=torch.float32, device=device)
    message = r"normalized_shape must be the last dimensions .*\(5, 8\), got \(7,\)"
    assert_raises(ValueError, message, G.layer_norm, x, (7,))
    assert_raises(ValueError, "normalized_shape", G.layer_norm, x, ())
    assert_raises(ValueError, "normalized_shape", G.layer_norm, x, (2, 5, 8))
    assert_raises(ValueError, r"weight must have shape \(8,\), got \(7,\)", G.layer_norm, x, (8,), x[0, :7])
    assert_raises(ValueError, "bias", G.layer_norm, x, (8,), None, x[0, :7])


@pytest.mark.parametrize("dims", [1, 2])
@all_dtypes
def test_residual_layer_norm_matches_torch(dims, dtype, device):
    x, residual = (randn(3, 4, 8, dtype=dtype, device=device) for _ in range(2))
    shape = x.shape[-dims:]
    weight, bias = (randn(*shape, dtype=dtype, device=device) for _ in range(2))

    def ours(*args):
        return torch.cat(G.residual_layer_norm(*args[:2], shape, *args[2:]))

    def torchs(x, residual, weight, bias):
        return torch.cat([F.layer_norm(x + residual, shape, weight, bias), x + residual])

    check(ours, torchs, x, residual, weight, bias)
    message = r"residual must have the shape of x, \(3, 4, 8\), got \(2, 4, 8\)"
    assert_raises(ValueError, message, G.residual_layer_norm, x, residual[:2], shape)


@pytest.mark.parametrize("shape", [(), (5,), (3, 5), (2, 3, 5), (2, 2, 2, 2)])
def test_softmax_without_dim_warns_as_torch_does(shape, device):
    x = randn(*shape, dtype=torch.float32, device=device)
    found = []
    for module in (G, F):
        with pytest.warns(UserWarning, match="dim"):
            found.append(module.softmax(x))
    torch.testing.assert_close(*found)


def test_gelu_and_softmax_refuse_bad_options(device):
    x = randn(3, 5, dtype=torch.float32, device=device)
    assert_raises(ValueError, "approximate must be 'none' or 'tanh', got 'fast'", G.gelu, x, "fast")
    assert_raises(IndexError, None, G.softmax, x, 2)


@all_dtypes
def test_embedding_matches_torch(dtype, device):
    weight = randn(9, 4, dtype=dtype, device=device)
    for tokens in (torch.randint(9, (3, 5)), torch.randint(9, ()), torch.randint(9, (2, 3, 4), dtype=torch.int32)):
        check(G.embedding, F.embedding, tokens.to(device), weight)


@pytest.mark.parametrize(
    "option", [{"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}]
)
def test_embedding_refuses_unsupported_options(option, device):
    tokens, weight = torch.zeros(3, dtype=torch.int64, device=device), torch.zeros(3, 2, device=device)
    message = f"embedding: the option {next(iter(option))} is not supported"
    assert_raises(ValueError, message, G.embedding, tokens, weight, **option)


def cross_entropies(**options):
    return [functools.partial(module.cross_entropy, **options) for module in (G, F)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(7,), (5, 7), (5, 7, 3), (2, 7, 3, 4)])
@all_dtypes
def test_cross_entropy_matches_torch(shape, reduction, dtype, device):
    logits = randn(*shape, dtype=dtype, device=device)
    target = torch.randint(7, shape[:1] + shape[2:] if len(shape) > 1 else (), device=device)
    check(*cross_entropies(reduction=reduction), logits, target)
    if target.dim():
        target.view(-1)[::2] = 3
        check(*cross_entropies(reduction=reduction, ignore_index=3), logits, target)


def test_cross_entropy_of_no_rows_matches_torch(device):
    logits = randn(5, 7, dtype=torch.float32, device=device, requires_grad=True)
    for targets in (torch.full((5,), -100, device=device), torch.empty(0, dtype=torch.int64, device=device)):
        rows = logits[: len(targets)]
        for reduction in ("mean", "sum", "none"):
            check(*cross_entropies(reduction=reduction), rows, targets)
        assert G.cross_entropy(rows, targets).isnan()
        assert G.linear_cross_entropy(rows, torch.eye(7, device=device), targets).isnan()
        assert G.linear_cross_entropy(rows, torch.eye(7, device=device), targets, reduction="sum") == 0


def test_deprecated_reductions_of_cross_entropy_match_torch(device):
    logits, target = randn(5, 7, dtype=torch.float32, device=device), torch.randint(7, (5,), device=device)
    for options in ({"size_average": False}, {"reduce": False}, {"size_average": True, "reduce": True}):
        found = []
        for function in cross_entropies(**options):
            with pytest.warns(UserWarning, match="deprecated"):
                found.append(function(logits, target))
        torch.testing.assert_close(*found)


def test_cross_entropy_refuses_bad_arguments(device):
    logits, target = randn(5, 7, dtype=torch.float32, device=device), torch.randint(7, (5,), device=device)

    def refuse(message, *args, **options):
        assert_raises(ValueError, message, G.cross_entropy, logits, *args, **options)

    refuse("the option weight is not supported", target, torch.ones(7, device=device))
    refuse("the option label_smoothing is not supported", target, label_smoothing=0.1)
    refuse("soft targets", logits.softmax(-1))
    refuse("reduction must be 'mean', 'sum' or 'none', got 'average'", target, reduction="average")
    refuse(r"target must have the input's shape \(5, 7\) without .*got \(4,\)", target[:4])


def test_cross_entropy_under_autocast_matches_torch(device):
    logits, target = randn(5, 7, dtype=torch.bfloat16, device=device), torch.randint(7, (5,), device=device)
    with torch.autocast(device.type, torch.bfloat16):
        for dtype in (torch.float32, torch.float64):
            check(G.cross_entropy, F.cross_entropy, logits.to(dtype), target)
        out, expected = G.cross_entropy(logits, target), F.cross_entropy(logits, target)
        assert out.dtype == expected.dtype == torch.float32
        # On CUDA, torch rounds the logarithms of bfloat16 logits to bfloat16 before it computes the loss in float32.
        torch.testing.assert_close(out, expected, **tolerance(torch.bfloat16))
        torch.testing.assert_close(out, F.cross_entropy(logits.float(), target))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_on_meta_has_shapes_and_gradients(reduction):
    logits = torch.empty(5, 7, device="meta", requires_grad=True)
    loss = G.cross_entropy(logits, torch.empty(5, device="meta", dtype=torch.int64), reduction=reduction)
    assert loss.is_meta
    assert loss.dtype == torch.float32
    assert loss.shape == ((5,) if reduction == "none" else ())
    loss.sum().backward()
    assert logits.grad.shape == logits.shape


@pytest.mark.parametrize("name", ["causal_attention", "scaled_dot_product_attention"])
def test_attention_on_meta(name):
    inputs = [torch.empty(2, 6, 8, 96, device="meta", requires_grad=True) for _ in range(3)]
    mask = torch.empty(8, 8, dtype=torch.bool, device="meta")
    packed = name == "causal_attention"
    out = G.causal_attention(inputs[0][0], 4) if packed else getattr(G, name)(*inputs, mask, is_causal=True)
    out.sum().backward()
    assert out.shape == ((6, 8, 32) if packed else inputs[0].shape)
    assert inputs[0].grad.shape == inputs[0].shape


def test_cross_entropy_is_twice_differentiable(device):
    logits = randn(4, 5, dtype=torch.float64, device=device, requires_grad=True)
    target = torch.tensor([1, -100, 4, 0], device=device)
    assert torch.autograd.gradgradcheck(lambda x: G.cross_entropy(x, target), (logits,))


def test_losses_do_not_synchronise(device):
    if device.type == "cpu":
        pytest.skip("the CPU is the host")
    x, weight = (randn(64, 32, dtype=torch.float32, device=device, requires_grad=True) for _ in range(2))
    targets = torch.randint(64, (64,), device=device)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for reduction in ("mean", "sum"):
            G.cross_entropy(G.linear(x, weight), targets, reduction=reduction).backward()
            G.linear_cross_entropy(x, weight, targets, reduction=reduction, chunk_size=16).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_allocation_that_fails_is_named(device):
    message = ".*(can't allocate memory|out of memory)" if torch.__version__ >= "2.13" else ""
    numbers = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(2)]
    with pytest.raises(RuntimeError, match=f"a call into LibTorch failed{message}"):
        torch.ops.gptkernels.attention_dropout_mask(2**12, 2**12, 2**12, 2**12, 0.5, *numbers)
