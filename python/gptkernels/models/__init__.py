"""Whole models on this package's operators."""

from gptkernels.models.gpt2 import GPT2, GPT2Config

__all__ = ["GPT2", "GPT2Config"]
