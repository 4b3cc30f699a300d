"""Tests of our attention as torch's flash attention implementation."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import gptkernels
from helpers import assert_as_exact_as_torch, assert_raises
from swapped import make_model_and_call, transformers

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
