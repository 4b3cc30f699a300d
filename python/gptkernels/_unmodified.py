"""Checks that a submodule was not changed since its parent made it. Only then may the parent call a fused operator."""

from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook

CHANGED = "_gptkernels_changed"
"""A mark in a swapped module's ``__dict__``: an attribute was set after the swap (``swapping/classes.py``)."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_unmodified(module: torch.nn.Module, kind: type[torch.nn.Module]) -> bool:
    """Return whether a call of ``module`` would run ``kind.forward`` and nothing else.

    If the result is False, the caller must call the module. Such a module is an adapter, a subclass or a wrapper
    (parametrisations and FSDP2 replace a module's class), has hooks (pruning adds one) or a ``forward`` among its
    attributes, is compiled separately, or has an attribute that was set after the swap (``CHANGED``). A global module
    hook makes the result False for all modules.
    """
    return are_unmodified((module, kind))


def are_unmodified(*parts: tuple[torch.nn.Module, type[torch.nn.Module]]) -> bool:
    for module, kind in parts:
        if type(module) is not kind or not is_bare(module.__dict__):
            return False
    return not _has_any_global_hook()


def is_fully_sharded(module: torch.nn.Module, kind: type[torch.nn.Module]) -> bool:
    """Return whether a call of ``module`` would run ``kind.forward`` and the hooks of FSDP2, and nothing else."""
    bases = type(module).__bases__  # fully_shard replaces the class by a subclass of FSDPModule and of the class
    return (
        len(bases) == 2
        and bases[0].__module__.startswith("torch.distributed.fsdp")
        and bases[1] is kind
        and runs_only_its_forward(module, "torch.distributed.fsdp._fully_shard._fsdp_state")
    )


def is_exporting() -> bool:
    """Return whether ``torch.export`` traces this call without dynamo.

    If so, the embeddings and the LM head must be called as modules, not fused: they share a weight, and
    ``torch.distributed.pipelining`` finds a module with a shared weight only if the module is called.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def is_bare(attributes: dict[str, Any]) -> bool:
    return not (
        attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or "forward" in attributes
        or attributes.get("_compiled_call_impl") is not None
        or CHANGED in attributes
    )


def runs_only_its_forward(module: torch.nn.Module, passive: str | None = None) -> bool:
    """Return whether a call of ``module`` runs its class's ``forward``, and no hooks except those of ``passive``.

    ``passive`` is the name of a Python module whose hooks only observe.
    """
    attributes = module.__dict__
    for hooks in _HOOKS:
        for hook in attributes[hooks].values():
            if passive is None or getattr(hook, "__module__", "") != passive:
                return False
    return (
        "forward" not in attributes
        and CHANGED not in attributes
        and attributes.get("_compiled_call_impl") is None
        and not _has_any_global_hook()
    )  # fmt: skip
