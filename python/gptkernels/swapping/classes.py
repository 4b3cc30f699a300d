"""Replaces the class of a module by a subclass of it, so that the module keeps its parameters, buffers and hooks.

The subclass has the name of the original class, because other libraries choose modules to wrap, shard or save by this
name. ``copy.deepcopy`` and pickling store the original class and the replacement's name, so that a copy or a loaded
module is replaced too.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from gptkernels._unmodified import CHANGED

MARK, KIND, OWN = "_gptkernels_original", "_gptkernels_kind", "_gptkernels_class"
FORWARD = "_gptkernels_forward"  # the original class's forward at the time of the swap
READ = {
    "training",
    "dropout",
    "gptkernels_report",
    "_is_full_backward_hook",
}  # attributes that may change: a replacement reads them at each call, or torch or swap() sets them
Namespace = dict[str, Any]
_namespaces: dict[str, Callable[..., Namespace]] = {}


def replacement(name: str) -> Callable[[Callable[..., Namespace]], Callable[..., Namespace]]:
    def register(function: Callable[..., Namespace]) -> Callable[..., Namespace]:
        _namespaces[name] = function
        return function

    return register


def options_of(name: str) -> list[str]:
    return list(inspect.signature(_namespaces[name]).parameters)[1:]


@functools.cache
def derive(original: type, name: str, *options: Any) -> type:
    namespace = _namespaces[name](original, *options)
    own: Any = original.forward  # type: ignore[attr-defined]
    replaced = namespace["forward"]
    if not hasattr(replaced, "__wrapped__"):  # sdpa.py's replacement may be a copy of the user's own forward
        parameters = inspect.signature(replaced).parameters
        known = tuple(parameters)  # torch.compile cannot trace the mapping before torch 2.12
        takes_all = any(one.kind is one.VAR_POSITIONAL for one in parameters.values())

        @functools.wraps(own)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            unknown = len(args) >= len(known) or any(name not in known for name in kwargs)
            if getattr(self, CHANGED, False) or is_patched(derived) or (unknown and not takes_all):
                return original.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
            return replaced(self, *args, **kwargs)

        namespace["forward"] = forward
    if not original.__module__.startswith(("torch.", "transformers.")):
        namespace["__setattr__"] = _setattr

    def reduce(self: Any, protocol: Any) -> Any:
        rebuild, args, *state = super(derived, self).__reduce_ex__(protocol)
        if args[:1] != (derived,):
            return rebuild, args, *state
        return _rebuild, (original, name, *options), *state

    derived: Any = type(original)(
        original.__name__,
        (original,),
        {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__reduce_ex__": reduce,
            MARK: original,
            FORWARD: staticmethod(own),
            KIND: name,
            **namespace,
        },
    )
    setattr(derived, OWN, derived)
    return derived


def is_patched(derived: Any) -> bool:
    """Return whether the original's forward was replaced after the swap; torch itself checks this for compiled code."""
    return not torch.compiler.is_compiling() and getattr(derived, MARK).forward is not getattr(derived, FORWARD)


def _setattr(self: Any, name: str, value: Any) -> None:
    """Set an attribute. If the user's forward may read it, mark the module as changed; the original forward then runs.

    Names that begin with an underscore do not count, because torch and other libraries mark modules with them.
    """
    plain = not isinstance(value, torch.nn.Module | torch.nn.Parameter)
    if plain and name not in READ and not name.startswith("_"):
        self.__dict__[CHANGED] = True
    torch.nn.Module.__setattr__(self, name, value)


def _rebuild(original: type, name: str, *options: Any) -> Any:
    import gptkernels.swapping  # noqa: F401  (registers every replacement in a process that only unpickles)

    derived: Any = derive(original, name, *options)
    return derived.__new__(derived)


def original_of(module: torch.nn.Module) -> type | None:
    return type(module).__dict__.get(MARK)


def kind_of(module: torch.nn.Module) -> str | None:
    """Return the name of the module's replacement, or None.

    None is also returned for a subclass of a replacement, and if the original class's forward was patched since.
    The ``__dict__`` of the class is not read, because ``torch.compile`` cannot trace it in ``functional_call``.
    """
    kind = type(module)
    return getattr(kind, KIND, None) if getattr(kind, OWN, None) is kind and not is_patched(kind) else None
