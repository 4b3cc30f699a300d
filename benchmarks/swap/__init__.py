"""Training steps of other people's GPT-2, unswapped and swapped: ``python -m benchmarks.swap``; docs/swap.md."""
