"""Benchmarks of this package's kernels and of other libraries' kernels: ``python -m benchmarks [OP ...]``.

docs/benchmarks.md describes them. Each op's file defines the sizes and the cases of its benchmark. ``harness``
measures, checks and shows the cases.
"""

import gptkernels  # noqa: F401  registers the ops
