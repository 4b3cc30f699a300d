"""Tests that the model calls a submodule that was replaced, wrapped, hooked or parametrised, instead of a fused op."""

import copy
import functools
import types

import pytest
import torch
import torch._dynamo.testing
import torch.nn.utils.parametrize as parametrize
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune

import small_models

make_models = functools.partial(small_models.make_pair, vocab_size=65)
make_batch = functools.partial(small_models.make_batch, vocab_size=65)
WIDTH = small_models.SIZES["n_embd"]
LAYER = ["ln_1", "attn", "attn.c_attn", "attn.c_proj", "ln_2", "mlp", "mlp.c_fc", "mlp.c_proj"]
PLACES = ["wte", "wpe", "ln_f", *(f"h.{i}" for i in (0, 1)), *(f"h.{i}.{name}" for i in (0, 1) for name in LAYER)]
MODULES = [f"transformer.{name}" for name in PLACES] + ["lm_head"]
MATRICES = [name for name in MODULES if name.endswith(("wte", "wpe", "c_attn", "c_proj", "c_fc"))]
all_modules = pytest.mark.parametrize("name", MODULES)
# For a full backward hook of an embedding, torch warns that the input has no gradient. The input is integers.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed"),
]
both_losses = pytest.mark.parametrize("return_logits", [True, False])


def assert_same_step(ours, reference, device, return_logits=True):
    tokens, targets = make_batch(device)
    logits, loss = ours(tokens, targets, return_logits=return_logits)
    wanted, wanted_loss = reference(tokens, targets)
    torch.testing.assert_close(logits, wanted if return_logits else None)
    torch.testing.assert_close(loss, wanted_loss)
    loss.backward()
    wanted_loss.backward()
    found, expected = ({name: p.grad for name, p in model.named_parameters()} for model in (ours, reference))
    torch.testing.assert_close(found, expected)


class Adapter(torch.nn.Module):
    def __init__(self, base, width):
        super().__init__()
        torch.manual_seed(9)
        self.base = base
        like = next(base.parameters())
        self.down = torch.nn.Parameter(torch.randn(width, 2).to(like) * 0.1)
        self.up = torch.nn.Parameter(torch.randn(2, width).to(like) * 0.1)

    def forward(self, x):
        out = self.base(x)
        return out + out @ self.down @ self.up


def replace_module(model, name, change):
    parent, _, child = name.rpartition(".")
    module = model.get_submodule(name)
    model.get_submodule(parent).register_module(child, change(module))


def width_of(module):
    return getattr(module, "out_features", WIDTH)


@both_losses
@all_modules
def test_adapters(name, return_logits, device):
    pair = make_models(device)
    for model in pair:
        replace_module(model, name, lambda module: Adapter(module, width_of(module)))
    assert_same_step(*pair, device, return_logits)


@all_modules
def test_wrappers(name, device):
    pair = make_models(device)
    for model in pair:
        replace_module(model, name, checkpoint_wrapper)
    assert_same_step(*pair, device)


@pytest.mark.parametrize("kind", ["LayerNorm", "Linear", "Embedding"])
def test_subclasses_of_layers_are_called(kind, device):
    ours, reference = make_models(device)
    for name in MODULES:
        module = ours.get_submodule(name)
        if type(module).__name__ == kind:

            class Doubled(type(module)):
                def forward(self, x):
                    return 2 * super().forward(x)

            module.__class__ = Doubled
            other = reference.get_submodule(name)
            other.register_forward_hook(lambda module, args, out: 2 * out)
    assert_same_step(ours, reference, device)


def test_a_replaced_forward_is_called(device):
    ours, reference = make_models(device)
    for model in (ours, reference):
        for name in MODULES:
            module = model.get_submodule(name)

            def forward(self, x, inner=module.forward):
                return inner(x) * 1.5

            module.forward = types.MethodType(forward, module)
    assert_same_step(ours, reference, device)


@both_losses
def test_every_hook_fires_once(return_logits, device):
    ours, reference = make_models(device)
    fired = []
    for name in MODULES:
        module = ours.get_submodule(name)
        module.register_forward_pre_hook(lambda *_, name=name: fired.append((name, "before")))
        module.register_forward_hook(lambda *_, name=name: fired.append((name, "after")))
        module.register_full_backward_pre_hook(lambda *_, name=name: fired.append((name, "backward before")))
        module.register_full_backward_hook(lambda *_, name=name: fired.append((name, "backward")))
    assert_same_step(ours, reference, device, return_logits)
    assert sorted(fired) == sorted(
        (name, when) for name in MODULES for when in ("before", "after", "backward before", "backward")
    )


HOOKS = {
    "forward": ("register_forward_hook", lambda module, args, out: out * 1.5),
    "forward_pre": ("register_forward_pre_hook", lambda module, args: (args[0] * 1.5, *args[1:])),
    "full_backward": ("register_full_backward_hook", lambda module, into, out: tuple(2 * g for g in into)),
    "full_backward_pre": ("register_full_backward_pre_hook", lambda module, out: tuple(2 * g for g in out)),
}


@pytest.mark.parametrize("kind", HOOKS)
@all_modules
def test_changes_by_hooks_have_effect(name, kind, device):
    if name.endswith(("wte", "wpe")) and kind in ("forward_pre", "full_backward"):
        pytest.skip("an embedding's input is integers")
    pair = make_models(device)
    register, hook = HOOKS[kind]
    for model in pair:
        getattr(model.get_submodule(name), register)(hook)
    assert_same_step(*pair, device)


def test_global_hooks_have_effect_until_they_are_removed(device):
    pair = make_models(device)
    layers = (torch.nn.Linear, torch.nn.LayerNorm, torch.nn.Embedding)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 1.5 if isinstance(module, layers) else None
    )
    try:
        assert_same_step(*pair, device)
    finally:
        handle.remove()
    for model in pair:
        model.zero_grad()
    assert_same_step(*pair, device)


def test_a_removed_hook_has_no_effect(device):
    ours, _ = make_models(device)
    tokens, _ = make_batch(device)
    before = ours(tokens)[0]
    handles = [ours.get_submodule(name).register_forward_hook(lambda m, a, out: out * 2) for name in MODULES]
    assert not torch.allclose(ours(tokens)[0], before)
    for handle in handles:
        handle.remove()
    assert torch.equal(ours(tokens)[0], before)


def test_cached_generation_calls_hooked_modules(device):
    ours, _ = make_models(device)
    calls = []
    for name in MODULES:
        ours.get_submodule(name).register_forward_hook(lambda m, a, out: calls.append(1))
    plain = copy.deepcopy(ours)
    for module in plain.modules():
        module._forward_hooks.clear()
    tokens, _ = make_batch(device, length=5)
    assert torch.equal(ours.generate(tokens, 4, temperature=0), plain.generate(tokens, 4, temperature=0))
    assert len(calls) == 4 * len(MODULES)


class Stretch(torch.nn.Module):
    def forward(self, weight):
        return weight * 1.5


@both_losses
@pytest.mark.parametrize("name", [*MATRICES, "transformer.ln_f", "transformer.h.0.ln_2", "transformer.h.1.ln_1"])
def test_parametrisations(name, return_logits, device):
    pair = make_models(device)
    for model in pair:
        module = model.get_submodule(name)
        parametrize.register_parametrization(module, "weight", Stretch())
    assert_same_step(*pair, device, return_logits)


@pytest.mark.parametrize("name", MATRICES)
def test_pruning(name, device):
    pair = make_models(device)
    for model in pair:
        prune.l1_unstructured(model.get_submodule(name), "weight", amount=0.5)
    assert_same_step(*pair, device)
    # The model computes the pruned weight again in each forward pass, so a changed weight_orig has an effect.
    for model in pair:
        model.zero_grad()
        with torch.no_grad():
            model.get_submodule(name).weight_orig.mul_(1.5)
    assert_same_step(*pair, device)


@both_losses
@pytest.mark.parametrize("adapted", [False, True])
def test_compiles_once_without_graph_breaks(adapted, return_logits, device):
    ours, _ = make_models(device)
    if adapted:
        replace_module(ours, "transformer.h.0.mlp.c_fc", lambda module: Adapter(module, width_of(module)))
        ours.get_submodule("transformer.h.1.ln_1").register_forward_hook(lambda m, a, out: out * 1.5)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, backend=counter)
    for seed in range(3):
        tokens, targets = make_batch(device, seed=seed)
        losses = [model(tokens, targets, return_logits=return_logits)[1] for model in (compiled, ours)]
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*(torch.autograd.grad(loss, list(ours.parameters())) for loss in losses))
    assert counter.frame_count == 1


def test_a_block_compiled_alone_is_called(device):
    ours, reference = make_models(device)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    ours.transformer.h[0].compile(fullgraph=True, backend=counter)
    assert_same_step(ours, reference, device)
    assert counter.frame_count == 1
