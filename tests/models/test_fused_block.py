"""A block as one node of autograd's graph: the bits of the single operators, and whatever may be done to a module."""

import contextlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gptkernels.models import GPT2, GPT2Config
from gptkernels.models.transformer import Block
from helpers import by_operators, kept_sizes, node_names

V, T = 60, 16
CONFIG = {"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": V, "block_size": T}
OPTIONS = {
    "plain": {},
    "dropout": {"dropout": 0.1},
    "without biases": {"bias": False},
    "exact GELU": {"activation": "gelu"},
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def model_of(device, dtype=torch.float32, **changes):
    torch.manual_seed(3)
    model = GPT2(GPT2Config(**CONFIG, **changes), device=device, dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def batch(device):
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(V, (2, T + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def nodes(loss):
    """How many blocks are one node."""
    return node_names(loss).count("_LayerBackward")


def step(model, autocast=None):
    """The loss and every gradient by its name, from the same random numbers."""
    device = next(model.parameters()).device
    torch.manual_seed(7)
    with torch.autocast(device.type, autocast) if autocast else contextlib.nullcontext():
        loss = model(*batch(device), return_logits=False)[1]
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def compare(model, monkeypatch, autocast=None):
    """As one node and by single operators."""
    found = step(model, autocast)
    with monkeypatch.context() as patch:
        by_operators(patch)
        expected = step(model, autocast)
    for name in expected:
        ours, theirs = found[name], expected[name]
        if ours is None or theirs is None:
            assert ours is theirs, name
            continue
        assert ours.dtype == theirs.dtype, name
        assert ours.stride() == theirs.stride(), name
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits(options, dtype, device, monkeypatch):
    compare(model_of(device, dtype, **OPTIONS[options]), monkeypatch)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_same_bits_in_autocast(options, dtype, device, monkeypatch):
    compare(model_of(device, **OPTIONS[options]), monkeypatch, dtype)


@pytest.mark.parametrize("options", OPTIONS)
def test_recomputed(options, device, monkeypatch):
    model = model_of(device, **OPTIONS[options])
    model.transformer.recompute_blocks = True
    compare(model, monkeypatch)


@pytest.mark.parametrize("options", ["plain", "exact GELU"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_gelus_that_are_computed_again(options, autocast, device, monkeypatch):
    """A block keeps a quarter less; on the CPU all bits are those of keeping everything."""
    model = model_of(device, **OPTIONS[options])
    plain, kept = step(model, autocast), [kept_bytes(model, autocast)]
    for block in model.transformer.h:
        block.mlp.recompute_gelu = True
    compare(model, monkeypatch, autocast)
    kept.append(kept_bytes(model, autocast))
    low = autocast or torch.float32
    assert kept[0] - kept[1] == 3 * 2 * T * 4 * 32 * low.itemsize
    if device.type == "cpu":
        again = step(model, autocast)
        assert all(torch.equal(plain[name], again[name]) for name in plain)


def kept_bytes(model, autocast):
    """What the graph of a loss keeps."""
    device = next(model.parameters()).device
    with kept_sizes() as sizes, torch.autocast(device.type, autocast, enabled=autocast is not None):
        _ = model(*batch(device), return_logits=False)[1]
    return sum(sizes.values())


@pytest.mark.parametrize(
    "frozen", ["transformer.h.0", "transformer.h.1", "ln_", "attn", "mlp", "bias", "weight", "transformer.w"]
)
def test_frozen_parameters(frozen, device, monkeypatch):
    model = model_of(device)
    for name, p in model.named_parameters():
        p.requires_grad_(frozen not in name)
    compare(model, monkeypatch)


def test_a_block_is_one_node(device):
    model = model_of(device)
    assert nodes(model(*batch(device), return_logits=False)[1]) == 3
    assert nodes(model(*batch(device))[1]) == 3
    block = Block(GPT2Config(**CONFIG), device)
    x = torch.randn(2, T, 32, device=device, requires_grad=True)
    assert nodes(block(x)) == 1


def hook(model):
    model.transformer.h[1].mlp.c_fc.register_forward_hook(lambda module, args, out: 2 * out)


def replace(model):
    model.transformer.h[1].attn.c_proj = torch.nn.Linear(32, 32, device=model.lm_head.weight.device)


def replace_forward(model):
    norm = model.transformer.h[1].ln_1
    norm.forward = lambda x: 2 * type(norm).forward(norm, x)


@pytest.mark.parametrize(("change", "left"), [(hook, 2), (replace, 2), (replace_forward, 2)])
def test_a_changed_block_is_called(change, left, device, monkeypatch):
    """The others stay nodes; the change has an effect."""
    model = model_of(device)
    before = step(model)["loss"]
    change(model)
    loss = model(*batch(device), return_logits=False)[1]
    assert nodes(loss) == left
    assert not torch.equal(loss.detach(), before)
    compare(model, monkeypatch)


def test_a_changed_dropout_is_called(device):
    """A block's last dropout belongs to the next block's node."""
    model = model_of(device, dropout=0.5)
    seen = []
    model.transformer.h[0].resid_dropout.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    assert nodes(model(*batch(device), return_logits=False)[1]) == 1
    assert len(seen) == 2


def test_no_node(device):
    """Where nothing records gradients, and for the modules that one was made of."""
    model = model_of(device)
    with torch.no_grad():
        assert model(*batch(device))[1].grad_fn is None
    hidden = model.transformer.h[0](torch.randn(2, T, 32, device=device))
    assert hidden.requires_grad


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_graph_that_is_kept(create_graph, device):
    """A second backward pass gives the same; without ``retain_graph`` it is refused."""
    model = model_of(device, torch.float64)
    parameters = list(model.parameters())
    loss = model(*batch(device), return_logits=False)[1]
    first = torch.autograd.grad(loss, parameters, retain_graph=True, create_graph=create_graph)
    second = torch.autograd.grad(loss, parameters)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a.detach(), b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, parameters)


def test_a_second_derivative(device, monkeypatch):
    """Of a penalty on the gradient's norm, by a node and by single operators."""

    def penalty(model):
        loss = model(*batch(device), return_logits=False)[1]
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), list(model.parameters()))

    model = model_of(device, torch.float64)
    found = penalty(model)
    with monkeypatch.context() as patch:
        by_operators(patch)
        expected = penalty(model)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_modified_parameter_is_detected(device):
    model = model_of(device)
    loss = model(*batch(device), return_logits=False)[1]
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_checkpointed_alone(device):
    """A block in torch's checkpoint, which replaces saved tensors."""
    block = Block(GPT2Config(**CONFIG), device)
    x = torch.randn(2, T, 32, device=device, requires_grad=True)
    dout = torch.randn_like(x)
    expected = torch.autograd.grad(block(x), [x, *block.parameters()], dout)
    found = torch.autograd.grad(checkpoint(block, x, use_reentrant=False), [x, *block.parameters()], dout)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_errors_are_the_modules(device):
    """A stream of another width is refused by the norm, by its name."""
    block = Block(GPT2Config(**CONFIG), device)
    with pytest.raises(ValueError, match="normalized_shape"):
        block(torch.randn(2, T, 48, device=device))
