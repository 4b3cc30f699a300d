"""GPT-2, built from this package's operators."""

from gptkernels.models.config import GPT2Config
from gptkernels.models.gpt2 import GPT2

__all__ = ["GPT2", "GPT2Config"]
