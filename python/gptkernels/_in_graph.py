"""Marks two functions with ``allow_in_graph``: dynamo records a call of such a function instead of tracing it.

``allow_in_graph`` imports torch._dynamo, which takes about as long as the import of torch. Callers therefore import
this module only while they are compiled.
"""

import torch

from gptkernels.block.node import compiled_layer
from gptkernels.swapping.head import compiled_head_and_loss

__all__ = ["compiled_head_and_loss", "compiled_layer"]

torch.compiler.allow_in_graph([compiled_layer, compiled_head_and_loss])
