"""Replacement of ``F.scaled_dot_product_attention`` in a user's own methods.

Torch's function is not patched, because all code in the process shares it. Instead, a method that calls it is copied
with its globals and closure. The copy calls this package's function, which is a new attribute of
``torch.nn.functional``, so that ``torch.compile`` sees an ordinary call.
"""

import dis
import functools
import types
from typing import Any

import torch.nn.functional as F

from gptkernels import functional
from gptkernels.swapping.checks import attention_is_replaced
from gptkernels.swapping.classes import Namespace, replacement

NAME = "scaled_dot_product_attention"
OURS = f"gptkernels_{NAME}"
_FOREIGN = ("torch.", "torch", "transformers.", "gptkernels.")


def _attention(*args: Any, **kwargs: Any) -> Any:
    function = F if attention_is_replaced() else functional
    return function.scaled_dot_product_attention(*args, **kwargs)


def methods_that_call_it(kind: type) -> dict[str, Any]:
    return {
        name: method
        for owner in kind.__mro__
        if not owner.__module__.startswith(_FOREIGN)
        for name, method in vars(owner).items()
        if isinstance(method, types.FunctionType) and getattr(kind, name) is method and _names(method)
    }


def _names(method: Any) -> list[str]:
    names = []
    for name in method.__code__.co_names:
        imported = method.__globals__.get(name) is F.scaled_dot_product_attention
        if imported or (name == NAME and _always_of_functional(method)):
            names.append(name)
    return names


def _always_of_functional(method: Any) -> bool:
    value: Any = None  # what the chain of globals and attributes up to the previous instruction refers to
    for instruction in dis.get_instructions(method):
        name = instruction.argval
        if instruction.opname == "LOAD_GLOBAL":
            value = method.__globals__.get(name)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if name == NAME and value is not F:
                return False
            value = getattr(value, name, None) if isinstance(value, types.ModuleType) else None
        elif instruction.opname not in ("CACHE", "EXTENDED_ARG"):
            if name == NAME:
                return False
            value = None
    return True


def _redirected(method: Any) -> Any:
    names = _names(method)
    setattr(F, OURS, _attention)
    if any(method.__globals__.get(name) is F.scaled_dot_product_attention for name in names):
        method.__globals__[OURS] = _attention
    code = method.__code__
    code = code.replace(co_names=tuple(OURS if name in names else name for name in code.co_names))
    made = types.FunctionType(code, method.__globals__, method.__name__, method.__defaults__, method.__closure__)
    made.__kwdefaults__ = method.__kwdefaults__
    return functools.wraps(method)(made)


@replacement("attention calls")
def attention_calls(original: Any) -> Namespace:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original.forward(self, *args, **kwargs)

    redirected = {name: _redirected(method) for name, method in methods_that_call_it(original).items()}
    return {"forward": forward, **redirected}
