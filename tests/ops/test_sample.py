"""Tests that sample_ draws the tokens of a formula in torch with the same noise."""

import pytest
import torch

from gptkernels.testing.cases.decode import sample_formula as formula
from helpers import all_dtypes, raises, refused

ops = torch.ops.gptkernels


def sample(logits, noise, *options):
    sequences = torch.full((len(logits), 3), -7, device=logits.device)
    lengths = torch.ones(len(logits), dtype=torch.int64, device=logits.device)
    ops.sample_(logits, noise, sequences, lengths, *options)
    assert (lengths == 2).all()
    assert (sequences[:, ::2] == -7).all()
    return sequences[:, 1]


def draws(rows, vocabulary, dtype, device, scale=3.0):
    torch.manual_seed(1)
    logits = (torch.randn(rows, vocabulary) * scale).to(device, dtype)
    return logits, torch.empty(rows, vocabulary).exponential_().to(device)


OPTIONS = [(), (0.7,), (1.0, 1), (1.3, 5), (1.0, 40, 0.9), (1.0, None, 0.5), (0.9, 10**6, 1.0), (1.0, None, 1e-9)]


@all_dtypes
@pytest.mark.parametrize("vocabulary", [1, 2, 65, 1000, 50257])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_matches_the_formula(options, vocabulary, dtype, device):
    logits, noise = draws(5, vocabulary, dtype, device)
    assert torch.equal(sample(logits, noise, *options), formula(logits, noise, *options))


@pytest.mark.parametrize("top_k", [1, 2, 47, 48, 49, 200, 256, 257, 3000])
@pytest.mark.parametrize("vocabulary", [300, 8192, 50257, 70000])
def test_top_k_of_clustered_and_equal_logits(vocabulary, top_k, device):
    logits, noise = draws(3, vocabulary, torch.bfloat16, device)
    logits[1] = torch.linspace(-5, 5, vocabulary).to(logits)
    logits[2].clamp_(max=0.5)
    for options in ((0.7, top_k), (1.0, top_k, 0.6)):
        assert torch.equal(sample(logits, noise, *options), formula(logits, noise, *options))


@all_dtypes
def test_likeliest_token(dtype, device):
    logits, _ = draws(6, 5000, dtype, device)
    logits[0] = 0
    logits[1] = -torch.inf
    logits[1, 4321] = -3
    assert torch.equal(sample(logits, None), formula(logits, None))
    padded = torch.cat([logits, torch.full_like(logits[:, :7], 100)], 1)
    assert torch.equal(sample(padded[:, :5000], None), formula(logits, None))
    assert torch.equal(sample(logits.T.contiguous().T, None), formula(logits, None))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equal_logits_and_negative_zero(options, device):
    """top_k keeps all logits that equal the smallest of the k largest. -0.0 and 0.0 are equal."""
    logits, noise = draws(4, 3000, torch.float32, device)
    logits = logits.round()
    logits[logits == 0] = -0.0
    logits[:, ::3][logits[:, ::3] == 0] = 0.0
    assert torch.equal(sample(logits, noise, *options), formula(logits, noise, *options))


def test_minus_infinity_is_never_drawn(device):
    logits, noise = draws(3, 100, torch.float32, device)
    logits[:, 1:] = -torch.inf
    noise[:, 1:] = 1e-30
    for options in OPTIONS:
        assert (sample(logits, noise, *options) == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_logits(bad, device):
    logits, noise = draws(3, 700, torch.float32, device)
    if bad == -torch.inf:
        logits[1] = bad
    else:
        logits[1, 650] = bad
    for given in (noise, None):
        found = sample(logits, given)
        assert found[1] == -1
        assert (found[[0, 2]] >= 0).all()


def test_matches_multinomial_with_the_same_seed(device):
    logits, _ = draws(4, 3000, torch.float32, device, 1.0)
    for seed in range(20):
        generator = torch.Generator(device).manual_seed(seed)
        expected = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        noise = torch.empty_like(logits).exponential_(generator=generator.manual_seed(seed))
        assert torch.equal(sample(logits, noise), expected)


def test_distribution(device):
    logits = torch.tensor([[0.1, 2.0, -1.0, 1.5, 0.0]], device=device).expand(20000, -1).contiguous()
    noise = torch.empty_like(logits).exponential_(generator=torch.Generator(device).manual_seed(0))
    kept = torch.tensor([False, True, False, True, False], device=device)
    p = logits[0].softmax(0).masked_fill(~kept, 0)
    found = sample(logits, noise, 1.0, 3, 0.8).bincount(minlength=5) / 20000
    torch.testing.assert_close(found, p / p.sum(), atol=0.015, rtol=0)


def test_bad_arguments(device):
    logits, noise = draws(2, 50, torch.float32, device)
    sequences = torch.zeros(2, 4, dtype=torch.int64, device=device)
    lengths = torch.tensor([0, 3], device=device)
    for match, args in (
        (r"logits must have shape \(B, V\)", (logits[0], noise, sequences, lengths)),
        (r"logits must have shape \(B, V\)", (logits[:, :0], None, sequences, lengths)),
        ("temperature must be above 0 with noise, got 0", (logits, noise, sequences, lengths, 0.0)),
        (r"sequences must have shape \(2, T\), got \(1, 4\)", (logits, noise, sequences[:1], lengths)),
        (r"lengths must have shape \(2\)", (logits, noise, sequences, lengths[:1])),
        ("top_k must be at least 1, got 0", (logits, noise, sequences, lengths, 1.0, 0)),
        ("top_p must be above 0 and at most 1, got 1.5", (logits, noise, sequences, lengths, 1.0, None, 1.5)),
        ("top_p must be above 0 and at most 1, got 0", (logits, noise, sequences, lengths, 1.0, None, 0.0)),
    ):
        with raises("sample_: " + match):
            ops.sample_(*args)
    if device.type == "cpu":
        with raises("length 4 of sequence 1 is not from 0 to 3"):
            ops.sample_(logits, noise, sequences, lengths + 1)
    refused(ops.sample_, (logits.requires_grad_(), noise, sequences, lengths), "sample_ has no derivative")
