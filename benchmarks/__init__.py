"""Benchmarks of this package's and other libraries' kernels: ``python -m benchmarks [OP ...]`` (docs/benchmarks.md)."""

import gptkernels  # noqa: F401  registers the ops
