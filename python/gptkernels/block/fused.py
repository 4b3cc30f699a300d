"""A transformer block of ``GPT2`` or of a swapped model, computed as one node of autograd's graph."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptkernels import functional
from gptkernels.block.node import NONE, Dropout, Plan, apply_layer, cast_layers
from gptkernels.block.tensors import BlockParameters, Matrices
from gptkernels.rules import ops


class Pending(NamedTuple):
    """The next addition to the residual stream: dropout(values + bias), values (B, T, C), bias (C) or None.

    A transformer block does not make its last addition, because one kernel computes it together with the first norm of
    the next transformer block.
    """

    values: Tensor
    bias: Tensor | None = None
    dropout: Dropout = NONE


def finished(pending: Pending) -> Tensor:
    values, bias, dropout = pending
    return apply_dropout(values if bias is None else values + bias.to(values.dtype), dropout)


def add(stream: Tensor, pending: Pending | None) -> Tensor:
    return stream if pending is None else stream + finished(pending)


def apply_dropout(x: Tensor, dropout: Dropout) -> Tensor:
    return x if dropout.p == 0 else ops.dropout(x, *dropout)  # type: ignore[no-any-return]


def draw(p: float, like: Tensor) -> Dropout:
    return Dropout(p, *functional._dropout_numbers(p, like)) if p else NONE


class FusedBlock(NamedTuple):
    """A transformer block that can be computed as one node of autograd's graph: its parameters and options."""

    plan: Plan
    parameters: BlockParameters
    mlp_proj_bias: Tensor | None  # (C), added after the block
    probabilities: tuple[float, float, float]  # of dropout: in attention, in attention's output, in the MLP's output
    matrices: Matrices | None = None  # in the matmuls' dtype, if they are already cast

    def supports(self, stream: Tensor, pending: Pending | None) -> bool:
        if pending is None:
            return True
        return pending.values.dtype == self.plan.low and (pending.bias is None or pending.bias.dtype == stream.dtype)

    def run(
        self, stream: Tensor, pending: Pending | None, draw: Callable[[float], Dropout]
    ) -> tuple[Tensor, Pending, Tensor]:
        """Compute the block without its last residual addition.

        Return residual_2 (B, T, C), the addition that is now pending, and qkv (B, T, 3C), which is None with float8
        matmuls.
        """
        plan, parameters, mlp_proj_bias, (attention_p, attn_proj_p, mlp_proj_p), matrices = self
        values, bias, dropout = (None, None, NONE) if pending is None else pending
        dropouts = dropout, draw(attention_p), draw(attn_proj_p)
        if torch.compiler.is_compiling():
            from gptkernels._in_graph import compiled_layer

            stream, values, qkv = compiled_layer(plan, dropouts, stream, values, bias, *parameters)
        else:
            stream, values, qkv, _ = apply_layer(plan, dropouts, matrices, stream, values, bias, *parameters)
        return stream, Pending(values, mlp_proj_bias, draw(mlp_proj_p)), qkv


def cast_all(blocks: Sequence[FusedBlock | None], stream: Tensor) -> Sequence[FusedBlock | None]:
    """Cast the matrices of all blocks to the matmuls' dtype by one foreach operation, if they need a cast."""
    given = [block for block in blocks if block is not None]
    if not given or given[0].plan.low == stream.dtype or type(stream) is not Tensor or torch.compiler.is_compiling():
        return blocks
    cast = iter(cast_layers([block.parameters for block in given], given[0].plan.low))
    return [None if block is None else block._replace(matrices=next(cast)) for block in blocks]


def parameters_of(
    ln_1: Any, c_attn: Any, attn_proj: Any, ln_2: Any, c_fc: Any, mlp_proj: Any
) -> tuple[BlockParameters, Tensor | None]:
    mlp_proj_weight, mlp_proj_bias = _weight_and_bias(mlp_proj)
    parameters = BlockParameters(
        *_weight_and_bias(ln_1), *_weight_and_bias(c_attn), *_weight_and_bias(attn_proj),
        *_weight_and_bias(ln_2), *_weight_and_bias(c_fc), mlp_proj_weight,
    )  # fmt: skip
    return parameters, mlp_proj_bias


def _weight_and_bias(module: Any) -> tuple[Any, Any]:
    """The module's dictionary is read because ``torch.nn.Module.__getattr__`` is slower."""
    parameters = module.__dict__["_parameters"]
    if "weight" in parameters and "bias" in parameters:
        return parameters["weight"], parameters["bias"]
    return module.weight, getattr(module, "bias", None)  # with FSDP, parameters are plain attributes
