"""Tests of our attention as torch's flash attention implementation, and of our layers in Hugging Face's Kernel Hub."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import gptkernels
from helpers import assert_as_exact_as_torch, assert_raises
from swapped import make_model_and_call, transformers

ROOT = Path(__file__).parents[2]


has_registration = hasattr(torch.nn.attention, "register_flash_attention_impl")
needs_restore = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "restore_flash_attention_impl"),
    reason="this torch has no restore_flash_attention_impl",  # for example torch 2.10
)


def compute(inputs, causal, dtype=None):
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in inputs]
    out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


@needs_restore
@pytest.mark.filterwarnings("ignore:Warning only once")
@pytest.mark.parametrize("causal", [True, False])
def test_torchs_attention_calls_ours(causal, device):
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    inputs = [torch.randn(2, 3, 37, 16, device=device, dtype=dtype) for _ in range(3)]
    with sdpa_kernel(SDPBackend.MATH):
        exact = compute(inputs, causal, torch.float64)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = compute(inputs, causal)
        gptkernels.register_attention("torch")
        try:
            assert torch.nn.attention.current_flash_attention_impl() == "gptkernels"
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                ours = compute(inputs, causal)
        finally:
            torch.nn.attention.restore_flash_attention_impl()
        seen = {event.key for event in profile.key_averages()}
        assert {f"gptkernels::scaled_dot_product_attention{end}" for end in ("", "_backward")} <= seen
        assert all(torch.equal(a, b) for a, b in zip(compute(inputs, causal), theirs, strict=True))
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert_as_exact_as_torch(a, b, c)


@needs_restore
@pytest.mark.filterwarnings("ignore:Warning only once")
def test_torchs_attention_calls_ours_with_dropout(device):
    if device.type == "cpu":
        pytest.skip("torch's flash attention on the CPU has no dropout and is not selected")
    q = torch.eye(64, device=device, dtype=torch.bfloat16).expand(1, 2, 64, 64).contiguous().requires_grad_()
    gptkernels.register_attention("torch")
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
            assert 0.4 < (out == 0).float().mean() < 0.6
            out.sum().backward()
    finally:
        torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.skipif(has_registration, reason="this torch has register_flash_attention_impl")
def test_an_older_torch_is_refused():
    message = r"has no torch\.nn.attention\.register_flash_attention_impl"
    assert_raises(RuntimeError, message, gptkernels.register_attention, "torch")


def test_an_unknown_library_is_refused():
    assert_raises(ValueError, "'transformers' or 'torch', got 'jax'", gptkernels.register_attention, "jax")


@pytest.fixture
def repository(tmp_path):
    """Make a repository of the Kernel Hub from the folder ``kernel-hub``, as ``kernel-builder`` does."""
    pytest.importorskip("kernels")
    (tmp_path / "build").mkdir()
    for backend in ("cpu", "cuda"):
        variant = tmp_path / "build" / f"torch-{backend}"
        shutil.copytree(ROOT / "kernel-hub" / "torch-ext" / "gptkernels_layers", variant)
        metadata = {
            "id": "_gptkernels_layers_local", "name": "gptkernels-layers", "version": 1, "license": "MIT",
            "python-depends": [], "backend": {"type": backend},
        }  # fmt: skip
        (variant / "metadata.json").write_text(json.dumps(metadata))
    return tmp_path


def test_layers_of_a_kernel_hub_repository_replace_a_models(repository, device):
    from kernels import LocalLayerRepository, Mode, kernelize, register_kernel_mapping, replace_kernel_forward_from_hub

    class Norm(torch.nn.LayerNorm):
        """A layer norm that ``kernelize`` may replace."""

    class NewGELU(torch.nn.Module):
        def forward(self, input):
            return F.gelu(input, approximate="tanh")

    replace_kernel_forward_from_hub(Norm, "LayerNorm")
    replace_kernel_forward_from_hub(NewGELU, "NewGELU")
    layers = {
        name: {device.type: LocalLayerRepository(repo_path=repository, layer_name=name)}
        for name in ("LayerNorm", "NewGELU")
    }
    model = torch.nn.Sequential(Norm(16), NewGELU()).to(device)
    x = torch.randn(3, 16, device=device, requires_grad=True)
    expected = model(x)
    register_kernel_mapping(layers)
    model = kernelize(model, mode=Mode.TRAINING, device=device.type)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = model(x)
    assert {"gptkernels::layernorm", "gptkernels::gelu"} <= {event.key for event in profile.key_averages()}
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert x.grad is not None


def test_names_in_build_toml_exist():
    tomllib = pytest.importorskip("tomllib")
    build = tomllib.loads((ROOT / "kernel-hub" / "build.toml").read_text())
    assert build["general"]["name"].replace("-", "_") == "gptkernels_layers"
    assert (ROOT / "kernel-hub" / "torch-ext" / "gptkernels_layers" / "layers.py").exists()


class Attention(torch.nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def test_swapped_models_call_a_replacement_of_torchs_attention(device, monkeypatch):
    """Torch's ``context_parallel`` replaces the attribute of ``torch.nn.functional`` in the same way."""
    torchs, calls = F.scaled_dot_product_attention, []

    def replacement(*args, **kwargs):
        calls.append(args)
        return torchs(*args, **kwargs)

    x = torch.randn(1, 2, 8, 16, device=device)
    families = ["nanoGPT", *["GPT2LMHeadModel"] * (transformers is not None)]
    models = [(gptkernels.swap(Attention()), lambda model, device: model(x), 1)]
    models += [(gptkernels.swap(model), call, 2) for model, call in (make_model_and_call(f, device) for f in families)]
    for model, call, layers in models:
        calls.clear()
        with monkeypatch.context() as context:
            context.setattr(F, "scaled_dot_product_attention", replacement)
            call(model, device)
        assert len(calls) == layers
