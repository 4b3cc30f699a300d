"""Ours beside torch's kernels: ``python -m benchmarks [OP ...]``. One file an op says its shapes, bytes and peers."""
