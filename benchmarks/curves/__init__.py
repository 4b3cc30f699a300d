"""Training curves with and without float8 matmuls: ``python -m benchmarks.curves`` (docs/fp8.md)."""
