"""Operators called without autograd's and autocast's rules, inside a node of autograd's graph that stands for them."""

from typing import Any

import torch

from gptkernels.ops._autocast import KEYS

_AUTOCAST = {
    device_type: torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)) for device_type, key in KEYS.items()
}


class Below:
    """Below autograd and autocast."""

    def __init__(self, device_type: str) -> None:
        keys = _AUTOCAST[device_type]
        self.guards = torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(keys)

    def __enter__(self) -> None:
        for guard in self.guards:
            guard.__enter__()

    def __exit__(self, *error: Any) -> None:
        for guard in reversed(self.guards):
            guard.__exit__(*error)
