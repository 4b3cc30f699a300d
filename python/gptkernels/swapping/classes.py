"""How a module is replaced: its class becomes a subclass of what it was.

Parameters, buffers, hooks, the training flag and everything else that a module owns stay where they are, and
``isinstance`` holds. The subclass keeps the class's names, by which other libraries choose modules to wrap, shard or
save, and overrides ``forward`` and nothing else that a caller sees. ``copy.deepcopy`` and pickling go by the original
class and the replacement's name, so a copy or a loaded module is a replaced one again.
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
}  # attributes read at each call, or by torch
Namespace = dict[str, Any]
_namespaces: dict[str, Callable[..., Namespace]] = {}


def replacement(name: str) -> Callable[[Callable[..., Namespace]], Callable[..., Namespace]]:
    """Register what a kind of replacement overrides: a function of the original class and options."""

    def register(function: Callable[..., Namespace]) -> Callable[..., Namespace]:
        _namespaces[name] = function
        return function

    return register


@functools.cache
def derive(original: type, name: str, *options: Any) -> type:
    """The subclass of ``original`` that the replacement ``name`` makes; the same one every time."""
    namespace = _namespaces[name](original, *options)
    own: Any = original.forward  # type: ignore[attr-defined]
    served = namespace["forward"]
    if not hasattr(served, "__wrapped__"):  # not the user's own code with other calls in it
        known = inspect.signature(served).parameters
        takes_all = any(one.kind is one.VAR_POSITIONAL for one in known.values())

        @functools.wraps(own)  # so that the signature is found where it is asked for
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            unknown = len(args) >= len(known) or any(name not in known for name in kwargs)
            if getattr(self, CHANGED, False) or is_patched(derived) or (unknown and not takes_all):
                return original.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
            return served(self, *args, **kwargs)

        namespace["forward"] = forward
    if not original.__module__.startswith(("torch.", "transformers.")):
        namespace["__setattr__"] = _setattr

    def reduce(self: Any, protocol: Any) -> Any:
        rebuild, args, *state = super(derived, self).__reduce_ex__(protocol)
        if args[:1] != (derived,):  # the class has a way of its own
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
    """Whether the class that a replacement was made from has been given another forward since.

    A compiled call does not notice: torch guards what it has traced.
    """
    return not torch.compiler.is_compiling() and getattr(derived, MARK).forward is not getattr(derived, FORWARD)


def _setattr(self: Any, name: str, value: Any) -> None:
    """Notes that the user's code may read another attribute than at the swap: the original forward is then called.

    Names with an underscore are those of torch and of other libraries, which mark modules with them.
    """
    plain = not isinstance(value, torch.nn.Module | torch.nn.Parameter)
    if plain and name not in READ and not name.startswith("_"):
        self.__dict__[CHANGED] = True
    torch.nn.Module.__setattr__(self, name, value)


def _rebuild(original: type, name: str, *options: Any) -> Any:
    import gptkernels.swapping  # noqa: F401  (in a process that only unpickles: every replacement is registered)

    derived: Any = derive(original, name, *options)
    return derived.__new__(derived)


def original_of(module: torch.nn.Module) -> type | None:
    """The class that the module had before it was replaced; None if its class is not a replacement."""
    return type(module).__dict__.get(MARK)


def kind_of(module: torch.nn.Module) -> str | None:
    """Which replacement the module's class is; None for another class, also for one made from a replacement.

    Attributes of the class are read, not its ``__dict__``: ``torch.compile`` does not trace that after the changes that
    ``torch.func.functional_call`` makes to a module.
    """
    kind = type(module)
    return getattr(kind, KIND, None) if getattr(kind, OWN, None) is kind and not is_patched(kind) else None
