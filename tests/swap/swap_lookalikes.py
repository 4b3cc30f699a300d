"""Twenty small models that resemble GPT-2 but compute slightly different functions, for tests of `swap(model)`.

`MODELS` maps a name to a function that returns `(model, run)`. `run(model, tokens)` returns `(logits, loss)`. Random
numbers come only from the generators of torch, Python and NumPy. Ten models change nanoGPT, ten Hugging Face's GPT-2.
Some differ from GPT-2 only after `run` has set an attribute, in training mode, for long sequences, from the second call
on, or for large activations.
"""

import math
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import published

MODELS: dict[str, Callable[[], tuple[nn.Module, Callable]]] = {}
VALUES: list[torch.Tensor] = []  # attention's values in the first layer of `nano_value_residual`


def register(build):
    MODELS[build.__name__] = build
    return build


def edit(base, kind, setup=lambda *args: None, before=lambda model: None, calls=1, method="forward"):
    """Return a decorator that adds a model in which a function replaces a method of some modules.

    The modules get a subclass of the same name, as if their source file had been edited.

    Args:
        base: a function that makes the model.
        kind: the name of the modules' class.
        setup: `setup(module, model, i)` prepares the i-th module of this class.
        before: `run` calls `before(model)` first.
        calls: the number of times that `run` calls the model; `run` returns the results of the last call.
        method: the name of the method. The decorated function gets the module, the old method and the arguments.
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
    if isinstance(model, published.GPT):
        return model(tokens, F.pad(tokens[:, 1:], (0, 1), value=-1))
    out = model(input_ids=tokens, labels=tokens, **kwargs)
    return out.logits, out.loss


@torch.no_grad()
def spread(model):
    """Draw weights so large that each change of a model shows in its logits."""

    for p in model.parameters():
        p.copy_(p + 0.1 * torch.randn_like(p) if p.dim() == 1 else 0.12 * torch.randn_like(p))
    return model


def nano():
    return spread(published.GPT(published.Config(block_size=64, vocab_size=65, n_layer=3, n_head=2, n_embd=32)))


def heads(attn, x):
    return [t.unflatten(2, (attn.n_head, -1)).transpose(1, 2) for t in attn.c_attn(x).split(attn.n_embd, dim=2)]


def attend(attn, q, k, v, mask=None, scale=None):
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return attn.resid_dropout(attn.c_proj(y.transpose(1, 2).flatten(2)))


@register
def nano_window_in_training():
    """In training mode, attention sees only the last 2, 4 and 8 tokens in the three layers. Its `forward` is a
    functools.partial.
    """

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
    self.step += 1
    if self.step <= 1:
        return forward(x)
    q, k, v = heads(self, x)
    return attend(self, F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, scale=4.0)


@edit(nano, "CausalSelfAttention", lambda self, model, i: setattr(self, "layer", i), lambda model: VALUES.clear())
def nano_value_residual(self, forward, x):
    q, k, v = heads(self, x)
    if self.layer == 0:
        VALUES.append(v)
    v = 0.5 * (v + (VALUES.pop() if self.layer == 2 else VALUES[-1]))
    return attend(self, q, k, v)


@register
def nano_token_shift_hook():
    """A hook shifts half of the input channels of `c_attn` by one token, as in RWKV."""

    def token_shift(module, args):
        near, far = args[0].chunk(2, dim=-1)
        return torch.cat([F.pad(near, (0, 0, 1, 0))[:, :-1], far], dim=-1)

    model = nano()
    model.transformer.h[1].attn.c_attn.register_forward_pre_hook(token_shift)
    return model, run


@register
def nano_fake_quantized_mlp():
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
    self.uses = self.uses % 3 + 1
    return forward(x) / self.uses


@edit(nano, "Block", setup=lambda self, model, i: setattr(self, "drop_rate", 0.2 * (i + 1)), method="__call__")
def nano_stochastic_depth(self, call, x):
    """`Block.__call__` skips layers at random with Python's `random`, later layers more often."""
    return x if self.training and random.random() < self.drop_rate else call(x)


@edit(nano, "CausalSelfAttention", before=lambda model: setattr(model.transformer.h[1].attn, "head_mask", (1, 0)))
def nano_head_ablation_later(self, forward, x):
    if not hasattr(self, "head_mask"):
        return forward(x)
    q, k, v = heads(self, x)
    return attend(self, q, k, v * v.new_tensor(self.head_mask).view(-1, 1, 1))


@edit(nano, "GPT")
def nano_logit_softcap_z_loss(self, forward, idx, targets):
    logits = 2.0 * torch.tanh(forward(idx, targets)[0] / 2.0)
    z_loss = torch.logsumexp(logits, dim=-1).square().mean()
    return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1) + 0.01 * z_loss


@edit(nano, "Block", before=lambda model: nn.init.constant_(model.transformer.h[1].mlp.c_proj.bias[3:4], 9.0))
def nano_clamped_residual(self, forward, x):
    """No value reaches the limit until `run` gives one channel a large bias."""
    return forward(x).clamp(-4.0, 4.0)


def hf():
    transformers = pytest.importorskip("transformers")
    sizes = dict(n_layer=3, n_head=2, n_embd=32, n_positions=64, vocab_size=65, bos_token_id=0, eos_token_id=0)
    config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
    return spread(transformers.GPT2LMHeadModel(config))


@register
def hf_attention_temperature_later():
    def scaled_run(model, tokens):
        for block, factor in zip(model.transformer.h, (2.0, 0.5, 3.0), strict=True):
            block.attn.scaling = factor * block.attn.head_dim**-0.5
        return run(model, tokens)

    return hf(), scaled_run


@edit(hf, "LayerNorm", setup=lambda self, model, i: self.weight.data.sub_(1.0))
def hf_norm_one_plus_weight(self, forward, x):
    """LayerNorm subclasses scale by 1 + weight, as Gemma's norms do. The weights are close to zero."""
    return F.layer_norm(x, self.normalized_shape, 1.0 + self.weight, self.bias, self.eps)


@register
def hf_alibi_registered_later():
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
    """position_ids begin again at separators, so that transformers masks attention between documents."""

    def packed(module, args, kwargs):
        position = torch.arange(args[0].size(1), device=args[0].device).expand_as(args[0])
        start = torch.where(args[0] < 16, position, 0).cummax(dim=1).values
        return args, {**kwargs, "position_ids": position - start, "use_cache": False}

    model = hf()
    model.transformer.register_forward_pre_hook(packed, with_kwargs=True)
    return model, run


@register
def hf_neftune_hook():
    """A forward hook on `wte` adds noise in training mode, as transformers' Trainer does for NEFTune."""

    def noise(module, args, y):
        return y + torch.empty_like(y).uniform_(-1, 1) / math.sqrt(y.size(1)) if module.training else y

    model = hf()
    model.transformer.wte.register_forward_hook(noise)
    return model, run


@edit(hf, "Conv1D", lambda self, model, i: setattr(self, "scale", nn.Parameter(torch.rand(self.nf))))
def hf_ia3_adapters(self, forward, x):
    """Conv1D is a subclass with a learned scale of each output channel, as in IA3."""
    return forward(x) * self.scale


@register
def hf_head_bias_smoothed_loss():
    """`lm_head`, tied to `wte`, has a bias. `loss_function` smooths the labels and ignores repeated tokens."""

    def smoothed(logits, labels, vocab_size, **kwargs):
        target = labels[:, 1:].masked_fill(labels[:, 1:] == labels[:, :-1], -100)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), target.flatten(), label_smoothing=0.1)

    model = hf()
    model.lm_head.bias = nn.Parameter(-torch.arange(1.0, 66.0).log())
    model.loss_function = smoothed
    return model, run


@register
def hf_repeated_block():
    """`transformer.h` has more than n_layer layers."""
    model = hf()
    model.transformer.h = nn.ModuleList([model.transformer.h[i] for i in (0, 1, 1, 2)])
    return model, partial(run, use_cache=False)


@register
def hf_mlp_property_by_length():
    """`mlp` is a property, which returns another MLP for sequences of more than 32 tokens."""

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
    out = forward(input_ids, output_hidden_states=True, **kwargs)
    out.logits = 0.5 * (out.logits + self.lm_head(self.transformer.ln_f(out.hidden_states[-2])))
    out.loss = self.loss_function(out.logits, labels, vocab_size=self.config.vocab_size)
    return out
