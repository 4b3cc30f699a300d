"""The classifier of logits whose columns are shards: statistics of a shard, losses and gradient from all statistics.

The ops have no derivative. ``gptkernels.parallel.vocabulary`` has the autograd functions, which also communicate.
"""

import torch

from gptkernels.rules import _register as register
from gptkernels.rules._register import accumulate_dtype

FP8_DLOGIT = 2.0**-15
"""The scale of the float8 dlogits, which are in [-1, 1]."""


def _fake_statistics(logits, targets, *_):
    return logits.new_empty((3, targets.numel()), dtype=accumulate_dtype(logits.dtype))


def _fake_losses(logits, *_):
    return logits.new_empty(logits.shape[:-1], dtype=accumulate_dtype(logits.dtype))


register.fake("fused_classifier_statistics", _fake_statistics)
register.fake("fused_classifier_from_statistics_", _fake_losses)
register.fake(
    "fp8_classifier_from_statistics",
    lambda logits, *_: (_fake_losses(logits), logits.new_empty(logits.shape, dtype=torch.float8_e5m2)),
)
for _name in (
    "fused_classifier_statistics", "fused_classifier_from_statistics_", "fp8_classifier_from_statistics"
):  # fmt: skip
    register.without_derivative(_name)
