"""Twenty small models that look like GPT-2 and each compute something slightly different, to test `swap(model)`.

`MODELS` maps a name to a function that returns `(model, run)`; `run(model, tokens)` returns `(logits, loss)` and is
deterministic for a given seed. Ten models are nanoGPT with a change, ten are Hugging Face's GPT-2 with a change: some
only after `run` sets something, in training mode, on long sequences, from the second call on or at large activations.
"""

import math
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

MODELS: dict[str, Callable[[], tuple[nn.Module, Callable]]] = {}
VALUES: list[torch.Tensor] = []  # the first layer's values in `nano_value_residual`; empty after each pass


def register(build):
    """Add a function that returns (model, run) to `MODELS`, under its own name."""
    MODELS[build.__name__] = build
    return build


def edit(base, kind, setup=lambda *args: None, before=lambda model: None, calls=1, method="forward"):
    """Add a model in which the decorated function replaces a method of the modules whose class is named `kind`.

    They get a subclass of the same name, as in an edited file. The function gets the module, the old method and the
    arguments. `setup(module, model, i)` prepares the ith of the modules; `run` calls `before(model)` first.
    """

    def add(function):
        def build():
            model = base()
            modules = [m for m in model.modules() if type(m).__name__ == kind]
            old = getattr(type(modules[0]), method)
            new = {method: lambda self, *args, **kwargs: function(self, partial(old, self), *args, **kwargs)}
            edited_class = type(kind, (type(modules[0]),), new)
            for i, module in enumerate(modules):
                module.__class__ = edited_class
                setup(module, model, i)
            return model, edited_run

        def edited_run(model, tokens):
            before(model)
            return [run(model, tokens) for _ in range(calls)][-1]

        MODELS[function.__name__] = build
        return function

    return add


def run(model, tokens, **kwargs):
    """Predict the next token; the last position has no target."""
    if isinstance(model, GPT):
        return model(tokens, F.pad(tokens[:, 1:], (0, 1), value=-1))
    out = model(input_ids=tokens, labels=tokens, **kwargs)
    return out.logits, out.loss


@torch.no_grad()
def spread(model):
    """Make the initial weights large and the vectors uneven, so that small changes show in the logits."""
    for p in model.parameters():
        p.copy_(p + 0.1 * torch.randn_like(p) if p.dim() == 1 else 0.12 * torch.randn_like(p))
    return model


class LayerNorm(nn.Module):
    def __init__(self, ndim, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.n_embd, self.dropout, self.flash = config.n_head, config.n_embd, config.dropout, True

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        wte, wpe = (nn.Embedding(n, config.n_embd) for n in (config.vocab_size, config.block_size))
        h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        ln_f = LayerNorm(config.n_embd, bias=config.bias)
        self.transformer = nn.ModuleDict(dict(wte=wte, wpe=wpe, drop=nn.Dropout(config.dropout), h=h, ln_f=ln_f))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def nano():
    config = dict(block_size=64, vocab_size=65, n_layer=3, n_head=2, n_embd=32, dropout=0.0, bias=True)
    return spread(GPT(SimpleNamespace(**config)))


def heads(attn, x):
    return [t.unflatten(2, (attn.n_head, -1)).transpose(1, 2) for t in attn.c_attn(x).split(attn.n_embd, dim=2)]


def attend(attn, q, k, v, mask=None, scale=None):
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return attn.resid_dropout(attn.c_proj(y.transpose(1, 2).flatten(2)))


@register
def nano_window_in_training():
    """Each attention's own `forward` is a functools.partial: windows of 2, 4 and 8 tokens, in training mode only."""

    def windowed(attn, window, x):
        if not attn.training:
            return type(attn).forward(attn, x)
        ones = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device)
        return attend(attn, *heads(attn, x), mask=ones.tril() & ones.triu(1 - window))

    model = nano()
    for i, block in enumerate(model.transformer.h):
        block.attn.forward = partial(windowed, block.attn, 2 ** (i + 1))
    return model, run


@edit(
    nano,
    "CausalSelfAttention",
    lambda self, model, i: self.register_buffer("step", torch.zeros((), dtype=torch.long)),
    before=lambda model: [block.attn.step.zero_() for block in model.transformer.h],
    calls=2,
)
def nano_qk_norm_after_warmup(self, forward, x):
    """Attention counts its calls in a buffer and normalizes q and k from the second call on."""
    self.step += 1
    if self.step <= 1:
        return forward(x)
    q, k, v = heads(self, x)
    return attend(self, F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, scale=4.0)


@edit(nano, "CausalSelfAttention", lambda self, model, i: setattr(self, "layer", i), lambda model: VALUES.clear())
def nano_value_residual(self, forward, x):
    """Attention averages its values with the first layer's, which it gets through a global variable."""
    q, k, v = heads(self, x)
    if self.layer == 0:
        VALUES.append(v)
    v = 0.5 * (v + (VALUES.pop() if self.layer == 2 else VALUES[-1]))
    return attend(self, q, k, v)


@register
def nano_token_shift_hook():
    """A pre-hook on the linear layer `attn.c_attn` of one block shifts half of its input by one token (as RWKV)."""

    def token_shift(module, args):
        near, far = args[0].chunk(2, dim=-1)
        return torch.cat([F.pad(near, (0, 0, 1, 0))[:, :-1], far], dim=-1)

    model = nano()
    model.transformer.h[1].attn.c_attn.register_forward_pre_hook(token_shift)
    return model, run


@register
def nano_fake_quantized_mlp():
    """A parametrization rounds the weight of one `mlp.c_proj` to 4 bits (quantization-aware training)."""

    class FakeQuant(nn.Module):
        def forward(self, weight):
            step = weight.detach().abs().amax(dim=1, keepdim=True) / 7
            return weight + ((weight / step).round() * step - weight).detach()

    model = nano()
    nn.utils.parametrize.register_parametrization(model.transformer.h[1].mlp.c_proj, "weight", FakeQuant())
    return model, run


def share_mlp(self, model, i):
    model.transformer.h[i].mlp = model.transformer.h[0].mlp


@edit(nano, "MLP", share_mlp, before=lambda model: setattr(model.transformer.h[0].mlp, "uses", 0))
def nano_shared_mlp_fades(self, forward, x):
    """All blocks hold the first block's MLP, which divides its output by its number of uses in this pass so far."""
    self.uses = self.uses % 3 + 1
    return forward(x) / self.uses


@edit(nano, "Block", setup=lambda self, model, i: setattr(self, "drop_rate", 0.2 * (i + 1)), method="__call__")
def nano_stochastic_depth(self, call, x):
    """In training mode, `Block.__call__` leaves a block out by Python's `random`, deeper blocks more often."""
    return x if self.training and random.random() < self.drop_rate else call(x)


@edit(nano, "CausalSelfAttention", before=lambda model: setattr(model.transformer.h[1].attn, "head_mask", (1, 0)))
def nano_head_ablation_later(self, forward, x):
    """Attention looks for an attribute `head_mask`, which is missing until `run` ablates the second head of a layer."""
    if not hasattr(self, "head_mask"):
        return forward(x)
    q, k, v = heads(self, x)
    return attend(self, q, k, v * v.new_tensor(self.head_mask).view(-1, 1, 1))


@edit(nano, "GPT")
def nano_logit_softcap_z_loss(self, forward, idx, targets):
    """GPT caps the logits of its superclass by tanh and computes its own loss on them, with a z-loss added."""
    logits = 2.0 * torch.tanh(forward(idx, targets)[0] / 2.0)
    z_loss = torch.logsumexp(logits, dim=-1).square().mean()
    return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1) + 0.01 * z_loss


@edit(nano, "Block", before=lambda model: nn.init.constant_(model.transformer.h[1].mlp.c_proj.bias[3:4], 9.0))
def nano_clamped_residual(self, forward, x):
    """Each block clamps its output to a limit which is not reached until `run` makes one channel an outlier."""
    return forward(x).clamp(-4.0, 4.0)


def hf():
    transformers = pytest.importorskip("transformers")
    sizes = dict(n_layer=3, n_head=2, n_embd=32, n_positions=64, vocab_size=65, bos_token_id=0, eos_token_id=0)
    config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
    return spread(transformers.GPT2LMHeadModel(config))


@register
def hf_attention_temperature_later():
    """A plain model until `run` sets each attention's attribute `scaling` to a temperature of its own."""

    def scaled_run(model, tokens):
        for block, factor in zip(model.transformer.h, (2.0, 0.5, 3.0), strict=True):
            block.attn.scaling = factor * block.attn.head_dim**-0.5
        return run(model, tokens)

    return hf(), scaled_run


@edit(hf, "LayerNorm", setup=lambda self, model, i: self.weight.data.sub_(1.0))
def hf_norm_one_plus_weight(self, forward, x):
    """The norms are LayerNorm subclasses which scale by 1 + weight (as Gemma's), with weights close to zero."""
    return F.layer_norm(x, self.normalized_shape, 1.0 + self.weight, self.bias, self.eps)


@register
def hf_alibi_registered_later():
    """A plain model until `run` registers an attention function with ALiBi's bias and selects it, for this run only."""

    def alibi(module, q, k, v, attention_mask, scaling=None, **kwargs):
        distance = (torch.arange(q.size(2)) - torch.arange(q.size(2))[:, None]).to(q.device)
        slopes = 2.0 ** -torch.arange(1.0, q.size(1) + 1, device=q.device)
        bias = (slopes[:, None, None] * distance).masked_fill(distance > 0, -math.inf).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling).transpose(1, 2), None

    def alibi_run(model, tokens):
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ALL_ATTENTION_FUNCTIONS, "alibi", alibi)
            patch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "alibi", lambda *args, **kwargs: None)
            patch.setattr(model.config, "_attn_implementation", "alibi")
            return run(model, tokens)

    return hf(), alibi_run


@register
def hf_packed_documents_hook():
    """A pre-hook on `transformer` passes position_ids which restart after separators, so documents are masked too."""

    def packed(module, args, kwargs):
        position = torch.arange(args[0].size(1), device=args[0].device).expand_as(args[0])
        start = torch.where(args[0] < 16, position, 0).cummax(dim=1).values
        return args, {**kwargs, "position_ids": position - start, "use_cache": False}

    model = hf()
    model.transformer.register_forward_pre_hook(packed, with_kwargs=True)
    return model, run


@register
def hf_neftune_hook():
    """A forward hook on `wte` adds noise in training mode (NEFTune, as transformers' Trainer does it)."""

    def noise(module, args, y):
        return y + torch.empty_like(y).uniform_(-1, 1) / math.sqrt(y.size(1)) if module.training else y

    model = hf()
    model.transformer.wte.register_forward_hook(noise)
    return model, run


@edit(hf, "Conv1D", lambda self, model, i: setattr(self, "scale", nn.Parameter(torch.rand(self.nf))))
def hf_ia3_adapters(self, forward, x):
    """Conv1D is a subclass which has a second parameter, a learned scale of its outputs (IA3)."""
    return forward(x) * self.scale


@register
def hf_head_bias_smoothed_loss():
    """`lm_head`, still tied to `wte`, got a bias of token frequencies, and `loss_function` now smooths labels."""

    def smoothed(logits, labels, vocab_size, **kwargs):
        target = labels[:, 1:].masked_fill(labels[:, 1:] == labels[:, :-1], -100)  # repeated tokens do not count
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), target.flatten(), label_smoothing=0.1)

    model = hf()
    model.lm_head.bias = nn.Parameter(-torch.arange(1.0, 66.0).log())
    model.loss_function = smoothed
    return model, run


@register
def hf_repeated_block():
    """The second block is in `transformer.h` twice (a looped transformer), so there are more blocks than n_layer."""
    model = hf()
    model.transformer.h = nn.ModuleList([model.transformer.h[i] for i in (0, 1, 1, 2)])
    return model, partial(run, use_cache=False)


@register
def hf_mlp_property_by_length():
    """`block.mlp` is a property: the usual MLP up to 32 tokens, another MLP for longer sequences."""

    class Routed:
        length = 0
        mlp = property(lambda self: self.long_mlp if self.length > 32 else self._modules["mlp"])

        def forward(self, hidden_states, *args, **kwargs):
            self.length = hidden_states.size(1)
            return super().forward(hidden_states, *args, **kwargs)

    model = hf()
    for block, donor in zip(model.transformer.h, hf().transformer.h, strict=True):
        block.__class__ = type("GPT2Block", (Routed, type(block)), {})
        block.long_mlp = donor.mlp
    return model, run


@edit(hf, "GPT2LMHeadModel")
def hf_deep_supervision(self, forward, input_ids=None, labels=None, **kwargs):
    """The logits are averaged with those of the layer before the last, which `output_hidden_states` gives."""
    out = forward(input_ids, output_hidden_states=True, **kwargs)
    out.logits = 0.5 * (out.logits + self.lm_head(self.transformer.ln_f(out.hidden_states[-2])))
    out.loss = self.loss_function(out.logits, labels, vocab_size=self.config.vocab_size)
    return out
