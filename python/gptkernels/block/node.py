"""A layer of GPT-2 as one node of autograd's graph, for training.

Called one by one, the operators of a layer cost the host more than the device needs for a small batch: each goes
through autocast's and autograd's rules. Here the same operators are called below both, with the casts that autocast
would do: matrix products in its dtype, norms and the residual stream in float32. The casts of a layer's parameters, or
of all layers', are one launch, and those of a layer's gradients.

``torch.compile`` records the operators that the node's forward and backward call (``compiled_layer``). Where anything
else than a plain first derivative is asked for, the caller computes the layer by single operators: under
``torch.func``, and with tangents. A second derivative runs the layer again by these.

Shapes: B batch, T tokens, C channels, F the MLP's hidden width.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

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


_TRACING = (FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode)

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
    if not compiled if torch.compiler.is_compiling() else _forward.active():
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
            values: (B, T, C), to be added to the stream; or None.
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
            if _by_one_operator(plan, None if values is None else values.dtype):
                outputs, weights, kept = _call(plan, dropouts, stream, values, bias, parameters, matrices)
            else:
                outputs, weights, kept = _compute(plan, dropouts, stream, values, bias, parameters, matrices)
        ctx.save_for_backward(*parameters, *kept, *(() if weights[0] is parameters[WEIGHTS[0]] else weights))
        ctx.plan, ctx.dropouts = plan, dropouts
        ctx.values_dtype = None if values is None else values.dtype
        ctx.set_materialize_grads(False)
        return *outputs, None if values is None else kept[0]

    @staticmethod
    def backward(ctx: Any, dtotal: Any, dout: Any, dqkv_outside: Any, dsum: Any):  # type: ignore[no-untyped-def]
        """All gradients that are wanted."""
        plan, dropouts, saved = ctx.plan, ctx.dropouts, ctx.saved_tensors
        parameters, kept, weights = saved[:11], saved[11:24], saved[24:] or [saved[i] for i in WEIGHTS]
        if torch.is_grad_enabled():
            return _differentiably(ctx, dropouts, parameters, kept[0], (dtotal, dout, dqkv_outside), dsum)
        apart = ctx.values_dtype is None and not plan.adds_past
        plain = dout is not None and dqkv_outside is None and dsum is None
        if plain and _by_one_operator(plan, ctx.values_dtype):
            return None, None, None, *_call_backward(ctx, dtotal, dout, parameters, kept, weights)
        need_stream, need_values, need_bias, *needs = ctx.needs_input_grad[3:]
        qkv_w, out_w, fc_w, proj_w = weights
        total_1, mean_1, rstd_1, normed_1, qkv, attended, logsumexp = kept[:7]
        total_2, mean_2, rstd_2, normed_2, pre, post = kept[7:]
        with below():
            found: list[Tensor | None] = [None] * 11
            dout = torch.zeros_like(total_2, dtype=plan.low) if dout is None else dout
            if plan.tanh:
                mask = (True, *needs[8:], False)
                dnormed, *found[8:], _ = ops.mlp_backward.default(dout, normed_2, fc_w, proj_w, pre, post, mask)
            else:
                post = ops.gelu.default(pre, approximate="none") if plan.recompute_gelu else post
                dpost, found[10], _ = ops.linear_backward.default(dout, post, proj_w, (True, needs[10], False))
                dpre = ops.gelu_backward.default(dpost, pre, approximate="none")
                dnormed, *found[8:10] = ops.linear_backward.default(dpre, normed_2, fc_w, (True, *needs[8:10]))
            inputs = dnormed, dtotal, total_2, parameters[6], mean_2, rstd_2
            dadded, *found[6:8], found[5], dtotal = _add_and_norm_backward(
                *inputs, dropouts[2], plan.low, (True, *needs[6:8], needs[5], True)
            )
            dattended, found[4], _ = ops.linear_backward.default(dadded, attended, out_w, (True, needs[4], False))
            del dadded
            dqkv = ops.attention_backward.default(
                dattended, qkv, attended, logsumexp, plan.heads, plan.scale, *dropouts[1]
            )
            if dqkv_outside is not None:
                dqkv = dqkv + dqkv_outside
            need_inputs = need_stream or need_values or need_bias
            need_dnormed = need_inputs or needs[0] or needs[1]
            dnormed, *found[2:4] = ops.linear_backward.default(dqkv, normed_1, qkv_w, (need_dnormed, *needs[2:4]))
            dvalues = dbias = dstream = None
            if apart:
                dnormed, mask = _to(dnormed, total_1.dtype), (need_inputs, *needs[:2])
                norm = dnormed, total_1, parameters[0], mean_1, rstd_1
                dstream, *found[:2] = ops.layernorm_backward.default(*norm, mask) if any(mask) else (None,) * 3
                if need_inputs:
                    dstream = dstream + dtotal
            elif need_dnormed:
                dtotal = dtotal if dsum is None else dtotal + dsum
                inputs = dnormed, dtotal, total_1, parameters[0], mean_1, rstd_1
                dvalues, *found[:2], dbias, dstream = _add_and_norm_backward(
                    *inputs, dropouts[0], ctx.values_dtype, (need_values, *needs[:2], need_bias, need_stream)
                )
            _cast_gradients(found, parameters, needs, plan)
            wanted = [dstream, dvalues, dbias, *found]
            gradients = (g if need else None for g, need in zip(wanted, ctx.needs_input_grad[3:], strict=True))
            return None, None, None, *gradients


# Function.apply without its part in Python, which is for torch.func: not here (``dtypes_of``).
apply_layer = super(torch.autograd.Function, _Layer).apply  # type: ignore[misc]


@torch.compiler.allow_in_graph
def compiled_layer(plan: Plan, dropouts: Sequence[Dropout], *tensors: Any) -> tuple[Tensor, ...]:
    """The block's outputs. ``torch.compile`` calls it as it is, and records the operators of both passes."""
    if _forward.active():  # under a transform of torch.func
        stream, values, bias, *parameters = tensors
        with without_autocast(stream.device.type):
            matrices = [t if t is None else t.to(plan.low) for t in (parameters[i] for i in MATRICES)]
            return _compute(plan, dropouts, stream, values, bias, parameters, matrices)[0]
    return apply_layer(plan, dropouts, None, *tensors)[:3]  # type: ignore[no-any-return]


def _by_one_operator(plan: Plan, values: torch.dtype | None) -> bool:
    """Whether ``ops.layer`` may compute the layer: the values are not cast, and nobody looks at its operators."""
    return (values is None or values == plan.low) and not (
        (torch._C._len_torch_dispatch_stack() and not _only_traced()) or torch._C._autograd._profiler_enabled()
    )


def _only_traced() -> bool:
    """Whether all dispatch modes are those by which torch traces."""
    return all(isinstance(mode, _TRACING) for mode in _get_current_dispatch_mode_stack())


def _call(
    plan: Plan,
    dropouts: Sequence[Dropout],
    stream: Tensor,
    values: Tensor | None,
    bias: Tensor | None,
    parameters: Sequence[Any],
    matrices: Sequence[Any],
) -> tuple[tuple[Tensor, ...], tuple[Any, ...], tuple[Any, ...]]:
    """``_compute`` by one operator."""
    qkv_w, qkv_b, out_w, fc_w, fc_b, proj_w = _as_linear(matrices) if plan.transposed else matrices
    norm_1_w, norm_1_b, _, _, _, out_b, norm_2_w, norm_2_b, *_ = parameters
    out, total_1, mean_1, rstd_1, normed_1, qkv, attended, logsumexp, total_2, *rest = ops.layer.default(
        stream, values, bias, norm_1_w, norm_1_b, qkv_w, qkv_b, out_w, out_b, norm_2_w, norm_2_b, fc_w, fc_b, proj_w,
        plan.heads, plan.scale, *plan.epsilons, "tanh" if plan.tanh else "none",
        *dropouts[0], *dropouts[1], *dropouts[2], not plan.recompute_gelu,
    )  # fmt: skip
    first = stream if values is None else total_1, mean_1, rstd_1, normed_1, qkv, attended, logsumexp
    return (total_2, out, qkv), (qkv_w, out_w, fc_w, proj_w), (*first, total_2, *rest)


def _call_backward(
    ctx: Any,
    dtotal: Tensor | None,
    dout: Tensor,
    parameters: Sequence[Any],
    kept: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> list[Tensor | None]:
    """The gradients of stream, values, bias and parameters."""
    plan, dropouts, needs = ctx.plan, ctx.dropouts, ctx.needs_input_grad[3:]
    adds_past = plan.adds_past or ctx.values_dtype is not None
    qkv_w, out_w, fc_w, proj_w = weights
    with below():
        dstream, dvalues, dbias, *found = ops.layer_backward.default(
            dout, dtotal, *kept, parameters[0], qkv_w, out_w, parameters[6], fc_w, proj_w,
            plan.heads, plan.scale, "tanh" if plan.tanh else "none", needs, *dropouts[0], *dropouts[1], *dropouts[2],
            ctx.values_dtype is not None, adds_past,
        )  # fmt: skip
        _cast_gradients(found, parameters, needs[3:], plan)
        if not adds_past and needs[0]:
            dstream = dvalues + dstream
    if ctx.values_dtype == dstream.dtype and not dropouts[0].p:
        dvalues = dstream
    return [g if need else None for g, need in zip((dstream, dvalues, dbias, *found), needs, strict=True)]


def _compute(
    plan: Plan,
    dropouts: Sequence[Dropout],
    stream: Tensor,
    values: Tensor | None,
    bias: Tensor | None,
    parameters: Sequence[Any],
    matrices: Sequence[Any],
) -> tuple[tuple[Tensor, ...], tuple[Any, ...], tuple[Any, ...]]:
    """The block's three outputs; the four weights as products take them; what else its backward needs.

    Args:
        plan: as made by ``plan_of``.
        dropouts: as of ``_Layer``.
        stream: as of ``_Layer``.
        values: as of ``_Layer``.
        bias: as of ``_Layer``.
        parameters: the block's, of which the norms' and the bias of attention's c_proj are used here.
        matrices: the others, in the dtype of matrix products.
    """
    qkv_w, qkv_b, out_w, fc_w, fc_b, proj_w = _as_linear(matrices) if plan.transposed else matrices
    low = plan.low
    if values is None:
        total_1 = stream
        normed, mean_1, rstd_1 = ops.layernorm.default(stream, *parameters[:2], plan.epsilons[0])
        normed_1 = _to(normed, low)
        del normed
    else:
        norm = (*parameters[:2], plan.epsilons[0])
        normed_1, total_1, mean_1, rstd_1 = _add_and_norm(values, bias, dropouts[0], stream, norm, low)
    qkv = ops.linear.default(normed_1, qkv_w, qkv_b)
    attended, logsumexp = ops.attention.default(qkv, plan.heads, plan.scale, *dropouts[1])
    added = ops.linear.default(attended, out_w, None)
    norm = (*parameters[6:8], plan.epsilons[1])
    normed_2, total_2, mean_2, rstd_2 = _add_and_norm(added, parameters[5], dropouts[2], total_1, norm, low)
    del added
    if plan.tanh:
        out, pre, post = ops.mlp.default(normed_2, fc_w, fc_b, proj_w, None, not plan.recompute_gelu)
    else:
        pre = ops.linear.default(normed_2, fc_w, fc_b)
        post = ops.gelu.default(pre, approximate="none")
        out = ops.linear.default(post, proj_w, None)
        post = post.new_empty(0) if plan.recompute_gelu else post
    kept = (
        *(total_1, mean_1, rstd_1, normed_1, qkv, attended, logsumexp),
        *(total_2, mean_2, rstd_2, normed_2, pre, post),
    )
    return (total_2, out, qkv), (qkv_w, out_w, fc_w, proj_w), kept


def _add_and_norm(
    values: Tensor, bias: Tensor | None, dropout: Dropout, stream: Tensor, norm: Sequence[Any], low: torch.dtype
) -> tuple[Tensor, ...]:
    """The norm in ``low`` of dropout(values + bias) + stream; that sum, its mean and its rstd.

    ``norm`` is its weight, bias and epsilon.
    """
    wide = stream.dtype
    if low == wide:
        return ops.residual_layernorm.default(_to(values, wide), stream, *norm, bias, *dropout)  # type: ignore[no-any-return]
    narrow = values.dtype == low
    normed, *rest = ops.residual_layernorm.default(values if narrow else values.to(wide), stream, *norm, bias, *dropout)
    return _to(normed, low), *rest


def _add_and_norm_backward(
    dnormed: Tensor,
    dsum: Tensor | None,
    sum: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dropout: Dropout,
    low: torch.dtype | None,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of values (in ``low``), weight, norm_bias, bias and stream; None for ``low`` without values."""
    narrow = low is not None and dnormed.dtype == low != sum.dtype
    inputs = dnormed if narrow else _to(dnormed, sum.dtype), dsum, sum, weight, mean, rstd
    if dropout.p or narrow:
        dvalues, *gradients, dstream = ops.residual_layernorm_dropout_backward.default(*inputs, *dropout, needs)
    elif needs[3]:
        mask = needs[0] or needs[4], *needs[1:4]
        dstream, *gradients = ops.residual_layernorm_bias_backward.default(*inputs, mask)
        dvalues = dstream
    else:
        dstream, *gradients = ops.residual_layernorm_backward.default(*inputs, (needs[0] or needs[4], *needs[1:3]))
        dvalues, gradients = dstream, [*gradients, None]
    return _to(dvalues, low) if low is not None and needs[0] else None, *gradients, dstream


def _differentiably(
    ctx: Any,
    dropouts: Sequence[Dropout],
    parameters: Sequence[Any],
    total: Tensor,
    grads: Sequence[Any],
    dsum: Tensor | None,
) -> tuple[Any, ...]:
    """The backward as a function that can be differentiated: by the single operators' own autograd."""
    plan = ctx.plan
    need_stream, need_values, need_bias, *needs = ctx.needs_input_grad[3:]

    def formula(total: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        with without_autocast(total.device.type):
            matrices = [t if t is None else t.to(plan.low) for t in (parameters[i] for i in MATRICES)]
            return _compute(plan, dropouts, total, None, None, parameters, matrices)[0]

    need_sum = need_stream or need_values or need_bias
    dtotal, *gradients = differentiate(formula, (total, *parameters), (need_sum, *needs), grads)
    if dsum is not None:
        dtotal = dsum if dtotal is None else dtotal + dsum
    dvalues = dbias = None
    if dtotal is not None and (need_values or need_bias):
        dvalues = drop(dtotal, *dropouts[0])
        dbias = dvalues.flatten(0, -2).sum(0) if need_bias else None
        dvalues = dvalues.to(ctx.values_dtype) if need_values else None
    return None, None, None, dtotal if need_stream else None, dvalues, dbias, *gradients


def _to(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t.to(dtype)``, which takes longer where there is nothing to do."""
    return t if t.dtype == dtype else t.to(dtype)


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
