"""Tests that a transformer block, run as one autograd node, gives the bits of its operators called one by one."""

import contextlib
import copy
import functools
import types

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gptkernels
import small_models
from gptkernels.models import GPT2Config
from gptkernels.models.transformer import Block
from helpers import assert_raises, by_operators, kept_sizes, node_names
from small_models import make_batch

T, C = small_models.SIZES["block_size"], small_models.SIZES["n_embd"]
make_model = functools.partial(small_models.make_model, noise=0.05, n_layer=3)
make_block = functools.partial(Block, GPT2Config(**small_models.SIZES))
FP8 = {"fp8": True}
OPTIONS = {
    "plain": {},
    "dropout": {"dropout": 0.1},
    "without biases": {"bias": False},
    "exact GELU": {"activation": "gelu"},
    "float8": FP8,
    "float8 with dropout": {**FP8, "dropout": 0.1},
    "float8 without biases": {**FP8, "bias": False},
}
WITHOUT_FP8 = [name for name in OPTIONS if not name.startswith("float8")]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
both_precisions = pytest.mark.parametrize("options", [{}, FP8], ids=["plain", "float8"])


def compute_loss(model, device, seed=5):
    return model(*make_batch(device, seed=seed), return_logits=False)[1]


def count_nodes(loss):
    return node_names(loss).count("_LayerBackward")


def train(model, device, autocast=None):
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for seed in range(3):
        with torch.autocast(device.type, autocast) if autocast else contextlib.nullcontext():
            loss = compute_loss(model, device, seed)
        optimizer.zero_grad()
        loss.backward()
        found += [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
        optimizer.step()
    return [*found, *(t.clone() for t in model.state_dict().values())]


def assert_same(found, expected):
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if ours is None or theirs is None:
            assert ours is theirs, i
            continue
        assert ours.dtype == theirs.dtype, i
        assert ours.stride() == theirs.stride(), i
        assert torch.equal(ours, theirs), i


def compare(model, device, monkeypatch, autocast=None, expected_nodes=None):
    other = copy.deepcopy(model)
    if expected_nodes is not None:
        # A forward pass updates the float8 histories, so the nodes are counted on a copy of the model.
        assert count_nodes(compute_loss(copy.deepcopy(model), device)) == expected_nodes
    found = train(model, device, autocast)
    with monkeypatch.context() as patch:
        by_operators(patch)
        assert count_nodes(compute_loss(copy.deepcopy(other), device)) == 0
        expected = train(other, device, autocast)
    assert_same(found, expected)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits(options, dtype, device, monkeypatch):
    if dtype == torch.float64 and options not in WITHOUT_FP8:
        pytest.skip("float8 layers do not support float64")
    compare(make_model(device, dtype, **OPTIONS[options]), device, monkeypatch, expected_nodes=3)


@pytest.mark.parametrize("options", WITHOUT_FP8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_same_bits_in_autocast(options, dtype, device, monkeypatch):
    compare(make_model(device, **OPTIONS[options]), device, monkeypatch, dtype)


def test_the_same_bits_with_float8_kernels_of_several_tiles(device, monkeypatch):
    model = make_model(device, torch.bfloat16, n_embd=768, n_head=12, n_layer=2, **FP8)
    compare(model, device, monkeypatch, expected_nodes=2)


@pytest.mark.parametrize("options", OPTIONS)
def test_recomputed_blocks_have_the_same_bits(options, device, monkeypatch):
    model = make_model(device, torch.float32 if options in WITHOUT_FP8 else torch.bfloat16, **OPTIONS[options])
    model.transformer.recompute_blocks = True
    compare(model, device, monkeypatch)


@pytest.mark.parametrize("options", ["plain", "exact GELU"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_recomputed_gelus(options, autocast, device, monkeypatch):
    """On the CPU, recomputation changes no bit of the results."""
    model = make_model(device, **OPTIONS[options])
    other, saved = copy.deepcopy(model), [count_saved_bytes(model, autocast)]
    for block in model.transformer.h:
        block.mlp.recompute_gelu = True
    saved.append(count_saved_bytes(model, autocast))
    low = autocast or torch.float32
    assert saved[0] - saved[1] == 3 * 2 * T * 4 * C * low.itemsize
    if device.type == "cpu":
        assert_same(train(copy.deepcopy(model), device, autocast), train(other, device, autocast))
    compare(model, device, monkeypatch, autocast)


def count_saved_bytes(model, autocast):
    device = next(model.parameters()).device
    with kept_sizes() as sizes, torch.autocast(device.type, autocast, enabled=autocast is not None):
        _ = compute_loss(model, device)
    return sum(sizes.values())


@pytest.mark.parametrize(
    "frozen",
    ["transformer.h.0", "transformer.h.1", "ln_", "attn", "mlp", "mlp.c_fc", "bias", "weight", "transformer.w"],
)
@both_precisions
def test_frozen_parameters(options, frozen, device, monkeypatch):
    """A block with float8 matmuls is one autograd node if and only if none of its parameters is frozen."""
    model = make_model(device, **options)
    for name, p in model.named_parameters():
        p.requires_grad_(frozen not in name)
    left = {"transformer.h.0": 2, "transformer.h.1": 2, "transformer.w": 3}.get(frozen, 0) if options else None
    compare(model, device, monkeypatch, expected_nodes=left)


def test_a_block_is_one_node(device):
    model = make_model(device)
    assert count_nodes(compute_loss(model, device)) == 3
    assert count_nodes(model(*make_batch(device))[1]) == 3
    x = torch.randn(2, T, C, device=device, requires_grad=True)
    assert count_nodes(make_block(device)(x)) == 1


def add_hook(model):
    model.transformer.h[1].mlp.c_fc.register_forward_hook(lambda module, args, out: 2 * out)


def replace_layer(model):
    model.transformer.h[1].attn.c_proj = torch.nn.Linear(C, C, device=model.lm_head.weight.device)


def replace_forward(model):
    def doubled(norm, x):
        return 2 * type(norm).forward(norm, x)

    norm = model.transformer.h[1].ln_1
    norm.forward = types.MethodType(doubled, norm)


def use_16_bits(model):
    model.transformer.h[1].mlp.c_fc = gptkernels.nn.Linear(C, 4 * C, device=model.lm_head.weight.device)


def set_evaluation(model):
    model.transformer.h[1].attn.c_proj.eval()


def add_buffer(model):
    model.transformer.h[1].attn.c_proj.register_buffer("mask", torch.ones(()))


@pytest.mark.parametrize(
    ("options", "change"),
    [
        *(({}, change) for change in (add_hook, replace_layer, replace_forward)),
        *((FP8, change) for change in (add_hook, use_16_bits, set_evaluation, add_buffer)),
    ],
)
def test_a_changed_block_is_called(options, change, device, monkeypatch):
    model = make_model(device, **options)
    before = compute_loss(copy.deepcopy(model), device)
    change(model)
    if change not in (set_evaluation, add_buffer):
        assert not torch.equal(compute_loss(copy.deepcopy(model), device), before)
    compare(model, device, monkeypatch, expected_nodes=2)


def test_a_changed_dropout_is_called(device):
    model = make_model(device, dropout=0.5)
    seen = []
    model.transformer.h[0].resid_dropout.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    assert count_nodes(compute_loss(model, device)) == 2
    assert len(seen) == 2  # after attention and after the MLP


def test_without_gradients_there_is_no_node(device):
    model = make_model(device)
    with torch.no_grad():
        assert compute_loss(model, device).grad_fn is None
    hidden = model.transformer.h[0](torch.randn(2, T, C, device=device))
    assert hidden.requires_grad


def test_some_calls_with_float8_matmuls_have_no_node(device, monkeypatch):
    model = make_model(device, **FP8)
    before = [t.clone() for t in model.buffers()]
    with torch.no_grad():
        assert compute_loss(model, device).grad_fn is None
    assert count_nodes(compute_loss(model.eval(), device)) == 0
    assert all(map(torch.equal, model.buffers(), before))
    with torch.autocast(device.type, torch.bfloat16):
        assert count_nodes(compute_loss(model.train(), device)) == 0
    compare(make_model(device, activation="gelu", **FP8), device, monkeypatch, expected_nodes=0)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_retained_graph_can_be_used_again(create_graph, device):
    model = make_model(device, torch.float64)
    parameters = list(model.parameters())
    loss = compute_loss(model, device)
    first = torch.autograd.grad(loss, parameters, retain_graph=True, create_graph=create_graph)
    torch.testing.assert_close([t.detach() for t in first], torch.autograd.grad(loss, parameters))
    assert_raises(RuntimeError, "second time", torch.autograd.grad, loss, parameters)


def test_a_second_derivative(device, monkeypatch):
    model = make_model(device, torch.float64)
    parameters = list(model.parameters())

    def differentiate_penalty():
        gradients = torch.autograd.grad(compute_loss(model, device), parameters, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), parameters)

    found = differentiate_penalty()
    by_operators(monkeypatch)
    torch.testing.assert_close(found, differentiate_penalty())


def test_a_modified_parameter_is_detected(device):
    model = make_model(device)
    loss = compute_loss(model, device)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight.mul_(2)
    assert_raises(RuntimeError, "modified by an inplace operation", loss.backward)


def test_float8_matmuls_refuse_a_second_derivative(device):
    model = make_model(device, **FP8)
    call = compute_loss(model, device), list(model.parameters())
    assert_raises(RuntimeError, "no second derivative", torch.autograd.grad, *call, create_graph=True)


@both_precisions
def test_a_block_in_torchs_checkpoint_has_the_same_bits(options, device):
    block = Block(GPT2Config(**small_models.SIZES | options), device)
    other = copy.deepcopy(block)
    x = torch.randn(2, T, C, device=device, requires_grad=True)
    dout = torch.randn_like(x)
    expected = torch.autograd.grad(block(x), [x, *block.parameters()], dout)
    found = torch.autograd.grad(checkpoint(other, x, use_reentrant=False), [x, *other.parameters()], dout)
    assert_same(found, expected)


def test_the_norm_refuses_another_width(device):
    assert_raises(ValueError, "normalized_shape", make_block(device), torch.randn(2, T, 48, device=device))


def test_accumulated_float8_gradients_have_the_same_bits(device, monkeypatch):
    found = []
    for patched in (False, True):
        model = make_model(device, torch.bfloat16, **FP8)
        if patched:
            by_operators(monkeypatch)
        losses = [compute_loss(model, device, seed) for seed in range(2)]
        for loss in losses:
            loss.backward(retain_graph=True)
        for loss in losses:
            loss.backward()
        found.append([*losses, *(p.grad for p in model.parameters()), *model.buffers()])
    assert_same(*found)
