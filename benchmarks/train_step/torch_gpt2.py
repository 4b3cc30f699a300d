"""GPT-2 in plain torch, with fused attention and the parameter names of this package's GPT2."""

import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        c, self.heads = config.n_embd, config.n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(c), nn.LayerNorm(c)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(c, 3 * c), "c_proj": nn.Linear(c, c)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(c, 4 * c), "c_proj": nn.Linear(4 * c, c)})

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.attn["c_attn"](self.ln_1(x)).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in qkv)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](out.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, config):
        super().__init__()
        layers = {
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            "ln_f": nn.LayerNorm(config.n_embd),
        }
        self.transformer = nn.ModuleDict(layers)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens, targets):
        x = self.transformer["wte"](tokens) + self.transformer["wpe"].weight[: tokens.shape[1]]
        with sdpa_kernel(ATTENTION, set_priority=True):
            for block in self.transformer["h"]:
                x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
