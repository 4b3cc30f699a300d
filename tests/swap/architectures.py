"""Architectures that have the modules of a GPT-2 but connect them in another way. Most of them are published.

`MODELS` maps a name to a function that returns `(model, run)`, as in `swap_lookalikes.py`. The models in `GPT2_FORMS`
compute the same function as GPT-2, but with other code.
"""

import torch
from swap_lookalikes import MODELS as OTHERS
from swap_lookalikes import attend, edit, heads, nano, register, run
from torch import nn
from torch.nn import functional as F

GPT2_FORMS = ("shared_block", "loop_by_index", "all_logits")
BEFORE = set(OTHERS)


def embed(self, idx):
    positions = torch.arange(idx.size(1), device=idx.device)
    return self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(positions))


def predict(self, x, targets):
    x = self.transformer.ln_f(x)
    if targets is None:
        return self.lm_head(x[:, [-1], :]), None
    logits = self.lm_head(x)
    return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def set_parameter(name, *values):
    return lambda self, model, i: self.register_parameter(name, nn.Parameter(torch.tensor(values)))


def set_trained(name, value):
    return lambda model: nn.init.constant_(model.get_parameter(name), value)


@edit(nano, "GPT", set_parameter("skip_weights", 1.0))
def unet_skips(self, forward, idx, targets=None):
    x, (first, middle, last) = embed(self, idx), self.transformer.h
    skip = first(x)
    return predict(self, last(middle(skip) + self.skip_weights[0] * skip), targets)


@edit(nano, "GPT", set_parameter("skip_weights", 0.0), set_trained("skip_weights", 0.5))
def unet_skips_from_zero(self, forward, idx, targets=None):
    """modded-nanogpt: while the skip connection's weight is 0, as at first, the model computes GPT-2."""
    x, (first, middle, last) = embed(self, idx), self.transformer.h
    skip = first(x)
    return predict(self, last(middle(skip) + self.skip_weights[0] * skip), targets)


@edit(nano, "GPT", set_parameter("lambdas", 1.0, 0.0), set_trained("lambdas", 0.6))
def embedding_in_every_layer(self, forward, idx, targets=None):
    x = x0 = embed(self, idx)
    for block in self.transformer.h:
        x = block(self.lambdas[0] * x + self.lambdas[1] * x0)
    return predict(self, x, targets)


@edit(nano, "GPT", set_parameter("depth_weights", 0.0, 0.0, 0.0, 1.0), set_trained("depth_weights", 0.25))
def denseformer(self, forward, idx, targets=None):
    """DenseFormer. The initial weights select the last layer's output."""
    states = [embed(self, idx)]
    for block in self.transformer.h:
        states.append(block(states[-1]))
    return predict(self, torch.einsum("n,nbtc->btc", self.depth_weights, torch.stack(states)), targets)


class ValueEmbeddingAttention(nn.Module):
    def forward(self, x, ve=None):
        q, k, v = heads(self, x)
        return attend(self, q, k, v if ve is None else v + 0.5 * ve.unflatten(2, (self.n_head, -1)).transpose(1, 2))


class ValueEmbeddingBlock(nn.Module):
    def forward(self, x, ve=None):
        x = x + self.attn(self.ln_1(x), ve)
        return x + self.mlp(self.ln_2(x))


@edit(nano, "GPT")
def value_embeddings(self, forward, idx, targets=None):
    x, (first, middle, last) = embed(self, idx), self.transformer.h
    ve = self.transformer.wte(idx)
    return predict(self, last(middle(first(x, ve)), ve=ve), targets)


def with_value_embeddings(build):
    def changed():
        model, run = build()
        for block in model.transformer.h:
            block.__class__, block.attn.__class__ = ValueEmbeddingBlock, ValueEmbeddingAttention
        return model, run

    return changed


OTHERS["value_embeddings"] = with_value_embeddings(OTHERS["value_embeddings"])


@edit(nano, "GPT")
def universal_transformer(self, forward, idx, targets=None):
    x = embed(self, idx)
    for step in range(2):
        x = x if step == 0 else x + self.transformer.wpe.weight[: idx.size(1)]
        for block in self.transformer.h:
            x = block(x)
    return predict(self, x, targets)


@edit(nano, "GPT")
def immediate_repeat(self, forward, idx, targets=None):
    """MobileLLM: each layer runs twice in a row."""
    x = embed(self, idx)
    for block in self.transformer.h:
        x = block(block(x))
    return predict(self, x, targets)


@register
def shared_block():
    model = nano()
    model.transformer.h = nn.ModuleList([model.transformer.h[0]] * 3)
    return model, run


@edit(nano, "GPT")
def layer_drop(self, forward, idx, targets=None):
    x = embed(self, idx)
    for block in self.transformer.h:
        if not (self.training and torch.rand(()) < 0.02):
            x = block(x)
    return predict(self, x, targets)


@edit(nano, "GPT", before=lambda model: model.lm_head.weight.data.mul_(40))
def confident_exit(self, forward, idx, targets=None):
    """Evaluation skips the layers after a confident prediction, as in CALM and DeeBERT.

    No prediction is confident until ``run`` multiplies the LM head's weight by 40.
    """
    x = embed(self, idx)
    for block in self.transformer.h:
        x = block(x)
        if not self.training and self.lm_head(self.transformer.ln_f(x[:, -1])).softmax(-1).amax(-1).min() > 0.99:
            break
    return predict(self, x, targets)


@edit(nano, "GPT")
def shallow_for_long(self, forward, idx, targets=None):
    x = embed(self, idx)
    for block in self.transformer.h[: 3 if idx.size(1) <= 60 else 2]:
        x = block(x)
    return predict(self, x, targets)


@edit(nano, "GPT", lambda self, model, i: setattr(self, "depth", 3), lambda model: setattr(model, "depth", 2))
def progressive_depth(self, forward, idx, targets=None):
    """Progressive stacking: `depth` is the number of all layers until `run` makes it smaller."""
    x = embed(self, idx)
    for block in self.transformer.h[: self.depth]:
        x = block(x)
    return predict(self, x, targets)


@edit(nano, "Block", set_parameter("router", *torch.linspace(-1, 1, 32).tolist()))
def mixture_of_depths(self, forward, x):
    chosen = (x @ self.router).topk(-(-x.size(1) // 2), dim=1).indices.sort(dim=1).values[..., None].expand(-1, -1, 32)
    return x.scatter(1, chosen, forward(x.gather(1, chosen)))


@edit(nano, "GPT")
def norm_in_the_middle(self, forward, idx, targets=None):
    x, (first, middle, last) = embed(self, idx), self.transformer.h
    return predict(self, last(self.transformer.ln_f(middle(first(x)))), targets)


@edit(nano, "Block")
def post_norm(self, forward, x):
    """The original Transformer: the norms follow the additions to the residual stream."""
    x = self.ln_1(x + self.attn(x))
    return self.ln_2(x + self.mlp(x))


@edit(nano, "Block")
def parallel(self, forward, x):
    """PaLM, GPT-NeoX: attention and the MLP have the same input."""
    return x + self.attn(self.ln_1(x)) + self.mlp(self.ln_2(x))


@edit(nano, "Block")
def sandwich_norm(self, forward, x):
    x = x + F.layer_norm(self.attn(self.ln_1(x)), (32,))
    return x + F.layer_norm(self.mlp(self.ln_2(x)), (32,))


@edit(
    nano,
    "CausalSelfAttention",
    set_parameter("head_scale", 1.0, 1.0),
    set_trained("transformer.h.1.attn.head_scale", 1.5),
)
def normformer_head_scale(self, forward, x):
    """NormFormer: each head's output has a scale, which is 1 at first."""
    q, k, v = heads(self, x)
    return attend(self, q, k, v * self.head_scale.view(-1, 1, 1))


@edit(nano, "CausalSelfAttention", lambda self, model, i: setattr(self, "first", i == 0))
def residual_scores(self, forward, x):
    """RealFormer: attention adds the previous layer's scores to its own."""
    q, k, v = heads(self, x)
    scores = q @ k.mT * q.size(-1) ** -0.5
    if not self.first:
        scores = scores + type(self).scores
    type(self).scores = scores
    mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1)
    y = scores.masked_fill(mask, -torch.inf).softmax(-1) @ v
    return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))


FIRST_VALUES: dict[str, torch.Tensor] = {}


@edit(nano, "CausalSelfAttention", lambda self, model, i: setattr(self, "layer", i))
def values_through_a_global(self, forward, x):
    q, k, v = heads(self, x)
    if self.layer == 0:
        FIRST_VALUES["v"] = v
        return forward(x)
    found = FIRST_VALUES.pop("v", None) if self.layer == 2 else None
    return forward(x) if found is None or found.shape != v.shape else attend(self, q, k, v + found)


def forget(model):
    for block in model.transformer.h:
        vars(block.attn).pop("kept", None)


@edit(nano, "CausalSelfAttention", before=forget, calls=2)
def memory_of_the_last_call(self, forward, x):
    """Transformer-XL: queries also see the keys and values of the previous call, if the batch sizes are equal."""
    q, k, v = heads(self, x)
    old, self.kept = getattr(self, "kept", None), (k.detach(), v.detach())
    if old is None or old[0].size(0) != x.size(0):
        return attend(self, q, k, v)
    k, v = (torch.cat(pair, dim=2) for pair in zip(old, (k, v), strict=True))
    mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=x.device).tril(k.size(2) - q.size(2))
    return attend(self, q, k, v, mask)


@edit(nano, "GPT", before=lambda model: vars(model).pop("before", None), calls=2)
def mean_hidden_state_of_the_previous_call(self, forward, idx, targets=None):
    x = embed(self, idx) + self.__dict__.get("before", 0.0)
    for block in self.transformer.h:
        x = block(x)
    self.__dict__["before"] = x.detach().mean((0, 1))
    return predict(self, x, targets)


@edit(nano, "GPT", lambda self, model, i: setattr(self, "prefix", nn.Parameter(torch.randn(2, 32))))
def prefix_tokens(self, forward, idx, targets=None):
    """Prompt tuning: two learned vectors precede the embeddings of each sequence."""
    x = torch.cat([self.prefix.expand(idx.size(0), -1, -1), embed(self, idx)], dim=1)
    for block in self.transformer.h:
        x = block(x)
    return predict(self, x[:, 2:], targets)


@edit(nano, "GPT")
def centred_over_the_batch(self, forward, idx, targets=None):
    x, (first, middle, last) = embed(self, idx), self.transformer.h
    x = middle(first(x))
    return predict(self, last(x - x.mean(0) if idx.size(0) > 1 else x), targets)


@edit(nano, "GPT")
def restarts_after_a_separator(self, forward, idx, targets=None):
    """Positions begin again at each separator, which is the last token of the vocabulary."""
    positions = torch.arange(idx.size(1), device=idx.device).expand_as(idx)
    start = torch.where(idx == 64, positions, 0).cummax(dim=1).values
    x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(positions - start))
    for block in self.transformer.h:
        x = block(x)
    return predict(self, x, targets)


@edit(nano, "GPT")
def shrunk_embedding_gradient(self, forward, idx, targets=None):
    """CogView, GLM-130B: only a tenth of the gradient reaches the embeddings."""
    x = embed(self, idx)
    x = 0.1 * x + 0.9 * x.detach()
    for block in self.transformer.h:
        x = block(x)
    return predict(self, x, targets)


@edit(nano, "GPT")
def loop_by_index(self, forward, idx, targets=None):
    x = self.transformer.wte(idx) + self.transformer.wpe.weight[None, : idx.size(1)]
    x = self.transformer.drop(x)
    for i in range(len(self.transformer.h)):
        x = self.transformer.h[i](x)
    return predict(self, x, targets)


@edit(nano, "GPT")
def all_logits(self, forward, idx, targets=None):
    """build-nanogpt: a GPT-2 that returns the logits of all positions even without targets."""
    x = embed(self, idx)
    for block in self.transformer.h:
        x = block(x)
    logits = self.lm_head(self.transformer.ln_f(x))
    if targets is None:
        return logits, None
    return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


MODELS = {name: OTHERS.pop(name) for name in list(OTHERS) if name not in BEFORE}
