"""The next token of each sequence: drawn from logits by temperature, top-k and top-p, and appended to the sequence."""

from gptkernels.rules._register import fake, mutates, without_derivative


def _fake(*_, **__):
    return None


fake("sample_", _fake)
mutates("sample_")
without_derivative("sample_")
