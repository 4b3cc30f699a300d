"""A layer of GPT-2 with float8 products as one node of autograd's graph, for training.

As ``_layer_node.py``, by one operator for each direction, in which the norms hand their outputs to the products in
float8. It has the bits of the single operators. Where it does not serve, the caller calls those.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptkernels.block.node import Dropout, Dtypes
from gptkernels.rules import ops
from gptkernels.rules._below_autograd import below
from gptkernels.rules.fp8_linear import refuse_second_derivatives

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Plan(NamedTuple):
    """What a block is computed with besides its tensors and parameters.

    Histories are those of c_attn, attention's c_proj, c_fc and the MLP's c_proj.
    """

    epsilons: tuple[float, float]
    heads: int
    histories: Sequence[Tensor]  # of their inputs
    dout_histories: Sequence[Tensor]  # of their outputs' gradients


def serves(dtypes: Dtypes, parameters: Sequence[Any]) -> bool:
    """Whether the node may stand for the operators.

    Not in autocast, which casts between them. Not where a parameter is frozen: the operators then leave the products
    out that only its gradient needs, and the scales of their operands.

    Args:
        dtypes: of this forward pass.
        parameters: the block's 11, as ``_layer_node.MATRICES`` describes them; None where there is none.
    """
    return (
        dtypes.low == dtypes.wide
        and dtypes.low in DTYPES
        and parameters[0] is not None
        and parameters[6] is not None
        and all([t is None or t.requires_grad for t in parameters])
    )


class _FP8Layer(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any,
        plan: Plan,
        dropouts: Sequence[Dropout],
        stream: Tensor,
        values: Tensor | None,
        bias: Tensor | None,
        *parameters: Any,
    ):
        """As ``_layer_node._Layer``'s: the stream (B, T, C), and the values (B, T, C) to be added to it."""
        with below():
            out, total_1, total_2, *saved = ops.fp8_layer.default(
                stream, values, bias, *parameters, plan.histories, plan.dout_histories, plan.heads, None,
                *plan.epsilons, *dropouts[0], *dropouts[1], *dropouts[2],
            )  # fmt: skip
        ctx.save_for_backward(parameters[0], parameters[6], stream if values is None else total_1, total_2, *saved)
        ctx.plan, ctx.dropouts, ctx.has_values = plan, dropouts, values is not None
        ctx.set_materialize_grads(False)
        return total_2, out

    @staticmethod
    def backward(ctx: Any, dtotal: Any, dout: Any):  # type: ignore[no-untyped-def]
        """All gradients that are wanted."""
        refuse_second_derivatives()
        plan, dropouts, needs = ctx.plan, ctx.dropouts, ctx.needs_input_grad[2:]
        norm_1, norm_2, total_1, total_2, *saved = ctx.saved_tensors
        with below():
            dout = torch.zeros_like(total_2) if dout is None else dout
            dstream, dvalues, *found = ops.fp8_layer_backward.default(
                dout, dtotal, total_1, total_2, saved, norm_1, norm_2, plan.dout_histories, plan.heads, None,
                ctx.has_values, needs, *dropouts[0], *dropouts[1], *dropouts[2],
            )  # fmt: skip
            if not ctx.has_values:  # what goes past the first norm is added as autograd would
                dstream = dstream + dvalues if needs[0] else None
            elif not dropouts[0].p:
                dvalues = dstream
        gradients = (g if need else None for g, need in zip((dstream, dvalues, *found), needs, strict=True))
        return None, None, *gradients


# Function.apply without its part in Python, which is for torch.func: not here (``_layer_node.dtypes_of``).
apply_fp8_layer = super(torch.autograd.Function, _FP8Layer).apply  # type: ignore[misc]
