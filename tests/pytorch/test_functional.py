import math

import pytest
import torch
import torch.nn.functional as F

import gptkernels.functional as G
from helpers import all_dtypes, as_view, check, randn, tolerance


def refused(name):
    return pytest.raises(ValueError, match=name)


# ---- normalisation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [1, 2, 3])
@all_dtypes
def test_layer_norm(dims, dtype, device):
    x = randn(2, 3, 4, 8, dtype=dtype, device=device)
    shape = x.shape[-dims:]
    weight, bias = (randn(*shape, dtype=dtype, device=device) for _ in range(2))
    check(
        lambda x, w, b: G.layer_norm(x, shape, w, b, 1e-3),
        lambda x, w, b: F.layer_norm(x, shape, w, b, 1e-3),
        x,
        weight,
        bias,
    )
    check(lambda x: G.layer_norm(x, list(shape)), lambda x: F.layer_norm(x, shape), as_view(x, "sliced"))


def test_layer_norm_shapes_that_do_not_fit(device):
    x = randn(5, 8, dtype=torch.float32, device=device)
    with refused(r"normalized_shape must be the last dimensions .*\(5, 8\), got \(7,\)"):
        G.layer_norm(x, (7,))
    with refused("normalized_shape"):
        G.layer_norm(x, ())
    with refused("normalized_shape"):
        G.layer_norm(x, (2, 5, 8))
    with refused(r"weight must have shape \(8,\), got \(7,\)"):
        G.layer_norm(x, (8,), x[0, :7])
    with refused("bias"):
        G.layer_norm(x, (8,), None, x[0, :7])


@pytest.mark.parametrize("dims", [1, 2])
@all_dtypes
def test_residual_layer_norm(dims, dtype, device):
    x, residual = (randn(3, 4, 8, dtype=dtype, device=device) for _ in range(2))
    shape = x.shape[-dims:]
    weight, bias = (randn(*shape, dtype=dtype, device=device) for _ in range(2))

    def ours(*args):
        return torch.cat(G.residual_layer_norm(*args[:2], shape, *args[2:]))

    def torchs(x, residual, weight, bias):
        return torch.cat([F.layer_norm(x + residual, shape, weight, bias), x + residual])

    check(ours, torchs, x, residual, weight, bias)
    with refused(r"residual must have the shape of x, \(3, 4, 8\), got \(2, 4, 8\)"):
        G.residual_layer_norm(x, residual[:2], shape)


# ---- activations and softmax -----------------------------------------------------------------------------------------


@all_dtypes
def test_gelu(dtype, device):
    x = randn(5, 33, dtype=dtype, device=device)
    check(G.gelu, F.gelu, x)
    for approximate in ("none", "tanh"):
        check(lambda x, a=approximate: G.gelu(x, a), lambda x, a=approximate: F.gelu(x, approximate=a), x)
    with refused("approximate must be 'none' or 'tanh', got 'fast'"):
        G.gelu(x, "fast")


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
@all_dtypes
def test_softmax(dim, dtype, device):
    x = randn(3, 4, 5, dtype=dtype, device=device)
    check(lambda x: G.softmax(x, dim), lambda x: F.softmax(x, dim), x)


@pytest.mark.parametrize("shape", [(), (5,), (3, 5), (2, 3, 5), (2, 2, 2, 2)])
def test_softmax_without_dim(shape, device):
    x = randn(*shape, dtype=torch.float32, device=device)
    with pytest.warns(UserWarning, match="dim"):
        out = G.softmax(x)
    with pytest.warns(UserWarning, match="dim"):
        torch.testing.assert_close(out, F.softmax(x))


def test_softmax_options(device):
    x = randn(3, 5, dtype=torch.float16, device=device)
    check(lambda x: G.softmax(x, -1, dtype=torch.float32), lambda x: F.softmax(x, -1, dtype=torch.float32), x)
    check(lambda x: G.softmax(x, 0), lambda x: F.softmax(x, 0), x.sum())
    with pytest.raises(IndexError):
        G.softmax(x, 2)


@all_dtypes
def test_causal_softmax(dtype, device):
    scores = randn(2, 3, 7, 7, dtype=dtype, device=device)
    future = torch.ones(7, 7, dtype=torch.bool, device=device).triu(1)
    check(
        lambda s: G.causal_softmax(s, 0.5),
        lambda s: F.softmax((s * 0.5).masked_fill(future, -math.inf), -1),
        scores,
    )


# ---- matrices --------------------------------------------------------------------------------------------------------


@all_dtypes
def test_linear(dtype, device):
    x, weight = randn(2, 3, 8, dtype=dtype, device=device), randn(5, 8, dtype=dtype, device=device)
    check(G.linear, F.linear, x, weight)
    check(G.linear, F.linear, x, weight, randn(5, dtype=dtype, device=device))
    check(G.linear, F.linear, x[0, 0], weight)


@all_dtypes
def test_mlp(dtype, device):
    shapes = [(2, 3, 8), (32, 8), (32,), (8, 32), (8,)]
    x, *parameters = (randn(*shape, dtype=dtype, device=device, scale=0.3) for shape in shapes)

    def torchs(x, fc_weight, fc_bias, proj_weight, proj_bias):
        return F.linear(F.gelu(F.linear(x, fc_weight, fc_bias), approximate="tanh"), proj_weight, proj_bias)

    check(G.mlp, torchs, x, *parameters)


@all_dtypes
def test_causal_attention(dtype, device):
    qkv = randn(2, 7, 3 * 8, dtype=dtype, device=device)

    def torchs(qkv, scale=None):
        q, k, v = qkv.view(2, 7, 3, 4, 2).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return out.transpose(1, 2).reshape(2, 7, 8)

    check(lambda qkv: G.causal_attention(qkv, 4), torchs, qkv)
    check(lambda qkv: G.causal_attention(qkv, 4, 0.1), lambda qkv: torchs(qkv, 0.1), qkv)


@all_dtypes
def test_embedding(dtype, device):
    weight = randn(9, 4, dtype=dtype, device=device)
    for tokens in (torch.randint(9, (3, 5)), torch.randint(9, ()), torch.randint(9, (2, 3, 4), dtype=torch.int32)):
        check(G.embedding, F.embedding, tokens.to(device), weight)


@pytest.mark.parametrize(
    "option", [{"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}]
)
def test_embedding_options_that_are_refused(option, device):
    with refused(f"embedding: the option {next(iter(option))} is not supported"):
        G.embedding(torch.zeros(3, dtype=torch.int64, device=device), torch.zeros(3, 2, device=device), **option)


# ---- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(7,), (5, 7), (5, 7, 3), (2, 7, 3, 4)])
@all_dtypes
def test_cross_entropy(shape, reduction, dtype, device):
    logits = randn(*shape, dtype=dtype, device=device)
    target_shape = shape[:1] + shape[2:] if len(shape) > 1 else ()
    target = torch.randint(7, target_shape, device=device)
    check(
        lambda x, t: G.cross_entropy(x, t, reduction=reduction),
        lambda x, t: F.cross_entropy(x, t, reduction=reduction),
        logits,
        target,
    )
    if target.dim():
        target.view(-1)[::2] = 3
        options = {"ignore_index": 3, "reduction": reduction}
        check(
            lambda x, t: G.cross_entropy(x, t, **options), lambda x, t: F.cross_entropy(x, t, **options), logits, target
        )


def test_cross_entropy_where_no_row_takes_part(device):
    logits = randn(5, 7, dtype=torch.float32, device=device, requires_grad=True)
    for targets in (torch.full((5,), -100, device=device), torch.empty(0, dtype=torch.int64, device=device)):
        rows = logits[: len(targets)]
        for reduction in ("mean", "sum", "none"):
            check(
                lambda x, t, r=reduction: G.cross_entropy(x, t, reduction=r),
                lambda x, t, r=reduction: F.cross_entropy(x, t, reduction=r),
                rows,
                targets,
            )
        assert G.cross_entropy(rows, targets).isnan()
        assert G.linear_cross_entropy(rows, torch.eye(7, device=device), targets).isnan()
        assert G.linear_cross_entropy(rows, torch.eye(7, device=device), targets, reduction="sum") == 0


def test_cross_entropy_deprecated_reductions(device):
    logits, target = randn(5, 7, dtype=torch.float32, device=device), torch.randint(7, (5,), device=device)
    for options in ({"size_average": False}, {"reduce": False}, {"size_average": True, "reduce": True}):
        with pytest.warns(UserWarning, match="deprecated"):
            out = G.cross_entropy(logits, target, **options)
        with pytest.warns(UserWarning, match="deprecated"):
            torch.testing.assert_close(out, F.cross_entropy(logits, target, **options))


def test_cross_entropy_refuses(device):
    logits, target = randn(5, 7, dtype=torch.float32, device=device), torch.randint(7, (5,), device=device)
    with refused("the option weight is not supported"):
        G.cross_entropy(logits, target, torch.ones(7, device=device))
    with refused("the option label_smoothing is not supported"):
        G.cross_entropy(logits, target, label_smoothing=0.1)
    with refused("soft targets"):
        G.cross_entropy(logits, logits.softmax(-1))
    with refused("reduction must be 'mean', 'sum' or 'none', got 'average'"):
        G.cross_entropy(logits, target, reduction="average")
    with refused(r"target must have the input's shape \(5, 7\) without its classes .*got \(4,\)"):
        G.cross_entropy(logits, target[:4])


def test_cross_entropy_autocast(device):
    logits, target = randn(5, 7, dtype=torch.bfloat16, device=device), torch.randint(7, (5,), device=device)
    with torch.autocast(device.type, torch.bfloat16):
        check(G.cross_entropy, F.cross_entropy, logits.float(), target)
        out, expected = G.cross_entropy(logits, target), F.cross_entropy(logits, target)
        assert out.dtype == expected.dtype == torch.float32
        # On CUDA torch rounds the logarithms of bfloat16 logits to bfloat16 before the loss is float32.
        torch.testing.assert_close(out, expected, **tolerance(torch.bfloat16))
        torch.testing.assert_close(out, F.cross_entropy(logits.float(), target))


def test_cross_entropy_on_meta():
    logits, target = (
        torch.empty(5, 7, device="meta", requires_grad=True),
        torch.empty(5, device="meta", dtype=torch.int64),
    )
    for reduction in ("mean", "sum", "none"):
        loss = G.cross_entropy(logits, target, reduction=reduction)
        assert (loss.device.type, loss.dtype, loss.shape) == (
            "meta",
            torch.float32,
            (5,) if reduction == "none" else (),
        )
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


def test_cross_entropy_autocast_keeps_float64(device):
    logits, target = randn(5, 7, dtype=torch.float64, device=device), torch.randint(7, (5,), device=device)
    with torch.autocast(device.type, torch.bfloat16):
        check(G.cross_entropy, F.cross_entropy, logits, target)


def test_cross_entropy_is_twice_differentiable(device):
    logits = randn(4, 5, dtype=torch.float64, device=device, requires_grad=True)
    target = torch.tensor([1, -100, 4, 0], device=device)
    assert torch.autograd.gradgradcheck(lambda x: G.cross_entropy(x, target), (logits,))


def test_losses_do_not_wait_for_the_device(device):
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
