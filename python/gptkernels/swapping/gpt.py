"""Replacements of the modules of nanoGPT's ``model.py``, of llm.c's ``train_gpt2.py``, and of files derived from them.

These classes are in the user's own code. They are therefore recognised by their attributes, and a replacement is used
only if it computes the same as the original (``equivalence.py``).
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from gptkernels._unmodified import is_exporting
from gptkernels.block.fused import FusedBlock, Pending, add, cast_all
from gptkernels.block.node import Dtypes, dtypes_of
from gptkernels.rules._autocast import autocast_dtype
from gptkernels.swapping.block_modules import fused_block, parts_of
from gptkernels.swapping.checks import attention_is_replaced, bare, count, dropout_of, untouched, why_not
from gptkernels.swapping.classes import Namespace, replacement
from gptkernels.swapping.dropout import Draws, drop
from gptkernels.swapping.head import head_and_loss
from gptkernels.swapping.layers import weight_of
from gptkernels.swapping.transformer import add_and_norm, attend, called, feed_forward, layer, mlp, pending_of, project

KINDS = BLOCK, ATTENTION, MLP = "gpt block", "gpt attention", "gpt mlp"


def children(module: torch.nn.Module) -> set[str]:
    return {name for name, child in module._modules.items() if child is not None}


def looks_like_attention(module: Any) -> bool:
    return (
        {"c_attn", "c_proj"} <= children(module) <= {"c_attn", "c_proj", "attn_dropout", "resid_dropout"}
        and isinstance(getattr(module, "n_head", None), int)
    )  # fmt: skip


def attention_dropout(module: Any) -> float | None:
    """Return the probability of dropout, or None if the original attention must run.

    It must if ``attn_dropout`` must be called, the two attributes disagree, or torch's attention was replaced.
    """
    if attention_is_replaced():
        return None
    p = 0.0
    if "attn_dropout" in module._modules:
        found = dropout_of(module.attn_dropout)
        if found is None:
            return None
        p = found
    if "dropout" in module.__dict__:
        other = module.dropout if module.training else 0.0
        if "attn_dropout" in module._modules and other != p:
            return None
        p = other
    return p


@replacement(ATTENTION)
def attention(original: Any) -> Namespace:
    def forward(self: Any, x: Tensor) -> Tensor:
        p = attention_dropout(self)
        if p is None or (reason := why_not(x)) is not None:
            count(self, "attn_dropout or F.scaled_dot_product_attention was changed" if p is None else str(reason))
            return original.forward(self, x)
        draws = Draws(2, x)
        return drop(project(_attended(self, x, p, draws), self.c_proj), self._modules.get("resid_dropout"), draws)

    return {"forward": forward}


def _attended(self: Any, x: Tensor, p: float, draws: Draws) -> Tensor:
    return attend(project(x, self.c_attn), self.n_head, None, draws(p))


def looks_like_mlp(module: Any) -> bool:
    rest = children(module) - {"c_fc", "c_proj", "dropout"}
    return {"c_fc", "c_proj"} <= children(module) and len(rest) == 1


def activation(module: Any) -> Any:
    (name,) = children(module) - {"c_fc", "c_proj", "dropout"}
    return module._modules[name]


@replacement(MLP)
def mlp_module(original: Any) -> Namespace:
    def forward(self: Any, x: Tensor) -> Tensor:
        if (reason := why_not(x)) is not None:
            count(self, reason)
            return original.forward(self, x)
        return drop(mlp(x, self.c_fc, activation(self), self.c_proj), self._modules.get("dropout"), Draws(1, x))

    return {"forward": forward}


def looks_like_block(module: Any) -> bool:
    return (
        children(module) == {"ln_1", "attn", "ln_2", "mlp"}
        and looks_like_attention(module.attn)
        and looks_like_mlp(module.mlp)
    )


def _fused(block: Any, dtypes: Dtypes | None, stream: Tensor) -> FusedBlock | None:
    if dtypes is None or not untouched(block, BLOCK):
        return None
    p = attention_dropout(block.attn) if untouched(block.attn, ATTENTION) else None
    parts = None if p is None else parts_of(block, KINDS)
    return None if p is None or parts is None else fused_block(parts, dtypes, stream, parts.attn.n_head, None, p)


def _layer(
    block: Any, fused: FusedBlock | None, stream: Tensor, pending: Pending | None, draws: Draws
) -> tuple[Tensor, Pending]:
    if fused is not None and fused.supports(stream, pending):
        return fused.run(stream, pending, draws)[:2]
    attn = block.attn
    p = attention_dropout(attn) if untouched(attn, ATTENTION) else None

    def attend(attn: Any, x: Tensor) -> Pending:
        if p is None or why_not(x) is not None:
            return called(attn, x)
        values = project(_attended(attn, x, p, draws), attn.c_proj, bias=False)
        return pending_of(values, attn.c_proj, attn._modules.get("resid_dropout"), draws)

    narrow = (
        p is not None and untouched(attn.c_attn, "Linear"),
        untouched(block.mlp, MLP) and untouched(block.mlp.c_fc, "Linear"),
    )
    return layer(stream, pending, block, attend, lambda m, x: feed_forward(m, x, MLP, activation, draws), narrow)


@replacement(BLOCK)
def block(original: Any) -> Namespace:
    def forward(self: Any, x: Tensor) -> Tensor:
        if (reason := why_not(x)) is not None:
            count(self, reason)
            return original.forward(self, x)
        return add(*_layer(self, _fused(self, dtypes_of(x, compiled=True), x), x, None, Draws(3, x)))

    return {"forward": forward}


def looks_like_gpt(module: Any) -> bool:
    trunk = module._modules.get("transformer")
    return (
        children(module) == {"transformer", "lm_head"}
        and type(trunk) is torch.nn.ModuleDict
        and {"wte", "wpe", "h", "ln_f"} <= children(trunk) <= {"wte", "wpe", "h", "ln_f", "drop"}
        and type(trunk.h) is torch.nn.ModuleList
        and len(trunk.h) > 0
        and all(looks_like_block(b) for b in trunk.h)
    )


@replacement("gpt model")
def model(original: Any, ignore_index: int, last_only: bool) -> Namespace:
    """Replace the whole model. One kernel computes a layer's last addition and the next layer's first norm.

    With ``last_only``, the model returns only the last position's logits if there are no targets.
    """

    known = {"return_logits"} & set(inspect.signature(original.forward).parameters)

    def forward(self: Any, idx: Tensor, targets: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        trunk, head = self.transformer, self.lm_head
        reason = _why_not_whole(self, idx)
        if reason is None and (args or not set(kwargs) <= known):
            reason = "an argument that is not idx, targets or return_logits"
        if reason is not None:
            count(self, reason)
            return original.forward(self, idx, targets, *args, **kwargs)
        hidden = torch.ops.gptkernels.encoder(idx, trunk.wte.weight, trunk.wpe.weight)
        draws = Draws(3 * len(trunk.h) + 1, hidden)
        hidden = drop(hidden, trunk._modules.get("drop"), draws)
        dtypes = dtypes_of(hidden, compiled=True)
        blocks = cast_all([_fused(one, dtypes, hidden) for one in trunk.h], hidden)
        pending: Pending | None = None
        for one, fused in zip(trunk.h, blocks, strict=True):
            if untouched(one, BLOCK):
                hidden, pending = _layer(one, fused, hidden, pending, draws)
            else:
                hidden, pending = one(add(hidden, pending)), None
        hidden = add_and_norm(hidden, pending, trunk.ln_f)[0]
        return_logits = kwargs.get("return_logits", True)
        if targets is None:
            logits = project(hidden[:, -1:] if last_only else hidden, head)
            return (logits if return_logits else None), None
        keep = return_logits and (self.gptkernels_report.return_logits if self.training else True)
        all_logits, loss = head_and_loss(hidden, weight_of(head), targets, ignore_index, return_logits=keep)
        return (all_logits if return_logits else None), like_torchs(loss, hidden)

    return {"forward": forward}


def like_torchs(loss: Tensor, x: Tensor) -> Tensor:
    """Give the loss the dtype of F.cross_entropy: float32 in autocast, otherwise the logits' dtype."""
    return loss if autocast_dtype(x.device.type) else loss.to(x.dtype)


def _why_not_whole(self: Any, idx: Tensor) -> str | None:
    trunk = self.transformer
    if is_exporting():
        return "torch.export takes the embeddings and the head as modules"
    if not (
        untouched(trunk.wte, "Embedding") and untouched(trunk.wpe, "Embedding") and untouched(self.lm_head, "Linear")
    ):
        return "an embedding or the head was replaced, hooked or wrapped"
    if not (bare(trunk) and self.lm_head.bias is None):
        return "transformer is hooked, or lm_head has a bias"
    if idx.dim() != 2 or idx.dtype not in (torch.int64, torch.int32) or idx.shape[1] > trunk.wpe.weight.shape[0]:
        return "tokens that are not (B, T) integers, T at most the block size"
    return why_not(trunk.wte.weight, trunk.wpe.weight)
