"""Times GPT-2's training steps with this library and plain torch: ``python -m benchmarks.train_step`` (docs/step.md)."""
