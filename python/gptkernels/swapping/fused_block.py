"""A swapped block as one node of autograd's graph, described by its modules.

``transformer.layer`` computes the blocks that the node does not support.
"""

from torch import Tensor

from gptkernels import functional
from gptkernels.block.fused import FusedBlock, parameters_of
from gptkernels.block.node import Dtypes, Plan
from gptkernels.swapping.block_modules import Parts, probability
from gptkernels.swapping.layers import eps_of, gelu_form


def fused_block(
    parts: Parts, dtypes: Dtypes, stream: Tensor, heads: int, scale: float | None, p: float
) -> FusedBlock | None:
    """Describe a block with its current parameters and settings; None if the node does not support it.

    ``scale`` is the factor of the scores, or None for 1/sqrt(HS), and ``p`` the probability of attention's dropout.
    """
    if stream.shape[-1] > functional.MAX_HEAD_SIZE * heads:
        return None
    parameters, mlp_proj_bias = parameters_of(
        parts.ln_1, parts.c_attn, parts.attn_proj, parts.ln_2, parts.c_fc, parts.mlp_proj
    )
    wide = dtypes.wide
    for t in (*parameters, mlp_proj_bias):
        if t is not None and t.dtype != wide:
            return None
    plan = Plan(
        (eps_of(parts.ln_1), eps_of(parts.ln_2)),
        heads,
        scale,
        gelu_form(parts.act) == "tanh",
        parts.c_attn._gptkernels_transposed,
        dtypes.low,
    )
    probabilities = p, probability(parts.resid_dropout), probability(parts.mlp_dropout)
    return FusedBlock(plan, parameters, mlp_proj_bias, probabilities)
