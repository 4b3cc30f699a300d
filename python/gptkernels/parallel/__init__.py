"""Models that are divided over processes. torch communicates, and this package's kernels compute.

A name's module is imported when the name is first used, because DTensor and FSDP2 take seconds to import.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptkernels.parallel._divided import plain_view, whole_state_dict
    from gptkernels.parallel.checkpoint import CheckpointWriter, load_checkpoint, read_checkpoint
    from gptkernels.parallel.context import (
        context_parallel,
        context_parallel_attention,
        gather_sequence,
        split_sequence,
        whole_sequences,
    )
    from gptkernels.parallel.mesh import Layout, make_mesh
    from gptkernels.parallel.ordered import all_reduce_in_order
    from gptkernels.parallel.tensor import shard_placement, tensor_parallel
    from gptkernels.parallel.vocabulary import cross_entropy, embedding, linear_cross_entropy

__all__ = [
    "CheckpointWriter", "Layout", "all_reduce_in_order", "context_parallel", "context_parallel_attention",
    "cross_entropy", "embedding", "gather_sequence", "linear_cross_entropy", "load_checkpoint", "make_mesh",
    "plain_view", "read_checkpoint", "shard_placement", "split_sequence", "tensor_parallel", "whole_sequences",
    "whole_state_dict",
]  # fmt: skip

_MODULES = {
    "_divided": ("plain_view", "whole_state_dict"),
    "checkpoint": ("CheckpointWriter", "load_checkpoint", "read_checkpoint"),
    "context": (
        "context_parallel", "context_parallel_attention", "gather_sequence", "split_sequence", "whole_sequences"
    ),
    "mesh": ("Layout", "make_mesh"),
    "ordered": ("all_reduce_in_order",),
    "tensor": ("shard_placement", "tensor_parallel"),
    "vocabulary": ("cross_entropy", "embedding", "linear_cross_entropy"),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
