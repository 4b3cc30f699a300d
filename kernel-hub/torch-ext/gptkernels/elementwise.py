"""Layer norm and GELU."""

from typing import Any, Optional

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops


@torch.library.register_fake(add_op_namespace_prefix("layernorm"))
def _fake_norm(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float = 1e-5) -> tuple:
    mean = x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32))
    return x.new_empty(x.shape), mean, torch.empty_like(mean)


@torch.library.register_fake(add_op_namespace_prefix("layernorm_backward"))
def _fake_norm_backward(dout: Tensor, x: Tensor, weight: Any, mean: Tensor, rstd: Tensor, output_mask: Any) -> tuple:
    shapes = x.shape, x.shape[-1:], x.shape[-1:]
    return tuple(x.new_empty(shape if wanted else (0,)) for shape, wanted in zip(shapes, output_mask))


def _setup_norm(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:2], *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _norm_backward(ctx: Any, dout: Tensor, dmean: Any, drstd: Any) -> tuple:
    wanted = list(ctx.needs_input_grad[:3])
    gradients = ops.layernorm_backward(dout, *ctx.saved_tensors, wanted)
    return *(g if w else None for g, w in zip(gradients, wanted)), None


@torch.library.register_fake(add_op_namespace_prefix("gelu"))
def _fake_gelu(x: Tensor, *, approximate: str = "tanh") -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("gelu_backward"))
def _fake_gelu_backward(dout: Tensor, x: Tensor, *, approximate: str = "tanh") -> Tensor:
    return x.new_empty(x.shape)


def _setup_gelu(ctx: Any, inputs: tuple, keyword_only_inputs: dict, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.form = keyword_only_inputs


def _gelu_backward(ctx: Any, dout: Tensor) -> Tensor:
    return ops.gelu_backward(dout, *ctx.saved_tensors, **ctx.form)


torch.library.register_autograd(add_op_namespace_prefix("layernorm"), _norm_backward, setup_context=_setup_norm)
for _device in ("cpu", "cuda"):
    torch.library.register_autocast(add_op_namespace_prefix("layernorm"), _device, torch.float32)
torch.library.register_autograd(add_op_namespace_prefix("gelu"), _gelu_backward, setup_context=_setup_gelu)


def layer_norm(x: Tensor, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None, eps: float = 1e-5) -> Tensor:
    """Normalise the rows of x (..., C); weight and bias are (C)."""
    return ops.layernorm(x, weight, bias, eps)[0]


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute the exact GELU, or with ``approximate="tanh"`` its approximation."""
    return ops.gelu(x, approximate=approximate)
