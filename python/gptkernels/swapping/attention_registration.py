"""Registers this package's attention with transformers or torch."""

import inspect
import sys
from typing import Any

import torch
from torch import Tensor

from gptkernels import _library, functional
from gptkernels.rules import ops

NAME = "gptkernels"


def register_attention(library: str) -> None:
    """Register this package's attention with a library, so that the library's own code calls it.

    With "transformers", models with ``attn_implementation="gptkernels"`` that use transformers' attention interface
    call it. With "torch", ``F.scaled_dot_product_attention`` calls it in place of torch's flash kernel, until
    ``torch.nn.attention.restore_flash_attention_impl()`` is called (with torch 2.10, until the process ends). On
    Hopper GPUs torch prefers cuDNN's attention: select the flash kernel by ``torch.nn.attention.sdpa_kernel``.

    Args:
        library: "transformers" or "torch".

    Raises:
        ValueError: if the library is another one.
        RuntimeError: if this version of torch has no interface to register attention.
        ImportError: if transformers is not installed.
    """
    if library == "transformers":
        _register_with_transformers()
    elif library == "torch":
        _register_with_torch()
    else:
        raise ValueError(f"register_attention: the library must be 'transformers' or 'torch', got {library!r}")


def _register_with_transformers() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, transformers_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


# Keywords of models that change the result and that no kernel supports. Transformers' sdpa ignores most of them.
_UNSUPPORTED = ("softcap", "s_aux", "sinks", "indices", "block_indices", "head_mask", "output_attentions")


def transformers_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature of transformers' ``sdpa_attention_forward``.

    With ``position_bias`` or a paged ``cache``, transformers' function is called. A keyword that changes the result and
    is not supported raises a ValueError.
    """
    name = "transformers_attention"
    functional.refuse(name, **{option: kwargs.get(option) for option in _UNSUPPORTED})
    if handed := [option for option in ("position_bias", "cache") if kwargs.get(option) is not None]:
        theirs = sys.modules["transformers.integrations.sdpa_attention"].sdpa_attention_forward
        taken = inspect.signature(theirs).parameters
        functional.refuse(name, **{option: kwargs[option] for option in handed if option not in taken})
        return theirs(  # type: ignore[no-any-return]
            *(module, query, key, value, attention_mask, dropout, scaling, is_causal), **kwargs
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    queries = query.shape[2]
    causal = attention_mask is None and queries > 1 and bool(is_causal)
    if causal and key.shape[2] > queries:  # a static cache's first call; its later keys are not yet written
        key, value = key[:, :, :queries], value[:, :, :queries]
    if attention_mask is not None:
        attention_mask = attention_mask[..., : key.shape[2]]
    else:
        window, packed = kwargs.get("sliding_window"), kwargs.get("cu_seq_lens_q")
        if window is not None and key.shape[2] > window:
            raise ValueError(f"{name}: sliding_window={window} of {key.shape[2]} keys takes a mask, got None")
        if packed is not None and packed.numel() > 2:
            raise ValueError(f"{name}: cu_seq_lens_q of several sequences takes a mask, got None")
    out = functional.scaled_dot_product_attention(
        *(query, key, value, attention_mask, dropout, causal), scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
    )
    return out.transpose(1, 2).contiguous(), None


def _register_with_torch() -> None:
    attention = torch.nn.attention
    if not hasattr(attention, "register_flash_attention_impl"):
        raise RuntimeError(
            f"register_attention: torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl: "
            "a newer torch is needed, or call gptkernels.functional.scaled_dot_product_attention"
        )
    attention.register_flash_attention_impl(NAME, register_fn=_Kernels)
    attention.activate_flash_attention_impl(NAME)


class _Kernels:
    def __init__(self) -> None:
        self.library: Any = torch.library.Library("aten", "IMPL")
        self.library.impl("_scaled_dot_product_flash_attention_for_cpu", _cpu, "CPU", allow_override=True)
        self.library.impl(
            "_scaled_dot_product_flash_attention_for_cpu_backward", _cpu_backward, "CPU", allow_override=True
        )
        if _library.without_cuda_because:
            return
        self.library.impl("_scaled_dot_product_flash_attention", _cuda, "CUDA", allow_override=True)
        self.library.impl("_scaled_dot_product_flash_attention_backward", _cuda_backward, "CUDA", allow_override=True)

    def remove(self) -> None:
        self.library._destroy()


# The functions have the signatures of torch's operators.


def _cpu(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):  # type: ignore[no-untyped-def]
    return ops.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale)


def _cpu_backward(  # type: ignore[no-untyped-def]
    grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
):
    return ops.scaled_dot_product_attention_backward(
        grad_out, None, query, key, value, out, logsumexp, attn_mask, 0.0, is_causal, scale
    )


def _cuda(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):  # type: ignore[no-untyped-def]
    numbers = torch.randint(2**63 - 1, (2,), device=query.device) if dropout_p else None
    seed, offset = (None, None) if numbers is None else numbers.unbind()
    out, logsumexp = ops.scaled_dot_product_attention(
        query, key, value, None, dropout_p, is_causal, scale, 0, None, None, seed, offset
    )
    if numbers is None:
        seed, offset = (torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2))
    return out, logsumexp, None, None, query.shape[2], key.shape[2], seed, offset, query.new_empty(0)


def _cuda_backward(  # type: ignore[no-untyped-def]
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    philox_seed, philox_offset, *, scale=None,
):  # fmt: skip
    numbers = (philox_seed, philox_offset) if dropout_p else (None, None)
    return ops.scaled_dot_product_attention_backward(
        grad_out, None, query, key, value, out, logsumexp, None, dropout_p, is_causal, scale, 0, None, None, *numbers
    )
