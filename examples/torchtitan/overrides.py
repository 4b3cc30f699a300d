"""Overrides torchtitan's cross-entropy by this package's, also with tensor parallelism.

In torchtitan's repository (0.3), whose tests/assets the debug model reads:

PYTHONPATH=.../examples/torchtitan torchrun --nproc-per-node 2 -m torchtitan.train --module llama3 \
    --config llama3_debugmodel --override.imports overrides.cross_entropy --parallelism.tensor_parallel_degree 2

The kernels read 16-bit logits without a float32 copy. The processes that divide the vocabulary exchange 12 bytes per
row, and keep no log-probabilities.
"""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.config import CompileConfig, derive, override
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size

from gptkernels import functional, parallel


def sum_of_losses(logits: torch.Tensor, labels: torch.Tensor, *, global_vocab_size: int | None = None) -> torch.Tensor:
    """Return the sum over the labels (B, T) that are not ignored, 0-dim float32."""
    options = {"reduction": "sum", "ignore_index": IGNORE_INDEX}
    if isinstance(logits, DTensor):  # --parallelism.spmd_backend partial_dtensor
        return parallel.cross_entropy(logits, labels, **options)
    if spmd_mesh_size("tp") > 1:
        group = current_spmd_mesh().get_group("tp")
        return parallel.cross_entropy(logits, labels, group, padded_vocab_size=global_vocab_size, **options)
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


class KernelCrossEntropyLoss(CrossEntropyLoss):
    """torchtitan's loss with another function."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        """The options of torchtitan's loss."""

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        super().__init__(config)
        self.fn = sum_of_losses
        self._maybe_compile(compile_config)


@override(target=CrossEntropyLoss.Config, description="gptkernels' cross-entropy")
def cross_entropy(config: CrossEntropyLoss.Config) -> KernelCrossEntropyLoss.Config:
    """Return the configuration that replaces torchtitan's."""
    return derive(config, KernelCrossEntropyLoss.Config)
