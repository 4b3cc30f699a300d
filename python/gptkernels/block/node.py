"""A transformer block as one node of autograd's graph, for training.

For a small batch, a block's single operators take more host time than device time, because each call passes autocast's
and autograd's rules. The node calls one operator, ``layer`` or ``fp8_layer``, without these rules. It casts as autocast
would: matmuls have autocast's dtype, and norms and the residual stream are float32.

For a second derivative, and if qkv or residual_1 has an incoming gradient, the node's backward runs the block again by
single operators. With float8 matmuls there is no second derivative.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptkernels._unmodified import is_exporting
from gptkernels.block.tensors import BlockParameters, LayerSaved, Matrices
from gptkernels.rules import _jvp as _forward
from gptkernels.rules import ops
from gptkernels.rules._autocast import autocast_dtype, below, without_autocast
from gptkernels.rules._register import differentiate
from gptkernels.rules.dropout import drop
from gptkernels.rules.fp8_linear import refuse_second_derivatives


class Dropout(NamedTuple):
    """A dropout's probability, and the 0-dim seed and offset of its mask, which are None if p is 0."""

    p: float = 0.0
    seed: Tensor | None = None
    offset: Tensor | None = None


NONE = Dropout()


class FP8Histories(NamedTuple):
    """The amax histories of c_attn, attention's c_proj, c_fc and the MLP's c_proj, in this order."""

    inputs: Sequence[Tensor]
    douts: Sequence[Tensor]


class Plan(NamedTuple):
    """The options with which a transformer block is computed."""

    epsilons: tuple[float, float]
    heads: int
    scale: float | None
    tanh: bool
    transposed: bool  # the matrices are (in, out)
    low: torch.dtype
    adds_past: bool = True  # as in the operator ``layer``; has no effect if the node has values
    recompute_gelu: bool = False
    histories: FP8Histories | None = None


_PARAMETERS, _SAVED = len(BlockParameters._fields), len(LayerSaved._fields)


class Dtypes(NamedTuple):
    """The dtype of the matmuls, ``low``, and the dtype of the norms and the residual stream, ``wide``."""

    low: torch.dtype
    wide: torch.dtype


def dtypes_of(stream: Tensor, compiled: bool = False) -> Dtypes | None:
    """Return the dtypes of this forward pass, or None if its transformer blocks cannot be nodes of autograd's graph."""
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
        matrices: Matrices | None,
        stream: Tensor,
        values: Tensor | None,
        bias: Tensor | None,
        *parameters: Any,
    ):
        """Return residual_2 (B, T, C), the values to be added to it (B, T, C), qkv (B, T, 3C) and residual_1 (B, T, C).

        The backward reads residual_1 instead of the inputs. residual_1 is an output, so that a second derivative can
        pass through it to the inputs. It is None without values. With float8 matmuls, qkv and residual_1 are None.
        """
        ctx.plan, ctx.dropouts, ctx.has_values = plan, dropouts, values is not None
        ctx.set_materialize_grads(False)
        with below():
            if plan.histories is not None:
                return _run_fp8(ctx, stream, values, bias, parameters)
            return _run(ctx, matrices, stream, values, bias, parameters)

    @staticmethod
    def backward(  # type: ignore[no-untyped-def]
        ctx: Any, dresidual_2: Any, dout: Any, dqkv: Any, dresidual_1: Any
    ):
        plan, dropouts, needs = ctx.plan, ctx.dropouts, ctx.needs_input_grad[3:]
        if plan.histories is not None:
            refuse_second_derivatives()
            gradients = _gradients_fp8
        elif torch.is_grad_enabled() or dout is None or dqkv is not None or dresidual_1 is not None:
            return _differentiably(ctx, (dresidual_2, dout, dqkv), dresidual_1)
        else:
            gradients = _gradients
        adds_past = plan.adds_past or ctx.has_values
        with below():
            dstream, dvalues, *found = gradients(ctx, needs, adds_past, dresidual_2, dout)
            if not adds_past and needs[0]:
                dstream = dvalues + dstream
        if ctx.has_values and plan.low == dstream.dtype and not dropouts[0].p:
            dvalues = dstream
        if all(needs):
            return None, None, None, dstream, dvalues, *found
        wanted = zip((dstream, dvalues, *found), needs, strict=True)
        return None, None, None, *[gradient if need else None for gradient, need in wanted]


# Function.apply's C++ part. Its Python part supports torch.func, under which the node is not used (``dtypes_of``).
apply_layer = super(torch.autograd.Function, _Layer).apply  # type: ignore[misc]


def compiled_layer(plan: Plan, dropouts: Sequence[Dropout], *tensors: Any) -> tuple[Tensor, ...]:
    """Run the node in a compiled model.

    Dynamo's graph has a call of this function (``allow_in_graph``). AOTAutograd records the operators that it calls.
    """
    if _forward.active():  # under a transform of torch.func
        stream, values, bias, *parameters = tensors
        return _compute(plan, dropouts, stream, values, bias, BlockParameters._make(parameters))
    return apply_layer(plan, dropouts, None, *tensors)[:3]  # type: ignore[no-any-return]


def _run(
    ctx: Any,
    matrices: Matrices | None,
    stream: Tensor,
    values: Tensor | None,
    bias: Tensor | None,
    parameters: Sequence[Any],
) -> tuple[Any, ...]:
    plan, dropouts = ctx.plan, ctx.dropouts
    used: Sequence[Any] = parameters
    weights: Sequence[Tensor] = ()
    if matrices is not None or plan.transposed or stream.dtype != plan.low:
        used = given = _with_matrices(BlockParameters._make(parameters), matrices, plan, stream)
        weights = given.weights()
    out, *saved = ops.layer.default(
        stream, values, bias, *used, plan.heads, plan.scale, *plan.epsilons, "tanh" if plan.tanh else "none",
        *dropouts[0], *dropouts[1], *dropouts[2], not plan.recompute_gelu,
    )  # fmt: skip
    kept = LayerSaved._make(saved)
    if values is None:
        ctx.save_for_backward(*parameters, *kept._replace(residual_1=stream), *weights)
        return kept.residual_2, out, kept.qkv, None
    ctx.save_for_backward(*parameters, *kept, *weights)
    return kept.residual_2, out, kept.qkv, kept.residual_1


def _run_fp8(
    ctx: Any, stream: Tensor, values: Tensor | None, bias: Tensor | None, parameters: Sequence[Any]
) -> tuple[Any, ...]:
    plan, dropouts = ctx.plan, ctx.dropouts
    out, residual_1, residual_2, *saved = ops.fp8_layer.default(
        stream, values, bias, *parameters, *plan.histories, plan.heads, plan.scale, *plan.epsilons,
        *dropouts[0], *dropouts[1], *dropouts[2],
    )  # fmt: skip
    given = BlockParameters._make(parameters)
    residual_1 = stream if values is None else residual_1
    ctx.save_for_backward(given.norm_1_weight, given.norm_2_weight, residual_1, residual_2, *saved)
    return residual_2, out, None, None


def _gradients(ctx: Any, needs: Sequence[bool], adds_past: bool, dresidual_2: Any, dout: Tensor) -> Sequence[Any]:
    plan, dropouts = ctx.plan, ctx.dropouts
    (
        norm_1_weight, _, qkv_weight, _, attn_proj_weight, _, norm_2_weight, _, fc_weight, _, mlp_proj_weight, *kept
    ) = ctx.saved_tensors  # fmt: skip
    dtype = qkv_weight.dtype
    if len(kept) > _SAVED:
        *kept, qkv_weight, attn_proj_weight, fc_weight, mlp_proj_weight = kept
    found = ops.layer_backward.default(
        dout, dresidual_2, *kept, norm_1_weight, qkv_weight, attn_proj_weight, norm_2_weight, fc_weight,
        mlp_proj_weight, plan.heads, plan.scale, "tanh" if plan.tanh else "none", needs,
        *dropouts[0], *dropouts[1], *dropouts[2], ctx.has_values, adds_past,
    )  # fmt: skip
    if not plan.transposed and dtype == plan.low:
        return found  # type: ignore[no-any-return]
    dstream, dvalues, dbias, *gradients = found
    return dstream, dvalues, dbias, *_as_parameters(BlockParameters._make(gradients), dtype, plan)


def _gradients_fp8(ctx: Any, needs: Sequence[bool], adds_past: bool, dresidual_2: Any, dout: Any) -> Sequence[Any]:
    plan, dropouts = ctx.plan, ctx.dropouts
    norm_1_weight, norm_2_weight, residual_1, residual_2, *saved = ctx.saved_tensors
    return ops.fp8_layer_backward.default(
        torch.zeros_like(residual_2) if dout is None else dout, dresidual_2, residual_1, residual_2, saved,
        norm_1_weight, norm_2_weight, plan.histories.douts, plan.heads, plan.scale, adds_past, needs,
        *dropouts[0], *dropouts[1], *dropouts[2],
    )  # fmt: skip


def _compute(
    plan: Plan,
    dropouts: Sequence[Dropout],
    stream: Tensor,
    values: Tensor | None,
    bias: Tensor | None,
    parameters: BlockParameters,
) -> tuple[Tensor, ...]:
    """Compute residual_2, the values and qkv of ``_Layer`` by single operators, which autograd can differentiate."""
    with without_autocast(stream.device.type):
        low = plan.low
        matrices = Matrices._make([t if t is None else t.to(low) for t in parameters.matrices()])
        p = parameters.with_matrices(_as_linear(matrices) if plan.transposed else matrices)
        norm_1, norm_2 = (p.norm_1_weight, p.norm_1_bias), (p.norm_2_weight, p.norm_2_bias)
        eps_1, eps_2 = plan.epsilons
        if values is None:
            residual_1, normed = stream, ops.layernorm.default(stream, *norm_1, eps_1)[0].to(low)
        else:
            normed, residual_1, _, _ = ops.residual_layernorm.default(
                values, stream, *norm_1, eps_1, bias, *dropouts[0]
            )
        qkv = ops.linear.default(normed, p.qkv_weight, p.qkv_bias)
        attended = ops.attention.default(qkv, plan.heads, plan.scale, *dropouts[1])[0]
        added = ops.linear.default(attended, p.attn_proj_weight, None)
        normed, residual_2, _, _ = ops.residual_layernorm.default(
            added, residual_1, *norm_2, eps_2, p.attn_proj_bias, *dropouts[2]
        )
        if plan.tanh:
            out = ops.mlp.default(normed, p.fc_weight, p.fc_bias, p.mlp_proj_weight, None)[0]
        else:
            hidden = ops.gelu.default(ops.linear.default(normed, p.fc_weight, p.fc_bias), approximate="none")
            out = ops.linear.default(hidden, p.mlp_proj_weight, None)
        return residual_2, out, qkv


def _differentiably(ctx: Any, grads: Sequence[Any], dresidual_1: Tensor | None) -> tuple[Any, ...]:
    plan, dropouts, tensors = ctx.plan, ctx.dropouts, ctx.saved_tensors
    parameters, kept = tensors[:_PARAMETERS], LayerSaved._make(tensors[_PARAMETERS : _PARAMETERS + _SAVED])
    need_stream, need_values, need_bias, *needs = ctx.needs_input_grad[3:]

    def formula(residual_1: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        return _compute(plan, dropouts, residual_1, None, None, BlockParameters._make(parameters))

    need_residual = need_stream or need_values or need_bias
    dresidual, *gradients = differentiate(formula, (kept.residual_1, *parameters), (need_residual, *needs), grads)
    if dresidual_1 is not None:
        dresidual = dresidual_1 if dresidual is None else dresidual + dresidual_1
    dvalues = dbias = None
    if dresidual is not None and (need_values or need_bias):
        dvalues = drop(dresidual, *dropouts[0])
        dbias = dvalues.flatten(0, -2).sum(0) if need_bias else None
        dvalues = dvalues.to(plan.low) if need_values else None
    return None, None, None, dresidual if need_stream else None, dvalues, dbias, *gradients


def _with_matrices(
    parameters: BlockParameters, matrices: Matrices | None, plan: Plan, stream: Tensor
) -> BlockParameters:
    if matrices is None:
        if stream.dtype == plan.low:
            matrices = parameters.matrices()
        elif type(stream) is Tensor:
            matrices = cast_layers([parameters], plan.low)[0]
        else:  # in traced code Inductor allocates the results
            matrices = _cast(parameters.matrices(), plan.low)
    return parameters.with_matrices(_as_linear(matrices) if plan.transposed else matrices)


def _as_linear(matrices: Matrices) -> Matrices:
    return Matrices._make([t.t() if t is not None and t.dim() == 2 else t for t in matrices])


def _cast(matrices: Matrices, dtype: torch.dtype) -> Matrices:
    given = [t for t in matrices if t is not None]
    made = [torch.empty_like(t, dtype=dtype) for t in given]
    if made:
        torch._foreach_copy_(made, given)
    cast = iter(made)
    return Matrices._make([None if t is None else next(cast) for t in matrices])


def cast_layers(layers: Sequence[BlockParameters], dtype: torch.dtype) -> list[Matrices]:
    """Cast the matrices of several layers by one foreach operation.

    The results of a layer share one allocation, because the layer's backward frees all of them.
    """
    matrices = [parameters.matrices() for parameters in layers]
    given = [[t for t in some if t is not None] for some in matrices]
    made: list[Tensor] = []
    for some in given:
        flat = some[0].new_empty(sum([t.numel() for t in some]), dtype=dtype)
        made += torch._utils._unflatten_dense_tensors(flat, some)
    torch._foreach_copy_(made, [t for some in given for t in some])
    cast = iter(made)
    return [Matrices._make([None if t is None else next(cast) for t in some]) for some in matrices]


def _as_parameters(gradients: BlockParameters, dtype: torch.dtype, plan: Plan) -> BlockParameters:
    matrices = gradients.matrices()
    if plan.transposed:
        matrices = _as_linear(matrices)
    return gradients.with_matrices(matrices if dtype == plan.low else _cast(matrices, dtype))
