"""Converts text files to `PREFIX_train.bin`, `PREFIX_val.bin` and a tokenizer file."""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from gptkernels.files.regular import open_regular
from gptkernels.files.writing import TOKENIZER_MAGIC, TOKENS_MAGIC, replace_file

from .corpus import Document, find_documents, split, standard_library
from .tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, load_tokenizer, train_bpe
from .tokens import MAX_VOCAB_SIZE, fill_token_file

DEFAULT_BPE_VOCAB_SIZE = 4096

Progress = Callable[[str, int, int], None]
"""A function of a description of the activity, the number of bytes of text that are done, and the total number."""


def _silent(what: str, done: int, total: int) -> None:
    pass


def prepare(
    files: Iterable[str | os.PathLike[str]] | str | os.PathLike[str],
    out_prefix: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] = "bytes",
    *,
    vocab_size: int | None = None,
    val_fraction: float = 0.05,
    progress: Progress = _silent,
) -> dict[str, Any]:
    """Convert text to `PREFIX_train.bin`, `PREFIX_val.bin` and `PREFIX_tokenizer.bin` (or `.json`).

    The end-of-text token, if there is one, precedes every document. The text is streamed, so that it may be larger than
    memory. The byte tokenizer keeps bytes that are not UTF-8; for other tokenizers they become U+FFFD. The byte
    tokenizer's end-of-text token is NUL; for text with NUL bytes it has none. Files that `prepare` wrote are replaced
    when all new files are complete.

    Args:
        files: text files and folders of text files, or a single one.
        out_prefix: the folder and the beginning of the names of the files to write.
        tokenizer: "bytes", "gpt2", "bpe" (trained here on the training text), "char" (the characters of the text),
            or an argument of `load_tokenizer`.
        vocab_size: for "bpe" only: the largest number of tokens; None is 4096.
        val_fraction: the fraction of the text that is for validation, from its end; between 0 and 1, both excluded.
        progress: called after every piece of text.

    Returns:
        A dict with the paths `train`, `val` and `tokenizer`, the numbers `train_tokens`, `val_tokens` and `vocab_size`,
            and `eot`, the end-of-text token or None.

    Raises:
        ValueError: if a file is missing, there is too little text, the tokenizer is not available, lacks a character or
            has more than 65536 tokens, or an output exists that `prepare` did not write.
        OSError: if a file cannot be read or written.
    """
    if not os.fspath(tokenizer):
        raise ValueError("the name of the tokenizer is empty")
    outputs = _output_files(out_prefix)
    train, val = split(find_documents(files, outputs), val_fraction)
    for path in outputs:
        _check_replaceable(path)
    made = _make_tokenizer(tokenizer, vocab_size, train, val, out_prefix, progress)
    return _write(train, val, out_prefix, made, progress)


def prepare_standard_library(out_prefix: str | os.PathLike[str], max_bytes: int = 16 << 20) -> dict[str, Any]:
    """Convert the sources of Python's standard library as `prepare` does, with bytes as tokens."""
    return _write(*standard_library(max_bytes), out_prefix, ByteTokenizer())


def tokenizer_for_prefix(prefix: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer that `prepare` wrote with `PREFIX_train.bin`; raise a ValueError if there is none."""
    path = find_tokenizer_file(prefix)
    if path is None:
        raise ValueError(f"no tokenizer for the data: neither {prefix}_tokenizer.bin nor .json exists")
    return load_tokenizer(path)


def find_tokenizer_file(prefix: str | os.PathLike[str]) -> Path | None:
    """Return `PREFIX_tokenizer.bin` or `.json`, the newer one if both exist; None if neither exists."""
    found = [path for path in _tokenizer_files(prefix) if path.exists()]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def _tokenizer_files(prefix: str | os.PathLike[str]) -> list[Path]:
    return [Path(f"{prefix}_tokenizer.{suffix}") for suffix in ("bin", "json")]


def _output_files(prefix: str | os.PathLike[str]) -> list[Path]:
    if not os.fspath(prefix):
        raise ValueError("the output prefix is empty")
    return [Path(f"{prefix}_train.bin"), Path(f"{prefix}_val.bin"), *_tokenizer_files(prefix)]


def _check_replaceable(path: Path) -> None:
    if not path.exists():
        return
    with open_regular(path) as file:
        if path.suffix == ".json":
            ours = _is_tokenizer_json(file)
        else:
            magic = TOKENIZER_MAGIC if path.name.endswith("_tokenizer.bin") else TOKENS_MAGIC
            ours = file.read(4) == magic.to_bytes(4, "little")
    if not ours:
        raise ValueError(f"{path} exists, and prepare did not write it: remove it, or choose another output")


def _is_tokenizer_json(file: BinaryIO) -> bool:
    try:
        content = json.load(file)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "model" in content


def _check_writable(prefix: str | os.PathLike[str]) -> None:
    folder = Path(f"{prefix}_train.bin").parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _make_tokenizer(
    name: str | os.PathLike[str],
    vocab_size: int | None,
    train: Sequence[Document],
    val: Sequence[Document],
    prefix: str | os.PathLike[str],
    progress: Progress,
) -> Tokenizer:
    if name != "bpe" and vocab_size is not None:
        raise ValueError(f"vocab_size is for tokenizer 'bpe'; {str(name)!r} has its own")
    both = [*train, *val]
    tokenizer: Tokenizer
    if name == "bpe":
        vocab_size = DEFAULT_BPE_VOCAB_SIZE if vocab_size is None else vocab_size
        _check_vocab_size(vocab_size)
        _check_writable(prefix)
        tokenizer = train_bpe(_texts(train, "reading for byte pairs", progress), vocab_size)
    elif name == "char":
        _check_writable(prefix)
        tokenizer = CharTokenizer.of_texts(_texts(both, "reading for characters", progress))
    else:
        tokenizer = load_tokenizer(name)
        if isinstance(tokenizer, ByteTokenizer) and any(b"\0" in chunk for text in both for chunk in text.chunks()):
            tokenizer = ByteTokenizer(eot=None)
    _check_vocab_size(tokenizer.vocab_size)
    return tokenizer


def _texts(documents: Sequence[Document], what: str, progress: Progress) -> Iterator[str]:
    done, total = 0, sum(document.size for document in documents)
    for document in documents:
        for text in document.text():
            yield text
            done += len(text.encode("utf-8", "surrogateescape"))
            progress(what, done, total)


def _check_vocab_size(vocab_size: int) -> None:
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size is {vocab_size}: token files hold 16-bit tokens, at most {MAX_VOCAB_SIZE}")


def _write(
    train: Sequence[Document],
    val: Sequence[Document],
    prefix: str | os.PathLike[str],
    tokenizer: Tokenizer,
    progress: Progress = _silent,
) -> dict[str, Any]:
    summary: dict[str, Any] = {"vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot}
    with ExitStack() as renamed_at_the_end:
        for name, documents in (("train", train), ("val", val)):
            path = f"{prefix}_{name}.bin"
            temporary = renamed_at_the_end.enter_context(replace_file(os.path.realpath(path)))
            tokens = _encode(documents, tokenizer, f"encoding {name}", progress)
            summary[name] = path
            summary[f"{name}_tokens"] = fill_token_file(temporary, tokens, tokenizer.vocab_size, path)
        written = tokenizer.save(prefix)
        summary["tokenizer"] = str(written)
        other = ".json" if written.suffix == ".bin" else ".bin"
        written.with_suffix(other).unlink(missing_ok=True)  # an earlier run's tokenizer, for other tokens
    return summary


def _encode(
    documents: Sequence[Document], tokenizer: Tokenizer, what: str, progress: Progress
) -> Iterator[NDArray[np.int64]]:
    done, total = 0, sum(document.size for document in documents)
    for document in documents:
        if tokenizer.eot is not None:
            yield np.array([tokenizer.eot])
        for text in document.text():
            yield np.array(tokenizer.encode(text), np.int64)
            done += len(text.encode("utf-8", "surrogateescape"))
            progress(what, done, total)
