"""Casts inside ``torch.autocast``, by torch's rules.

Torch caches the casts of weights, but its cache cannot be called from Python. This module's cache stores the same casts
and is cleared when torch clears its cache.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

KEYS = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}


def autocast_dtype(device_type: str) -> torch.dtype | None:
    if device_type in KEYS and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Turn autocast off; device types without autocast, such as "meta", are allowed."""
    return torch.autocast(device_type, enabled=False) if device_type in KEYS else nullcontext()


def _excluded() -> torch._C.DispatchKeySet:
    before = torch._C._dispatch_tls_local_exclude_set()
    with torch._C._AutoDispatchBelowAutograd():
        keys = torch._C._dispatch_tls_local_exclude_set() - before
    for key in KEYS.values():
        keys |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return keys


_BELOW, _guard = _excluded(), torch._C._ExcludeDispatchKeyGuard


def below() -> Any:
    return _guard(_BELOW)


def kernel(op: Callable[..., Any], device_type: str, policy: str) -> Callable[..., Any]:
    def target(values: Sequence[Any]) -> torch.dtype:
        if policy == "lower":
            return torch.get_autocast_dtype(device_type)
        floating = {value.dtype for value in values if _eligible(value, device_type)}
        return torch.float32 if policy == "float32" or len(floating) != 1 else floating.pop()

    def rule(op: Callable[..., Any], cast: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        dtype = target((*args, *kwargs.values()))
        return op(*(cast(a, dtype) for a in args), **{name: cast(a, dtype) for name, a in kwargs.items()})

    return kernel_by(op, device_type, rule)


def kernel_by(op: Callable[..., Any], device_type: str, rule: Callable[..., Any]) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEYS[device_type]))

    def cast_eligible(value: Any, dtype: torch.dtype) -> Any:
        return cast(value, dtype) if _eligible(value, device_type) else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return rule(op, cast_eligible, *args, **kwargs)

    return kernel


def _eligible(value: Any, device_type: str) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device.type == device_type
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


class _Casts(dict[tuple[int, bool], tuple[Tensor, int, Tensor]]):
    """Maps (a parameter's id, whether gradients are recorded) to (the parameter, its version, its cast)."""


_casts: Callable[[], _Casts | None] = lambda: None  # noqa: E731  (a weak reference after the first context)


def cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    if value.dtype == dtype or not _is_cacheable(value, dtype):
        return value.to(dtype)
    casts = _casts()
    if casts is None:
        casts = _new_casts()
    key = (id(value), torch.is_grad_enabled())
    kept = casts.get(key)
    if kept is None or kept[1] != value._version or kept[2].dtype != dtype:
        casts[key] = kept = (value, value._version, value.to(dtype))
    return kept[2]


def _is_cacheable(value: Tensor, dtype: torch.dtype) -> bool:
    """Return whether torch would cache the cast.

    Torch caches a cast to autocast's dtype if the tensor is a float32 leaf that requires a gradient and is not a view.
    """
    return (
        value.dtype == torch.float32
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
        and type(value) in (Tensor, torch.nn.Parameter)
        and torch.is_autocast_cache_enabled()
        and dtype == torch.get_autocast_dtype(value.device.type)
        and not torch._C._are_functorch_transforms_active()
        and not torch.compiler.is_compiling()
    )


def _new_casts() -> _Casts:
    """Make a dictionary that lives until torch clears its cache.

    Torch has no callback for clearing its cache. A matmul without rows puts the cast of a small weight into torch's
    cache, and the dictionary is an attribute of this cast, so that both are freed together.
    """
    global _casts
    casts = _Casts()
    with _disable_current_modes(), _disable_saved_tensors_hooks(), torch.inference_mode(False), torch.enable_grad():
        rows, weight = torch.ones(0, 1, device="cpu", requires_grad=True), torch.ones(1, 1, device="cpu")
        # The CPU's autocast key works for every device type, because all device types share one cache.
        autocast_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
        product = torch.ops.aten.linear.default.redispatch(autocast_cpu, rows, weight.requires_grad_())
        product.grad_fn._saved_mat2._base.gptkernels_casts = casts
    _casts = weakref.ref(casts)
    return casts


@contextmanager
def _disable_saved_tensors_hooks() -> Iterator[None]:
    """Disable hooks such as activation checkpointing's, which would replace the tensors that autograd saves."""
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
