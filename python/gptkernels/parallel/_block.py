"""A transformer block whose heads, hidden units and rows are divided among the processes of a group.

Each process has n of the N = B*T rows of the residual stream, and computes the additions, norms and dropouts of these
rows. For the matmuls and attention it gathers all rows, and computes with its own heads and hidden units. The outputs
of attention's projection and of the MLP are sums over the processes, of which each process keeps its rows. This is the
sequence parallelism of Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022).

The block is one node of autograd's graph. The backward gathers the norms' outputs again, so that no activation of all
rows and all channels is stored.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gptkernels.block.node import Plan
from gptkernels.block.tensors import BlockParameters
from gptkernels.parallel._collectives import (
    gather,
    reduce_scatter,
    refuse_second_derivative,
    start_gather,
    start_reduce_scatter,
    wait,
)
from gptkernels.parallel._dropout import RowDropout, join
from gptkernels.parallel.context import attend, attend_backward
from gptkernels.rules import ops
from gptkernels.rules._autocast import below
from gptkernels.rules._register import present
from gptkernels.rules.attention import packed_options, unpack


class HeadDropout(NamedTuple):
    """A dropout of the attention probabilities of this process's heads."""

    p: float
    seed: Tensor | None
    offset: Tensor | None
    first_head: int
    total_heads: int


class Dropouts(NamedTuple):
    """The dropouts of the pending addition, of attention's probabilities and of attention's output."""

    values: RowDropout
    attention: HeadDropout
    attention_output: RowDropout


class ShardedBlock(torch.autograd.Function):
    """stream (n, C), values (n, C) or None, bias (C) or None -> residual_2 (n, C) and the values to be added to it.

    The parameters are this process's parts, (out, in). The gradients of the norms' parameters and of the biases that
    are added to the stream are sums over this process's rows only.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, plan: Plan, group: ProcessGroup, context_group: ProcessGroup | None, length: int, dropouts: Dropouts,
        stream, values, bias, *parameters,
    ):  # fmt: skip
        ctx.options, ctx.has_values = (plan, group, context_group, length, dropouts), values is not None
        ctx.set_materialize_grads(False)
        p = BlockParameters._make(parameters)
        low = plan.low
        qkv_weight, attn_proj_weight, fc_weight, mlp_proj_weight = weights = [w.to(low) for w in p.weights()]
        qkv_bias, fc_bias = (None if b is None else b.to(low) for b in (p.qkv_bias, p.fc_bias))
        with below():
            norm_1, residual_1, mean_1, rstd_1 = add_and_norm(
                values, stream, p.norm_1_weight, p.norm_1_bias, plan.epsilons[0], bias, dropouts.values
            )
            norm_1 = norm_1.to(low)
            qkv = ops.linear.default(_sequences(gather(norm_1, group), length), qkv_weight, qkv_bias)
            if context_group is None:
                attended, logsumexp = ops.attention.default(qkv, plan.heads, plan.scale, *dropouts.attention)
            else:
                options = packed_options(plan.scale, *dropouts.attention)
                out, logsumexp = attend(*unpack(qkv, plan.heads), context_group, options)  # type: ignore[call-arg, arg-type]
                attended = out.transpose(1, 2).flatten(2)
            added = reduce_scatter(ops.linear.default(attended.flatten(0, 1), attn_proj_weight, None), group)
            norm_2, residual_2, mean_2, rstd_2 = add_and_norm(
                added, residual_1, p.norm_2_weight, p.norm_2_bias, plan.epsilons[1], p.attn_proj_bias,
                dropouts.attention_output,
            )  # fmt: skip
            out, pre_gelu, post_gelu = _mlp(plan, gather(norm_2, group), fc_weight, fc_bias, mlp_proj_weight)
            out = reduce_scatter(out, group)
        ctx.save_for_backward(
            p.norm_1_weight, p.norm_2_weight, *weights, residual_1, mean_1, rstd_1, norm_1, qkv, attended, logsumexp,
            residual_2, mean_2, rstd_2, norm_2, pre_gelu, post_gelu,
        )  # fmt: skip
        return residual_2, out

    @staticmethod
    def backward(ctx, dresidual_2, dout):  # type: ignore[no-untyped-def]
        refuse_second_derivative("a tensor-parallel GPT2")
        plan, group, context_group, length, dropouts = ctx.options
        (
            norm_1_weight, norm_2_weight, qkv_weight, attn_proj_weight, fc_weight, mlp_proj_weight, residual_1, mean_1,
            rstd_1, norm_1, qkv, attended, logsumexp, residual_2, mean_2, rstd_2, norm_2, pre_gelu, post_gelu,
        ) = ctx.saved_tensors  # fmt: skip
        needs_stream, needs_values, needs_bias, *needs = ctx.needs_input_grad[5:]
        p = BlockParameters._make(needs)
        with below():
            dout_all, norm_2_all, norm_1_all = (start_gather(t, group) for t in (dout, norm_2, norm_1))
            dnorm_2, dfc_weight, dfc_bias, dmlp_proj_weight = _mlp_backward(
                plan, wait(dout_all), wait(norm_2_all), fc_weight, mlp_proj_weight, pre_gelu, post_gelu, p
            )
            del dout_all, norm_2_all
            dnorm_2 = reduce_scatter(dnorm_2, group)
            dadded, dnorm_2_weight, dnorm_2_bias, dattn_proj_bias, dresidual_1 = _add_and_norm_backward(
                dnorm_2, dresidual_2, residual_2, norm_2_weight, mean_2, rstd_2, dropouts.attention_output,
                (True, p.norm_2_weight, p.norm_2_bias, p.attn_proj_bias, True),
            )  # fmt: skip
            dattended, dattn_proj_weight, _ = ops.linear_backward.default(
                _sequences(gather(dadded, group), length), attended, attn_proj_weight,
                (True, p.attn_proj_weight, False),
            )  # fmt: skip
            if context_group is None:
                dqkv = ops.attention_backward.default(
                    dattended, qkv, attended, logsumexp, plan.heads, plan.scale, *dropouts.attention
                )
            else:
                dout, out = (t.unflatten(2, (plan.heads, -1)).transpose(1, 2) for t in (dattended, attended))
                options = packed_options(plan.scale, *dropouts.attention)
                parts = attend_backward(dout, *unpack(qkv, plan.heads), out, logsumexp, context_group, options)
                dqkv = torch.cat([part.transpose(1, 2).flatten(2) for part in parts], 2)
            linear = dqkv.flatten(0, 1), wait(norm_1_all), qkv_weight
            dnorm_1 = start_reduce_scatter(ops.linear_backward.default(*linear, (True, False, False))[0], group)
            _, dqkv_weight, dqkv_bias = ops.linear_backward.default(*linear, (False, p.qkv_weight, p.qkv_bias))
            dvalues, dnorm_1_weight, dnorm_1_bias, dbias, dstream = _add_and_norm_backward(
                wait(dnorm_1).to(plan.low if ctx.has_values else residual_1.dtype), dresidual_1, residual_1,
                norm_1_weight, mean_1, rstd_1, dropouts.values,
                (needs_values, p.norm_1_weight, p.norm_1_bias, needs_bias, needs_stream),
            )  # fmt: skip
        gradients = BlockParameters(
            norm_1_weight=dnorm_1_weight, norm_1_bias=dnorm_1_bias, qkv_weight=dqkv_weight, qkv_bias=dqkv_bias,
            attn_proj_weight=dattn_proj_weight, attn_proj_bias=dattn_proj_bias, norm_2_weight=dnorm_2_weight,
            norm_2_bias=dnorm_2_bias, fc_weight=dfc_weight, fc_bias=dfc_bias, mlp_proj_weight=dmlp_proj_weight,
        )  # fmt: skip
        wide = residual_1.dtype
        found = (dstream, dvalues, dbias, *(g if g is None else g.to(wide) for g in present(gradients, needs)))
        return None, None, None, None, None, *found


def _sequences(rows: Tensor, length: int) -> Tensor:
    return rows.view(-1, length, rows.shape[-1])


def add_and_norm(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    x_bias: Tensor | None,
    dropout: RowDropout,
) -> tuple[Tensor, ...]:
    """Return the normalised sum, the sum, and the norm's mean and rstd. Without x the sum is the residual."""
    if x is None:
        out, mean, rstd = ops.layernorm.default(residual, weight, bias, eps)
        return out, residual, mean, rstd
    found = [
        ops.residual_layernorm.default(*rows, weight, bias, eps, x_bias, *dropout[:3], first)
        for *rows, first in dropout.by_range(x, residual)
    ]
    return tuple(map(join, zip(*found, strict=True)))


def _add_and_norm_backward(
    dout: Tensor,
    dsum: Tensor | None,
    sum: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dropout: RowDropout,
    mask: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight, bias, x_bias and the residual, or None where the mask is False."""
    if dropout.p or dout.dtype != sum.dtype:
        op, drawn = ops.residual_layernorm_dropout_backward.default, dropout[:3]
        of_ranges = [
            present(op(dout, dsum, sum, weight, mean, rstd, *drawn, mask, first), mask)
            for dout, dsum, sum, mean, rstd, first in dropout.by_range(dout, dsum, sum, mean, rstd)
        ]
        of_x, *of_parameters, of_residual = zip(*of_ranges, strict=True)
        totals = (None if parts[0] is None else functools.reduce(torch.add, parts) for parts in of_parameters)
        return join(of_x), *totals, join(of_residual)
    needs_x, *needs, needs_residual = mask
    some = needs_x or needs_residual, *needs
    dx, *found = ops.residual_layernorm_bias_backward.default(dout, dsum, sum, weight, mean, rstd, some)
    return present((dx, *found, dx), mask)


def _mlp(
    plan: Plan, x: Tensor, fc_weight: Tensor, fc_bias: Tensor | None, proj_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and the hidden units before and after GELU."""
    if plan.tanh:
        keep = not plan.recompute_gelu
        return ops.mlp.default(x, fc_weight, fc_bias, proj_weight, None, keep)  # type: ignore[no-any-return]
    pre_gelu = ops.linear.default(x, fc_weight, fc_bias)
    post_gelu = ops.gelu.default(pre_gelu, approximate="none")
    return ops.linear.default(post_gelu, proj_weight, None), pre_gelu, post_gelu


def _mlp_backward(
    plan: Plan,
    dout: Tensor,
    x: Tensor,
    fc_weight: Tensor,
    proj_weight: Tensor,
    pre_gelu: Tensor,
    post_gelu: Tensor,
    needs: BlockParameters,
) -> tuple[Tensor, ...]:
    """Return the gradients of x, the first weight, its bias and the second weight."""
    if plan.tanh:
        mask = True, needs.fc_weight, needs.fc_bias, needs.mlp_proj_weight, False
        found = ops.mlp_backward.default(dout, x, fc_weight, proj_weight, pre_gelu, post_gelu, mask)
        return found[:4]  # type: ignore[no-any-return]
    dpost, dproj_weight, _ = ops.linear_backward.default(
        dout, post_gelu, proj_weight, (True, needs.mlp_proj_weight, False)
    )
    dpre = ops.gelu_backward.default(dpost, pre_gelu, approximate="none")
    return *ops.linear_backward.default(dpre, x, fc_weight, (True, needs.fc_weight, needs.fc_bias)), dproj_weight
