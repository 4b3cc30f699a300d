"""From text files to token files: `PREFIX_train.bin`, `PREFIX_val.bin`, and the tokenizer beside them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .corpus import Document, find_documents, split, standard_library
from .tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from .tokens import MAX_VOCAB_SIZE, write_tokens

DEFAULT_BPE_VOCAB_SIZE = 4096


def prepare(
    files: Iterable[str | os.PathLike[str]] | str | os.PathLike[str],
    out_prefix: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] = "bytes",
    *,
    vocab_size: int | None = None,
    val_fraction: float = 0.05,
) -> dict[str, Any]:
    """Turn text into `PREFIX_train.bin`, `PREFIX_val.bin` and `PREFIX_tokenizer.bin` (or `.json`).

    The end-of-text token, where the tokenizer has one, stands before every document. The last `val_fraction`
    of the text is for validation. The text is streamed: it may be larger than memory. Any bytes will do;
    those that are no UTF-8 are kept by the byte tokenizer and become U+FFFD for the others.

    Args:
        files: text files and folders of them, or a single one.
        out_prefix: where the files go and how their names begin.
        tokenizer: "bytes", "gpt2", "bpe" (trained here on the training text), or what `load_tokenizer` takes.
        vocab_size: of "bpe" only: at most so many tokens (4096 when not given).
        val_fraction: between 0 and 1, both excluded.

    Returns:
        What was written: the paths `train`, `val` and `tokenizer`, the numbers `train_tokens`, `val_tokens`,
        `vocab_size`, and `eot`, the end-of-text token or None.

    Raises:
        ValueError: a file is missing, there is no text or too little to split, the tokenizer cannot be had,
            or its vocabulary is beyond the 65536 tokens that token files can hold.
    """
    train, val = split(find_documents(files), val_fraction)
    return _write(train, val, out_prefix, _make_tokenizer(tokenizer, vocab_size, train))


def prepare_standard_library(out_prefix: str | os.PathLike[str], max_bytes: int = 16 << 20) -> dict[str, Any]:
    """`prepare` for the standard library's own sources, by bytes: real text on every machine with Python."""
    return _write(*standard_library(max_bytes), out_prefix, ByteTokenizer())


def tokenizer_for_prefix(prefix: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that `prepare` wrote beside `PREFIX_train.bin`; ValueError where there is none."""
    for suffix in ("bin", "json"):
        path = Path(f"{prefix}_tokenizer.{suffix}")
        if path.exists():
            return load_tokenizer(path)
    raise ValueError(f"no tokenizer beside the data: neither {prefix}_tokenizer.bin nor .json")


def _make_tokenizer(name: str | os.PathLike[str], vocab_size: int | None, documents: Sequence[Document]) -> Tokenizer:
    if name != "bpe":
        if vocab_size is not None:
            raise ValueError(f"vocab_size is for tokenizer 'bpe'; {str(name)!r} has its own")
        tokenizer = load_tokenizer(name)
        _check_vocab_size(tokenizer.vocab_size)
        return tokenizer
    vocab_size = DEFAULT_BPE_VOCAB_SIZE if vocab_size is None else vocab_size
    _check_vocab_size(vocab_size)
    return train_bpe((text for document in documents for text in document.text()), vocab_size)


def _check_vocab_size(vocab_size: int) -> None:
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size is {vocab_size}: token files hold 16-bit tokens, at most {MAX_VOCAB_SIZE}")


def _write(
    train: Sequence[Document], val: Sequence[Document], prefix: str | os.PathLike[str], tokenizer: Tokenizer
) -> dict[str, Any]:
    summary: dict[str, Any] = {"vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot}
    for name, documents in (("train", train), ("val", val)):
        path = f"{prefix}_{name}.bin"
        summary[name] = path
        summary[f"{name}_tokens"] = write_tokens(path, _encode(documents, tokenizer), tokenizer.vocab_size)
    written = tokenizer.save(prefix)
    summary["tokenizer"] = str(written)
    other = ".json" if written.suffix == ".bin" else ".bin"
    written.with_suffix(other).unlink(missing_ok=True)  # of an earlier run, for other tokens
    return summary


def _encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[NDArray[np.int64]]:
    for document in documents:
        if tokenizer.eot is not None:
            yield np.array([tokenizer.eot])
        for text in document.text():
            yield np.array(tokenizer.encode(text), np.int64)
