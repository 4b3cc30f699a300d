"""Benchmarks of our kernels and those of other libraries: ``python -m benchmarks [OP ...]``; see docs/benchmarks.md.

Each op's file has its sizes, its fewest bytes and flops, our kernel and its peers; ``harness`` has the rest.
"""

import gptkernels  # noqa: F401  registers the ops
