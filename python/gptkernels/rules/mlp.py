"""Multi-layer perceptron: out = gelu(x @ fc_weight^T + fc_bias) @ proj_weight^T + proj_bias, with tanh-GELU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gptkernels.rules import _register as register
from gptkernels.rules._jvp import by_formula
from gptkernels.rules._register import below_autograd, differentiate, ops, present
from gptkernels.rules._vmap import rows, rows_and_sums
from gptkernels.rules.linear import fake_weight_gradient, linear_flops


def _fake(x, fc_weight, fc_bias, proj_weight, proj_bias, keep_post_gelu=True):
    rows = x.shape[:-1]
    pre_gelu = x.new_empty((*rows, fc_weight.shape[0]))
    post_gelu = torch.empty_like(pre_gelu) if keep_post_gelu else x.new_empty(0)
    return x.new_empty((*rows, proj_weight.shape[0])), pre_gelu, post_gelu


def _fake_backward(dout, x, fc_weight, proj_weight, pre_gelu, post_gelu, output_mask):
    dx, dfc_weight, dfc_bias, dproj_weight, dproj_bias = output_mask
    return (
        x.new_empty(x.shape if dx else (0,)),
        fake_weight_gradient(fc_weight) if dfc_weight else x.new_empty(0),
        x.new_empty(fc_weight.shape[:1] if dfc_bias else (0,)),
        fake_weight_gradient(proj_weight) if dproj_weight else x.new_empty(0),
        x.new_empty(proj_weight.shape[:1] if dproj_bias else (0,)),
    )


def formula(
    x: Tensor,
    fc_weight: Tensor,
    fc_bias: Tensor | None,
    proj_weight: Tensor,
    proj_bias: Tensor | None,
    keep_post_gelu: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    pre_gelu = F.linear(x, fc_weight, fc_bias)
    post_gelu = F.gelu(pre_gelu, approximate="tanh")
    out = F.linear(post_gelu, proj_weight, proj_bias)
    return out, pre_gelu, post_gelu if keep_post_gelu else x.new_empty(0)


class MLP(torch.autograd.Function):
    """x (..., C), weights (F, C) and (C', F), biases (F) and (C') -> out (..., C'), pre_gelu and post_gelu (..., F).

    pre_gelu and post_gelu are differentiable too, because the second derivative reaches fc_bias through pre_gelu.
    Without ``keep_post_gelu``, post_gelu has no elements and no derivative.
    """

    @staticmethod
    def forward(ctx, x, fc_weight, fc_bias, proj_weight, proj_bias, keep_post_gelu):
        tensors = x, fc_weight, fc_bias, proj_weight, proj_bias
        out, pre_gelu, post_gelu = below_autograd(ops.mlp.default, *tensors, keep_post_gelu)
        if not keep_post_gelu:
            ctx.mark_non_differentiable(post_gelu)
        ctx.save_for_backward(*tensors, pre_gelu, post_gelu)
        ctx.set_materialize_grads(False)
        return out, pre_gelu, post_gelu

    @staticmethod
    def backward(ctx, dout, dpre_gelu, dpost_gelu):
        *inputs, pre_gelu, post_gelu = ctx.saved_tensors
        mask = ctx.needs_input_grad[:5]
        if dout is None or dpre_gelu is not None or dpost_gelu is not None:
            return *differentiate(formula, inputs, mask, (dout, dpre_gelu, dpost_gelu)), None
        x, fc_weight, _, proj_weight, _ = inputs
        gradients = ops.mlp_backward.default(dout, x, fc_weight, proj_weight, pre_gelu, post_gelu, mask)
        return *present(gradients, mask), None


def backward_formula(dout, x, fc_weight, proj_weight, pre_gelu, post_gelu, output_mask):
    if post_gelu.shape[-1] != pre_gelu.shape[-1]:
        post_gelu = F.gelu(pre_gelu, approximate="tanh")
    linear = ops.linear.default
    du = torch.ops.aten.gelu_backward(linear(dout, proj_weight.T), pre_gelu, approximate="tanh")
    rows, dout_rows, du_rows, post_rows = (t.reshape(-1, t.shape[-1]) for t in (x, dout, du, post_gelu))
    dfc, dproj = linear(du_rows.T, rows.T), linear(dout_rows.T, post_rows.T)
    return present((linear(du, fc_weight.T), dfc, du_rows.sum(0), dproj, dout_rows.sum(0)), output_mask)


def mlp_flops(x_shape, fc_shape, fc_bias_shape, proj_shape, *args, **kwargs) -> int:
    hidden_shape = (*x_shape[:-1], fc_shape[0])
    return linear_flops(x_shape, fc_shape) + linear_flops(hidden_shape, proj_shape)


def mlp_backward_flops(dout_shape, x_shape, fc_shape, proj_shape, pre_shape, post_shape, output_mask, **kwargs) -> int:
    fc, proj = linear_flops(x_shape, fc_shape), linear_flops(pre_shape, proj_shape)
    return fc * (output_mask[0] + output_mask[1]) + proj * (any(output_mask[:3]) + output_mask[3])


def _mapped(op, size, in_dims, args):
    """Return post_gelu in any case, because an empty output would not have the mapped dimension."""
    return rows(0)(op, size, in_dims[:5], args[:5])


register.fake("mlp", _fake)
register.fake("mlp_backward", _fake_backward)
register.autograd("mlp", MLP, jvp=by_formula(formula))
register.autograd_by_formula("mlp_backward", backward_formula, inputs=6)
register.vmap("mlp", _mapped)
register.vmap("mlp_backward", rows_and_sums(0, 1, 4, 5))
register.autocast("mlp", cuda="lower", cpu="lower")
register.flops("mlp", mlp_flops)
register.flops("mlp_backward", mlp_backward_flops)
