"""Sampling: draws each sequence's next token from logits, by temperature, top-k and top-p, and appends it."""

from gptkernels.rules._register import fake, mutates, without_derivative


def _fake(*_, **__):
    return None


fake("sample_", _fake)
mutates("sample_")
without_derivative("sample_")
