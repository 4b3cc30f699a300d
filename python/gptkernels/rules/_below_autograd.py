"""Calls of operators below autograd and autocast, inside a node of autograd's graph that differentiates them."""

from typing import Any

import torch

from gptkernels.rules._autocast import KEYS


def _excluded() -> torch._C.DispatchKeySet:
    """Return the keys that ``torch._C._AutoDispatchBelowAutograd`` excludes, and autocast's for all devices."""
    before = torch._C._dispatch_tls_local_exclude_set()
    with torch._C._AutoDispatchBelowAutograd():
        keys = torch._C._dispatch_tls_local_exclude_set() - before
    for key in KEYS.values():
        keys |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return keys


_KEYS, _guard = _excluded(), torch._C._ExcludeDispatchKeyGuard


def below() -> Any:
    """Return a context manager in which operators are called below autograd and autocast."""
    return _guard(_KEYS)
