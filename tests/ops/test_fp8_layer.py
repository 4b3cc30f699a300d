"""A layer with float8 products as one operator, and as one node of autograd's graph: the bits of its parts."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import gptkernels
from gptkernels.models import GPT2, GPT2Config
from gptkernels.models.transformer import Block
from gptkernels.rules import ops
from gptkernels.rules.fp8 import CALLS, new_history
from helpers import by_operators, node_names

B, T, C, HEADS, F, V = 2, 16, 32, 2, 128, 60
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
CONFIG = {"n_layer": 3, "n_embd": C, "n_head": HEADS, "vocab_size": V, "block_size": T, "fp8": True}


def model_of(device, dtype=torch.float32, **changes):
    torch.manual_seed(3)
    model = GPT2(GPT2Config(**CONFIG | changes), device=device, dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def batches(count, device):
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        tokens = torch.randint(V, (B, T + 1), generator=generator).to(device)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(model, device):
    return model(*next(batches(1, device)), return_logits=False)[1]


def nodes(loss):
    """How many blocks are one node."""
    return node_names(loss).count("_FP8LayerBackward")


def train(model, device, steps=3, optimizer=None):
    """Losses, gradients, parameters and histories of some steps, from the same random numbers."""
    torch.manual_seed(7)
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for tokens, targets in batches(steps, device):
        loss = model(tokens, targets, return_logits=False)[1]
        optimizer.zero_grad()
        loss.backward()
        found += [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
        optimizer.step()
    return [*found, *(t.clone() for t in model.state_dict().values())]


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
            continue
        assert ours.dtype == theirs.dtype
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours, theirs)


def compare(model, device, monkeypatch, expected_nodes=3):
    """As one node and by single operators."""
    other = copy.deepcopy(model)
    # A call moves the histories on: the nodes are counted on a copy.
    assert nodes(loss_of(copy.deepcopy(model), device)) == expected_nodes
    found = train(model, device)
    with monkeypatch.context() as patch:
        by_operators(patch)
        assert nodes(loss_of(copy.deepcopy(other), device)) == 0
        expected = train(other, device)
    assert_same(found, expected)


# ---- the node --------------------------------------------------------------------------------------------------------


@all_dtypes
@pytest.mark.parametrize("options", [{}, {"dropout": 0.1}, {"bias": False}], ids=["plain", "dropout", "no biases"])
def test_the_same_bits(options, dtype, device, monkeypatch):
    compare(model_of(device, dtype, **options), device, monkeypatch)


def test_a_size_that_the_kernels_serve(device, monkeypatch):
    """Of GPT-2's width, with more rows than a tile has."""
    model = model_of(device, torch.bfloat16, n_embd=768, n_head=12, n_layer=2)
    compare(model, device, monkeypatch, 2)


def test_recomputed(device, monkeypatch):
    model = model_of(device, torch.bfloat16)
    model.transformer.recompute_blocks = True
    compare(model, device, monkeypatch)


def test_a_copy_and_a_loaded_state_go_on_alike(device):
    """With the histories of the first steps."""
    model = model_of(device, torch.bfloat16)
    train(model, device, 2)
    copied, loaded = copy.deepcopy(model), model_of(device, torch.bfloat16)
    loaded.load_state_dict(model.state_dict())
    expected = train(model, device)
    assert_same(train(copied, device), expected)
    assert_same(train(loaded, device), expected)


def test_accumulated_gradients(device, monkeypatch):
    """Two forward passes before their backward passes, then a second backward pass of each."""
    found = []
    for patched in (False, True):
        model = model_of(device, torch.bfloat16)
        with monkeypatch.context() as patch:
            if patched:
                by_operators(patch)
            losses = [model(*pair, return_logits=False)[1] for pair in batches(2, device)]
            for loss in losses:
                loss.backward(retain_graph=True)
            for loss in losses:
                loss.backward()
        found.append([*losses, *(p.grad for p in model.parameters()), *model.buffers()])
    assert_same(*found)


def test_a_history_is_its_layers(device):
    """Each moves on by a call in each step."""
    model = model_of(device)
    train(model, device, 3)
    for name, history in model.named_buffers():
        assert history[:CALLS].count_nonzero() == 3, name
        assert not history[CALLS:].any(), name


@pytest.mark.parametrize("frozen", ["transformer.h.0", "ln_", "attn", "mlp.c_fc", "bias", "transformer.w"])
def test_frozen_parameters(frozen, device, monkeypatch):
    """A block with a frozen parameter is called; the others stay nodes."""
    model = model_of(device)
    for name, p in model.named_parameters():
        p.requires_grad_(frozen not in name)
    left = {"transformer.h.0": 2, "transformer.w": 3}.get(frozen, 0)
    compare(model, device, monkeypatch, left)


def hook(model):
    model.transformer.h[1].mlp.c_fc.register_forward_hook(lambda module, args, out: 2 * out)


def in_16_bits(model):
    model.transformer.h[1].mlp.c_fc = gptkernels.nn.Linear(C, F, device=model.lm_head.weight.device)


def evaluate(model):
    model.transformer.h[1].attn.c_proj.eval()


def another_buffer(model):
    model.transformer.h[1].attn.c_proj.register_buffer("mask", torch.ones(()))


@pytest.mark.parametrize("change", [hook, in_16_bits, evaluate, another_buffer])
def test_a_changed_block_is_called(change, device, monkeypatch):
    model = model_of(device)
    change(model)
    compare(model, device, monkeypatch, 2)


def test_no_node(device, monkeypatch):
    """In evaluation, without gradients, with the exact GELU, in autocast, and under torch.func."""
    model = model_of(device)
    before = [t.clone() for t in model.buffers()]
    with torch.no_grad():
        assert loss_of(model, device).grad_fn is None
    assert nodes(loss_of(model.eval(), device)) == 0
    assert all(map(torch.equal, model.buffers(), before))
    with torch.autocast(device.type, torch.bfloat16):
        assert nodes(loss_of(model.train(), device)) == 0
    compare(model_of(device, activation="gelu"), device, monkeypatch, 0)


def test_no_second_derivative(device):
    model = model_of(device)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss_of(model, device), list(model.parameters()), create_graph=True)


def test_checkpointed_alone(device):
    """A block in torch's checkpoint, which replaces saved tensors."""
    block = Block(GPT2Config(**CONFIG), device)
    other = copy.deepcopy(block)
    x = torch.randn(B, T, C, device=device, requires_grad=True)
    dout = torch.randn_like(x)
    expected = torch.autograd.grad(block(x), [x, *block.parameters()], dout)
    found = torch.autograd.grad(checkpoint(other, x, use_reentrant=False), [x, *other.parameters()], dout)
    assert_same(found, expected)


def test_step_in_a_cuda_graph(device, monkeypatch):
    """Replays give the bits of eager steps by single operators."""
    if device.type == "cpu":
        pytest.skip("graphs are CUDA's")
    runs = []
    for capture in (False, True):
        with monkeypatch.context() as patch:
            if not capture:
                by_operators(patch)
            model = model_of(device, torch.bfloat16)
            optimizer = gptkernels.optim.AdamW(model.parameters(), lr=3e-3, master_weights=True)
            step = gptkernels.graphed_step(
                lambda tokens, targets, model=model: model(tokens, targets, return_logits=False)[1],
                optimizer,
                capture=capture,
            )
            losses = [step(pair).loss.item() for pair in batches(10, device)]
        runs.append((losses, [t.clone() for t in model.state_dict().values()]))
    assert runs[0][0] == runs[1][0]
    assert_same(runs[1][1], runs[0][1])


# ---- the operators ---------------------------------------------------------------------------------------------------


def arguments(dtype, device, values=True, biases=True):
    """Of the forward, up to the options."""
    torch.manual_seed(3)

    def tensor(*shape, given=True):
        return torch.randn(shape).to(device, dtype) if given else None

    return (
        *(tensor(B, T, C), tensor(B, T, C, given=values), tensor(C, given=values and biases)),
        *(tensor(C), tensor(C, given=biases)),
        *(tensor(3 * C, C), tensor(3 * C, given=biases), tensor(C, C), tensor(C, given=biases)),
        *(tensor(C), tensor(C, given=biases)),
        *(tensor(F, C), tensor(F, given=biases), tensor(C, F)),
        *([new_history(device) for _ in range(4)] for _ in range(2)),
    )


OPTIONS = HEADS, None, 1e-5, 1e-6


def backward_arguments(args, outputs, mask, adds_past=True):
    _, sum_1, sum_2, *saved = outputs
    stream, values = args[:2]
    dout, dsum = torch.randn_like(sum_2), torch.randn_like(sum_2)
    sum_1 = stream if values is None else sum_1
    return dout, dsum, sum_1, sum_2, saved, args[3], args[9], args[15], HEADS, None, adds_past, mask


# opcheck's that do not multiply an op's inputs: torch has no such product of float8 numbers.
WITHOUT_PRODUCTS = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"


@pytest.mark.parametrize("values", [True, False])
def test_opcheck(values, device):
    args = arguments(torch.bfloat16, device, values)  # float32 is test_every_op_passes'
    torch.library.opcheck(ops.fp8_layer, (*args, *OPTIONS))
    outputs = ops.fp8_layer(*args, *OPTIONS)
    for mask in ([True] * 14, [False, True] * 7, [False] * 14):
        for adds_past in {True, values}:
            given = backward_arguments(args, outputs, mask, adds_past)
            torch.library.opcheck(ops.fp8_layer_backward, given, test_utils=WITHOUT_PRODUCTS)


def test_flops(device):
    """Those of the layer without float8 numbers."""
    args = arguments(torch.float32, device)
    with FlopCounterMode(display=False) as counter:
        outputs = ops.fp8_layer(*args, *OPTIONS)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        ops.layer(*args[:14], *OPTIONS, "tanh")
    assert forward == counter.get_total_flops() > 0
    with FlopCounterMode(display=False) as counter:
        ops.fp8_layer_backward(*backward_arguments(args, outputs, [True] * 14))
    products = 2 * B * T * C * (3 * C + C + 2 * F)
    attention = forward - products
    assert counter.get_total_flops() == 2 * products + 5 * attention // 2


def test_bad_input(device):
    args = arguments(torch.float32, device)
    few = [new_history(device)[:4]] * 4
    for call, message in [
        (lambda: ops.fp8_layer(*args[:14], args[14][:3], args[15], *OPTIONS), "histories must be 4 tensors, got 3"),
        (lambda: ops.fp8_layer(*args[:14], few, args[15], *OPTIONS), r"histories must have shape \(18\)"),
        (lambda: ops.fp8_layer(*args[:14], args[14], few, *OPTIONS), r"dout_histories must have shape \(18\)"),
        (lambda: ops.fp8_layer(args[0], None, *args[2:], *OPTIONS), "values_bias and values_dropout_p are of values"),
        (lambda: ops.fp8_layer(*args[:5], args[7], *args[6:], *OPTIONS), r"qkv_bias must have shape \(32\)"),
        (lambda: ops.fp8_layer(*args[:11], args[11][:40], *args[12:], *OPTIONS), "multiple of 16"),
        (lambda: ops.fp8_layer(args[0].requires_grad_(), *args[1:], *OPTIONS), "fp8_layer has no derivative"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call()
    with torch.no_grad():
        outputs = ops.fp8_layer(*args, *OPTIONS)
        given = backward_arguments(args, outputs, [True] * 14)
        with pytest.raises(RuntimeError, match="saved must be the 24 tensors of the forward, got 3"):
            ops.fp8_layer_backward(*given[:4], given[4][:3], *given[5:])
