"""A layer of GPT-2 as one node of autograd's graph, for training.

Called one by one, the operators of a layer cost the host more than the device needs for a small batch: each goes
through autocast's and autograd's rules. Here the same operators are called below both, with the casts that autocast
would do: matrix products in its dtype, norms and the residual stream in float32. The casts of a layer's parameters, or
of all layers', are one launch, and those of a layer's gradients.

``torch.compile`` records the operators that the node's forward and backward call (``compiled_layer``). The caller
computes the layer by single operators under ``torch.func``, with tangents and under a dispatch mode. The node's
backward runs the layer again by these where its own operator does not serve: for a second derivative, and where a
gradient arrives at qkv or at the sum.

Shapes: B batch, T tokens, C channels, F the MLP's hidden width.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptkernels._unmodified import is_exporting
from gptkernels.rules import _jvp as _forward
from gptkernels.rules import ops
from gptkernels.rules._autocast import autocast_dtype, without_autocast
from gptkernels.rules._below_autograd import below
from gptkernels.rules._register import differentiate
from gptkernels.rules.dropout import drop


class Dropout(NamedTuple):
    """One dropout: p, and the 0-dim seed and offset of its mask, which are None where p is 0."""

    p: float = 0.0
    seed: Tensor | None = None
    offset: Tensor | None = None


NONE = Dropout()


class Plan(NamedTuple):
    """What a block is computed with besides its tensors."""

    epsilons: tuple[float, float]
    heads: int
    scale: float | None
    tanh: bool
    transposed: bool  # the matrices are (in, out)
    low: torch.dtype  # of matrix products
    adds_past: bool = True  # without values: the first norm's backward adds the gradient that goes past it
    recompute_gelu: bool = False  # the GELU's output is not kept


# A block's 11 parameters: ln_1's weight and bias, c_attn's, attention's c_proj's, ln_2's, c_fc's, and the weight of the
# MLP's c_proj.
MATRICES = (2, 3, 4, 8, 9, 10)  # those that matrix products take
WEIGHTS = (2, 4, 8, 10)  # of these, the weights
_matrices = itemgetter(*MATRICES)


class Dtypes(NamedTuple):
    """Of a forward pass: of matrix products, and of the residual stream, the norms and the parameters."""

    low: torch.dtype
    wide: torch.dtype


def dtypes_of(stream: Tensor, compiled: bool = False) -> Dtypes | None:
    """None where no block of this forward pass can be one node; ``compiled`` tells that the caller can be traced."""
    if not torch.is_grad_enabled() or is_exporting():
        return None
    if torch.compiler.is_compiling():
        if not compiled:
            return None
    elif _forward.active() or torch._C._len_torch_dispatch_stack():
        return None
    low = autocast_dtype(stream.device.type)
    if low is None:
        return Dtypes(stream.dtype, stream.dtype)
    return Dtypes(low, torch.float32) if stream.dtype == torch.float32 else None


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any,
        plan: Plan,
        dropouts: Sequence[Dropout],
        matrices: Sequence[Any] | None,
        stream: Tensor,
        values: Tensor | None,
        bias: Tensor | None,
        *parameters: Any,
    ):
        """The block's outputs, and the sum of its inputs.

        The sum is all that the backward needs of the inputs. It is an output so that a second derivative finds its way
        from the sum to them.

        Args:
            ctx: autograd's.
            plan: as made by ``plan_of``.
            dropouts: of the values, of attention's probabilities, and of attention's output.
            matrices: the parameters that matrix products take, in their dtype; None: they are cast here.
            stream: (B, T, C).
            values: (B, T, C), to be added to the stream, in the dtype of products; or None.
            bias: (C), to be added to the values; or None.
            parameters: the block's.

        Returns:
            stream (B, T, C); values (B, T, C), to be added to it; qkv (B, T, 3C); sum (B, T, C), None without values.
        """
        with below():
            if matrices is None:
                matrices = _matrices(parameters)
                if stream.dtype != plan.low:
                    traced = type(stream) is not Tensor  # Inductor then allocates
                    matrices = _cast(matrices, plan.low) if traced else cast_layers([parameters], plan.low)[0]
            qkv_w, qkv_b, out_w, fc_w, fc_b, proj_w = _as_linear(matrices) if plan.transposed else matrices
            norm_1_w, norm_1_b, _, _, _, out_b, norm_2_w, norm_2_b, *_ = parameters
            out, sum_1, mean_1, rstd_1, normed_1, qkv, attended, logsumexp, sum_2, *rest = ops.layer.default(
                stream, values, bias, norm_1_w, norm_1_b, qkv_w, qkv_b, out_w, out_b, norm_2_w, norm_2_b, fc_w, fc_b,
                proj_w, plan.heads, plan.scale, *plan.epsilons, "tanh" if plan.tanh else "none",
                *dropouts[0], *dropouts[1], *dropouts[2], not plan.recompute_gelu,
            )  # fmt: skip
        kept = stream if values is None else sum_1, mean_1, rstd_1, normed_1, qkv, attended, logsumexp, sum_2, *rest
        weights = () if qkv_w is parameters[WEIGHTS[0]] else (qkv_w, out_w, fc_w, proj_w)
        ctx.save_for_backward(*parameters, *kept, *weights)
        ctx.plan, ctx.dropouts, ctx.has_values = plan, dropouts, values is not None
        ctx.set_materialize_grads(False)
        return sum_2, out, qkv, None if values is None else sum_1

    @staticmethod
    def backward(ctx: Any, dtotal: Any, dout: Any, dqkv: Any, dsum: Any):  # type: ignore[no-untyped-def]
        """All gradients that are wanted."""
        plan, dropouts, saved, needs = ctx.plan, ctx.dropouts, ctx.saved_tensors, ctx.needs_input_grad[3:]
        parameters, kept, weights = saved[:11], saved[11:24], saved[24:] or [saved[i] for i in WEIGHTS]
        if torch.is_grad_enabled() or dout is None or dqkv is not None or dsum is not None:
            return _differentiably(ctx, parameters, kept[0], (dtotal, dout, dqkv), dsum)
        adds_past = plan.adds_past or ctx.has_values
        qkv_w, out_w, fc_w, proj_w = weights
        with below():
            dstream, dvalues, dbias, *found = ops.layer_backward.default(
                dout, dtotal, *kept, parameters[0], qkv_w, out_w, parameters[6], fc_w, proj_w,
                plan.heads, plan.scale, "tanh" if plan.tanh else "none", needs,
                *dropouts[0], *dropouts[1], *dropouts[2], ctx.has_values, adds_past,
            )  # fmt: skip
            _cast_gradients(found, parameters, needs[3:], plan)
            if not adds_past and needs[0]:
                dstream = dvalues + dstream
        if ctx.has_values and plan.low == dstream.dtype and not dropouts[0].p:
            dvalues = dstream
        gradients = (g if need else None for g, need in zip((dstream, dvalues, dbias, *found), needs, strict=True))
        return None, None, None, *gradients


# Function.apply without its part in Python, which is for torch.func: not here (``dtypes_of``).
apply_layer = super(torch.autograd.Function, _Layer).apply  # type: ignore[misc]


@torch.compiler.allow_in_graph
def compiled_layer(plan: Plan, dropouts: Sequence[Dropout], *tensors: Any) -> tuple[Tensor, ...]:
    """The block's outputs. ``torch.compile`` calls it as it is, and records the operators of both passes."""
    if _forward.active():  # under a transform of torch.func
        stream, values, bias, *parameters = tensors
        return _compute(plan, dropouts, stream, values, bias, parameters)
    return apply_layer(plan, dropouts, None, *tensors)[:3]  # type: ignore[no-any-return]


def _compute(
    plan: Plan,
    dropouts: Sequence[Dropout],
    stream: Tensor,
    values: Tensor | None,
    bias: Tensor | None,
    parameters: Sequence[Any],
) -> tuple[Tensor, ...]:
    """The block's three outputs by single operators, which can be differentiated; arguments as of ``_Layer``."""
    with without_autocast(stream.device.type):
        low = plan.low
        matrices = [t if t is None else t.to(low) for t in _matrices(parameters)]
        qkv_w, qkv_b, out_w, fc_w, fc_b, proj_w = _as_linear(matrices) if plan.transposed else matrices
        norm_1, norm_2 = (*parameters[:2], plan.epsilons[0]), (*parameters[6:8], plan.epsilons[1])
        if values is None:
            total_1, normed = stream, ops.layernorm.default(stream, *norm_1)[0].to(low)
        else:
            normed, total_1, _, _ = ops.residual_layernorm.default(values, stream, *norm_1, bias, *dropouts[0])
        qkv = ops.linear.default(normed, qkv_w, qkv_b)
        attended = ops.attention.default(qkv, plan.heads, plan.scale, *dropouts[1])[0]
        added = ops.linear.default(attended, out_w, None)
        normed, total_2, _, _ = ops.residual_layernorm.default(added, total_1, *norm_2, parameters[5], *dropouts[2])
        if plan.tanh:
            out = ops.mlp.default(normed, fc_w, fc_b, proj_w, None)[0]
        else:
            hidden = ops.gelu.default(ops.linear.default(normed, fc_w, fc_b), approximate="none")
            out = ops.linear.default(hidden, proj_w, None)
        return total_2, out, qkv


def _differentiably(
    ctx: Any,
    parameters: Sequence[Any],
    total: Tensor,
    grads: Sequence[Any],
    dsum: Tensor | None,
) -> tuple[Any, ...]:
    """The backward as a function that can be differentiated: by the single operators' own autograd."""
    plan, dropouts = ctx.plan, ctx.dropouts
    need_stream, need_values, need_bias, *needs = ctx.needs_input_grad[3:]

    def formula(total: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        return _compute(plan, dropouts, total, None, None, parameters)

    need_sum = need_stream or need_values or need_bias
    dtotal, *gradients = differentiate(formula, (total, *parameters), (need_sum, *needs), grads)
    if dsum is not None:
        dtotal = dsum if dtotal is None else dtotal + dsum
    dvalues = dbias = None
    if dtotal is not None and (need_values or need_bias):
        dvalues = drop(dtotal, *dropouts[0])
        dbias = dvalues.flatten(0, -2).sum(0) if need_bias else None
        dvalues = dvalues.to(plan.low) if need_values else None
    return None, None, None, dtotal if need_stream else None, dvalues, dbias, *gradients


def _as_linear(matrices: Sequence[Any]) -> list[Any]:
    """Weights (in, out) as (out, in) views, biases as they are."""
    return [t.t() if t is not None and t.dim() == 2 else t for t in matrices]


def _cast(tensors: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """The tensors in another dtype, by one launch; None stays None."""
    given = [t for t in tensors if t is not None]
    if given[0].dtype == dtype:
        return list(tensors)
    made = [torch.empty_like(t, dtype=dtype) for t in given]
    torch._foreach_copy_(made, given)
    cast = iter(made)
    return [None if t is None else next(cast) for t in tensors]


def cast_layers(layers: Sequence[Sequence[Any]], dtype: torch.dtype) -> list[list[Any]]:
    """The matrices of several layers, each given by its parameters, in another dtype, by one launch.

    Those of a layer are one allocation, since they live equally long; a layer's are freed in its backward.
    """
    matrices = [_matrices(parameters) for parameters in layers]
    given = [[t for t in some if t is not None] for some in matrices]
    made: list[Tensor] = []
    for some in given:
        flat = some[0].new_empty(sum([t.numel() for t in some]), dtype=dtype)
        made += torch._utils._unflatten_dense_tensors(flat, some)
    torch._foreach_copy_(made, [t for some in given for t in some])
    cast = iter(made)
    return [[None if t is None else next(cast) for t in some] for some in matrices]


def _cast_gradients(found: list[Any], parameters: Sequence[Any], needs: Sequence[bool], plan: Plan) -> None:
    """The matrices' gradients in the parameters' dtype and layout, in place in the list."""
    if plan.transposed:
        for i in WEIGHTS:
            found[i] = found[i].t() if needs[i] else None
    if plan.low == parameters[MATRICES[0]].dtype:
        return
    wanted = [i for i in MATRICES if needs[i]]
    if wanted:
        for i, t in zip(wanted, _cast([found[i] for i in wanted], parameters[wanted[0]].dtype), strict=True):
            found[i] = t
