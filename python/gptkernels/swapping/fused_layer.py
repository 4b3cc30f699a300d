"""A whole block as one node of autograd's graph, for eager training.

Called one by one, the operators of a block cost the host more than the device needs for a small batch: each goes
through autocast's and autograd's rules. Here the same operators are called below both, with the casts that autocast
would do: matrix products in its dtype, norms and the residual stream in float32. The casts of a block's parameters, and
of their gradients, are one launch each.

Where anything else than a plain first derivative is asked for, the block is computed by ``transformer.layer``: under
``torch.compile`` and ``torch.func``, with tangents, and for a second derivative, which runs it again.

Shapes: B batch, T tokens, C channels, F the MLP's hidden width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptkernels import functional
from gptkernels.ops import _forward, ops
from gptkernels.ops._autocast import KEYS
from gptkernels.ops._register import differentiate
from gptkernels.swapping.checks import dropout_of, untouched
from gptkernels.swapping.layers import gelu_form, norm_of


class Plan(NamedTuple):
    """What a block is computed with besides its tensors."""

    epsilons: tuple[float, float]
    heads: int
    scale: float | None
    attention_p: float
    residual_p: float
    mlp_p: float
    tanh: bool
    transposed: bool  # the matrices are (in, out)
    low: torch.dtype  # of matrix products


MATRICES = (2, 3, 4, 5, 8, 9, 10, 11)  # where the linear layers' are among a block's 12 parameters
TOTAL_1 = 6  # where the sum of its inputs is, among what is kept for the backward


def plan_of(
    block: Any, stream: Tensor, heads: int, scale: float | None, attention_p: float, kinds: Sequence[str]
) -> tuple[Plan, tuple[Any, ...]] | None:
    """The plan and the parameters; None where the block must be computed otherwise.

    Args:
        block: has ``ln_1``, ``attn``, ``ln_2`` and ``mlp``, and these nanoGPT's names.
        stream: (B, T, C).
        heads: NH.
        scale: of the scores, or None.
        attention_p: the probability of attention's dropout.
        kinds: the replacements that the block's attention and MLP are when they are as the swap left them.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or _forward.active():
        return None
    attention, mlp = block.attn, block.mlp
    if not (untouched(attention, kinds[0]) and untouched(mlp, kinds[1])):
        return None
    names = mlp._modules.keys() - {"c_fc", "c_proj", "dropout"}
    if len(names) != 1:
        return None
    act = mlp._modules[next(iter(names))]
    linears = attention.c_attn, attention.c_proj, mlp.c_fc, mlp.c_proj
    if not (
        untouched(act, "GELU")
        and untouched(block.ln_1, "LayerNorm")
        and untouched(block.ln_2, "LayerNorm")
        and all(untouched(one, "Linear") for one in linears)
    ):
        return None
    residual_p = _probability(attention._modules.get("resid_dropout"))
    mlp_p = _probability(mlp._modules.get("dropout"))
    if residual_p is None or mlp_p is None or stream.shape[-1] > functional.MAX_HEAD_SIZE * heads:
        return None
    norms = norm_of(block.ln_1), norm_of(block.ln_2)
    parameters = (
        *norms[0][:2],
        *(t for one in linears[:2] for t in (one.weight, one.bias)),
        *norms[1][:2],
        *(t for one in linears[2:] for t in (one.weight, one.bias)),
    )
    device = stream.device.type
    autocast = torch.is_autocast_enabled(device)
    low = torch.get_autocast_dtype(device) if autocast else stream.dtype
    wide = torch.float32 if autocast else stream.dtype
    if stream.dtype != wide or any(t is not None and t.dtype != wide for t in parameters):
        return None
    return (
        Plan(
            epsilons=(norms[0][2], norms[1][2]),
            heads=heads,
            scale=scale,
            attention_p=attention_p,
            residual_p=residual_p,
            mlp_p=mlp_p,
            tanh=gelu_form(act) == "tanh",
            transposed=linears[0]._gptkernels_transposed,
            low=low,
        ),
        parameters,
    )


def _probability(dropout: Any) -> float | None:
    return 0.0 if dropout is None else dropout_of(dropout)


def run(
    plan: Plan, parameters: Sequence[Tensor | None], stream: Tensor, pending: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The stream, what is to be added to it, and qkv (B, T, 3C)."""
    seed, offset = functional._dropout_numbers(plan.attention_p, stream)
    return _Layer.apply(plan, stream, pending, seed, offset, *parameters)[:3]  # type: ignore[no-any-return]


# ---- the node --------------------------------------------------------------------------------------------------------


class _Below:
    """Below autograd and autocast."""

    def __init__(self, device_type: str) -> None:
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEYS[device_type]))
        self.guards = torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(keys)

    def __enter__(self) -> None:
        for guard in self.guards:
            guard.__enter__()

    def __exit__(self, *error: Any) -> None:
        for guard in reversed(self.guards):
            guard.__exit__(*error)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, stream: Tensor, pending: Tensor | None, seed: Any, offset: Any, *parameters: Any):  # type: ignore[no-untyped-def]
        """stream, pending (B, T, C) -> stream, pending (B, T, C), qkv (B, T, 3C), and the sum of the inputs.

        The sum is all that the backward needs of the inputs. It is an output so that a second derivative finds its way
        from the sum to them; None without pending.
        """
        with _Below(stream.device.type):
            matrices = _cast([parameters[i] for i in MATRICES], plan.low)
            outputs, kept = _compute(plan, stream, pending, seed, offset, parameters, matrices, (None, None))
        ctx.save_for_backward(seed, offset, *parameters, *kept)
        ctx.plan = plan
        ctx.pending_dtype = None if pending is None else pending.dtype
        ctx.set_materialize_grads(False)
        return *outputs, None if pending is None else kept[TOTAL_1]

    @staticmethod
    def backward(ctx: Any, dtotal: Any, dout: Any, dqkv_outside: Any, dsum: Any):  # type: ignore[no-untyped-def]
        """All gradients that are wanted."""
        plan, saved = ctx.plan, ctx.saved_tensors
        _, need_stream, need_pending, _, _, *needs = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return _differentiably(ctx, (dtotal, dout, dqkv_outside), dsum)
        seed, offset, *parameters = saved[:14]
        mask_1, mask_2, qkv_w, out_w, fc_w, proj_w = saved[14:20]
        total_1, mean_1, rstd_1, normed_1, qkv, attended, logsumexp = saved[20:27]
        total_2, mean_2, rstd_2, normed_2, pre, post = saved[27:]
        wide = total_1.dtype
        with _Below(total_1.device.type):
            found: list[Tensor | None] = [None] * 12
            dout = _or_zeros(dout, total_2, plan.low)
            dout = _drop_backward(dout, mask_2, plan.mlp_p)
            if plan.tanh:
                dnormed, *found[8:] = ops.mlp_backward(dout, normed_2, fc_w, proj_w, pre, post, (True, *needs[8:]))
            else:
                dpost, *found[10:] = ops.linear_backward(dout, post, proj_w, (True, *needs[10:]))
                dpre = ops.gelu_backward(dpost, pre, approximate="none")
                dnormed, *found[8:10] = ops.linear_backward(dpre, normed_2, fc_w, (True, *needs[8:10]))
            dtotal, *found[6:8] = ops.residual_layernorm_backward(
                dnormed.to(wide), dtotal, total_2, parameters[6], mean_2, rstd_2, (True, *needs[6:8])
            )
            dadded = _drop_backward(dtotal.to(plan.low), mask_1, plan.residual_p)
            dattended, *found[4:6] = ops.linear_backward(dadded, attended, out_w, (True, *needs[4:6]))
            del dadded
            dqkv = ops.attention_backward(
                dattended, qkv, attended, logsumexp, plan.heads, plan.scale, plan.attention_p, seed, offset
            )
            if dqkv_outside is not None:
                dqkv = dqkv + dqkv_outside
            need_dnormed = need_stream or need_pending or needs[0] or needs[1]
            dnormed, *found[2:4] = ops.linear_backward(dqkv, normed_1, qkv_w, (need_dnormed, *needs[2:4]))
            dstream = None
            if need_dnormed:
                dstream, *found[:2] = ops.residual_layernorm_backward(
                    dnormed.to(wide), dtotal, total_1, parameters[0], mean_1, rstd_1, (True, *needs[:2])
                )
                if dsum is not None:
                    dstream = dstream + dsum
            _cast_gradients(found, parameters, needs, plan)
            return _returned(ctx, dstream, [g if need else None for g, need in zip(found, needs, strict=True)])


def _returned(ctx: Any, dsum: Tensor | None, gradients: Sequence[Any]) -> tuple[Any, ...]:
    """The backward's outputs: the gradient of the inputs' sum is that of each."""
    need_stream, need_pending = ctx.needs_input_grad[1:3]
    dstream = dsum if need_stream else None
    dpending = dsum.to(ctx.pending_dtype) if need_pending and dsum is not None else None
    return None, dstream, dpending, None, None, *gradients


def _compute(
    plan: Plan,
    stream: Tensor,
    pending: Tensor | None,
    seed: Tensor | None,
    offset: Tensor | None,
    parameters: Sequence[Any],
    matrices: Sequence[Any],
    masks: Sequence[Tensor | None],
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """The block's three outputs, and what its backward needs.

    Args:
        plan: as made by ``plan_of``.
        stream: (B, T, C).
        pending: (B, T, C) or None.
        seed: of attention's dropout.
        offset: of attention's dropout.
        parameters: the block's, of which the norms' are used here.
        matrices: the others, in the dtype of matrix products.
        masks: what the two dropouts keep; None to draw it.
    """
    wide, low = stream.dtype, plan.low
    qkv_w, qkv_b, out_w, out_b, fc_w, fc_b, proj_w, proj_b = _as_linear(matrices, plan)
    if pending is None:
        total_1 = stream
        normed, mean_1, rstd_1 = ops.layernorm(stream, *parameters[:2], plan.epsilons[0])
    else:
        normed, total_1, mean_1, rstd_1 = ops.residual_layernorm(
            pending.to(wide), stream, *parameters[:2], plan.epsilons[0]
        )
    normed_1 = normed.to(low)
    del normed
    qkv = ops.linear(normed_1, qkv_w, qkv_b)
    attended, logsumexp = ops.attention(qkv, plan.heads, plan.scale, plan.attention_p, seed, offset)
    added, mask_1 = _drop(ops.linear(attended, out_w, out_b), plan.residual_p, masks[0])
    normed, total_2, mean_2, rstd_2 = ops.residual_layernorm(
        added.to(wide), total_1, *parameters[6:8], plan.epsilons[1]
    )
    del added
    normed_2 = normed.to(low)
    del normed
    if plan.tanh:
        out, pre, post = ops.mlp(normed_2, fc_w, fc_b, proj_w, proj_b)
    else:
        pre = ops.linear(normed_2, fc_w, fc_b)
        post = ops.gelu(pre, approximate="none")
        out = ops.linear(post, proj_w, proj_b)
    out, mask_2 = _drop(out, plan.mlp_p, masks[1])
    kept = (
        *(mask_1, mask_2, qkv_w, out_w, fc_w, proj_w),
        *(total_1, mean_1, rstd_1, normed_1, qkv, attended, logsumexp),
        *(total_2, mean_2, rstd_2, normed_2, pre, post),
    )
    return (total_2, out, qkv), kept


def _differentiably(ctx: Any, grads: Sequence[Any], dsum: Tensor | None) -> tuple[Any, ...]:
    """The backward as a function that can be differentiated: by the single operators' own autograd."""
    plan, saved = ctx.plan, ctx.saved_tensors
    seed, offset, *parameters = saved[:14]
    kept = saved[14:]

    def formula(total: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        with torch.autocast(total.device.type, enabled=False):
            matrices = [t if t is None else t.to(plan.low) for t in (parameters[i] for i in MATRICES)]
            return _compute(plan, total, None, seed, offset, parameters, matrices, kept[:2])[0]

    needs = any(ctx.needs_input_grad[1:3]), *ctx.needs_input_grad[5:]
    dtotal, *gradients = differentiate(formula, (kept[TOTAL_1], *parameters), needs, grads)
    if dsum is not None:
        dtotal = dsum if dtotal is None else dtotal + dsum
    return _returned(ctx, dtotal, gradients)


def _or_zeros(dout: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of the block's output, zeros where it was not used."""
    return torch.zeros_like(like, dtype=dtype) if dout is None else dout


def _as_linear(matrices: Sequence[Any], plan: Plan) -> list[Any]:
    """Weights as (out, in) views, biases as they are."""
    return [t.t() if plan.transposed and i % 2 == 0 else t for i, t in enumerate(matrices)]


def _cast(tensors: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """The tensors in another dtype, by one launch; None stays None."""
    given = [t for t in tensors if t is not None]
    if given[0].dtype == dtype:
        return list(tensors)
    made = [torch.empty_like(t, dtype=dtype) for t in given]
    torch._foreach_copy_(made, given)
    cast = iter(made)
    return [None if t is None else next(cast) for t in tensors]


def _cast_gradients(found: list[Any], parameters: Sequence[Any], needs: Sequence[bool], plan: Plan) -> None:
    """The matrices' gradients in the parameters' dtype and layout, in place in the list."""
    if plan.transposed:
        for i in (2, 4, 8, 10):
            found[i] = found[i].t() if needs[i] else None
    wanted = [i for i in MATRICES if needs[i]]
    if wanted and plan.low != parameters[wanted[0]].dtype:
        for i, t in zip(wanted, _cast([found[i] for i in wanted], parameters[wanted[0]].dtype), strict=True):
            found[i] = t


def _drop(x: Tensor, p: float, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if not p:
        return x, None
    if mask is not None:
        return x * mask.to(x.dtype) * _kept_scale(p), mask
    return torch.native_dropout(x, p, True)


def _kept_scale(p: float) -> float:
    return 1 / (1 - p) if p < 1 else 0.0


def _drop_backward(dout: Tensor, mask: Tensor | None, p: float) -> Tensor:
    if mask is None:
        return dout
    return torch.ops.aten.native_dropout_backward(dout, mask, _kept_scale(p))  # type: ignore[no-any-return]
