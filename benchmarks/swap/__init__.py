"""Training steps of third-party GPT-2 models, unswapped and swapped: ``python -m benchmarks.swap`` (docs/swap.md)."""
