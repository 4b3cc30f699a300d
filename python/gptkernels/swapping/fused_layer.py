"""A swapped block as one node of autograd's graph: what ``_layer_node`` needs to know, read from its modules.

Where the node does not serve, the block is computed by ``transformer.layer``.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptkernels import functional
from gptkernels._layer_node import Dropout, Dtypes, Plan, apply_layer, compiled_layer
from gptkernels.swapping.dropout import Draws
from gptkernels.swapping.layers import gelu_form, norm_of
from gptkernels.swapping.parts import Parts, probability
from gptkernels.swapping.transformer import Pending


class Planned(NamedTuple):
    """A block that can be one node."""

    plan: Plan
    parameters: tuple[Any, ...]
    last_bias: Tensor | None  # of the MLP's c_proj, added with its output after the block
    probabilities: tuple[float, float, float]  # of the dropouts of attention, of its output, and of the MLP's


def plan_of(
    parts: Parts, dtypes: Dtypes, stream: Tensor, pending: Pending | None, heads: int, scale: float | None, p: float
) -> Planned | None:
    """The block as it is now; None where it must be computed otherwise.

    Args:
        parts: the block's.
        dtypes: of the forward pass.
        stream: (B, T, C).
        pending: yet to be added to it.
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
    for t in (*parameters, last_bias, None if pending is None else pending.bias):
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


def run(planned: Planned, stream: Tensor, pending: Pending | None, draws: Draws) -> tuple[Tensor, Pending, Tensor]:
    """The stream, what is to be added to it, and qkv (B, T, 3C)."""
    plan, parameters, last_bias, (attention_p, residual_p, mlp_p) = planned
    values, bias, before = (None, None, Dropout()) if pending is None else pending
    dropouts = before, draws(attention_p), draws(residual_p)
    after = draws(mlp_p)
    apply = compiled_layer if torch.compiler.is_compiling() else apply_layer
    stream, values, qkv, *_ = apply(plan, dropouts, stream, values, bias, *parameters)
    return stream, Pending(values, last_bias, after), qkv
