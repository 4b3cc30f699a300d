"""Attention, layer norm and GELU for CPUs and CUDA, with gradients, in float64, float32, bfloat16 and float16."""

from . import layers
from .attention import flash_attn_func, flash_attn_varlen_func
from .elementwise import gelu, layer_norm

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "gelu", "layer_norm", "layers"]
