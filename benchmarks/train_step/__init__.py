"""A whole training step of GPT-2 beside torch's: ``python -m benchmarks.train_step``; docs/step.md has its results."""
