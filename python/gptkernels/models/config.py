"""GPT-2's configuration, and the sizes of OpenAI's four models."""

import dataclasses
import math
from typing import Any

from gptkernels.rules.fp8 import ALIGNMENT

PRESETS = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},  # 124M parameters
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},  # 355M
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},  # 774M
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},  # 1558M
}
PADDING = 128
ACTIVATIONS = ("gelu_tanh", "gelu")


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """The shape of a GPT-2 and its options.

    Args:
        block_size: the longest sequence.
        vocab_size: V.
        padded_vocab_size: Vp, the number of rows of the embedding. None rounds V up to a multiple of 128, because
            matmuls with aligned sizes are faster.
        n_layer, n_head, n_embd: L; NH, which divides n_embd; C.
        bias: whether linear layers and norms have a bias.
        dropout: in training, the probability of dropout in attention's probabilities, in what a layer adds to the
            residual stream, and in the sum of the embeddings.
        activation: the GELU: "gelu_tanh" as in GPT-2 and llm.c, or "gelu", the exact one, as in nanoGPT.
        fp8: train with float8 matmuls in the layers (``gptkernels.nn.Linear``); n_embd must be a multiple of 16.
        fp8_head: in training without logits, compute the LM head's gradients by float8 matmuls
            (``gptkernels.functional.fp8_linear_cross_entropy``); n_embd and padded_vocab_size must be multiples of 16.
        fp8_logits: in training with fp8_head, also compute the logits by a float8 matmul.

    Raises:
        ValueError: if a size is below 1 or inconsistent with another size, the dropout is not from 0 to 1, the
            activation is unknown, a size is not a multiple of 16 where float8 requires it, or fp8_logits is set
            without fp8_head.
    """

    block_size: int = 1024
    vocab_size: int = 50257
    padded_vocab_size: int = None  # type: ignore[assignment]  # __post_init__ replaces None
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    bias: bool = True
    dropout: float = 0.0
    activation: str = "gelu_tanh"
    fp8: bool = False
    fp8_head: bool = False
    fp8_logits: bool = False

    def __post_init__(self) -> None:
        if self.padded_vocab_size is None:
            object.__setattr__(self, "padded_vocab_size", math.ceil(self.vocab_size / PADDING) * PADDING)
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"GPT2Config: {name} must be at least 1, got {getattr(self, name)}")
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"GPT2Config: padded_vocab_size must be at least vocab_size {self.vocab_size}, "
                f"got {self.padded_vocab_size}"
            )
        if self.n_embd % self.n_head:
            raise ValueError(f"GPT2Config: n_embd must be a multiple of n_head, got {self.n_embd} and {self.n_head}")
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"GPT2Config: dropout must be from 0 to 1, got {self.dropout}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"GPT2Config: activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        self._check_fp8("fp8", "n_embd")
        self._check_fp8("fp8_head", "n_embd", "padded_vocab_size")
        if self.fp8_logits and not self.fp8_head:
            raise ValueError("GPT2Config: fp8_logits needs fp8_head")

    def _check_fp8(self, option: str, *names: str) -> None:
        for name in names:
            if getattr(self, option) and getattr(self, name) % ALIGNMENT:
                raise ValueError(
                    f"GPT2Config: {name} must be a multiple of {ALIGNMENT} for {option}, got {getattr(self, name)}"
                )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "GPT2Config":
        """Return the configuration of "gpt2", "gpt2-medium", "gpt2-large" or "gpt2-xl".

        ``changes`` are fields with other values. Another name raises a ValueError.
        """
        if name not in PRESETS:
            raise ValueError(f"GPT2Config: no preset {name!r}; there are {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **changes})
