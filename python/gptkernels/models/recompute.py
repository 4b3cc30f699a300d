"""Whether a layer that the backward pass runs again must find the random state that it had."""

from typing import Any

import torch

from gptkernels import nn
from gptkernels._modules import is_unmodified

_NEVER_DRAW = (
    nn.LayerNorm,
    nn.Linear,
    nn.MLP,
    nn.GELU,
    torch.nn.LayerNorm,
    torch.nn.Linear,
    torch.nn.GELU,
    torch.nn.Identity,
)


def may_draw(layer: torch.nn.Module, kind: type[torch.nn.Module], *others: torch.nn.Module) -> bool:
    """Whether running a layer may take random numbers: it drops elements now, or has a part that is not known.

    Args:
        layer: asked with all its parts, as they are now: an adapter may have come since it was made, a probability or
            the mode may have changed.
        kind: the layer's class, whose own forward draws nothing.
        others: modules that run with it.
    """
    if not is_unmodified(layer, kind):
        return True
    return any(_draws(part) for part in layer.modules() if part is not layer) or any(map(_draws, others))


def _draws(part: Any) -> bool:
    if is_unmodified(part, nn.Dropout) or is_unmodified(part, torch.nn.Dropout):
        return part.training and part.p > 0
    if is_unmodified(part, nn.CausalSelfAttention):
        return part.training and part.dropout > 0
    return not any(is_unmodified(part, kind) for kind in _NEVER_DRAW)
