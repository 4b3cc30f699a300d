"""GPT-2 in plain PyTorch, the reference for the tests of models.

It imports nothing from gptkernels. Its parameters have nanoGPT's names, as in `gptkernels.models.GPT2`, so that each
model can load the other's state.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Config(Protocol):
    block_size: int
    vocab_size: int
    padded_vocab_size: int | None
    n_layer: int
    n_head: int
    n_embd: int
    bias: bool
    activation: str


class CausalSelfAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_heads = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.probabilities = nn.Identity()  # a hook here can apply dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(C // self.num_heads)  # (B, NH, T, T)
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        out = self.probabilities(scores.masked_fill(future, -math.inf).softmax(-1)) @ v  # (B, NH, T, HS)
        return self.c_proj(out.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.approximate = "none" if config.activation == "gelu" else "tanh"

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate=self.approximate))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class ReferenceGPT2(nn.Module):
    """GPT-2 without dropout. `wte` has `padded_vocab_size` rows, and the logits have `vocab_size` columns."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        rows = config.padded_vocab_size or config.vocab_size
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(rows, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": nn.LayerNorm(config.n_embd, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, rows, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.dim() == 2:
                parameter.normal_(0.0, residual_std if name.endswith("c_proj.weight") else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the logits (B, T, V) and the mean cross-entropy with `targets` (B, T)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](positions)
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))[..., : self.config.vocab_size]
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        return logits, loss
