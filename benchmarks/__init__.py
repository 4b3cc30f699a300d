"""Ours beside everybody else's kernels: ``python -m benchmarks [OP ...]``; docs/benchmarks.md says what is measured.

One file an op holds its sizes, its fewest bytes and flops, ours and the peers; ``harness`` does the rest.
"""

import gptkernels  # noqa: F401  the ops that the files speak of
