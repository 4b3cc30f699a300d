"""The classifier of logits whose columns are shards: statistics of a shard, losses and gradient from all statistics.

The ops have no derivative. ``gptkernels.parallel.vocabulary`` has the autograd functions, which also communicate.
"""

from gptkernels.rules import _register as register
from gptkernels.rules._register import accumulate_dtype


def _fake_statistics(logits, targets, *_):
    return logits.new_empty((3, targets.numel()), dtype=accumulate_dtype(logits.dtype))


def _fake_losses(logits, *_):
    return logits.new_empty(logits.shape[:-1], dtype=accumulate_dtype(logits.dtype))


register.fake("fused_classifier_statistics", _fake_statistics)
register.fake("fused_classifier_from_statistics_", _fake_losses)
for _name in ("fused_classifier_statistics", "fused_classifier_from_statistics_"):
    register.without_derivative(_name)
