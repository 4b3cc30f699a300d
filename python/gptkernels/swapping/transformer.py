"""GPT-2's layer, computed with the parameters of a user's own modules.

A module that was replaced, hooked or wrapped since the swap is called instead of the kernel. Shapes: B batch, T tokens,
C channels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gptkernels import functional
from gptkernels.block.fused import Pending, add, finished
from gptkernels.block.node import Dropout
from gptkernels.rules import ops
from gptkernels.rules._autocast import autocast_dtype, without_autocast
from gptkernels.swapping.checks import dropout_of, untouched, why_not
from gptkernels.swapping.dropout import Draws
from gptkernels.swapping.layers import gelu_form, norm_of, weight_of


def norm(x: Tensor, module: Any) -> Tensor:
    if not untouched(module, "LayerNorm"):
        return module(x)  # type: ignore[no-any-return]
    weight, bias, eps = norm_of(module)
    return ops.layernorm(x, weight, bias, eps)[0]  # type: ignore[no-any-return]


def add_and_norm(stream: Tensor, pending: Pending | None, module: Any, narrow: bool = False) -> tuple[Tensor, Tensor]:
    """Return the normalised stream, and the stream after the pending addition.

    With ``narrow`` the normalised stream may have autocast's dtype, because only a matmul reads it.
    """
    if pending is None or not untouched(module, "LayerNorm"):
        stream = add(stream, pending)
        return norm(stream, module), stream
    values, x_bias, dropout = pending
    args = values, stream, *norm_of(module), x_bias, *dropout
    if narrow and _is_narrow(*args):  # inside autocast the operator would return float32, as layer_norm does
        with without_autocast(stream.device.type):
            normed, stream, _, _ = ops.residual_layernorm(*args)
    else:
        normed, stream, _, _ = ops.residual_layernorm(*args)
    return normed, stream


def _is_narrow(values: Tensor, stream: Tensor, *args: Any) -> bool:
    if values.dtype != autocast_dtype(stream.device.type):
        return False
    others = (stream, *(t for t in args if isinstance(t, Tensor) and t.is_floating_point()))
    return values.dtype in (torch.bfloat16, torch.float16) and all(t.dtype == torch.float32 for t in others)


def project(x: Tensor, module: Any, bias: bool = True) -> Tensor:
    if not untouched(module, "Linear"):
        return module(x)  # type: ignore[no-any-return]
    return functional.linear(x, weight_of(module), module.bias if bias else None)


def mlp(x: Tensor, fc: Any, act: Any, proj: Any, bias: bool = True) -> Tensor:
    if untouched(act, "GELU"):
        form = gelu_form(act)
        if form == "tanh" and untouched(fc, "Linear") and untouched(proj, "Linear"):
            return functional.mlp(x, weight_of(fc), fc.bias, weight_of(proj), proj.bias if bias else None)
        return project(functional.gelu(project(x, fc), form), proj, bias)
    return project(act(project(x, fc)), proj, bias)


def pending_of(values: Tensor, proj: Any, module: Any, draws: Draws) -> Pending:
    """Make the pending addition of ``proj``'s output, to which the dropout ``module`` (None: no dropout) is applied."""
    pending = Pending(values, proj.bias if untouched(proj, "Linear") else None)
    if module is None:
        return pending
    p = dropout_of(module)
    return Pending(module(finished(pending))) if p is None else pending._replace(dropout=draws(p))


def feed_forward(module: Any, x: Tensor, kind: str, activation: Callable[[Any], Any], draws: Draws) -> Pending:
    if not untouched(module, kind) or why_not(x) is not None:
        return called(module, x)
    values = mlp(x, module.c_fc, activation(module), module.c_proj, bias=False)
    return pending_of(values, module.c_proj, module._modules.get("dropout"), draws)


def attend(qkv: Tensor, num_heads: int, scale: float | None, dropout: Dropout) -> Tensor:
    if qkv.shape[2] > 3 * functional.MAX_HEAD_SIZE * num_heads:
        return functional.causal_attention(qkv, num_heads, scale, dropout.p)
    return ops.attention(qkv, num_heads, scale, *dropout)[0]  # type: ignore[no-any-return]


def layer(
    stream: Tensor,
    pending: Pending | None,
    block: Any,
    attend: Callable[[Any, Tensor], Pending],
    feed_forward: Callable[[Any, Tensor], Pending],
    narrow: tuple[bool, bool] = (False, False),
) -> tuple[Tensor, Pending]:
    """Compute a transformer block without its last residual addition; return the stream, and the pending addition.

    ``narrow`` says for ``ln_1`` and ``ln_2`` whether only a matmul reads the output.
    """
    normed, residual_1 = add_and_norm(stream, pending, block.ln_1, narrow[0])
    normed, residual_2 = add_and_norm(residual_1, attend(block.attn, normed), block.ln_2, narrow[1])
    del residual_1  # without gradients its memory is free for the MLP
    return residual_2, feed_forward(block.mlp, normed)


def called(module: Any, x: Tensor) -> Pending:
    return Pending(module(x))
