"""A block of GPT-2 as one node of autograd's graph: what ``_layer_node.py`` needs to know, read from its modules.

Shapes: B batch, T tokens, C channels.
"""

from typing import Any

import torch
from torch import Tensor

from gptkernels import functional, nn
from gptkernels._dtensor import PLAIN
from gptkernels._unmodified import are_unmodified
from gptkernels.block import fp8_node as fp8
from gptkernels.block.node import NONE, Dropout, Plan, apply_layer, dtypes_of
from gptkernels.rules._autocast import KEYS


def run(
    block: torch.nn.Module, stream: Tensor, values: Tensor | None, bias: Tensor | None, dropout: torch.nn.Module | None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """The block without its last residual addition, by the same operators as its modules and with the same bits.

    Args:
        block: a ``Block``.
        stream: (B, T, C), the residual stream.
        values: (B, T, C), not yet added to it; None if nothing is.
        bias: (C), to be added to the values, or None.
        dropout: the module that drops elements of values + bias before they are added; None without values.

    Returns:
        The stream, what is now to be added to it, and a bias of that. None where the modules must be called one by one:
        one has been replaced, hooked or parametrised; the block is traced or transformed; nothing records gradients.
    """
    dtypes = dtypes_of(stream)
    if dtypes is None or stream.device.type not in KEYS:
        return None
    # torch.nn.Module looks its own children up in Python: its dictionaries are asked instead.
    children = block.__dict__["_modules"]
    ln_1, attn, ln_2, mlp, resid_dropout = map(children.__getitem__, ("ln_1", "attn", "ln_2", "mlp", "resid_dropout"))
    if not are_unmodified(
        (ln_1, nn.LayerNorm), (attn, nn.CausalSelfAttention), (ln_2, nn.LayerNorm), (mlp, nn.MLP),
        (resid_dropout, nn.Dropout), (resid_dropout if dropout is None else dropout, nn.Dropout),
    ):  # fmt: skip
        return None
    of_attn, of_mlp = attn.__dict__["_modules"], mlp.__dict__["_modules"]
    c_attn, attn_proj, c_fc, mlp_proj = of_attn["c_attn"], of_attn["c_proj"], of_mlp["c_fc"], of_mlp["c_proj"]
    if not are_unmodified((c_attn, nn.Linear), (attn_proj, nn.Linear), (c_fc, nn.Linear), (mlp_proj, nn.Linear)):
        return None
    histories = _histories(c_attn, attn_proj, c_fc, mlp_proj)
    if histories is None:
        return None
    proj_weight, last_bias = _parameters(mlp_proj)
    parameters = (
        *(*_parameters(ln_1), *_parameters(c_attn), *_parameters(attn_proj)),
        *(*_parameters(ln_2), *_parameters(c_fc), proj_weight),
    )
    for t in (*parameters, last_bias, bias):
        if t is not None and (t.dtype != dtypes.wide or type(t) not in PLAIN):
            return None
    shape, heads = stream.shape, attn.n_head
    if not (
        len(shape) == 3
        and shape[2:] == ln_1.normalized_shape == ln_2.normalized_shape
        and shape[2] <= functional.MAX_HEAD_SIZE * heads
        and type(stream) in PLAIN
        and (values is None or (type(values) in PLAIN and values.shape == shape and values.dtype == dtypes.low))
    ):
        return None
    if histories and not (fp8.serves(dtypes, parameters) and mlp.activation != "gelu"):
        return None
    if not histories and torch._C._autograd._profiler_enabled():
        return None  # the same kernels, each by an operator of its own
    epsilons = ln_1.eps, ln_2.eps
    dropouts = (
        NONE if dropout is None else _draw(dropout.p, dropout, stream),
        _draw(attn.dropout, attn, stream),
        _draw(resid_dropout.p, resid_dropout, stream),
    )
    if histories:
        eight = fp8.Plan(epsilons, heads, histories[::2], histories[1::2])
        stream, values = fp8.apply_fp8_layer(eight, dropouts, stream, values, bias, *parameters)
        return stream, values, last_bias
    plan = Plan(epsilons, heads, None, mlp.activation != "gelu", False, dtypes.low, False, mlp.recompute_gelu)
    stream, values, _, _ = apply_layer(plan, dropouts, None, stream, values, bias, *parameters)
    return stream, values, last_bias


def _histories(*layers: nn.Linear) -> list[Tensor] | None:
    """Both histories of each, if all multiply float8 numbers; none if no layer does.

    None where a layer has other buffers, or some multiply float8 numbers: other products than a node's.
    """
    found: list[Tensor] = []
    for layer in layers:
        buffers = layer.__dict__["_buffers"]
        if not buffers:
            continue
        if tuple(buffers) != nn.Linear.HISTORIES or not layer.multiplies_fp8():
            return None
        found += buffers.values()
    return found if len(found) in (0, 2 * len(layers)) else None


def _parameters(module: torch.nn.Module) -> tuple[Any, Any]:
    """Weight and bias."""
    parameters = module.__dict__["_parameters"]
    if "weight" in parameters and "bias" in parameters:
        return parameters["weight"], parameters["bias"]
    return module.weight, module.bias  # FSDP makes them plain attributes


def _draw(p: Any, module: torch.nn.Module, like: Tensor) -> Dropout:
    """A dropout of this probability in training: its numbers are those that the operator would be given by itself."""
    return Dropout(p, *functional._dropout_numbers(p, like)) if p and module.training else NONE
