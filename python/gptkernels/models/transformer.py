"""GPT-2 (Radford et al., 2019) without its LM head: embeddings, layers and the final norm."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from gptkernels import nn
from gptkernels._unmodified import are_unmodified, is_exporting, is_fully_sharded, is_unmodified
from gptkernels.block.fused import Pending, add, draw
from gptkernels.models import fused_block
from gptkernels.models.config import GPT2Config
from gptkernels.models.recompute import checkpointed, uses_dropout
from gptkernels.rules import ops

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def whole_length(tokens: Tensor, group: "ProcessGroup | None") -> int:
    """Return the length of the sequences of which this rank has the tokens (B, T)."""
    return tokens.shape[1] * (1 if group is None else group.size())


class Block(torch.nn.Module):
    """A layer of GPT-2: ``x = x + dropout(attn(ln_1(x)))``, then ``x = x + dropout(mlp(ln_2(x)))``."""

    def __init__(self, config: GPT2Config, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        C, bias = config.n_embd, config.bias
        self.ln_1 = nn.LayerNorm(C, bias=bias, device=device, dtype=dtype)
        self.attn = nn.CausalSelfAttention(C, config.n_head, bias, device, dtype, config.dropout, config.fp8)
        self.ln_2 = nn.LayerNorm(C, bias=bias, device=device, dtype=dtype)
        self.mlp = nn.MLP(C, bias, device, dtype, config.activation, config.fp8)
        self.resid_dropout = nn.Dropout(config.dropout)  # used in both additions

    def forward(
        self,
        x: Tensor,
        cache: nn.KeyValueCache | None = None,
        *,
        pending: Pending | None = None,
        finish: bool = True,
    ) -> Any:
        """Map x (B, T, C) to (B, T, C). With a cache, x has the positions that follow the cached ones.

        ``pending`` is first added to x. If ``finish`` is False, return what :meth:`without_last_addition` returns.
        """
        stream, (values, bias, dropout) = self.without_last_addition(x, pending, cache)
        if finish:
            return add(stream, Pending(values, bias, dropout))
        # FSDP frees the memory of the layer's parameters after this call.
        return stream, Pending(values, None if bias is None else bias.clone(), dropout)

    def without_last_addition(
        self, stream: Tensor, pending: Pending | None, cache: nn.KeyValueCache | None = None
    ) -> tuple[Tensor, Pending]:
        """Compute the layer without its last residual addition; return the stream (B, T, C), and the pending addition.

        One kernel computes an addition and the norm that follows it, and the norm after a layer's last addition belongs
        to the next layer.
        """
        if cache is None:
            found = fused_block.run(self, stream, pending)
            if found is not None:
                return found
        normed, residual_1 = _add_and_norm(stream, pending, self.ln_1)
        caches = () if cache is None else (cache,)
        if is_unmodified(self.attn, nn.CausalSelfAttention):
            values, bias = self.attn.without_bias(normed, *caches)
        else:
            values, bias = self.attn(normed, *caches), None
        normed, residual_2 = _add_and_norm(residual_1, _pending(values, bias, self.resid_dropout), self.ln_2)
        del residual_1  # without gradients its memory is free for the MLP
        if is_unmodified(self.mlp, nn.MLP):
            values, bias = self.mlp.without_bias(normed)
        else:
            values, bias = self.mlp(normed), None
        return residual_2, _pending(values, bias, self.resid_dropout)


def _pending(values: Tensor, bias: Tensor | None, dropout: torch.nn.Module) -> Pending:
    if is_unmodified(dropout, nn.Dropout):
        p = cast(nn.Dropout, dropout).p if dropout.training else 0.0
        if not p or dropout.context_group is None:
            return Pending(values, bias, draw(p, values))
    return Pending(dropout(values if bias is None else values + bias.to(values.dtype)))


def _add_and_norm(stream: Tensor, pending: Pending | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Add ``pending`` and normalise, in one kernel if possible; return the normalised stream, and the stream."""
    if pending is None or not is_unmodified(norm, nn.LayerNorm) or norm.normalized_shape != stream.shape[-1:]:
        stream = add(stream, pending)
        return norm(stream), stream
    values, bias, dropout = pending
    normed, total, _, _ = ops.residual_layernorm.default(
        values, stream, norm.weight, norm.bias, norm.eps, bias, *dropout
    )
    return normed, total


def _run(
    layer: torch.nn.Module, stream: Tensor, pending: Pending | None, cache: nn.KeyValueCache | None = None
) -> tuple[Tensor, Pending | None]:
    if is_unmodified(layer, Block):
        return cast(Block, layer).without_last_addition(stream, pending, cache)
    if cache is None and not torch.compiler.is_compiling() and is_fully_sharded(layer, Block):
        return layer(stream, pending=pending, finish=False)  # type: ignore[no-any-return]
    stream = add(stream, pending)
    return layer(stream) if cache is None else layer(stream, cache), None  # an adapter may have no cache argument


class Transformer(torch.nn.Module):
    """GPT-2 without its LM head.

    One kernel computes an addition and the norm that follows it, and one kernel computes both embeddings, unless a
    module was replaced or hooked.

    Attributes:
        recompute_blocks: save only a layer's inputs for the backward, which computes the layer again.
        context_group: the process group over which the sequences are divided; None, the default, if they are not.
    """

    recompute_blocks: bool = False
    context_group: "ProcessGroup | None" = None

    def __init__(self, config: GPT2Config, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        C = config.n_embd
        self.wte = nn.Embedding(config.padded_vocab_size, C, device=device, dtype=dtype)
        self.wte.vocab_size = self.vocab_size = config.vocab_size
        self.wpe = nn.Embedding(config.block_size, C, device=device, dtype=dtype)
        self.drop = nn.Dropout(config.dropout)
        self.h = torch.nn.ModuleList(Block(config, device, dtype) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(C, bias=config.bias, device=device, dtype=dtype)

    def forward(self, tokens: Tensor, caches: Sequence[nn.KeyValueCache] | None = None) -> Tensor:
        """Map tokens (B, T) to the final norm's output (B, T, C). With caches, the tokens follow the cached ones."""
        return self.after_embedding(self._embed(tokens, 0 if caches is None else caches[0].length), caches)

    def after_embedding(self, stream: Tensor, caches: Sequence[nn.KeyValueCache] | None = None) -> Tensor:
        """Compute the rest of :meth:`forward` from the sum of both embeddings, (B, T, C)."""
        stream = self.drop(stream)
        pending: Pending | None = None
        recompute = self.recompute_blocks and caches is None and torch.is_grad_enabled()
        for i, layer in enumerate(self.h):
            if recompute:
                draws = uses_dropout(layer, Block)
                stream, pending = checkpointed(_run, layer, stream, pending, draws=draws)
            else:
                stream, pending = _run(layer, stream, pending, None if caches is None else caches[i])
        return _add_and_norm(stream, pending, self.ln_f)[0]

    def embeds_in_one(self) -> bool:
        """Return whether one operator can compute both embeddings."""
        return are_unmodified((self.wte, nn.Embedding), (self.wpe, nn.Embedding)) and not is_exporting()

    def _embed(self, tokens: Tensor, start: int) -> Tensor:
        if self.embeds_in_one():
            positions = self.positions(tokens, self.wpe.weight[start:] if start else self.wpe.weight)
            return ops.encoder.default(tokens, self.wte.weight, positions, self.vocab_size)
        places = torch.arange(start, start + whole_length(tokens, self.context_group), device=tokens.device)
        return self.wte(tokens) + self.wpe(self._part_of_this_rank(places))

    def positions(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Return the position embeddings of tokens (B, T) from those of the whole sequence: (T or more, C)."""
        if self.context_group is None:
            return weight
        return self._part_of_this_rank(weight[: whole_length(tokens, self.context_group)])

    def _part_of_this_rank(self, positions: Tensor) -> Tensor:
        if self.context_group is None:
            return positions
        from gptkernels.parallel.context import split_sequence  # imports this module

        return split_sequence(positions, self.context_group, 0)
