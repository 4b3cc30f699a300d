"""A decoding step: computes GPT-2's logits after the newest token of each sequence, with a cache of keys and values."""

from gptkernels.rules import _register as register


def _fake(sequences, lengths, wte, wpe, layers, norm_weight, norm_bias, head, *_, **__):
    return wte.new_empty((sequences.shape[0], head.shape[0]))


register.fake("decode", _fake)
register.mutates("decode")
register.without_derivative("decode")
