"""Computes a layer of ``GPT2`` as one node of autograd's graph, if the layer's modules allow it."""

from functools import partial

import torch
from torch import Tensor

from gptkernels import functional, nn
from gptkernels._dtensor import PLAIN
from gptkernels._unmodified import are_unmodified
from gptkernels.block.fused import FusedBlock, Pending, draw, parameters_of
from gptkernels.block.node import FP8Histories, Plan, dtypes_of
from gptkernels.rules._autocast import KEYS

FP8_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(block: torch.nn.Module, stream: Tensor, pending: Pending | None) -> tuple[Tensor, Pending] | None:
    """Compute a ``Block`` without its last residual addition, bitwise as its modules would.

    Return the stream (B, T, C) and the pending addition, or None if the modules must be called one by one, for example
    because one of them was replaced or hooked, the block is traced, no gradients are recorded, or the sequences are
    divided over ranks.
    """
    dtypes = dtypes_of(stream)
    if dtypes is None or stream.device.type not in KEYS:
        return None
    # torch.nn.Module.__getattr__ is slow, so children and parameters are read from the dictionaries.
    children = block.__dict__["_modules"]
    ln_1, attn, ln_2, mlp, resid_dropout = map(children.__getitem__, ("ln_1", "attn", "ln_2", "mlp", "resid_dropout"))
    if not are_unmodified(
        (ln_1, nn.LayerNorm), (attn, nn.CausalSelfAttention), (ln_2, nn.LayerNorm), (mlp, nn.MLP),
        (resid_dropout, nn.Dropout),
    ):  # fmt: skip
        return None
    if attn.context_group is not None:
        return None
    of_attn, of_mlp = attn.__dict__["_modules"], mlp.__dict__["_modules"]
    c_attn, attn_proj, c_fc, mlp_proj = of_attn["c_attn"], of_attn["c_proj"], of_mlp["c_fc"], of_mlp["c_proj"]
    if not are_unmodified((c_attn, nn.Linear), (attn_proj, nn.Linear), (c_fc, nn.Linear), (mlp_proj, nn.Linear)):
        return None
    histories = _histories(c_attn, attn_proj, c_fc, mlp_proj)
    if histories is None:
        return None
    parameters, mlp_proj_bias = parameters_of(ln_1, c_attn, attn_proj, ln_2, c_fc, mlp_proj)
    values, bias, _ = (None, None, None) if pending is None else pending
    wide = dtypes.wide
    for t in (*parameters, mlp_proj_bias, bias):
        if t is not None and (t.dtype != wide or type(t) not in PLAIN):
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
    if histories:
        # The node does not cast between operators as autocast does. For a frozen parameter's gradient it would compute
        # a matmul, and the scales of the operands, which separate operators skip.
        trains = all([t is None or t.requires_grad for t in parameters])
        norms = parameters.norm_1_weight is not None and parameters.norm_2_weight is not None
        if not (dtypes.low == wide and wide in FP8_DTYPES and trains and norms and mlp.activation != "gelu"):
            return None
    elif torch._C._autograd._profiler_enabled():
        return None  # so that the profile shows the single operators
    plan = Plan(
        (ln_1.eps, ln_2.eps), heads, None, mlp.activation != "gelu", False, dtypes.low, False, mlp.recompute_gelu,
        FP8Histories(histories[::2], histories[1::2]) if histories else None,
    )  # fmt: skip
    p = resid_dropout.p if resid_dropout.training else 0.0
    fused = FusedBlock(plan, parameters, mlp_proj_bias, (attn.dropout if attn.training else 0.0, p, p))
    return fused.run(stream, pending, partial(draw, like=stream))[:2]


def _histories(*layers: nn.Linear) -> list[Tensor] | None:
    """Return both amax histories of every linear layer, or an empty list if no layer has amax histories.

    Return None if only some layers have them, or if a layer would not use float8 matmuls in this call.
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
