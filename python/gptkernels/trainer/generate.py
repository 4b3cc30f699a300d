"""Generates text with a trained model: `gptkernels generate`."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gptkernels._device import pick_device
from gptkernels.checkpoint import find_non_finite
from gptkernels.data import Tokenizer, find_tokenizer_file, load_tokenizer, stream_text
from gptkernels.models import GPT2
from gptkernels.models.config import PADDING
from gptkernels.models.decoding import TokenStream
from gptkernels.trainer.model import model_file
from gptkernels.trainer.output import command_line
from gptkernels.trainer.progress import printable
from gptkernels.trainer.retention import is_numbered
from gptkernels.trainer.runs import TOKENIZER_PREFIX

MIN_TEMPERATURE = 1e-6
"""The smallest temperature except 0. Logits divided by a smaller number may overflow float32."""
MAX_SEED = 2**63 - 1
_VOCAB_SIZES = {"bytes": 256, "gpt2": 50257}
"""The vocabulary sizes of tokenizers without a file. They are checked before GPT-2's vocabulary is downloaded."""


class Sampling(NamedTuple):
    """The options of generation, which adds at most `max_new_tokens` tokens.

    The logits are divided by `temperature`; at temperature 0 the likeliest token is taken. Otherwise a token is drawn
    from the `top_k` likeliest tokens (None: all), and of these only from the smallest set of likeliest tokens whose
    total probability reaches `top_p` (None: all).
    """

    max_new_tokens: int = 256
    temperature: float = 0.8
    top_k: int | None = 40
    top_p: float | None = None


DEFAULT_SAMPLING = Sampling()


class Writer:
    """A model and its tokenizer, which continue texts.

    Args:
        checkpoint: the folder of a run, a training checkpoint, or a model in any format that `gptkernels.convert`
            reads.
        tokenizer: a name or file for `load_tokenizer`. None selects the checkpoint's tokenizer. If the checkpoint has
            none, a vocabulary of 256 tokens is taken as bytes, and one of 50257 as GPT-2's.
        device: the name of a device; "auto" is CUDA if available.
        seed: the seed of the random numbers.

    Raises:
        ValueError: if a file is damaged, no tokenizer is found, the tokenizer's vocabulary has another size than the
            model's, a weight is NaN or infinite, the device is unknown, or the magnitude of the seed is above 2^63 - 1.
        OSError: if a file cannot be read.
    """

    def __init__(
        self, checkpoint: str | Path, tokenizer: str | None = None, device: str = "auto", seed: int = 0
    ) -> None:
        if not -MAX_SEED <= seed <= MAX_SEED:
            raise ValueError(f"--seed is {seed}, must be in -(2^63-1)..2^63-1")
        path = model_file(checkpoint)
        self.device = pick_device(device)
        self.model = GPT2.from_checkpoint(path, self.device).eval()
        if name := find_non_finite(self.model.state_dict()):
            raise ValueError(f"{path}: {name} holds NaN or infinity: the model has diverged, and can write nothing")
        self.tokenizer = _find_tokenizer(path, tokenizer, self.model.config.vocab_size)
        self._generator = torch.Generator(self.device).manual_seed(seed)

    def write(self, prompt: str = "", sampling: Sampling = DEFAULT_SAMPLING) -> Iterator[str]:
        """Yield the continuation of `prompt` in pieces, up to the end-of-text token or `max_new_tokens` tokens.

        An empty prompt starts a new document.

        Raises:
            ValueError: if an option is out of its range, or the tokenizer cannot encode the prompt.
        """
        _check(sampling)
        tokens = self.tokenizer.encode(prompt) or [self.tokenizer.start]
        stream = self.model.stream(
            torch.tensor([tokens], device=self.device),
            sampling.max_new_tokens,
            sampling.temperature,
            sampling.top_k,
            self._generator,
            **({} if sampling.top_p is None else {"top_p": sampling.top_p}),
        )
        return stream_text(self.tokenizer, takewhile(lambda token: token != self.tokenizer.eot, _on_host(stream)))

    def print(self, prompt: str, sampling: Sampling) -> None:
        """Print the prompt, and then its continuation as it is generated."""
        continuation = self.write(prompt, sampling)
        sys.stdout.write(printable(prompt))
        for text in continuation:
            sys.stdout.write(printable(text))
            sys.stdout.flush()
        sys.stdout.write("\n")

    def converse(self, sampling: Sampling) -> None:
        """Read lines from standard input until its end, and print each line with its continuation.

        Ctrl-C ends a continuation. If the tokenizer cannot encode a line, an error is printed. Input bytes that are not
        UTF-8 are read as surrogate escapes.
        """
        with suppress(ImportError):
            importlib.import_module("readline")
        with suppress(AttributeError):
            sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        _check(sampling)
        while (prompt := _ask()) is not None:
            try:
                self.print(prompt, sampling)
            except KeyboardInterrupt:
                print()
            except ValueError as error:
                print(f"error: {error}", file=sys.stderr)


def _check(sampling: Sampling) -> None:
    if sampling.max_new_tokens < 0:
        raise ValueError(f"--max-new-tokens is {sampling.max_new_tokens}, must be at least 0")
    if not 0 <= sampling.temperature < float("inf"):
        raise ValueError(f"--temperature is {sampling.temperature}, must be finite and at least 0")
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        raise ValueError(f"--temperature is {sampling.temperature}, must be 0 or at least {MIN_TEMPERATURE}")
    if sampling.top_k is not None and sampling.top_k < 1:
        raise ValueError(f"--top-k is {sampling.top_k}, must be at least 1")
    if sampling.top_p is not None and not 0 < sampling.top_p <= 1:
        raise ValueError(f"--top-p is {sampling.top_p}, must be above 0 and at most 1")


def _on_host(stream: Iterator[Tensor]) -> Iterator[int]:
    if isinstance(stream, TokenStream):
        return (token for (token,) in stream.on_host())
    return (int(tokens) for tokens in stream)


def _ask() -> str | None:
    try:
        return input("> ")
    except EOFError:
        print()
        return None


def _find_tokenizer(checkpoint: Path, name: str | None, vocab_size: int) -> Tokenizer:
    source: str | Path | None = name
    if source is None:
        source = find_tokenizer_file(checkpoint.with_suffix(""))
    if source is None and is_numbered(checkpoint):
        source = find_tokenizer_file(checkpoint.with_name(TOKENIZER_PREFIX))
    if source is None:
        source = next((known for known, size in _VOCAB_SIZES.items() if size == vocab_size), None)
    if source is None:
        raise ValueError(
            f"{checkpoint}: no tokenizer in its folder for its vocabulary of {vocab_size}: name one by --tokenizer. "
            "For a model of characters, such as nanoGPT's shakespeare_char, 'gptkernels prepare TEXT -o PREFIX "
            "--tokenizer char' makes PREFIX_tokenizer.bin from the training text"
        )
    _check_vocab_size(checkpoint, vocab_size, _VOCAB_SIZES.get(str(source), vocab_size))
    tokenizer = load_tokenizer(source)
    _check_vocab_size(checkpoint, vocab_size, tokenizer.vocab_size)
    return tokenizer


def _check_vocab_size(checkpoint: Path, model: int, tokenizer: int) -> None:
    if tokenizer == model:
        return
    message = f"{checkpoint}: the model has a vocabulary of {model}, the tokenizer {tokenizer}"
    if 0 < model - tokenizer < PADDING:
        command = command_line("convert", checkpoint, "model.safetensors", "--vocab-size", tokenizer)
        message += f". If the model's other rows are padding, '{command}' removes them"
    raise ValueError(message)
