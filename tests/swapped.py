"""Models for the tests of ``gptkernels.swap``, and comparisons of swapped and unswapped models."""

import contextlib
import copy
import os

import pytest
import torch
import torch.nn.functional as F

import gptkernels
import published
from gptkernels import functional
from gptkernels.block.node import Dropout
from gptkernels.swapping import checks
from gptkernels.swapping.dropout import Draws
from helpers import assert_as_exact_as_torch, error_of

V, T = 101, 24
TOKENS = torch.randint(3, V, (4, T), generator=torch.Generator().manual_seed(7))

try:
    import transformers
except ImportError:
    if os.environ.get("CI"):
        raise
    transformers = None

needs_transformers = pytest.mark.skipif(transformers is None, reason="transformers is not installed")


def hf_config(dropout=0.0, **changes):
    base = dict(
        n_layer=2, n_head=2, n_embd=32, vocab_size=V, n_positions=64, num_labels=3, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        summary_first_dropout=dropout,
    )  # fmt: skip
    return transformers.GPT2Config(**{**base, **changes})


def randomised(model):
    """Set the parameters, with a fixed seed, to values so large that each of them affects the results."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            drawn = torch.randn(p.shape, generator=generator)
            is_norm = p.dim() == 1 and bool((p == 1).all())
            p.copy_(1 + 0.1 * drawn if is_norm else drawn * (0.1 if p.dim() == 2 else 0.05))
    return model


def huggingface(kind):
    def make(dropout):
        return randomised(getattr(transformers, kind)(hf_config(dropout)))

    return make


def tokens(device, draw=0, batch=2):
    """Return tokens (B, T) without padding; ``draw`` selects one of several samples."""
    return TOKENS[:batch].roll(5 * draw).to(device)


def call_language_model(model, device, draw=0):
    x = tokens(device, draw)
    labels = x.clone()
    labels[0, :3] = -100
    out = model(input_ids=x, labels=labels)
    return [out.logits], out.loss


def call_model(model, device, draw=0):
    hidden = model(input_ids=tokens(device, draw)).last_hidden_state
    return [hidden], hidden.float().square().mean() if hidden.dtype != torch.float64 else hidden.square().mean()


def call_classifier(model, device, draw=0):
    """One of the two sequences ends with padding."""
    x = tokens(device, draw)
    x[0, -4:] = 0
    out = model(input_ids=x, attention_mask=(x != 0).long(), labels=torch.tensor([2, 0], device=device))
    return [out.logits], out.loss


def call_double_heads(model, device, draw=0):
    x = tokens(device, draw, 4).view(2, 2, T)
    out = model(
        input_ids=x, mc_token_ids=torch.tensor([[3, 5], [9, T - 1]], device=device), labels=x,
        mc_labels=torch.tensor([1, 0], device=device),
    )  # fmt: skip
    return [out.logits, out.mc_logits], out.loss + out.mc_loss


def call_gpt(model, device, draw=0):
    x = tokens(device, draw)
    targets = x.roll(-1, 1)
    targets[:, -1] = -1
    logits, loss = model(x, targets)
    return [logits], loss


def gpt(kind, bias=True):
    return lambda dropout: randomised(kind(published.Config(64, V, 2, 2, 32, dropout, bias)))


FAMILIES = {
    "GPT2LMHeadModel": (huggingface("GPT2LMHeadModel"), call_language_model),
    "GPT2Model": (huggingface("GPT2Model"), call_model),
    "GPT2ForSequenceClassification": (huggingface("GPT2ForSequenceClassification"), call_classifier),
    "GPT2DoubleHeadsModel": (huggingface("GPT2DoubleHeadsModel"), call_double_heads),
    "nanoGPT": (gpt(published.GPT), call_gpt),
    "nanoGPT without bias": (gpt(published.GPT, bias=False), call_gpt),
    "nanoGPT before torch 2": (gpt(published.SlowGPT), call_gpt),
    "llm.c": (gpt(published.LlmcGPT), call_gpt),
}
all_families = pytest.mark.parametrize(
    "family", [pytest.param(n, marks=[needs_transformers] if n.startswith("GPT2") else []) for n in FAMILIES]
)


def make_model_and_call(family, device, dropout=0.0):
    make, call = FAMILIES[family]
    return make(dropout).to(device), call


def make_copies_and_call(family, device, dropout=0.0):
    model, call = make_model_and_call(family, device, dropout)
    return gptkernels.swap(copy.deepcopy(model)), model, copy.deepcopy(model).double(), call


def results(model, call, device, autocast=False, draw=0):
    context = torch.autocast(device.type, torch.bfloat16) if autocast else contextlib.nullcontext()
    with context:
        outputs, loss = call(model, device, draw)
    model.zero_grad()
    loss.backward()
    found = {f"output {i}": out.detach() for i, out in enumerate(outputs)}
    return {**found, "loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters()}}


def assert_as_exact(ours, torchs, exact, others=()):
    """Assert that every result satisfies the rule of ``helpers.assert_as_exact_as_torch``.

    torch's largest error for a small tensor varies from input to input, so the rule uses torch's largest error over
    ``others``, too. ``others`` has pairs of torch's results and float64 results for other inputs. torch's error of a
    loss may happen to be near 0, so the rule uses at least the mean error of torch's first output.
    """
    assert ours.keys() == torchs.keys() == exact.keys()
    typical = (torchs["output 0"].double() - exact["output 0"].double()).abs().mean().item()
    for name in ours:
        error = max([typical if name == "loss" else 0.0, *(error_of(t[name], e[name].double()) for t, e in others)])
        assert_as_exact_as_torch(ours[name], torchs[name], exact[name].double(), name, error)


@contextlib.contextmanager
def our_dropout(monkeypatch):
    """Make torch's attention and dropout apply the dropout masks of our kernels.

    Every dropout has the same seed, and its offset is the number of earlier dropouts in the context. A swapped and an
    unswapped model therefore apply the same masks.
    """
    count = iter(range(10**6))

    def numbers(dropout_p, like):
        if dropout_p == 0:
            return None, None
        return tuple(torch.tensor(n, device=like.device) for n in (77, next(count)))

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        p = scores.softmax(-1).to(value.dtype)
        seed, offset = numbers(dropout_p, query)
        if dropout_p:
            p = p * torch.ops.gptkernels.attention_dropout_mask(*p.shape, dropout_p, seed, offset) / (1 - dropout_p)
        return p @ value

    def dropout(input, p=0.5, training=True, inplace=False):
        if not (training and p):
            return input
        kept = torch.ops.gptkernels.dropout_mask(input.numel(), p, *numbers(p, input)).view(input.shape)
        return input * kept / (1 - p)

    with monkeypatch.context() as patch:
        patch.setattr(functional, "_dropout_numbers", numbers)
        patch.setattr(Draws, "__call__", lambda draws, p: Dropout(p, *numbers(p, draws._like)))
        patch.setattr(F, "scaled_dot_product_attention", attention)
        patch.setattr(checks, "TORCHS_ATTENTION", attention)  # swapped models must not call the replacement
        patch.setattr(F, "dropout", dropout)
        yield
