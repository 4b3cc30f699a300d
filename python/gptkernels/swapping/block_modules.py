"""Finds the modules of a swapped transformer block, so that it can be computed as one node of autograd's graph.

The modules are found once. Later calls only check that they are still the same, which takes less host time than
``checks.untouched`` for each module.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from gptkernels import functional
from gptkernels._unmodified import is_bare
from gptkernels.block.fused import FusedBlock, parameters_of
from gptkernels.block.node import Dtypes, Plan
from gptkernels.swapping.checks import bare, untouched
from gptkernels.swapping.classes import is_patched, kind_of, original_of
from gptkernels.swapping.layers import eps_of, gelu_form

KINDS = ("LayerNorm", "Linear", "Linear", "LayerNorm", "Linear", "GELU", "Linear")


@dataclasses.dataclass(eq=False)
class Parts:
    """The modules of a transformer block, but not the block itself, which ``_known`` must not keep alive."""

    ln_1: Any
    c_attn: Any
    attn_proj: Any
    ln_2: Any
    c_fc: Any
    act: Any
    mlp_proj: Any
    attn: Any
    attn_dropout: Any
    resid_dropout: Any
    mlp_dropout: Any
    classes: tuple[tuple[torch.nn.Module, type, dict[str, Any]], ...] = ()
    links: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = ()  # each module's dictionary of children, and a copy

    def are_as_found(self) -> bool:
        for children, found in self.links:
            if children != found:  # modules compare by identity
                return False
        for module, kind, attributes in self.classes:
            # `bare` takes longer, but allows hooks that only observe
            if type(module) is not kind or not (is_bare(attributes) or bare(module)):
                return False
            if original_of(module) is not None and is_patched(kind):
                return False
        return True


_known: WeakKeyDictionary[torch.nn.Module, Parts] = WeakKeyDictionary()


def parts_of(block: Any, kinds: Sequence[str]) -> Parts | None:
    """Return the modules of a transformer block; None if one was replaced, hooked or wrapped."""
    if kind_of(block) != kinds[0] or not (is_bare(block.__dict__) or bare(block)):
        return None
    return parts_inside(block, kinds[1:])


def parts_inside(block: Any, kinds: Sequence[str]) -> Parts | None:
    """Return what ``parts_of`` returns, but do not check the block itself. ``kinds`` are those of attention and MLP."""
    if _has_any_global_hook():
        return None
    if torch.compiler.is_compiling():  # torch guards what it has traced
        return _find(block, kinds)
    parts = _known.get(block)
    if parts is not None and parts.are_as_found():
        return parts
    parts = _find(block, kinds)
    if parts is None:
        _known.pop(block, None)
    else:
        _known[block] = parts
    return parts


def _find(block: Any, kinds: Sequence[str]) -> Parts | None:
    attn, mlp = block.attn, block.mlp
    if not all(untouched(one, kind) for one, kind in zip((attn, mlp), kinds, strict=True)):
        return None
    names = mlp._modules.keys() - {"c_fc", "c_proj", "dropout"}
    if len(names) != 1:
        return None
    act = mlp._modules[next(iter(names))]
    computing = block.ln_1, attn.c_attn, attn.c_proj, block.ln_2, mlp.c_fc, act, mlp.c_proj
    if not all(untouched(one, kind) for one, kind in zip(computing, KINDS, strict=True)):
        return None
    dropouts = [
        attn._modules.get("attn_dropout"), attn._modules.get("resid_dropout"), mlp._modules.get("dropout")
    ]  # fmt: skip
    if not all(one is None or (type(one) is torch.nn.Dropout and bare(one)) for one in dropouts):
        return None
    parts = Parts(*computing, attn, *dropouts)
    if torch.compiler.is_compiling():
        return parts
    given = [one for one in (attn, mlp, *computing, *dropouts) if one is not None]
    parts.classes = tuple((one, type(one), one.__dict__) for one in given)
    parts.links = tuple((one._modules, dict(one._modules)) for one in (block, attn, mlp))
    return parts


def probability(dropout: Any) -> float:
    return dropout.p if dropout is not None and dropout.training else 0.0


def fused_block(
    parts: Parts, dtypes: Dtypes, stream: Tensor, heads: int, scale: float | None, p: float
) -> FusedBlock | None:
    if stream.shape[-1] > functional.MAX_HEAD_SIZE * heads:
        return None
    parameters, mlp_proj_bias = parameters_of(
        parts.ln_1, parts.c_attn, parts.attn_proj, parts.ln_2, parts.c_fc, parts.mlp_proj
    )
    wide = dtypes.wide
    for t in (*parameters, mlp_proj_bias):
        if t is not None and t.dtype != wide:
            return None
    plan = Plan(
        (eps_of(parts.ln_1), eps_of(parts.ln_2)),
        heads,
        scale,
        gelu_form(parts.act) == "tanh",
        parts.c_attn._gptkernels_transposed,
        dtypes.low,
    )
    probabilities = p, probability(parts.resid_dropout), probability(parts.mlp_dropout)
    return FusedBlock(plan, parameters, mlp_proj_bias, probabilities)
