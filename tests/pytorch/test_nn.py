"""Tests that gptkernels.nn's modules match torch's modules, or a formula in torch where torch has no such module."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F

import gptkernels.nn as nn
from helpers import assert_raises, randn, tolerance

LAYERS = [
    ("LayerNorm", (8,), {}, (3, 8)),
    ("LayerNorm", ((4, 8),), {"eps": 1e-3}, (3, 4, 8)),
    ("LayerNorm", (8,), {"bias": False}, (3, 8)),
    ("LayerNorm", (8,), {"elementwise_affine": False}, (3, 8)),
    ("GELU", (), {}, (3, 8)),
    ("GELU", (), {"approximate": "tanh"}, (3, 8)),
    ("Softmax", (-1,), {}, (3, 8)),
    ("Softmax", (), {"dim": 0}, (3, 8)),
    ("Linear", (8, 5), {}, (2, 3, 8)),
    ("Linear", (8, 5), {"bias": False, "dtype": torch.float64}, (2, 3, 8)),
    ("Embedding", (9, 4), {}, "tokens"),
    ("CrossEntropyLoss", (), {}, "classes"),
    ("CrossEntropyLoss", (), {"ignore_index": 2, "reduction": "sum"}, "classes"),
]
all_layers = pytest.mark.parametrize(("name", "args", "options", "shape"), LAYERS, ids=lambda value: str(value))


def make_pair(name, args, options, device):
    made = []
    for module in (nn, torch.nn):
        torch.manual_seed(5)
        made.append(getattr(module, name)(*args, **options).to(device))
    return made


OPTIONS_OF_OURS = {"Linear": [("fp8", False)]}


def list_parameters(layer):
    return [(p.name, p.default) for p in inspect.signature(layer).parameters.values()]


@all_layers
def test_is_a_drop_in_for_torchs_layer(name, args, options, shape, device):
    ours, torchs = make_pair(name, args, options, device)
    assert isinstance(ours, type(torchs))
    assert repr(ours) == repr(torchs)
    assert list_parameters(type(ours)) == list_parameters(type(torchs)) + OPTIONS_OF_OURS.get(name, [])
    torch.testing.assert_close(dict(ours.state_dict()), dict(torchs.state_dict()), rtol=0, atol=0)
    ours.load_state_dict(torchs.state_dict())


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "symbolic_trace"])
@all_layers
def test_computes_what_torchs_layer_computes(name, args, options, shape, traced, device):
    ours, torchs = make_pair(name, args, options, device)
    if traced:
        ours = torch.fx.symbolic_trace(ours)
    dtype = options.get("dtype", torch.float32)
    if shape == "tokens":
        inputs = (torch.randint(9, (2, 5), device=device),)
    else:
        inputs = (randn(*((6, 7) if shape == "classes" else shape), dtype=dtype, device=device, requires_grad=True),)
    if shape == "classes":
        inputs += (torch.arange(6, device=device),)
    out, expected = ours(*inputs), torchs(*inputs)
    torch.testing.assert_close(out, expected)
    dout = randn(*out.shape, dtype=out.dtype, device=device)
    for module, result in ((ours, out), (torchs, expected)):
        named = [t for _, t in sorted(module.named_parameters())]  # tracing changes the order of parameters
        leaves = [t for t in (*inputs, *named) if t.requires_grad]
        module.found = torch.autograd.grad(result, leaves, dout)
    torch.testing.assert_close(ours.found, torchs.found)


@all_layers
def test_copies_and_pickles(name, args, options, shape, device):
    ours, _ = make_pair(name, args, options, device)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(again) is type(ours)
        assert repr(again) == repr(ours)


def test_embedding_from_pretrained(device):
    weight = randn(9, 4, dtype=torch.float32, device=device)
    layer = nn.Embedding.from_pretrained(weight)
    assert isinstance(layer, nn.Embedding)
    assert not layer.weight.requires_grad
    assert torch.equal(layer(torch.tensor([3, 1], device=device)), weight[[3, 1]])


def test_softmax_without_dim_warns(device):
    with pytest.warns(UserWarning, match="dim") as warned:
        nn.Softmax()(randn(3, 8, dtype=torch.float32, device=device))
    assert warned[0].filename == __file__ or "torch" in warned[0].filename


@pytest.mark.parametrize(
    ("layer", "option"),
    [
        *(("Embedding", option) for option in ({"padding_idx": 0}, {"max_norm": 1.0}, {"sparse": True})),
        ("Embedding", {"scale_grad_by_freq": True}),
        *(("CrossEntropyLoss", option) for option in ({"weight": torch.ones(3)}, {"label_smoothing": 0.1})),
    ],
)
def test_unsupported_options_are_refused(layer, option):
    args = (3, 4) if layer == "Embedding" else ()
    message = f"{layer}: the option {next(iter(option))} is not supported"
    assert_raises(ValueError, message, getattr(nn, layer), *args, **option)


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu"])
@pytest.mark.parametrize("bias", [True, False])
def test_mlp_computes_its_formula(bias, activation, device):
    layer = nn.MLP(8, bias, device=device, dtype=torch.float64, activation=activation)
    names = ["c_fc.weight", "c_fc.bias", "c_proj.weight", "c_proj.bias"]
    assert list(layer.state_dict()) == [n for n in names if bias or not n.endswith("bias")]
    assert layer.c_fc.weight.shape == (32, 8)
    x = randn(2, 3, 8, dtype=torch.float64, device=device, requires_grad=True)
    fc, proj = layer.c_fc, layer.c_proj
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    expected = F.linear(F.gelu(F.linear(x, fc.weight, fc.bias), approximate=approximate), proj.weight, proj.bias)
    assert_same_with_gradients(layer(x), expected, (x, *layer.parameters()))
    assert ("activation='gelu'" in repr(layer)) == (activation == "gelu")
    assert_raises(ValueError, "activation must be 'gelu_tanh' or 'gelu', got 'relu'", nn.MLP, 8, activation="relu")


@pytest.mark.parametrize("bias", [True, False])
def test_causal_self_attention_computes_its_formula(bias, device):
    layer = nn.CausalSelfAttention(8, 2, bias, device=device, dtype=torch.float64)
    names = ["c_attn.weight", "c_attn.bias", "c_proj.weight", "c_proj.bias"]
    assert list(layer.state_dict()) == [n for n in names if bias or not n.endswith("bias")]
    assert "n_head=2" in repr(layer)
    x = randn(3, 5, 8, dtype=torch.float64, device=device, requires_grad=True)
    qkv = F.linear(x, layer.c_attn.weight, layer.c_attn.bias)
    q, k, v = qkv.view(3, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(3, 5, 8)
    expected = F.linear(heads, layer.c_proj.weight, layer.c_proj.bias)
    assert_same_with_gradients(layer(x), expected, (x, *layer.parameters()))
    assert_raises(ValueError, "n_embd must be a multiple of n_head, got 8 and 3", nn.CausalSelfAttention, 8, 3)


def assert_same_with_gradients(out, expected, leaves):
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(expected)
    torch.testing.assert_close(*(torch.autograd.grad(t, leaves, dout) for t in (out, expected)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunks", [[1] * 9, [4, 1, 1, 1, 1, 1], [9], [4, 5], [1, 7, 1], [3, 3, 3]], ids=str)
def test_attention_with_a_cache_equals_attention_of_all_tokens(chunks, dtype, device):
    layer = nn.CausalSelfAttention(8, 2, device=device, dtype=dtype)
    x = randn(3, 9, 8, dtype=dtype, device=device)
    cache = nn.KeyValueCache(9)
    with torch.no_grad():
        out = torch.cat([layer(part, cache) for part in x.split(chunks, 1)], 1)
        torch.testing.assert_close(out, layer(x), **tolerance(dtype))
    assert cache.length == 9


def test_a_cache_refuses_bad_input(device):
    layer = nn.CausalSelfAttention(8, 2, device=device)
    x = randn(3, 9, 8, dtype=torch.float32, device=device)
    cache = nn.KeyValueCache(4)
    assert_raises(ValueError, r"0 \+ 9 tokens are more than its capacity 4", layer, x, cache)
    layer(x[:, :2], cache)
    assert_raises(ValueError, "it holds 3 sequences, got 2", layer, x[:2, 2:4], cache)
    assert_raises(ValueError, r"2 \+ 3 tokens are more than its capacity 4", layer, x[:, 2:5], cache)


def test_dropout_differs_from_torchs_only_in_its_random_numbers(device):
    ours, torchs = (module.Dropout(0.3).to(device) for module in (nn, torch.nn))
    assert repr(ours) == repr(torchs)
    assert inspect.signature(nn.Dropout) == inspect.signature(torch.nn.Dropout)
    x = torch.ones(10_000, device=device)
    out = ours(x)
    assert set(out.unique().tolist()) == set(torchs(x).unique().tolist())
    assert not torch.equal(out, ours(x))
    for layer in (ours.eval(), nn.Dropout(0.0)):
        assert layer(x) is x
    for bad in ({"p": 1.5}, {"inplace": True}):
        assert_raises(ValueError, r"1\.5|the option inplace is not supported", nn.Dropout, **bad)


def test_dropout_of_attention_acts_in_training_only(device):
    layer = nn.CausalSelfAttention(16, 2, device=device, dropout=0.5)
    plain = nn.CausalSelfAttention(16, 2, device=device)
    plain.load_state_dict(layer.state_dict())
    x = randn(3, 9, 16, dtype=torch.float32, device=device)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), plain(x))
    assert "dropout=0.5" in repr(layer)
    assert_raises(ValueError, r"dropout must be from 0 to 1, got 1\.5", nn.CausalSelfAttention, 16, 2, dropout=1.5)
