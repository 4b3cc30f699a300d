"""Tests that GPT2 calls our kernels, matches the reference model and refuses bad input."""

import contextlib
import copy
import dataclasses
import functools
import math
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

import small_models
from gptkernels import functional
from gptkernels.models import GPT2, GPT2Config
from gptkernels.models.recompute import uses_dropout
from gptkernels.models.transformer import Block
from gptkernels.nn import KeyValueCache
from gptkernels.optim import AdamW
from gptkernels.rules import ops
from helpers import CountCalls, all_dtypes, assert_raises, kept_sizes, tolerance

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"n_layer": 3, "vocab_size": 65}
CONFIG = GPT2Config(**small_models.SIZES | SIZES)
make_pair = functools.partial(small_models.make_pair, **SIZES)
make_batch = functools.partial(small_models.make_batch, vocab_size=65)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


def assert_same(ours, theirs, exact, dtype, name):
    """Assert that a result matches the reference. In 16 bits, the norm of the result's error may be 1.5 times the norm
    of the reference's error, plus epsilon times the norm of the exact result.
    """
    if dtype in (torch.float64, torch.float32):
        torch.testing.assert_close(ours, theirs, **tolerance(dtype), msg=lambda text: f"{name}: {text}")
        return
    error, allowed = ((t.double() - exact).norm() for t in (ours, theirs))
    assert error <= 1.5 * allowed + torch.finfo(dtype).eps * exact.norm(), f"{name}: {error}, reference {allowed}"


def gradients_of(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()))


def test_the_configuration_pads_the_vocabulary():
    assert GPT2Config().padded_vocab_size == 50304
    assert GPT2Config(vocab_size=256).padded_vocab_size == 256
    assert GPT2Config(vocab_size=257, padded_vocab_size=257).padded_vocab_size == 257
    assert GPT2Config(**dataclasses.asdict(CONFIG)) == CONFIG
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.n_layer = 4


@pytest.mark.parametrize("token", [65, 127])
def test_tokens_of_the_padding_are_refused(token, device):
    if device.type != "cpu":
        pytest.skip("on CUDA a device-side assertion ends the process's context; see the next test")
    assert (CONFIG.vocab_size, CONFIG.padded_vocab_size) == (65, 128)
    model = GPT2(CONFIG)
    tokens, targets = make_batch()
    bad = tokens.clone()
    bad[1, 3] = token
    message = f"token {token} at position .* is outside the vocabulary of 65"
    assert_raises(RuntimeError, message, model, bad)
    assert_raises(RuntimeError, message, model, bad, targets, return_logits=False)
    assert_raises(RuntimeError, message, model.generate, bad, 2)
    assert_raises(RuntimeError, message, model.transformer.wte, bad)
    for return_logits in (True, False):
        message = f"target {token} at row 19 is outside the vocabulary of 65"
        assert_raises(RuntimeError, message, model, tokens, bad, return_logits=return_logits)


@pytest.mark.parametrize("call", ["model(bad)", "model(good, bad)", "model(good, bad, return_logits=False)"])
def test_tokens_of_the_padding_are_refused_on_cuda(call, device):
    if device.type != "cuda":
        pytest.skip("CUDA only")
    script = f"""
import torch
from gptkernels.models import GPT2, GPT2Config
model = GPT2(GPT2Config(block_size=16, vocab_size=65, n_layer=1, n_head=2, n_embd=32), "cuda")
good = torch.zeros(2, 16, dtype=torch.int64, device="cuda")
bad = good.clone()
bad[1, 3] = 65
try:
    {call}
    torch.cuda.synchronize()
except Exception as error:
    print(error)
    raise SystemExit(7)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    assert "outside the vocabulary of 65" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200)],
)
def test_presets_have_gpt2s_numbers_of_parameters(name, parameters):
    model = GPT2(GPT2Config.preset(name), device="meta")
    assert model.num_parameters() == parameters
    assert GPT2Config.preset(name, block_size=8).block_size == 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_embd": 10, "n_head": 3}, "n_embd must be a multiple of n_head, got 10 and 3"),
        ({"dropout": 1.5}, r"dropout must be from 0 to 1, got 1\.5"),
        ({"dropout": -0.1}, r"dropout must be from 0 to 1, got -0\.1"),
        ({"dropout": math.nan}, "dropout must be from 0 to 1"),
        ({"n_layer": 0}, "n_layer must be at least 1, got 0"),
        ({"activation": "relu"}, "activation must be one of gelu_tanh, gelu, got 'relu'"),
        ({"vocab_size": -5}, "vocab_size must be at least 1, got -5"),
        ({"vocab_size": 100, "padded_vocab_size": 99}, "padded_vocab_size must be at least vocab_size 100, got 99"),
    ],
)
def test_bad_configurations_are_refused(fields, message):
    assert_raises(ValueError, message, GPT2Config, **fields)
    assert_raises(ValueError, "no preset 'gpt3'; there are gpt2,", GPT2Config.preset, "gpt3")


def test_flops_per_token():
    model = GPT2(CONFIG)
    matrices = sum(p.numel() for n, p in model.named_parameters() if "wpe" not in n) - 63 * 32
    assert model.flops_per_token(10) == 6 * matrices + 12 * 3 * 32 * 10


@pytest.mark.parametrize("bias", [True, False])
def test_parameters_have_nanogpts_names_and_shapes(bias):
    model, reference = make_pair(bias=bias)
    assert list(model.state_dict()) == list(reference.state_dict())
    assert [p.shape for p in model.parameters()] == [p.shape for p in reference.parameters()]
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.transformer.h[0].attn.c_attn.weight.shape == (96, 32)


def test_initial_weights_have_gpt2s_deviations(device):
    torch.manual_seed(0)
    model = GPT2(dataclasses.replace(CONFIG, n_embd=128), device)
    torch.manual_seed(1)
    model.reset_parameters()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if name == "transformer.wte.weight":
            assert not values[65:].any()
            values = values[:65]
        if name.endswith(".bias"):
            assert not values.any()
        elif parameter.dim() == 1:
            assert values.eq(1).all()
        else:
            std = 0.02 / math.sqrt(6) if name.endswith("c_proj.weight") else 0.02
            assert values.std().item() == pytest.approx(std, rel=0.05)
            assert abs(values.mean().item()) < 3 * std / math.sqrt(values.numel()) + 1e-4


@all_dtypes
def test_a_seed_gives_the_same_weights_on_every_device(dtype, device):
    """The weights of all dtypes are the same float64 numbers, rounded once to float32 and then to 16 bits."""
    states = []
    for wanted in (("cpu", torch.float64), (device, dtype)):
        torch.manual_seed(5)
        states.append(GPT2(CONFIG, *wanted).state_dict())
        state = torch.random.get_rng_state()
        torch.manual_seed(5)
        torch.randint(2**63 - 1, ())
        assert torch.equal(torch.random.get_rng_state(), state)  # one number was drawn
    for expected, found in zip(*(s.values() for s in states), strict=True):
        assert torch.equal(found.cpu(), expected if dtype == torch.float64 else expected.float().to(dtype))


def test_the_size_of_a_model_changes_no_matrix_of_equal_width():
    """A longer model begins with the matrices of a shorter one, except for the scale of the residual projections."""
    states = []
    for layers in (1, 3):
        torch.manual_seed(5)
        states.append(GPT2(dataclasses.replace(CONFIG, n_layer=layers)).state_dict())
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]) != name.endswith("c_proj.weight")


def test_meta_and_fake_models_draw_no_weights():
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    assert all(p.is_meta for p in GPT2(CONFIG, "meta").parameters())
    assert torch.equal(torch.random.get_rng_state(), state)
    with FakeTensorMode():
        assert all(isinstance(p, FakeTensor) for p in GPT2(CONFIG).parameters())


@pytest.mark.parametrize("rows", [65, 70, 128, 200])
@pytest.mark.parametrize("head", [True, False])
def test_a_state_with_any_padding_can_be_loaded(rows, head):
    model, _ = make_pair()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    wte = torch.full((rows, 32), 7.0, dtype=torch.float64)
    wte[:65] = state["transformer.wte.weight"][:65]
    state["transformer.wte.weight"] = wte
    state["lm_head.weight"] = wte
    if not head:
        del state["lm_head.weight"]
    again = GPT2(CONFIG, dtype=torch.float64)
    before = set(state)
    again.load_state_dict(state)
    assert set(state) == before
    assert again.lm_head.weight is again.transformer.wte.weight
    assert torch.equal(again.lm_head.weight[:65], wte[:65])
    assert rows == 128 or not again.lm_head.weight[65:].any()
    tokens, targets = make_batch()
    assert torch.equal(again(tokens, targets)[1], model(tokens, targets)[1])


def test_a_state_with_a_smaller_vocabulary_is_refused():
    state = GPT2(dataclasses.replace(CONFIG, vocab_size=64, padded_vocab_size=64)).state_dict()
    assert_raises(RuntimeError, r"size mismatch for transformer.wte.weight", GPT2(CONFIG).load_state_dict, state)


def test_a_submodule_loads_a_state_without_a_head():
    outer = torch.nn.ModuleDict({"model": GPT2(CONFIG)})
    state = outer.state_dict()
    state["model.transformer.wte.weight"] = state["model.lm_head.weight"][:65]
    del state["model.lm_head.weight"]
    outer.load_state_dict(state)


@pytest.mark.parametrize("fill", ["to_empty", "load_state_dict"])
@pytest.mark.parametrize("nested", [False, True])
def test_models_made_on_meta_stay_tied(fill, nested, tmp_path, device):
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, fp8=True)
    model, state = GPT2(config, "meta"), GPT2(config, device).state_dict()
    outer = torch.nn.ModuleDict({"model": model}) if nested else model
    if fill == "to_empty":
        outer.to_empty(device=device)
        for buffer in model.buffers():
            buffer.fill_(-1)  # as uninitialised memory may be
        torch.manual_seed(0)
        model.reset_parameters()
    else:
        outer.load_state_dict({f"model.{name}" if nested else name: t for name, t in state.items()}, assign=True)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert len([*model.parameters()]) == len([*GPT2(config, "meta").parameters()])
    assert all(p.requires_grad for p in model.parameters())
    assert not any(buffer.any() for buffer in model.buffers())
    model(*make_batch(device))[1].backward()
    AdamW(model.parameters(), lr=0.1).step()
    model.save_checkpoint(tmp_path / "model.safetensors")
    again = GPT2.from_checkpoint(tmp_path / "model.safetensors", device)
    assert torch.equal(again.lm_head.weight[:65], model.transformer.wte.weight[:65])


def test_an_untied_head_stays_untied(device):
    model = GPT2(CONFIG, "meta")
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    model.to_empty(device=device)
    assert model.lm_head.weight is not model.transformer.wte.weight
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    assert model.lm_head.weight is not model.transformer.wte.weight


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_checkpoint_restores_the_model(suffix, tmp_path, device):
    model, _ = make_pair(device, torch.float32)
    tokens, targets = make_batch(device)
    path = tmp_path / f"model{suffix}"
    model.save_checkpoint(path)
    again = GPT2.from_checkpoint(path, device)
    assert again.config == model.config
    assert next(again.parameters()).device == next(model.parameters()).device
    assert torch.equal(again(tokens, targets)[1], model(tokens, targets)[1])  # Only padding is not in the file.
    assert next(GPT2.from_checkpoint(path, dtype=torch.bfloat16).parameters()).dtype == torch.bfloat16


@contextlib.contextmanager
def record_numbers(monkeypatch):
    drawn, draw = [], functional._dropout_numbers

    def note(p, like):
        drawn.append(draw(p, like))
        return drawn[-1]

    with monkeypatch.context() as patch:
        patch.setattr(functional, "_dropout_numbers", note)
        yield drawn


def drop_out(reference, drawn, p):
    """Make the reference apply dropout where nanoGPT does, with our masks. Return the unused pairs (seed, offset)."""
    drawn = iter(drawn)

    def attention(module, args, out):
        return out * ops.attention_dropout_mask(*out.shape, p, *next(drawn)) / (1 - p)

    def dense(x):
        return x * ops.dropout_mask(x.numel(), p, *next(drawn)).view(x.shape) / (1 - p)

    blocks = reference.transformer["h"]
    blocks[0].register_forward_pre_hook(lambda module, args: (dense(args[0]),))
    for block in blocks:
        block.attn.probabilities.register_forward_hook(attention)
        for layer in (block.attn, block.mlp):
            layer.register_forward_hook(lambda module, args, out: dense(out))
    return drawn


@DTYPES
@pytest.mark.parametrize("changes", [{}, {"bias": False}, {"activation": "gelu"}, {"dropout": 0.2}], ids=str)
@pytest.mark.parametrize("return_logits", [True, False])
def test_outputs_and_gradients_match_the_reference(return_logits, changes, dtype, device, monkeypatch):
    ours, reference = make_pair(device, dtype, **changes)
    exact = copy.deepcopy(reference).double()
    tokens, targets = make_batch(device)
    targets[0, 3:6] = -100
    with record_numbers(monkeypatch) as drawn:
        logits, loss = ours(tokens, targets, return_logits=return_logits)
    if "dropout" in changes:
        assert len(drawn) == 1 + 3 * CONFIG.n_layer
        unused = [drop_out(model, drawn, changes["dropout"]) for model in (reference, exact)]
    (wanted, wanted_loss), (exact_logits, exact_loss) = reference(tokens, targets), exact(tokens, targets)
    if "dropout" in changes:
        assert not any(map(list, unused))
    elif return_logits:
        assert_same(ours(tokens)[0], wanted, exact_logits, dtype, "logits without targets")
    if return_logits:
        assert logits.shape == (2, 16, 65)
        assert_same(logits, wanted, exact_logits, dtype, "logits")
    else:
        assert logits is None
    assert ours(tokens)[1] is None
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_same(loss.to(dtype), wanted_loss, exact_loss, dtype, "loss")
    for result in (loss, wanted_loss, exact_loss):
        result.backward()
    for (name, a), b, c in zip(ours.named_parameters(), reference.parameters(), exact.parameters(), strict=True):
        assert a.grad.dtype == dtype
        assert_same(a.grad, b.grad, c.grad, dtype, f"gradient of {name}")
    assert not ours.lm_head.weight.grad[65:].any()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("return_logits", [True, False])
def test_meta_tensors(return_logits, compiled):
    model = GPT2(CONFIG, "meta")
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    logits, loss = call(*make_batch("meta"), return_logits=return_logits)
    assert loss.is_meta
    assert logits is None or logits.shape == (2, 16, 65)
    gradients = torch.autograd.grad(loss, [*model.parameters()], create_graph=not compiled)
    if not compiled:
        sum(gradient.square().sum() for gradient in gradients).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
    assert [g.shape for g in gradients] == [p.shape for p in model.parameters()]


def test_logits_and_loss_are_differentiable_together(device):
    found = []
    for model in make_pair(device):
        logits, loss = model(*make_batch(device))
        found.append(gradients_of(loss + logits.square().mean(), model))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 0), (0, 4)])
def test_short_and_empty_sequences(shape, device):
    ours, reference = make_pair(device)
    tokens, _ = make_batch(device, *shape)
    for given in (tokens, tokens.int()):
        torch.testing.assert_close(ours(given)[0], reference(tokens)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_twenty_steps_of_training_match_the_reference(dtype, device):
    ours, reference = make_pair(device, dtype)
    batches = [make_batch(device, 4, seed=i) for i in range(4)]

    def curve(model, optimizer):
        losses = []
        for i in range(20):
            optimizer.zero_grad()
            _, loss = model(*batches[i % 4])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    found = curve(ours, AdamW(ours.parameters(), lr=3e-3))
    wanted = curve(reference, torch.optim.AdamW(reference.parameters(), lr=3e-3))
    assert found == pytest.approx(wanted, rel=1e-9 if dtype == torch.float64 else 1e-4)
    assert found[-1] < found[0] - 0.5


class NoisyAdapter(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return self.linear(torch.nn.functional.dropout(x, 0.5, self.training))


@pytest.mark.parametrize(
    ("change", "autocast"),
    [(None, False), (None, True), *((change, False) for change in ("adapter", "probability", "attention", "hook"))],
)
def test_recomputed_blocks_have_the_same_gradient_bits(change, autocast, device):
    ours, _ = make_pair(device, torch.float64 if change else torch.float32)
    block = ours.transformer.h[0]
    if change == "adapter":
        block.attn.c_proj = NoisyAdapter(block.attn.c_proj)
    elif change == "probability":
        ours.transformer.h[-2].resid_dropout.p = 0.5  # The next layer's fused op applies this dropout.
    elif change == "attention":
        block.attn.dropout = 0.5
    elif change == "hook":
        block.mlp.register_forward_hook(lambda module, x, out: out * torch.rand_like(out))
    saved, gradients = [], []
    for recompute in (False, True):
        ours.transformer.recompute_blocks = recompute
        torch.manual_seed(8)
        with kept_sizes() as sizes, torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = ours(*make_batch(device), return_logits=change is not None)[1]
        saved.append(sum(sizes.values()))
        gradients.append(gradients_of(loss, ours))
    small_models.assert_equal(*gradients)
    assert change or saved[1] < saved[0] / 2


@pytest.mark.parametrize("return_logits", [True, False])
def test_autocast(return_logits, device):
    ours, reference = make_pair(device, torch.float32)
    tokens, targets = make_batch(device)
    with torch.autocast(device.type, torch.bfloat16):
        _, loss = ours(tokens, targets, return_logits=return_logits)
        _, wanted = reference(tokens, targets)
    loss.backward()
    wanted.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, wanted.float(), **tolerance(torch.bfloat16))
    for (name, a), b in zip(ours.named_parameters(), reference.parameters(), strict=True):
        assert a.grad.dtype == torch.float32
        assert (a.grad - b.grad).norm() < 0.05 * b.grad.norm() + 1e-6, name


KERNELS_OF_THE_BLOCKS = {
    "encoder": 1,
    "layernorm": 1,
    "residual_layernorm": 6,
    "attention": 3,
    "mlp": 3,
    "encoder_backward": 1,
    "layernorm_backward": 1,
    "residual_layernorm_bias_backward": 6,  # also computes the gradient of the preceding linear module's bias
    "attention_backward": 3,
    "mlp_backward": 3,
    "adamw_": 1,
}
VIEWS = {
    *("aten::view", "aten::_unsafe_view", "aten::detach", "aten::alias", "aten::slice.Tensor", "aten::expand"),
    "aten::lift_fresh",
}
# These ops compute the mean loss over the targets that are not ignored, and the gradient 1 of the loss.
MEAN = {"aten::ne.Scalar", "aten::sum", "aten::ones_like"}
# These ops add the encoder's and the LM head's gradients of wte, and count the optimizer's steps.
COUNTING = {"aten::_foreach_add_.Scalar", "aten::_foreach_add_.Tensor", "aten::ones"}
ACCUMULATION = {"aten::add.Tensor", "aten::add_.Tensor"} | COUNTING
PROFILER = {"profiler::_record_function_enter_new", "profiler::_record_function_exit._RecordFunction"}


@pytest.mark.parametrize("return_logits", [True, False])
def test_a_training_step_runs_on_our_kernels(return_logits, device):
    """With L layers, 2L of the 2L + 1 norms are fused with the addition before them."""
    ours, _ = make_pair(device, torch.float32)
    tokens, targets = make_batch(device)
    optimizer = AdamW(ours.parameters())
    ours(tokens, targets)[1].backward()
    optimizer.step()
    optimizer.zero_grad()
    with CountCalls() as calls:
        ours(tokens, targets, return_logits=return_logits)[1].backward()
        optimizer.step()
    if return_logits:
        head = {"linear": 7, "linear_backward": 7, "fused_classifier": 1, "fused_classifier_backward": 1}
        others = MEAN | {"aten::div.Tensor"}
    else:
        # This op multiplies the gradients of the hidden states and of the weight by the gradient of the loss.
        head = {"linear": 6, "linear_backward": 6, "linear_cross_entropy_with_gradients": 1}
        head |= {"fused_classifier_backward_": 2}
        others = {"aten::ones_like"}
    expected = KERNELS_OF_THE_BLOCKS | head
    if not return_logits:
        # This op adds the embedding's gradient to the LM head's in place.
        expected["encoder_backward_"] = expected.pop("encoder_backward")
    assert calls.kernels() == expected
    assert {name for name in calls.count if "gptkernels::" not in name} <= others | VIEWS | ACCUMULATION | PROFILER


def test_the_tied_weights_gradient_is_a_sum(device):
    """The embedding's backward adds its gradient to the LM head's in place. If it cannot, autograd adds the two."""
    ours, _ = make_pair(device)
    weight = ours.lm_head.weight
    tokens, targets = make_batch(device)

    def loss():
        return ours(tokens, targets, return_logits=False)[1]

    first = loss()
    found = [torch.autograd.grad(first, weight, retain_graph=True)[0] for _ in range(2)]
    found.append(torch.autograd.grad(2 * loss(), weight)[0] / 2)
    loss().backward()
    found.append(weight.grad.clone())
    loss().backward()
    found.append(weight.grad / 2)
    ours.transformer.register_forward_hook(lambda *_: None)  # A module with a hook is not fused with the LM head.
    found.append(torch.autograd.grad(loss(), weight)[0])
    (expected,) = torch.autograd.grad(ours(tokens, targets)[1], weight)
    torch.testing.assert_close(found, [expected] * len(found))
    assert torch.autograd.grad(loss(), weight, create_graph=True)[0].requires_grad


DROPOUT = dataclasses.replace(CONFIG, dropout=0.2)


def test_dropout_acts_in_training_only(device):
    ours, _ = make_pair(device, torch.float32, dropout=0.2)
    plain = GPT2(CONFIG, device)
    plain.load_state_dict(ours.state_dict())
    tokens, targets = make_batch(device)
    assert not torch.equal(ours(tokens)[0], ours(tokens)[0])
    ours.eval()
    assert torch.equal(ours(tokens, targets)[1], plain(tokens, targets)[1])
    assert torch.equal(ours.generate(tokens[:, :4], 6, 0), plain.generate(tokens[:, :4], 6, 0))
    ours.transformer.drop.train()  # as for Monte Carlo dropout
    assert not torch.equal(ours(tokens)[0], ours(tokens)[0])


def test_a_seed_fixes_all_dropout_masks(device):
    ours, _ = make_pair(device, dropout=0.2)

    def step():
        torch.manual_seed(8)
        _, loss = ours(*make_batch(device))
        return [loss, *gradients_of(loss, ours)]

    expected = step()
    small_models.assert_equal(step(), expected)
    first = ours.transformer.h[0]
    hooks = [m.register_forward_hook(lambda *_: None) for m in (first.resid_dropout, ours.transformer.drop)]
    torch.testing.assert_close(step(), expected)
    for hook in hooks:
        hook.remove()
    first.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(step(), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_under_activation_checkpointing(reentrant, device):
    ours, _ = make_pair(device, dropout=0.2)

    def gradients():
        ours.zero_grad()
        torch.manual_seed(8)
        ours(*make_batch(device))[1].backward()
        return [p.grad.clone() for p in ours.parameters()]

    expected = gradients()
    for block in ours.transformer.h:
        forward = block.forward
        block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=reentrant)
    torch.testing.assert_close(gradients(), expected)


def test_dropout_saves_no_mask(device):
    """For each dropout, autograd saves at most two more numbers, seed and offset."""

    def saved_by(config):
        model = GPT2(config, device)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            model(*make_batch(device))
        return sorted(t.numel() for t in saved if t.numel() > 1), sum(t.numel() == 1 for t in saved)

    (plain, plain_numbers), (dropped, numbers) = saved_by(CONFIG), saved_by(DROPOUT)
    assert dropped == plain
    assert 0 < numbers - plain_numbers <= 2 * (1 + 3 * CONFIG.n_layer)


def test_only_the_embeddings_dropout_is_a_kernel(device):
    ours, _ = make_pair(device, torch.float32, dropout=0.2)
    tokens, targets = make_batch(device)
    ours(tokens, targets)[1].backward()
    with CountCalls() as calls:
        ours(tokens, targets)[1].backward()
    head = {"linear": 7, "linear_backward": 7, "fused_classifier": 1, "fused_classifier_backward": 1}
    found = calls.kernels()
    assert found.pop("dropout") == 2  # the backward calls the same op as the forward
    found["residual_layernorm_bias_backward"] = found.pop("residual_layernorm_dropout_backward")
    assert found == {name: count for name, count in (KERNELS_OF_THE_BLOCKS | head).items() if name != "adamw_"}
    assert calls.count["aten::randint"] == 1 + 3 * DROPOUT.n_layer


@DTYPES
@pytest.mark.parametrize("prompt", [1, 5, 16, 20])
def test_cached_generation_matches_the_full_forward(prompt, dtype, device):
    ours, _ = make_pair(device, dtype)
    tokens = torch.randint(65, (3, prompt), device=device)
    found = ours.generate(tokens, 22, temperature=0)
    assert torch.equal(found[:, :prompt], tokens)
    window = tokens
    for t in range(prompt, prompt + 22):
        logits = ours(window[:, -16:])[0][:, -1].float()
        # In bfloat16, the logit of the chosen token may differ from the largest logit by rounding errors.
        chosen = logits.gather(1, found[:, t : t + 1])
        slack = 0 if dtype != torch.bfloat16 else 0.05
        assert (chosen + slack >= logits.max(-1, keepdim=True).values).all()
        window = found[:, : t + 1]


@DTYPES
def test_cached_logits_match_the_full_forward(dtype, device):
    ours, _ = make_pair(device, dtype)
    tokens = torch.randint(65, (3, 16), device=device)
    with torch.no_grad():
        expected = ours(tokens)[0]
        caches = [KeyValueCache(16) for _ in range(3)]
        parts = [ours.transformer(tokens[:, :6], caches)]
        parts += [ours.transformer(tokens[:, t : t + 1], caches) for t in range(6, 16)]
        found = ours.lm_head(torch.cat(parts, 1))[..., :65]
    torch.testing.assert_close(found, expected, **tolerance(dtype))


def test_a_seed_fixes_the_generated_tokens(device):
    ours, _ = make_pair(device, torch.float32)
    tokens = torch.randint(65, (2, 3), device=device, dtype=torch.int32)

    def draw(seed, **options):
        return ours.generate(tokens, 18, generator=torch.Generator(device).manual_seed(seed), **options)

    assert draw(1).shape == (2, 21)
    assert draw(1).dtype == torch.int32
    assert draw(1).max() < 65
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert not torch.equal(draw(1), draw(1, temperature=3.0))
    assert torch.equal(draw(1, top_k=1), ours.generate(tokens, 18, temperature=0))
    assert torch.equal(draw(1, top_k=65), draw(1, top_k=1000))
    torch.manual_seed(4)
    once = ours.generate(tokens, 5)
    torch.manual_seed(4)
    assert torch.equal(ours.generate(tokens, 5), once)


def test_generation_and_files_ignore_the_default_device(device, tmp_path):
    ours, _ = make_pair(device, torch.float32)
    tokens = torch.randint(65, (2, 3), device=device)
    wanted = ours.generate(tokens, 18, temperature=0)
    ours.save_checkpoint(tmp_path / "model.bin")
    with torch.device("meta"):
        again = GPT2.from_checkpoint(tmp_path / "model.bin", device)
        found = again.generate(tokens, 18, temperature=0), again.generate([*tokens], 18, temperature=0)
    assert torch.equal(found[0], wanted)
    assert all(map(torch.equal, found[1], wanted))


def test_generated_tokens_follow_the_distribution(device):
    ours, _ = make_pair(device, torch.float32)
    tokens = torch.tensor([[3, 1, 4]], device=device)
    probabilities = (ours(tokens)[0][0, -1] / 0.7).topk(5)
    generator = torch.Generator(device).manual_seed(0)
    drawn = ours.generate(tokens.expand(4000, -1), 1, 0.7, 5, generator)[:, -1]
    expected = torch.zeros(65, device=device).index_put((probabilities.indices,), probabilities.values.softmax(-1))
    torch.testing.assert_close(drawn.bincount(minlength=65) / 4000, expected, atol=0.03, rtol=0)


def test_stream_yields_generated_tokens(device):
    ours, _ = make_pair(device, torch.float32)
    tokens = torch.randint(65, (2, 3), device=device)
    steps = list(ours.stream(tokens, 4, temperature=0))
    assert [step.shape for step in steps] == [(2,)] * 4
    assert torch.equal(torch.stack(steps, 1), ours.generate(tokens, 4, temperature=0)[:, 3:])
    assert not steps[0].requires_grad
    assert torch.equal(ours.generate(tokens, 0), tokens)
    next(ours.stream(tokens, 4))
    assert torch.is_grad_enabled()


def test_a_cached_step_runs_on_our_kernels(device):
    """A decoding step calls two of our operators. With a hook or more than 8 sequences, it calls the modules."""
    ours, _ = make_pair(device, torch.float32)
    modules = {"encoder": 1, "layernorm": 1, "residual_layernorm": 6, "mlp": 3, "linear": 7}
    modules |= {"scaled_dot_product_attention": 3, "sample_": 1}

    def kernels(sequences):
        stream = ours.stream(torch.randint(65, (sequences, 3), device=device), 4, temperature=0)
        next(stream)
        with CountCalls() as calls:
            next(stream)
        assert "aten::bmm" not in calls.count
        return calls.kernels()

    assert kernels(8) == {"decode": 1, "sample_": 1}
    assert kernels(9) == modules
    ours.transformer.h[1].mlp.c_fc.register_forward_hook(lambda *_: None)
    assert kernels(2) == modules | {"mlp": 2, "linear": 9, "gelu": 1}


def test_bad_tokens_and_targets_are_refused(device):
    ours, _ = make_pair(device, torch.float32)
    tokens, targets = make_batch(device)
    long = torch.zeros(1, 17, dtype=torch.int64, device=device)
    assert_raises(ValueError, "17 tokens are more than block_size 16", ours, long)
    assert_raises(ValueError, r"tokens must have shape \(B, T\), got \(16,\)", ours, tokens[0])
    assert_raises(TypeError, r"tokens must be int64 or int32, got torch.float32", ours, tokens.float())
    assert_raises(TypeError, r"targets must be int64 or int32, got torch.int16", ours, tokens, targets.short())
    message = r"targets must have the shape of tokens, \(2, 16\), got \(2, 15\)"
    assert_raises(ValueError, message, ours, tokens, targets[:, :15])
    if device.type == "cpu":
        assert_raises(RuntimeError, r"65|128", ours, torch.full((1, 4), 128))


def test_bad_options_of_generation_are_refused(device):
    ours, _ = make_pair(device, torch.float32)
    tokens, _ = make_batch(device)
    assert_raises(ValueError, "max_new_tokens must be at least 0, got -1", ours.generate, tokens, -1)
    # `stream` raises the error when it is called, not when the first token is read.
    assert_raises(ValueError, "temperature must be at least 0, got -1", ours.stream, tokens, 3, temperature=-1)
    assert_raises(ValueError, "top_k must be at least 1, got 0", ours.generate, tokens, 3, top_k=0)
    assert_raises(ValueError, "at least one token", ours.generate, tokens[:, :0], 3)
    assert_raises(ValueError, r"tokens must have shape \(B, T\), got \(16,\)", ours.generate, tokens[0], 3)


def test_only_layers_with_dropout_keep_random_state(device):
    """A layer without dropout keeps no random state, because a GPU's would have to be copied to the host."""
    kept = []
    for config, training in ((CONFIG, True), (DROPOUT, True), (DROPOUT, False)):
        block = GPT2(config, device).train(training).transformer.h[0]
        kept.append(uses_dropout(block, Block, block.resid_dropout))
    assert kept == [False, True, False]
