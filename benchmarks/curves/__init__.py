"""Losses of GPT-2 trained with and without float8 products: ``python -m benchmarks.curves``; see docs/fp8.md."""
