"""Tests that models which resemble GPT-2, but compute something else, have the same results after the swap."""

import copy
import random

import architectures
import numpy
import pytest
import torch
import torch.nn.functional as F
from swap_lookalikes import MODELS

import gptkernels
import published
from swapped import hf_config, needs_transformers, transformers

cpu_only = pytest.mark.skipif(
    "config.getoption('--device') != 'cpu'", reason="what swap decides does not depend on the device"
)


def assert_unchanged(model, run, lengths=(3, 17, 64), vocabulary=65):
    swapped = gptkernels.swap(copy.deepcopy(model))
    for training in (False, True):
        model.train(training), swapped.train(training)
        for length in lengths:
            tokens = torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(length))
            results = []
            for one in (model, swapped):
                torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
                logits, loss = run(one, tokens)
                one.zero_grad()
                loss.backward()
                results.append([logits, loss, *(p.grad for p in one.parameters() if p.grad is not None)])
            largest = max(t.abs().max().item() for t in results[0][2:])  # the exact gradient of a parameter may be 0
            for expected, found in zip(*results, strict=True):
                scale = max(expected.abs().max().item(), 1e-3 * largest)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * scale)


@cpu_only
@pytest.mark.parametrize("name", MODELS)
def test_lookalikes_are_unchanged(name):
    if name.startswith("hf_") and transformers is None:
        pytest.skip("without transformers")
    torch.manual_seed(0)
    assert_unchanged(*MODELS[name]())


@cpu_only
@pytest.mark.parametrize("name", architectures.MODELS)
def test_architectures_are_unchanged(name):
    torch.manual_seed(0)
    model, run = architectures.MODELS[name]()
    assert_unchanged(model, run)
    if name in architectures.GPT2_FORMS:
        assert gptkernels.swap(model).gptkernels_report.replaced[0].note.startswith("gpt model")


def test_a_model_with_state_outside_its_modules_is_left():
    """Layers share values through a global variable, which only swap's comparison of the whole model shows."""
    torch.manual_seed(0)
    model, _ = architectures.MODELS["values_through_a_global"]()
    classes = [type(module) for module in model.modules()]
    report = gptkernels.swap(model).gptkernels_report
    assert not report.replaced
    assert all("the whole model computes something else" in e.note for e in report.left if e.kind != "Dropout")
    assert [type(module) for module in model.modules()] == classes


def test_random_generators_keep_their_state():
    """``swap`` restores the generators after its trials of a model, even if a trial ends early."""
    for name in ("layer_drop", "loop_by_index"):
        model, _ = architectures.MODELS[name]()
        torch.manual_seed(4), random.seed(4), numpy.random.seed(4)
        gptkernels.swap(model)
        found = torch.rand(()).item(), random.random(), numpy.random.rand()
        torch.manual_seed(4), random.seed(4), numpy.random.seed(4)
        assert found == (torch.rand(()).item(), random.random(), numpy.random.rand())


def attend_locally(x, c_attn, heads, window):
    q, k, v = c_attn(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    i = torch.arange(x.shape[1])
    seen = (i[:, None] >= i) & (i[:, None] - i < window)
    return F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2)


class Local(published.CausalSelfAttention):
    def forward(self, x):
        return self.c_proj(attend_locally(x, self.c_attn, self.n_head, self.window()))


def make_local(window):
    return type("Window", (Local,), {"window": window})


class LongOnly(published.MLP):
    def forward(self, x):
        out = super().forward(x)
        return out if x.shape[1] < 12 else 2 * out


class LargeOnly(published.MLP):
    def forward(self, x):
        return super().forward(x.clamp(-200, 200))


class Skips(published.Block):
    def forward(self, x):
        return x if getattr(self, "skip", False) else super().forward(x)


def make_gpt():
    torch.manual_seed(0)
    return published.GPT(published.Config(64, 65, 3, 2, 32))


def make_changed(path, kind, set_up=lambda part, i: None):
    model = make_gpt()
    for i, block in enumerate(model.transformer.h):
        part = block.get_submodule(path) if path else block
        part.__class__ = kind
        set_up(part, i)
    return model


CHANGED = {
    "a window": ("attn", make_local(lambda self: 4)),
    "a window in every other layer": (
        *("attn", make_local(lambda self: 5 if self.layer_idx % 2 else 10**6)),
        lambda a, i: setattr(a, "layer_idx", i),
    ),
    "a window by a tuple": (
        *("attn", make_local(lambda self: self.windows[1])),
        lambda a, i: setattr(a, "windows", (0, (99, 6)[i % 2])),
    ),
    "a window by a buffer": (
        *("attn", make_local(lambda self: int(self.limit))),
        lambda a, i: a.register_buffer("limit", torch.tensor((99, 6)[i % 2])),
    ),
    "another function of long sequences": ("mlp", LongOnly),
    "another function of large values": ("mlp", LargeOnly),
}


@cpu_only
@pytest.mark.parametrize("name", CHANGED)
def test_models_with_changed_parts_are_unchanged(name):
    model = make_changed(*CHANGED[name])
    if "large" in name:
        for p in model.transformer.wte.parameters():
            p.data *= 3000
        for block in model.transformer.h:
            block.ln_2.weight.data *= 300
    assert_unchanged(model, lambda m, tokens: m(tokens, tokens), (3, 17, 40))


@cpu_only
def test_attributes_set_after_the_swap_have_effect():
    def run(model, tokens):
        model.transformer.h[1].skip = True
        return model(tokens, tokens)

    assert_unchanged(make_changed("", Skips), run)
    swapped = gptkernels.swap(make_changed("", Skips))
    tokens = torch.arange(8)[None]
    before = swapped(tokens, tokens)[1]
    assert swapped.gptkernels_report.replaced
    assert not torch.equal(run(swapped, tokens)[1], before)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", ["torch.nn.LayerNorm", "GPT2MLP", "Conv1D", "GPT2Block"])
@needs_transformers
def test_a_patched_forward_is_called(name, before, monkeypatch, device):
    model = transformers.GPT2LMHeadModel(hf_config()).to(device).eval()
    kind = torch.nn.LayerNorm if "." in name else getattr(transformers.models.gpt2.modeling_gpt2, name)
    original, calls = kind.forward, []

    def mine(self, *args, **kwargs):
        calls.append(self)
        return original(self, *args, **kwargs)

    tokens = torch.arange(8, device=device)[None]
    expected = model(tokens).logits
    if not before:
        gptkernels.swap(model)
    monkeypatch.setattr(kind, "forward", mine)
    if before:
        gptkernels.swap(model)
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert {id(one) for one in calls} == {id(one) for one in model.modules() if isinstance(one, kind)}


@needs_transformers
def test_attention_registered_as_sdpa_is_called(monkeypatch, device):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = gptkernels.swap(transformers.GPT2LMHeadModel(hf_config()).to(device).eval())
    calls = []
    ALL_ATTENTION_FUNCTIONS.register("sdpa", lambda *args, **kw: calls.append(1) or sdpa_attention_forward(*args, **kw))
    try:
        model(torch.arange(8, device=device)[None])
    finally:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", sdpa_attention_forward)
    assert len(calls) == model.config.n_layer


@needs_transformers
def test_loss_function_of_the_class_is_called(device):
    class Doubled(transformers.GPT2LMHeadModel):
        @property
        def loss_function(self):
            return lambda logits, labels, **kwargs: (
                2 * F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            )

    model = Doubled(hf_config()).to(device).eval()
    tokens = torch.arange(8, device=device)[None]
    expected = model(tokens, labels=tokens).loss
    torch.testing.assert_close(gptkernels.swap(model)(tokens, labels=tokens).loss, expected, rtol=1e-4, atol=1e-4)
