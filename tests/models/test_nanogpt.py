"""Tests that GPT2's methods with nanoGPT's names match the methods of nanoGPT's model."""

import dataclasses
import math

import pytest
import torch

import published
from conversions import CONFIG, make_model, nanogpt_groups
from gptkernels.models import GPT2, nanogpt
from gptkernels.optim import AdamW
from helpers import assert_raises


def make_pair(device="cpu", **changes):
    ours = make_model(dtype=torch.float64, activation="gelu", **changes).to(device)
    names = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")
    theirs = published.GPT(published.Config(**{name: getattr(ours.config, name) for name in names}))
    state = ours.state_dict()
    rows = {name: state[name][: ours.config.vocab_size] for name in ("transformer.wte.weight", "lm_head.weight")}
    theirs.load_state_dict(state | rows)
    return ours, theirs.to(device, torch.float64)


@pytest.mark.parametrize("bias", [True, False])
def test_configure_optimizers_matches_nanogpt(bias, device):
    ours, theirs = make_pair(device, bias=bias)
    optimizer = ours.configure_optimizers(weight_decay=0.1, learning_rate=1e-2, betas=(0.8, 0.9), device_type="cpu")
    assert type(optimizer) is AdamW
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    expected = torch.optim.AdamW(nanogpt_groups(theirs), lr=1e-2, betas=(0.8, 0.9))
    shapes = [[[len(p.shape) for p in group["params"]] for group in o.param_groups] for o in (optimizer, expected)]
    assert shapes[0] == shapes[1]
    for group in (*optimizer.param_groups, *expected.param_groups):
        # The gradient of the keys' bias is 0, except for rounding errors, which Adam would amplify with a smaller eps.
        group["eps"] = 1e-3
    for tokens in torch.randint(50, (5, 2, 8), device=device):
        for model, steps in ((ours, optimizer), (theirs, expected)):
            steps.zero_grad()
            model(tokens, tokens.roll(1))[1].backward()
            steps.step()
    for (name, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q[: len(p)], p, rtol=1e-9, atol=1e-9, msg=name)
    assert ours.configure_optimizers(0.1, 1e-2, (0.8, 0.9)).defaults["betas"] == (0.8, 0.9)


def test_the_optimizer_has_no_frozen_parameters():
    model = make_model()
    model.transformer.wpe.weight.requires_grad_(False)
    groups = model.configure_optimizers(0.1, 1e-2, (0.8, 0.9), "cpu").param_groups
    assert all(p is not model.transformer.wpe.weight for group in groups for p in group["params"])


@pytest.mark.parametrize("return_logits", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ignored_targets_match_nanogpt(return_logits, dtype, device):
    ours, theirs = make_pair(device)
    tokens = torch.randint(50, (2, 8), device=device)
    targets = tokens.roll(1).masked_fill(torch.rand(2, 8, device=device) < 0.4, -1)
    _, loss = ours(tokens, targets.to(dtype), return_logits=return_logits, ignore_index=-1)
    _, expected = theirs(tokens, targets)
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(loss, list(ours.parameters()))
    for gradient, other in zip(found, torch.autograd.grad(expected, list(theirs.parameters())), strict=True):
        torch.testing.assert_close(gradient[: len(other)], other)
    by_default = ours(tokens, targets.masked_fill(targets == -1, -100), return_logits=return_logits)[1]
    torch.testing.assert_close(by_default, expected)


def test_crop_block_size(device):
    ours, theirs = make_pair(device, dropout=0.1)
    ours.eval().crop_block_size(5)
    tokens = torch.randint(50, (2, 5), device=device)
    torch.testing.assert_close(ours(tokens)[0], theirs(tokens, tokens)[0])
    assert ours.config == dataclasses.replace(CONFIG, block_size=5, activation="gelu", dropout=0.1)
    assert ours.transformer.wpe.num_embeddings == 5
    assert ours.transformer.wpe.weight.untyped_storage().nbytes() == 5 * 16 * 8
    assert_raises(ValueError, "6 tokens are more than block_size 5", ours, torch.randint(50, (2, 6), device=device))
    for size in (0, 6):
        assert_raises(ValueError, f"block_size must be from 1 to 5, got {size}", ours.crop_block_size, size)
    GPT2(ours.config).load_state_dict(ours.state_dict())
    assert ours.generate(tokens[:, :1], 8).shape == (2, 9)  # has more tokens than block_size


@pytest.mark.parametrize("bias", [True, False])
def test_get_num_params_matches_nanogpt(bias):
    ours, theirs = make_pair(bias=bias)
    count = sum(p.numel() for p in theirs.parameters())
    assert ours.get_num_params(non_embedding=False) == count
    assert ours.get_num_params() == count - 8 * 16


def test_estimate_mfu_is_nanogpts_formula(monkeypatch):
    model = make_model()
    L, H, Q, T = 2, 2, 8, 8
    flops = (6 * model.get_num_params() + 12 * L * H * Q * T) * T
    assert math.isclose(model.estimate_mfu(40, 0.25, peak_flops=1e12), flops * 40 / 0.25 / 1e12)
    assert_raises(ValueError, "the peak of a cpu is not known: give peak_flops", model.estimate_mfu, 40, 0.25)
    assert_raises(ValueError, "dt must be above 0, got 0", model.estimate_mfu, 40, 0, peak_flops=1e12)
    monkeypatch.setattr(nanogpt, "peak_of", lambda device: 989.4e12)
    assert math.isclose(model.estimate_mfu(40, 0.25), flops * 40 / 0.25 / 989.4e12)
