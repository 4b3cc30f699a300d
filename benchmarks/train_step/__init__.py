"""Times training steps of GPT-2, ours and plain torch's: ``python -m benchmarks.train_step`` (docs/step.md)."""
