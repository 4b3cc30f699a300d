"""Recomputes layers in the backward, with the random numbers and, if not compiled, the float8 scales of the forward."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from gptkernels import nn
from gptkernels._unmodified import is_unmodified

_NO_DROPOUT = (
    nn.LayerNorm,
    nn.Linear,
    nn.MLP,
    nn.GELU,
    torch.nn.LayerNorm,
    torch.nn.Linear,
    torch.nn.GELU,
    torch.nn.Identity,
)


def uses_dropout(layer: torch.nn.Module, kind: type[torch.nn.Module], *others: torch.nn.Module) -> bool:
    """Return whether a layer may draw random numbers: a dropout is active, or a submodule is of an unknown class."""
    if not is_unmodified(layer, kind):
        return True
    return any(_draws(part) for part in layer.modules() if part is not layer) or any(map(_draws, others))


def _draws(part: Any) -> bool:
    if is_unmodified(part, nn.Dropout) or is_unmodified(part, torch.nn.Dropout):
        return part.training and part.p > 0
    if is_unmodified(part, nn.CausalSelfAttention):
        return part.training and part.dropout > 0
    return not any(is_unmodified(part, kind) for kind in _NO_DROPOUT)


def checkpointed(run: Callable[..., Any], layer: torch.nn.Module, *args: Any, draws: bool) -> Any:
    """Compute ``run(layer, *args)``, and save only the arguments; the backward repeats the computation.

    Under ``torch.compile`` a ``context_fn`` may only return TorchDispatchModes. So compiled code recomputes with the
    float8 scales at the time of the backward.
    """
    options: Any = {} if torch.compiler.is_compiling() else {"context_fn": partial(_contexts, layer)}
    return checkpoint(run, layer, *args, use_reentrant=False, preserve_rng_state=draws, **options)


def _contexts(layer: torch.nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    layers = [part for part in layer.modules() if isinstance(part, nn.Linear) and part.multiplies_fp8()]
    return nullcontext(), _Histories(layers) if layers else nullcontext()


class _Histories(AbstractContextManager[None]):
    """A context in which layers use copies of the amax histories that they had when this object was made.

    The recomputation then rounds to the same float8 numbers as the first forward, and leaves the layers' histories
    unchanged.
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
