"""Sampling: draws each sequence's next token from logits, by temperature, top-k and top-p, and appends it."""

from gptkernels.rules import _register as register

register.fake("sample_", lambda *_, **__: None)
register.mutates("sample_")
register.without_derivative("sample_")
