"""What a layer that the backward pass runs again must find as it was: random state, and scales of float8 numbers."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from gptkernels import nn
from gptkernels._unmodified import is_unmodified

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


def checkpointed(run: Callable[..., Any], layer: torch.nn.Module, *args: Any, draws: bool) -> Any:
    """``run(layer, *args)``, of which only the arguments are kept for the backward pass, which runs it again.

    Under ``torch.compile``, which knows no such contexts, that rounds to float8 with the scales of the call after it.
    """
    options: Any = {} if torch.compiler.is_compiling() else {"context_fn": partial(_contexts, layer)}
    return checkpoint(run, layer, *args, use_reentrant=False, preserve_rng_state=draws, **options)


def _contexts(layer: torch.nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Of the first run, which is yet to come, and of the others."""
    layers = [part for part in layer.modules() if isinstance(part, nn.Linear) and part.multiplies_fp8()]
    return nullcontext(), _Histories(layers) if layers else nullcontext()


class _Histories(AbstractContextManager[None]):
    """Layers have copies of the histories that their inputs had when this was made.

    So they round to the same numbers, and what is run again is not noted again. May be entered more than once: a graph
    that is retained has several backward passes.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.layers = layers
        self.then = torch.stack([layer.fp8_history for layer in layers])

    def __enter__(self) -> None:
        self.own = [layer.fp8_history for layer in self.layers]
        self._give(self.then.clone().unbind())

    def __exit__(self, *_: Any) -> None:
        self._give(self.own)

    def _give(self, histories: Any) -> None:
        for layer, history in zip(self.layers, histories, strict=True):
            layer.fp8_history = history
