"""Benchmarks of this package's and other libraries' kernels: ``python -m benchmarks [OP ...]`` (docs/benchmarks.md).

Each op's file defines the sizes and cases of its benchmark; ``harness`` measures, checks and shows them.
"""

import gptkernels  # noqa: F401  registers the ops
