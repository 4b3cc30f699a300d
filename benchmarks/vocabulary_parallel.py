"""The two ops of a classifier whose columns are divided over processes, on the shard of one process."""

import torch
import torch.nn.functional as F

from benchmarks.harness import exact
from benchmarks.harness.case import Case, nbytes

ops = torch.ops.gptkernels
SIZES = {"bfloat16": [(8192, 25152), (8192, 64128), (2048, 16032)], "float32": [(8192, 25152)]}
CPU_SIZES = [(256, 25152)]
TINY = (4, 8)
SHARDS = 2


def cases(device, dtype, rows, columns):
    """The targets are in the first shard. The other shards have equal logits."""
    logits = torch.randn(rows, columns, device=device, dtype=dtype)
    targets = torch.randint(columns, (rows,), device=device)
    scratch = torch.empty_like(logits)
    options = 0, SHARDS * columns

    def statistics_of(logits, targets):
        maximum = logits.amax(1)
        logit = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
        return torch.stack([maximum, (logits - maximum.unsqueeze(1)).exp().sum(1) - (logit - maximum).exp(), logit])

    def exact_statistics():
        for _, part, columns in exact.outputs(lambda *args: statistics_of(*args).T, [logits, targets]):
            yield 0, (slice(None), part), columns.T

    own = ops.fused_classifier_statistics(logits, targets, *options)
    other = ops.fused_classifier_statistics(logits, targets, columns, SHARDS * columns)
    statistics = torch.stack([own] + [other] * (SHARDS - 1))

    def gradient(logits, targets):
        return torch.cat([logits] * SHARDS, 1).softmax(1)[:, :columns] - F.one_hot(targets, columns)

    yield Case(
        "fused_classifier_statistics",
        f"{rows}x{columns}",
        ours=lambda: ops.fused_classifier_statistics(logits, targets, *options),
        exact=exact_statistics,
        bytes=nbytes(logits, targets, own),
        flops=4 * logits.numel(),
        peers={"torch": lambda: statistics_of(logits.to(own.dtype), targets)},
    )
    yield Case(
        "fused_classifier_from_statistics_",
        f"{rows}x{columns}",
        ours=lambda: ops.fused_classifier_from_statistics_(scratch, targets, statistics, *options),
        exact=lambda: exact.outputs(gradient, [logits, targets]),
        bytes=2 * nbytes(logits) + nbytes(targets, statistics, own[0]),
        flops=4 * logits.numel(),
        look=lambda losses: (scratch,),
        reset=lambda: scratch.copy_(logits),
    )
