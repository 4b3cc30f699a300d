import contextlib
import copy
import dataclasses
import math
import pickle
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gptkernels import functional
from gptkernels.models import GPT2, GPT2Config
from gptkernels.models.recompute import uses_dropout
from gptkernels.models.transformer import Block
from gptkernels.nn import KeyValueCache
from gptkernels.optim import AdamW
from gptkernels.rules import ops
from helpers import CountCalls, assert_raises, kept_sizes, tolerance
from reference_gpt2 import ReferenceGPT2

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = GPT2Config(block_size=16, vocab_size=65, n_layer=3, n_head=2, n_embd=32)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
BIAS = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])


def make_pair(dtype=torch.float64, device="cpu", config=CONFIG):
    """Return our model and the reference with the same weights, larger than initial ones so that every part matters."""
    torch.manual_seed(3)
    ours = GPT2(config, device, dtype)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn(parameter.shape).to(parameter) * 0.1)
    reference = ReferenceGPT2(config).to(device, dtype)
    reference.load_state_dict(ours.state_dict())
    return ours, reference


def make_batch(B=2, T=16, device="cpu", config=CONFIG):
    tokens = torch.randint(config.vocab_size, (B, T + 1))
    return tokens[:, :-1].clone().to(device), tokens[:, 1:].clone().to(device)


def assert_same(ours, theirs, exact, dtype, name):
    """In float64 and float32, compare with the reference; in low precision, allow 1.5 times its error."""
    if dtype in (torch.float64, torch.float32):
        torch.testing.assert_close(ours, theirs, **tolerance(dtype), msg=lambda text: f"{name}: {text}")
        return
    error, allowed = ((t.double() - exact).norm() for t in (ours, theirs))
    assert error <= 1.5 * allowed + torch.finfo(dtype).eps * exact.norm(), f"{name}: {error}, reference {allowed}"


# ---- configuration ---------------------------------------------------------------------------------------------------


def test_vocabulary_is_padded():
    assert GPT2Config().padded_vocab_size == 50304
    assert GPT2Config(vocab_size=256).padded_vocab_size == 256
    assert GPT2Config(vocab_size=257, padded_vocab_size=257).padded_vocab_size == 257
    assert GPT2Config(**dataclasses.asdict(CONFIG)) == CONFIG
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.n_layer = 4


@pytest.mark.parametrize("token", [65, 127])
def test_tokens_of_the_padding_are_refused(token, device):
    """The model and its embedding alone refuse tokens and targets from V to Vp."""
    if device.type != "cpu":
        pytest.skip("on CUDA a device-side assertion ends the process's context; see the next test")
    assert CONFIG.vocab_size == 65
    assert CONFIG.padded_vocab_size == 128
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
        with pytest.raises(RuntimeError, match=f"target {token} at row 19 is outside the vocabulary of 65"):
            model(tokens, bad, return_logits=return_logits)


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


def test_padding_has_no_gradient(device):
    model = GPT2(CONFIG, device)
    _, loss = model(*make_batch(device=device))
    loss.backward()
    assert not model.lm_head.weight.grad[CONFIG.vocab_size :].any()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200)],
)
def test_presets(name, parameters):
    model = GPT2(GPT2Config.preset(name), device="meta")
    assert model.num_parameters() == parameters
    assert GPT2Config.preset(name, block_size=8).block_size == 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_embd": 10, "n_head": 3}, "n_embd must be a multiple of n_head, got 10 and 3"),
        ({"dropout": 1.5}, r"dropout must be from 0 to 1, got 1\.5"),
        ({"dropout": -0.1}, r"dropout must be from 0 to 1, got -0\.1"),
        ({"n_layer": 0}, "n_layer must be at least 1, got 0"),
        ({"activation": "relu"}, "activation must be one of gelu_tanh, gelu, got 'relu'"),
        ({"vocab_size": -5}, "vocab_size must be at least 1, got -5"),
        ({"vocab_size": 100, "padded_vocab_size": 99}, "padded_vocab_size must be at least vocab_size 100, got 99"),
    ],
)
def test_configuration_errors(fields, message):
    assert_raises(ValueError, message, GPT2Config, **fields)
    assert_raises(ValueError, "no preset 'gpt3'; there are gpt2,", GPT2Config.preset, "gpt3")


def test_flops_per_token():
    """A token takes 6 flops for each weight of a matrix product, plus attention's."""
    model = GPT2(CONFIG)
    matrices = sum(p.numel() for n, p in model.named_parameters() if "wpe" not in n) - 63 * 32
    assert model.flops_per_token(10) == 6 * matrices + 12 * 3 * 32 * 10


# ---- parameters ------------------------------------------------------------------------------------------------------


@BIAS
def test_parameter_names(bias):
    config = dataclasses.replace(CONFIG, bias=bias)
    model, reference = GPT2(config), ReferenceGPT2(config)
    assert list(model.state_dict()) == list(reference.state_dict())
    assert [p.shape for p in model.parameters()] == [p.shape for p in reference.parameters()]
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.transformer.h[0].attn.c_attn.weight.shape == (96, 32)


def test_initial_weights(device):
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


@pytest.mark.parametrize("rows", [65, 70, 128, 200])
@pytest.mark.parametrize("head", [True, False])
def test_loads_any_padding(rows, head):
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


def test_refuses_a_smaller_vocabulary():
    state = GPT2(dataclasses.replace(CONFIG, vocab_size=64, padded_vocab_size=64)).state_dict()
    assert_raises(RuntimeError, r"size mismatch for transformer.wte.weight", GPT2(CONFIG).load_state_dict, state)


def test_loads_inside_another_module():
    outer = torch.nn.ModuleDict({"model": GPT2(CONFIG)})
    state = outer.state_dict()
    state["model.transformer.wte.weight"] = state["model.lm_head.weight"][:65]
    del state["model.lm_head.weight"]
    outer.load_state_dict(state)


def test_copies_and_pickles_stay_tied():
    model, _ = make_pair()
    tokens, _ = make_batch()
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.lm_head.weight is again.transformer.wte.weight
        assert torch.equal(again(tokens)[0], model(tokens)[0])


@pytest.mark.parametrize("fill", ["to_empty", "load_state_dict"])
@pytest.mark.parametrize("nested", [False, True])
def test_models_made_on_meta_stay_tied(fill, nested, tmp_path, device):
    """They train, also with float8 products, and can be saved."""
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, fp8=True)
    model, state = GPT2(config, "meta"), GPT2(config, device).state_dict()
    outer = torch.nn.ModuleDict({"model": model}) if nested else model
    if fill == "to_empty":
        outer.to_empty(device=device)
        for buffer in model.buffers():
            buffer.fill_(-1)  # stands for uninitialised memory
        torch.manual_seed(0)
        model.reset_parameters()
    else:
        outer.load_state_dict({f"model.{name}" if nested else name: t for name, t in state.items()}, assign=True)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert len([*model.parameters()]) == len([*GPT2(config, "meta").parameters()])
    assert all(p.requires_grad for p in model.parameters())
    assert not any(buffer.any() for buffer in model.buffers())
    model(*make_batch(device=device))[1].backward()
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
def test_checkpoints(suffix, tmp_path, device):
    model, _ = make_pair(torch.float32, device)
    tokens, targets = make_batch(device=device)
    path = tmp_path / f"model{suffix}"
    model.save_checkpoint(path)
    again = GPT2.from_checkpoint(path, device)
    assert again.config == model.config
    assert next(again.parameters()).device == next(model.parameters()).device
    # The file omits the padding, which no result depends on.
    assert torch.equal(again(tokens, targets)[1], model(tokens, targets)[1])
    assert next(GPT2.from_checkpoint(path, dtype=torch.bfloat16).parameters()).dtype == torch.bfloat16


# ---- against the reference -------------------------------------------------------------------------------------------


@DTYPES
@BIAS
@pytest.mark.parametrize("return_logits", [True, False])
def test_matches_the_reference(return_logits, bias, dtype, device):
    ours, reference = make_pair(dtype, device, dataclasses.replace(CONFIG, bias=bias))
    exact = copy.deepcopy(reference).double()
    tokens, targets = make_batch(device=device)
    targets[0, 3:6] = -100
    logits, loss = ours(tokens, targets, return_logits=return_logits)
    wanted, wanted_loss = reference(tokens, targets)
    exact_logits, exact_loss = exact(tokens, targets)
    if return_logits:
        assert logits.shape == (2, 16, 65)
        assert_same(logits, wanted, exact_logits, dtype, "logits")
        assert_same(ours(tokens)[0], wanted, exact_logits, dtype, "logits without targets")
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
    """First and, in eager mode, second derivatives have the parameters' shapes."""
    model = GPT2(CONFIG, "meta")
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    logits, loss = call(*make_batch(device="meta"), return_logits=return_logits)
    assert loss.is_meta
    assert logits is None or logits.shape == (2, 16, 65)
    gradients = torch.autograd.grad(loss, [*model.parameters()], create_graph=not compiled)
    if not compiled:
        sum(gradient.square().sum() for gradient in gradients).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
    assert [g.shape for g in gradients] == [p.shape for p in model.parameters()]


def test_logits_and_loss_are_differentiable_together(device):
    ours, reference = make_pair(device=device)
    tokens, targets = make_batch(device=device)
    for model in (ours, reference):
        logits, loss = model(tokens, targets)
        (loss + logits.square().mean()).backward()
    for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 0), (0, 4)])
def test_other_lengths(shape, device):
    ours, reference = make_pair(device=device)
    tokens, _ = make_batch(*shape, device=device)
    torch.testing.assert_close(ours(tokens)[0], reference(tokens)[0])
    torch.testing.assert_close(ours(tokens.int())[0], reference(tokens)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_twenty_steps_of_training(dtype, device):
    ours, reference = make_pair(dtype, device)
    batches = [make_batch(4, device=device) for _ in range(4)]

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


@DTYPES
def test_exact_gelu_matches_the_reference(dtype, device):
    config = dataclasses.replace(CONFIG, activation="gelu")
    ours, reference = make_pair(dtype, device, config)
    exact, _ = make_pair(torch.float64, device, config)
    tokens, targets = make_batch(device=device)
    losses = [model(tokens, targets)[1] for model in (ours, reference, exact)]
    assert_same(*losses, dtype, "loss")
    tanh, _ = make_pair(torch.float64, device)
    assert tanh(tokens, targets)[1] != losses[2]
    models = (ours, reference, exact)
    grads = [torch.autograd.grad(loss, list(m.parameters())) for loss, m in zip(losses, models, strict=True)]
    for (name, _), *gradients in zip(ours.named_parameters(), *grads, strict=True):
        assert_same(*gradients, dtype, name)


@pytest.mark.parametrize("autocast", [False, True])
def test_recomputed_blocks_have_the_same_gradient_bits(autocast, device):
    """The graph keeps less than half as much."""
    ours, _ = make_pair(torch.float32, device)
    tokens, targets = make_batch(device=device)
    kept, gradients = [], []
    for recompute in (False, True):
        ours.transformer.recompute_blocks = recompute
        with kept_sizes() as sizes, torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            _, loss = ours(tokens, targets, return_logits=False)
        kept.append(sum(sizes.values()))
        gradients.append(torch.autograd.grad(loss, list(ours.parameters())))
    for (name, _), plain, recomputed in zip(ours.named_parameters(), *gradients, strict=True):
        assert torch.equal(plain, recomputed), name
    assert kept[1] < kept[0] / 2


@pytest.mark.parametrize("return_logits", [True, False])
def test_autocast(return_logits, device):
    ours, reference = make_pair(torch.float32, device)
    tokens, targets = make_batch(device=device)
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


# ---- operators that run ----------------------------------------------------------------------------------------------


BLOCKS = {
    "encoder": 1,
    "layernorm": 1,
    "residual_layernorm": 6,
    "attention": 3,
    "mlp": 3,
    "encoder_backward": 1,
    "layernorm_backward": 1,
    "residual_layernorm_bias_backward": 6,  # with the gradient of the bias of the layer before
    "attention_backward": 3,
    "mlp_backward": 3,
    "adamw_": 1,
}
VIEWS = {
    "aten::view",
    "aten::_unsafe_view",
    "aten::detach",
    "aten::alias",
    "aten::slice.Tensor",
    "aten::expand",
    "aten::lift_fresh",
}
# These compute the mean over the targets that are not ignored, and its gradient's seed.
MEAN = {"aten::ne.Scalar", "aten::sum", "aten::ones_like"}
# wte's gradient is the sum of the encoder's and the LM head's; the optimizer counts its steps.
COUNTING = {"aten::_foreach_add_.Scalar", "aten::_foreach_add_.Tensor", "aten::ones"}
ACCUMULATION = {"aten::add.Tensor", "aten::add_.Tensor"} | COUNTING
PROFILER = {"profiler::_record_function_enter_new", "profiler::_record_function_exit._RecordFunction"}


@pytest.mark.parametrize("return_logits", [True, False])
def test_a_training_step_runs_on_our_kernels(return_logits, device):
    """A step has 2L + 1 norms, 2L of them with an addition, and 2 linear layers per attention."""
    ours, _ = make_pair(torch.float32, device)
    tokens, targets = make_batch(device=device)
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
        # The two backward ops scale the gradients of the hidden layer and of the weight by the loss's.
        head = {
            "linear": 6,
            "linear_backward": 6,
            "linear_cross_entropy_with_gradients": 1,
            "fused_classifier_backward_": 2,
        }
        others = {"aten::ones_like"}
    expected = BLOCKS | head
    if not return_logits:  # the encoder's backward adds to the LM head's gradient of the weight
        expected["encoder_backward_"] = expected.pop("encoder_backward")
    assert calls.kernels() == expected
    assert {name for name in calls.count if "gptkernels::" not in name} <= others | VIEWS | ACCUMULATION | PROFILER


def test_the_tied_weights_gradient_is_a_sum(device):
    """The sum is right if the embedding's backward adds in place or autograd adds, also with a retained graph."""
    ours, _ = make_pair(torch.float64, device)
    weight = ours.lm_head.weight
    tokens, targets = make_batch(device=device)
    loss = ours(tokens, targets, return_logits=False)[1]
    found = [torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2)]
    found.append(torch.autograd.grad(2 * ours(tokens, targets, return_logits=False)[1], weight)[0] / 2)
    ours(tokens, targets, return_logits=False)[1].backward()
    found.append(weight.grad.clone())
    ours(tokens, targets, return_logits=False)[1].backward()
    found.append(weight.grad / 2)
    (expected,) = torch.autograd.grad(ours(tokens, targets)[1], weight)
    for gradient in found:
        torch.testing.assert_close(gradient, expected)
    ours.transformer.register_forward_hook(lambda *_: None)  # the hooked module is called, not fused with the LM head
    (separate,) = torch.autograd.grad(ours(tokens, targets, return_logits=False)[1], weight)
    torch.testing.assert_close(separate, expected)
    create = torch.autograd.grad(ours(tokens, targets, return_logits=False)[1], weight, create_graph=True)[0]
    assert create.requires_grad


# ---- dropout ---------------------------------------------------------------------------------------------------------

DROPOUT = dataclasses.replace(CONFIG, dropout=0.2)


@contextlib.contextmanager
def record_numbers(monkeypatch):
    """Record seed and offset of every dropout inside the context, in the order of the calls."""
    drawn, draw = [], functional._dropout_numbers

    def note(p, like):
        drawn.append(draw(p, like))
        return drawn[-1]

    with monkeypatch.context() as patch:
        patch.setattr(functional, "_dropout_numbers", note)
        yield drawn


def drop_out(reference, drawn, p):
    """Apply our model's dropouts to the reference, at nanoGPT's places with our ops' masks."""
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
@pytest.mark.parametrize("return_logits", [True, False])
def test_dropout_matches_the_reference_with_our_masks(return_logits, dtype, device, monkeypatch):
    ours, reference = make_pair(dtype, device, DROPOUT)
    exact = copy.deepcopy(reference).double()
    tokens, targets = make_batch(device=device)
    with record_numbers(monkeypatch) as drawn:
        logits, loss = ours(tokens, targets, return_logits=return_logits)
    assert len(drawn) == 1 + 3 * DROPOUT.n_layer
    rests = [drop_out(model, drawn, DROPOUT.dropout) for model in (reference, exact)]
    (wanted, wanted_loss), (exact_logits, exact_loss) = reference(tokens, targets), exact(tokens, targets)
    assert all(next(rest, None) is None for rest in rests)
    if return_logits:
        assert_same(logits, wanted, exact_logits, dtype, "logits")
    assert_same(loss.to(dtype), wanted_loss, exact_loss, dtype, "loss")
    for result in (loss, wanted_loss, exact_loss):
        result.backward()
    for (name, a), b, c in zip(ours.named_parameters(), reference.parameters(), exact.parameters(), strict=True):
        assert_same(a.grad, b.grad, c.grad, dtype, f"gradient of {name}")


def test_dropout_acts_in_training_only(device):
    """In evaluation and generation the model is the one without dropout; each module has its own mode."""
    ours, _ = make_pair(torch.float32, device, DROPOUT)
    plain = GPT2(CONFIG, device)
    plain.load_state_dict(ours.state_dict())
    tokens, targets = make_batch(device=device)
    assert not torch.equal(ours(tokens)[0], ours(tokens)[0])
    ours.eval()
    assert torch.equal(ours(tokens, targets)[1], plain(tokens, targets)[1])
    assert torch.equal(ours.generate(tokens[:, :4], 6, 0), plain.generate(tokens[:, :4], 6, 0))
    ours.transformer.drop.train()  # as Monte Carlo dropout does
    assert not torch.equal(ours(tokens)[0], ours(tokens)[0])
    assert_raises(ValueError, "dropout must be from 0 to 1", GPT2Config, dropout=float("nan"))


def test_a_seed_fixes_all_dropout_masks(device):
    """Blocks draw the same masks as parts of the model, alone, hooked or fused."""
    ours, _ = make_pair(torch.float64, device, DROPOUT)
    tokens, targets = make_batch(device=device)

    def step():
        torch.manual_seed(8)
        _, loss = ours(tokens, targets)
        return [loss, *torch.autograd.grad(loss, list(ours.parameters()))]

    expected = step()
    for a, b in zip(step(), expected, strict=True):
        assert torch.equal(a, b)
    first = ours.transformer.h[0]
    hooks = [m.register_forward_hook(lambda *_: None) for m in (first.resid_dropout, ours.transformer.drop)]
    for a, b in zip(step(), expected, strict=True):
        torch.testing.assert_close(a, b)
    for hook in hooks:
        hook.remove()
    first.register_forward_hook(lambda *_: None)
    for a, b in zip(step(), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_under_activation_checkpointing(reentrant, device):
    """Each block is recomputed with the random state that it had."""
    ours, _ = make_pair(torch.float64, device, DROPOUT)
    tokens, targets = make_batch(device=device)

    def gradients():
        ours.zero_grad()
        torch.manual_seed(8)
        ours(tokens, targets)[1].backward()
        return [p.grad.clone() for p in ours.parameters()]

    expected = gradients()
    for block in ours.transformer.h:
        forward = block.forward
        block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=reentrant)
    for a, b in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_dropout_keeps_no_mask(device):
    """A step with dropout saves what one without saves, and at most two numbers for each dropout."""

    def saved_by(config):
        model = GPT2(config, device)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            model(*make_batch(device=device))
        return sorted(t.numel() for t in saved if t.numel() > 1), sum(t.numel() == 1 for t in saved)

    (plain, plain_numbers), (dropped, numbers) = saved_by(CONFIG), saved_by(DROPOUT)
    assert dropped == plain
    assert 0 < numbers - plain_numbers <= 2 * (1 + 3 * CONFIG.n_layer)


def test_dropout_adds_one_kernel(device):
    """Only the embeddings' dropout has a kernel of its own; the other dropouts are fused."""
    ours, _ = make_pair(torch.float32, device, DROPOUT)
    tokens, targets = make_batch(device=device)
    ours(tokens, targets)[1].backward()
    with CountCalls() as calls:
        ours(tokens, targets)[1].backward()
    head = {"linear": 7, "linear_backward": 7, "fused_classifier": 1, "fused_classifier_backward": 1}
    found = calls.kernels()
    assert found.pop("dropout") == 2  # its gradient is the op itself
    found["residual_layernorm_bias_backward"] = found.pop("residual_layernorm_dropout_backward")
    assert found == {name: count for name, count in (BLOCKS | head).items() if name != "adamw_"}
    assert calls.count["aten::randint"] == 1 + 3 * DROPOUT.n_layer


# ---- generation ------------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("prompt", [1, 5, 16, 20])
def test_cached_generation_matches_the_full_forward(prompt, dtype, device):
    """This holds beyond block_size, too, where the window slides."""
    ours, _ = make_pair(dtype, device)
    tokens = torch.randint(65, (3, prompt), device=device)
    found = ours.generate(tokens, 22, temperature=0)
    assert torch.equal(found[:, :prompt], tokens)
    window = tokens
    for t in range(prompt, prompt + 22):
        logits = ours(window[:, -16:])[0][:, -1].float()
        # The token is the likeliest one or, in low precision, one whose logit differs by roundings.
        chosen = logits.gather(1, found[:, t : t + 1])
        slack = 0 if dtype != torch.bfloat16 else 0.05
        assert (chosen + slack >= logits.max(-1, keepdim=True).values).all()
        window = found[:, : t + 1]


@DTYPES
def test_cached_logits_match_the_full_forward(dtype, device):
    ours, _ = make_pair(dtype, device)
    tokens = torch.randint(65, (3, 16), device=device)
    with torch.no_grad():
        expected = ours(tokens)[0]
        caches = [KeyValueCache(16) for _ in range(3)]
        parts = [ours.transformer(tokens[:, :6], caches)]
        parts += [ours.transformer(tokens[:, t : t + 1], caches) for t in range(6, 16)]
        found = ours.lm_head(torch.cat(parts, 1))[..., :65]
    torch.testing.assert_close(found, expected, **tolerance(dtype))


def test_a_seed_fixes_the_generated_tokens(device):
    ours, _ = make_pair(torch.float32, device)
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


def test_default_device_is_ignored(device, tmp_path):
    """Generation and files do not depend on torch's default device."""
    ours, _ = make_pair(torch.float32, device)
    tokens = torch.randint(65, (2, 3), device=device)
    wanted = ours.generate(tokens, 18, temperature=0)
    ours.save_checkpoint(tmp_path / "model.bin")
    with torch.device("meta"):
        again = GPT2.from_checkpoint(tmp_path / "model.bin", device)
        found = again.generate(tokens, 18, temperature=0), again.generate([*tokens], 18, temperature=0)
    assert torch.equal(found[0], wanted)
    assert all(map(torch.equal, found[1], wanted))


def test_generated_tokens_follow_the_distribution(device):
    ours, _ = make_pair(torch.float32, device)
    tokens = torch.tensor([[3, 1, 4]], device=device)
    probabilities = (ours(tokens)[0][0, -1] / 0.7).topk(5)
    generator = torch.Generator(device).manual_seed(0)
    drawn = ours.generate(tokens.expand(4000, -1), 1, 0.7, 5, generator)[:, -1]
    expected = torch.zeros(65, device=device).index_put((probabilities.indices,), probabilities.values.softmax(-1))
    torch.testing.assert_close(drawn.bincount(minlength=65) / 4000, expected, atol=0.03, rtol=0)


def test_stream_yields_generated_tokens(device):
    ours, _ = make_pair(torch.float32, device)
    tokens = torch.randint(65, (2, 3), device=device)
    steps = list(ours.stream(tokens, 4, temperature=0))
    assert [step.shape for step in steps] == [(2,)] * 4
    assert torch.equal(torch.stack(steps, 1), ours.generate(tokens, 4, temperature=0)[:, 3:])
    assert not steps[0].requires_grad
    assert torch.equal(ours.generate(tokens, 0), tokens)
    assert torch.is_grad_enabled()
    next(ours.stream(tokens, 4))
    assert torch.is_grad_enabled()


def test_a_cached_step_runs_on_our_kernels(device):
    """A step is two operators, or the modules' if one has a hook or there are many sequences."""
    ours, _ = make_pair(torch.float32, device)
    modules = {
        "encoder": 1,
        "layernorm": 1,
        "residual_layernorm": 6,
        "scaled_dot_product_attention": 3,
        "mlp": 3,
        "linear": 7,
    }

    def kernels(sequences):
        stream = ours.stream(torch.randint(65, (sequences, 3), device=device), 4, temperature=0)
        next(stream)
        with CountCalls() as calls:
            next(stream)
        assert "aten::bmm" not in calls.count
        return calls.kernels()

    assert kernels(8) == {"decode": 1, "sample_": 1}
    assert kernels(9) == {**modules, "sample_": 1}
    ours.transformer.h[1].mlp.c_fc.register_forward_hook(lambda *_: None)
    assert kernels(2) == {**modules, "mlp": 2, "linear": 9, "gelu": 1, "sample_": 1}


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_token_errors(device):
    ours, _ = make_pair(torch.float32, device)
    tokens, targets = make_batch(device=device)
    with pytest.raises(ValueError, match="17 tokens are more than block_size 16"):
        ours(torch.zeros(1, 17, dtype=torch.int64, device=device))
    assert_raises(ValueError, r"tokens must have shape \(B, T\), got \(16,\)", ours, tokens[0])
    assert_raises(TypeError, r"tokens must be int64 or int32, got torch.float32", ours, tokens.float())
    assert_raises(TypeError, r"targets must be int64 or int32, got torch.int16", ours, tokens, targets.short())
    with pytest.raises(ValueError, match=r"targets must have the shape of tokens, \(2, 16\), got \(2, 15\)"):
        ours(tokens, targets[:, :15])
    if device.type == "cpu":
        assert_raises(RuntimeError, r"65|128", ours, torch.full((1, 4), 128))


def test_generation_errors(device):
    ours, _ = make_pair(torch.float32, device)
    tokens, _ = make_batch(device=device)
    assert_raises(ValueError, "max_new_tokens must be at least 0, got -1", ours.generate, tokens, -1)
    with pytest.raises(ValueError, match="temperature must be at least 0, got -1"):
        ours.stream(tokens, 3, temperature=-1)  # at once, not at the first token
    assert_raises(ValueError, "top_k must be at least 1, got 0", ours.generate, tokens, 3, top_k=0)
    assert_raises(ValueError, "at least one token", ours.generate, tokens[:, :0], 3)
    assert_raises(ValueError, r"tokens must have shape \(B, T\), got \(16,\)", ours.generate, tokens[0], 3)


class NoisyAdapter(torch.nn.Module):
    """A linear layer with a dropout that the configuration does not have."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return self.linear(torch.nn.functional.dropout(x, 0.5, self.training))


@pytest.mark.parametrize("change", ["adapter", "probability", "attention", "hook"])
def test_changed_blocks_are_recomputed_with_the_same_masks(change, device):
    """The configuration has no dropout, but the changed modules have."""
    ours, _ = make_pair(torch.float64, device)
    tokens, targets = make_batch(device=device)
    block = ours.transformer.h[0]
    if change == "adapter":
        block.attn.c_proj = NoisyAdapter(block.attn.c_proj)
    elif change == "probability":
        ours.transformer.h[-2].resid_dropout.p = 0.5  # the next block drops this block's output
    elif change == "attention":
        block.attn.dropout = 0.5
    else:
        block.mlp.register_forward_hook(lambda module, x, out: out * torch.rand_like(out))
    gradients = []
    for recompute in (False, True):
        ours.transformer.recompute_blocks = recompute
        torch.manual_seed(8)
        gradients.append(torch.autograd.grad(ours(tokens, targets)[1], list(ours.parameters())))
    for (name, _), plain, recomputed in zip(ours.named_parameters(), *gradients, strict=True):
        assert torch.equal(plain, recomputed), name


def test_only_layers_with_dropout_keep_random_state(device):
    """Keeping the state copies it from the device to the host."""
    kept = []
    for config, training in ((CONFIG, True), (DROPOUT, True), (DROPOUT, False)):
        block = GPT2(config, device).train(training).transformer.h[0]
        kept.append(uses_dropout(block, Block, block.resid_dropout))
    assert kept == [False, True, False]
