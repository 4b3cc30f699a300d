"""Names for a transformer block's parameters, and for the tensors that its operators save, in the order of the schemas.

Shapes: B batch, T tokens, C channels, F the MLP's hidden width, NH heads, N = B*T rows; weights are (out, in).
"""

from typing import Any, NamedTuple

from torch import Tensor


class Weights(NamedTuple):
    """The weights of the four matmuls."""

    qkv_weight: Tensor  # (3C, C)
    attn_proj_weight: Tensor  # (C, C)
    fc_weight: Tensor  # (F, C)
    mlp_proj_weight: Tensor  # (C, F)


class Matrices(NamedTuple):
    """The parameters that the matmuls read: weights, and the biases that the matmuls add."""

    qkv_weight: Any
    qkv_bias: Any  # (3C) or None
    attn_proj_weight: Any
    fc_weight: Any
    fc_bias: Any  # (F) or None
    mlp_proj_weight: Any


class BlockParameters(NamedTuple):
    """A tensor or flag for each parameter of a transformer block, without ``mlp_proj``'s bias, which is added later."""

    norm_1_weight: Any  # (C) or None
    norm_1_bias: Any  # (C) or None
    qkv_weight: Any
    qkv_bias: Any
    attn_proj_weight: Any
    attn_proj_bias: Any  # (C) or None, added by the second norm
    norm_2_weight: Any  # (C) or None
    norm_2_bias: Any  # (C) or None
    fc_weight: Any
    fc_bias: Any
    mlp_proj_weight: Any

    def weights(self) -> Weights:
        return Weights(self.qkv_weight, self.attn_proj_weight, self.fc_weight, self.mlp_proj_weight)

    def matrices(self) -> Matrices:
        _, _, qkv_weight, qkv_bias, attn_proj_weight, _, _, _, fc_weight, fc_bias, mlp_proj_weight = self
        return Matrices(qkv_weight, qkv_bias, attn_proj_weight, fc_weight, fc_bias, mlp_proj_weight)

    def with_matrices(self, matrices: Matrices) -> "BlockParameters":
        norm_1_weight, norm_1_bias, _, _, _, attn_proj_bias, norm_2_weight, norm_2_bias, _, _, _ = self
        qkv_weight, qkv_bias, attn_proj_weight, fc_weight, fc_bias, mlp_proj_weight = matrices
        return BlockParameters(
            norm_1_weight, norm_1_bias, qkv_weight, qkv_bias, attn_proj_weight, attn_proj_bias,
            norm_2_weight, norm_2_bias, fc_weight, fc_bias, mlp_proj_weight,
        )  # fmt: skip


class LayerSaved(NamedTuple):
    """The tensors that ``layer`` returns for ``layer_backward``."""

    residual_1: Tensor  # (B, T, C), the stream after the first addition
    mean_1: Tensor  # (B, T)
    rstd_1: Tensor  # (B, T)
    norm_1: Tensor  # (B, T, C)
    qkv: Tensor  # (B, T, 3C)
    attended: Tensor  # (B, T, C)
    logsumexp: Tensor  # (B, NH, T)
    residual_2: Tensor  # (B, T, C), the stream after the second addition
    mean_2: Tensor  # (B, T)
    rstd_2: Tensor  # (B, T)
    norm_2: Tensor  # (B, T, C)
    pre_gelu: Tensor  # (B, T, F)
    post_gelu: Tensor  # (B, T, F), or no elements


class FP8LayerSaved(NamedTuple):
    """The tensors that ``fp8_layer`` returns for ``fp8_layer_backward`` after ``residual_1`` and ``residual_2``.

    A field ending in ``_t`` is a transposed float8 matrix. In its shape, N is rounded up to a multiple of 16.
    """

    mean_1: Tensor  # (B, T)
    rstd_1: Tensor  # (B, T)
    norm_1_t: Tensor  # (C, N)
    norm_1_scale: Tensor
    qkv_weight_t: Tensor  # (C, 3C)
    qkv_weight_scale: Tensor
    qkv: Tensor  # (B, T, 3C)
    attended: Tensor  # (B, T, C)
    logsumexp: Tensor  # (B, NH, T)
    attended_t: Tensor  # (C, N)
    attended_scale: Tensor
    attn_proj_weight_t: Tensor  # (C, C)
    attn_proj_weight_scale: Tensor
    mean_2: Tensor  # (B, T)
    rstd_2: Tensor  # (B, T)
    norm_2_t: Tensor  # (C, N)
    norm_2_scale: Tensor
    fc_weight_t: Tensor  # (C, F)
    fc_weight_scale: Tensor
    pre_gelu: Tensor  # (B, T, F)
    hidden_t: Tensor  # (F, N)
    hidden_scale: Tensor
    mlp_proj_weight_t: Tensor  # (F, C)
    mlp_proj_weight_scale: Tensor
