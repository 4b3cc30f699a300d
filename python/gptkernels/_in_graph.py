"""Marks two functions with ``allow_in_graph``: dynamo records a call of the function instead of tracing it.

Marking imports torch._dynamo, which takes longer than importing torch. So only traced callers import this module.
"""

import torch

from gptkernels.block.node import compiled_layer
from gptkernels.swapping.head import compiled_head_and_loss

__all__ = ["compiled_head_and_loss", "compiled_layer"]

torch.compiler.allow_in_graph([compiled_layer, compiled_head_and_loss])
