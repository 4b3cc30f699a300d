"""Benchmarks of this package's kernels and of other libraries' kernels: ``python -m benchmarks [OP ...]``.

docs/benchmarks.md describes them. Each op's file has its sizes and its cases. ``harness`` has the rest.
"""

import gptkernels  # noqa: F401  registers the ops
