"""A swapped block as one node of autograd's graph: what ``_layer_node`` needs to know, read from its modules.

Where the node does not serve, the block is computed by ``transformer.layer``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptkernels import functional
from gptkernels.block.node import Dropout, Dtypes, Plan, apply_layer, cast_layers, compiled_layer
from gptkernels.swapping.block_modules import Parts, probability
from gptkernels.swapping.dropout import Draws
from gptkernels.swapping.layers import gelu_form, norm_of
from gptkernels.swapping.transformer import Pending


class Planned(NamedTuple):
    """A block that can be one node."""

    plan: Plan
    parameters: tuple[Any, ...]
    last_bias: Tensor | None  # of the MLP's c_proj, added with its output after the block
    probabilities: tuple[float, float, float]  # of the dropouts of attention, of its output, and of the MLP's
    matrices: Sequence[Any] | None = None  # those of the parameters that products take, if they are cast already


def plan_of(parts: Parts, dtypes: Dtypes, stream: Tensor, heads: int, scale: float | None, p: float) -> Planned | None:
    """The block as it is now; None where it must be computed otherwise.

    Args:
        parts: the block's.
        dtypes: of the forward pass.
        stream: (B, T, C).
        heads: NH.
        scale: of the scores, or None.
        p: the probability of attention's dropout.
    """
    if stream.shape[-1] > functional.MAX_HEAD_SIZE * heads:
        return None
    first, second = norm_of(parts.ln_1), norm_of(parts.ln_2)
    (qkv_w, qkv_b), (out_w, out_b) = _matrix(parts.c_attn), _matrix(parts.attn_proj)
    (fc_w, fc_b), (proj_w, last_bias) = _matrix(parts.c_fc), _matrix(parts.mlp_proj)
    parameters = (*first[:2], qkv_w, qkv_b, out_w, out_b, *second[:2], fc_w, fc_b, proj_w)
    for t in (*parameters, last_bias):
        if t is not None and t.dtype != dtypes.wide:
            return None
    plan = Plan(
        (first[2], second[2]),
        heads,
        scale,
        gelu_form(parts.act) == "tanh",
        parts.c_attn._gptkernels_transposed,
        dtypes.low,
    )
    probabilities = p, probability(parts.resid_dropout), probability(parts.mlp_dropout)
    return Planned(plan, parameters, last_bias, probabilities)


def _matrix(linear: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear layer; its own dictionary is asked first, ``torch.nn.Module`` takes longer."""
    parameters = linear.__dict__["_parameters"]
    if "weight" in parameters and "bias" in parameters:
        return parameters["weight"], parameters["bias"]
    return linear.weight, linear.bias


def cast_all(planned: Sequence[Planned | None], stream: Tensor) -> Sequence[Planned | None]:
    """The blocks with their matrices in the dtype of products: cast by one launch, where that is another."""
    given = [one for one in planned if one is not None]
    if not given or given[0].plan.low == stream.dtype or type(stream) is not Tensor or torch.compiler.is_compiling():
        return planned
    cast = iter(cast_layers([one.parameters for one in given], given[0].plan.low))
    return [None if one is None else one._replace(matrices=next(cast)) for one in planned]


def fits(planned: Planned, pending: Pending | None, stream: Tensor) -> bool:
    """Whether the node can add this to the stream: values in the dtype of products, a bias in the stream's."""
    if pending is None:
        return True
    return pending.values.dtype == planned.plan.low and (pending.bias is None or pending.bias.dtype == stream.dtype)


def run(planned: Planned, stream: Tensor, pending: Pending | None, draws: Draws) -> tuple[Tensor, Pending, Tensor]:
    """The stream, what is to be added to it, and qkv (B, T, 3C)."""
    plan, parameters, last_bias, (attention_p, residual_p, mlp_p), matrices = planned
    values, bias, before = (None, None, Dropout()) if pending is None else pending
    dropouts = before, draws(attention_p), draws(residual_p)
    after = draws(mlp_p)
    if torch.compiler.is_compiling():
        stream, values, qkv = compiled_layer(plan, dropouts, stream, values, bias, *parameters)
    else:
        stream, values, qkv, _ = apply_layer(plan, dropouts, matrices, stream, values, bias, *parameters)
    return stream, Pending(values, last_bias, after), qkv
