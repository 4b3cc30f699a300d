"""Marks the functions whose operators ``torch.compile`` records without tracing the functions.

``allow_in_graph`` imports torch._dynamo, which takes longer than importing torch; so only traced callers import this
module.
"""

import torch

from gptkernels.block.node import compiled_layer
from gptkernels.swapping.head import compiled_head_and_loss

__all__ = ["compiled_head_and_loss", "compiled_layer"]

torch.compiler.allow_in_graph([compiled_layer, compiled_head_and_loss])
