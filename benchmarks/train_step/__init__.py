"""A whole training step of GPT-2, ours and torch's: ``python -m benchmarks.train_step`` (docs/step.md)."""
