"""Operators called without autograd's and autocast's rules, inside a node of autograd's graph that stands for them."""

from typing import Any

import torch

from gptkernels.ops._autocast import KEYS

_AUTOCAST = {
    device_type: torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)) for device_type, key in KEYS.items()
}


class Below:
    """Below autograd and autocast."""

    __slots__ = ("autocast", "autograd")

    def __init__(self, device_type: str) -> None:
        self.autograd = torch._C._AutoDispatchBelowAutograd()
        self.autocast = torch._C._ExcludeDispatchKeyGuard(_AUTOCAST[device_type])

    def __enter__(self) -> None:
        self.autograd.__enter__()
        self.autocast.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.autocast.__exit__(*error)
        self.autograd.__exit__(*error)
