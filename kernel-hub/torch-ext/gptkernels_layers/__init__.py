"""gptkernels' layers for Hugging Face's ``kernels`` library. The package ``gptkernels`` itself must be installed."""

from . import layers

__all__ = ["layers"]
