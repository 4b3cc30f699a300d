"""Tests of the functions and layers of the kernel as it is loaded from the hub, or from LOCAL_KERNELS."""

from pathlib import Path

import kernels
import pytest
import torch
import torch.nn.functional as F

kernel = kernels.get_kernel("gptkernels/gptkernels", version=0, trust_remote_code=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float32 if DEVICE == "cpu" else torch.bfloat16
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4} if DEVICE == "cpu" else {"rtol": 3e-2, "atol": 3e-2}


def draw(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE).requires_grad_()


def attention(q, k, v, causal):
    """The formula of flash_attn_func, (B, T, heads, HS), in float64."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    mask = seen.tril(k.shape[2] - q.shape[2]) if causal else None
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)


def assert_same(ours, exact, inputs):
    torch.testing.assert_close(ours.double(), exact, **TOLERANCE)
    dout = torch.randn_like(ours)
    found = torch.autograd.grad(ours, inputs, dout)
    expected = torch.autograd.grad(exact, inputs, dout.double())
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, **TOLERANCE)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "heads", "key_heads"), [(37, 2, 2), (37, 6, 2), (5, 4, 1)])
def test_attention_and_its_gradients(queries, heads, key_heads, causal):
    inputs = draw(2, queries, heads, 16), draw(2, 37, key_heads, 16), draw(2, 37, key_heads, 16)
    out = kernel.flash_attn_func(*inputs, causal=causal)
    assert_same(out, attention(*inputs, causal), inputs)
    again = kernel.flash_attn_func(*inputs, causal=causal)
    assert torch.equal(out, again)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("same_lengths", [False, True])
def test_concatenated_sequences(same_lengths, causal):
    lengths_q = [7, 1, 12]
    lengths_k = lengths_q if same_lengths else [9, 4, 12]
    inputs = draw(20, 6, 16), draw(sum(lengths_k), 2, 16), draw(sum(lengths_k), 2, 16)
    cu_q = F.pad(torch.tensor(lengths_q, device=DEVICE).cumsum(0), (1, 0)).int()
    cu_k = cu_q if same_lengths else F.pad(torch.tensor(lengths_k, device=DEVICE).cumsum(0), (1, 0)).int()
    out = kernel.flash_attn_varlen_func(*inputs, cu_q, cu_k, 12, 12, causal=causal)
    split = zip(*(t.split(lengths) for t, lengths in zip(inputs, (lengths_q, lengths_k, lengths_k))))
    exact = torch.cat([attention(*(t[None] for t in parts), causal)[0] for parts in split])
    assert_same(out, exact, inputs)


@pytest.mark.kernels_ci
def test_dropout_draws_other_masks():
    inputs = draw(1, 64, 2, 16), draw(1, 64, 2, 16), draw(1, 64, 2, 16)
    first, second = (kernel.flash_attn_func(*inputs, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    first.sum().backward()
    assert all(t.grad.isfinite().all() for t in inputs)


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    "option", [{"window_size": (8, 0)}, {"softcap": 1.0}, {"alibi_slopes": torch.ones(2)}, {"return_attn_probs": True}]
)
def test_unsupported_options_are_refused(option):
    inputs = draw(1, 4, 2, 16), draw(1, 4, 2, 16), draw(1, 4, 2, 16)
    with pytest.raises(ValueError, match=next(iter(option))):
        kernel.flash_attn_func(*inputs, **option)


@pytest.mark.kernels_ci
def test_layer_norm_and_gelu():
    x, weight, bias = draw(5, 64), draw(64), draw(64)
    exact = F.layer_norm(x.double(), (64,), weight.double(), bias.double())
    assert_same(kernel.layer_norm(x, weight, bias), exact, (x, weight, bias))
    for form in ("none", "tanh"):
        assert_same(kernel.gelu(x, form), F.gelu(x.double(), approximate=form), (x,))


@pytest.mark.kernels_ci
def test_layers_under_autocast():
    norm = torch.nn.LayerNorm(64, device=DEVICE)
    x = torch.randn(5, 64, device=DEVICE, dtype=torch.bfloat16)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = kernel.layers.LayerNorm.forward(norm, x)
    torch.testing.assert_close(found.float(), norm(x.float()), rtol=1e-2, atol=1e-2)


@pytest.mark.kernels_ci
def test_compiled_without_graph_breaks():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(q, k, v, weight):
        out = kernel.flash_attn_func(q, k, v, causal=True)
        return kernel.gelu(kernel.layer_norm(out, weight))

    inputs = *(draw(2, 9, heads, 16) for heads in (4, 2, 2)), draw(16)
    exact = F.gelu(F.layer_norm(attention(*inputs[:3], True), (16,), inputs[3].double()))
    assert_same(run(*inputs), exact, inputs)


@pytest.mark.kernels_ci
def test_operators():
    ops = kernel.attention.ops
    for transposed in (False, True):
        q, k, v = (
            draw(2, 9, heads, 16).detach().transpose(1, 2).requires_grad_() if transposed else draw(2, heads, 9, 16)
            for heads in (4, 2, 2)
        )
        torch.library.opcheck(ops.scaled_dot_product_attention.default, (q, k, v, None, 0.0, True))
    torch.library.opcheck(ops.layernorm.default, (draw(3, 8), draw(8), draw(8)))
    torch.library.opcheck(ops.gelu.default, (draw(3, 8),))


@pytest.mark.kernels_ci
def test_layers_replace_a_models():
    class Norm(torch.nn.LayerNorm):
        pass

    class NewGELU(torch.nn.Module):
        def forward(self, input):
            return F.gelu(input, approximate="tanh")

    kernels.replace_kernel_forward_from_hub(Norm, "LayerNorm")
    kernels.replace_kernel_forward_from_hub(NewGELU, "NewGELU")
    layers = {
        name: {DEVICE: kernels.LocalLayerRepository(Path(kernel.__file__).parents[2], layer_name=name)}
        for name in ("LayerNorm", "NewGELU")
    }
    model = torch.nn.Sequential(Norm(16), NewGELU()).to(DEVICE)
    x = torch.randn(3, 16, device=DEVICE, requires_grad=True)
    expected = model(x)
    kernels.register_kernel_mapping(layers)
    model = kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, device=DEVICE)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = model(x)
    called = {event.key for event in profile.key_averages()}
    assert {kernel.attention.add_op_namespace_prefix(op) for op in ("layernorm", "gelu")} <= called
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert x.grad is not None
