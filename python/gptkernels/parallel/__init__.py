"""Models that are divided over processes. torch communicates, and this package's kernels compute.

The modules that import DTensor and FSDP2, which takes seconds, are imported when a name of them is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from gptkernels.parallel.mesh import Layout, make_mesh
from gptkernels.parallel.ordered import all_reduce_in_order

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
    from gptkernels.parallel.tensor import shard_placement, tensor_parallel
    from gptkernels.parallel.vocabulary import cross_entropy, embedding, linear_cross_entropy

__all__ = [
    "CheckpointWriter", "Layout", "all_reduce_in_order", "context_parallel", "context_parallel_attention",
    "cross_entropy", "embedding", "gather_sequence", "linear_cross_entropy", "load_checkpoint", "make_mesh",
    "plain_view", "read_checkpoint", "shard_placement", "split_sequence", "tensor_parallel", "whole_sequences",
    "whole_state_dict",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    names = ("vocabulary", "context", "_divided", "tensor", "checkpoint")
    modules = (importlib.import_module(f"{__name__}.{module}") for module in names)
    return next(getattr(module, name) for module in modules if hasattr(module, name))
