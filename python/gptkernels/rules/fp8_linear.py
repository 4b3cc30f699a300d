"""Linear layers with float8 operands: x and weights in e4m3, gradients in e5m2.

The gradients are computed from the quantised operands.
"""

import torch

from gptkernels.rules import _register as register
from gptkernels.rules._register import below_autograd, empty_gradients, ops, present
from gptkernels.rules._vmap import loop
from gptkernels.rules.fp8 import scale_like, transposed_like
from gptkernels.rules.linear import linear_flops
from gptkernels.rules.mlp import mlp_backward_flops, mlp_flops

SAVED = torch.float8_e4m3fn


def refuse_tangents(inputs, tangents, outputs):
    raise RuntimeError("gptkernels: float8 layers have no forward-mode derivative")


def refuse_second_derivatives():
    """Raise an error if the backward is recorded.

    Its derivative would be wrong, because the unquantised operands are not saved.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "gptkernels: float8 layers have no second derivative: not with create_graph=True, not under torch.func"
        )


def _fake_linear(x, weight, bias, history, dout_history, save):
    return (
        x.new_empty((*x.shape[:-1], weight.shape[0])),
        transposed_like(x, SAVED, save[1]),
        transposed_like(weight, SAVED, save[0]),
        scale_like(x),
        scale_like(x),
    )


def _fake_linear_backward(dout, x_t, weight_t, x_scale, weight_scale, history, output_mask):
    *rows, width = dout.shape
    return empty_gradients(dout, ((*rows, weight_t.shape[0]), (width, x_t.shape[0]), (width,)), output_mask)


class FP8Linear(torch.autograd.Function):
    """x (..., K), weight (M, K), bias (M) -> out (..., M), and the tensors that the backward reads."""

    @staticmethod
    def forward(ctx, x, weight, bias, history, dout_history, save):
        save = ctx.needs_input_grad[:2]
        out, *saved = below_autograd(ops.fp8_linear.default, x, weight, bias, history, dout_history, save)
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)
        ctx.history = dout_history  # not saved as a tensor, because later calls update it
        return out, *saved

    @staticmethod
    def backward(ctx, dout, *unused):
        if dout is None:
            return (None,) * 6
        refuse_second_derivatives()
        mask = ctx.needs_input_grad[:3]
        grads = ops.fp8_linear_backward.default(dout, *ctx.saved_tensors, ctx.history, mask)
        return *present(grads, mask), None, None, None


def fp8_linear_backward_flops(dout_shape, x_t_shape, weight_t_shape, *args, **kwargs) -> int:
    mask = args[-1]
    inner = weight_t_shape[0] if mask[0] else x_t_shape[0]
    return linear_flops(dout_shape, (inner,)) * (mask[0] + mask[1])


register.fake("fp8_linear", _fake_linear)
register.fake("fp8_linear_backward", _fake_linear_backward)
register.autograd("fp8_linear", FP8Linear, jvp=refuse_tangents)
register.mutates("fp8_linear")
register.mutates("fp8_linear_backward")
register.without_derivative("fp8_linear_backward")
register.vmap("fp8_linear", loop)
register.vmap("fp8_linear_backward", loop)
register.autocast("fp8_linear", cuda="lower", cpu="lower")
register.flops("fp8_linear", linear_flops)
register.flops("fp8_linear_backward", fp8_linear_backward_flops)
register.fake("fp8_linear_dweight_", lambda *_: None)
register.without_derivative("fp8_linear_dweight_")
register.flops("fp8_linear_dweight_", lambda dout_shape, x_t_shape, *_, **__: linear_flops(dout_shape, x_t_shape))


def _fake_mlp(
    x, fc_weight, fc_bias, proj_weight, proj_bias, history, hidden_history, dhidden_history, dout_history, save
):
    pre_gelu = x.new_empty((*x.shape[:-1], fc_weight.shape[0]))
    return (
        x.new_empty((*x.shape[:-1], proj_weight.shape[0])),
        pre_gelu,
        transposed_like(x, SAVED, save[1]),
        transposed_like(fc_weight, SAVED, save[0]),
        transposed_like(pre_gelu, SAVED, save[2]),
        transposed_like(proj_weight, SAVED, save[3]),
        *(scale_like(x) for _ in range(4)),
    )


def _fake_mlp_backward(dout, pre_gelu, x_t, fc_weight_t, *args):
    (*rows, width), hidden = dout.shape, pre_gelu.shape[-1]
    shapes = (*rows, fc_weight_t.shape[0]), (hidden, x_t.shape[0]), (hidden,), (width, hidden), (width,)
    return empty_gradients(dout, shapes, args[-1])


class FP8MLP(torch.autograd.Function):
    """x (..., C), weights (F, C) and (C', F), biases (F) and (C') -> out (..., C'), and the backward's inputs.

    GELU's output is saved only in float8.
    """

    @staticmethod
    def forward(ctx, *args):
        needs = ctx.needs_input_grad
        save = needs[0], needs[1], needs[3], any(needs[:3])
        out, *saved = below_autograd(ops.fp8_mlp.default, *args[:-1], save)
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)
        ctx.histories = args[7:9]
        return out, *saved

    @staticmethod
    def backward(ctx, dout, *unused):
        if dout is None:
            return (None,) * 10
        refuse_second_derivatives()
        mask = ctx.needs_input_grad[:5]
        grads = ops.fp8_mlp_backward.default(dout, *ctx.saved_tensors, *ctx.histories, mask)
        return *present(grads, mask), *(None,) * 5


def fp8_mlp_backward_flops(dout_shape, pre_shape, *args, **kwargs) -> int:
    """The input width is the first dimension of whichever transposed operand was saved."""
    mask, x_t, fc_t = args[-1], args[0], args[1]
    inner = (fc_t if mask[0] else x_t)[0]
    fc, proj = (pre_shape[-1], inner), (dout_shape[-1], pre_shape[-1])
    return mlp_backward_flops(dout_shape, (*dout_shape[:-1], inner), fc, proj, pre_shape, pre_shape, mask)


register.fake("fp8_mlp", _fake_mlp)
register.fake("fp8_mlp_backward", _fake_mlp_backward)
register.autograd("fp8_mlp", FP8MLP, jvp=refuse_tangents)
register.mutates("fp8_mlp")
register.mutates("fp8_mlp_backward")
register.without_derivative("fp8_mlp_backward")
register.vmap("fp8_mlp", loop)
register.vmap("fp8_mlp_backward", loop)
register.autocast("fp8_mlp", cuda="lower", cpu="lower")
register.flops("fp8_mlp", mlp_flops)
register.flops("fp8_mlp_backward", fp8_mlp_backward_flops)
