"""Tokenizers of bytes and of characters, GPT-2's tokenizer, byte-pair encodings, and llm.c's tokenizer files.

llm.c's file has a header of 256 uint32 (magic 20240328, version 1, vocabulary size; in version 2 also the end-of-text
token), and then for each token a byte with its length, and its bytes.
"""

from __future__ import annotations

import codecs
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from gptkernels.files.regular import check_regular, open_regular
from gptkernels.files.writing import HEADER_BYTES, TOKENIZER_MAGIC, file_size, make_header, read_header, replace_file

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
GPT2_SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
"""The pattern by which GPT-2 splits text into words before it merges bytes, as written in tiktoken."""
MAX_TRAINING_WORD = 256
"""The longest word in training, in characters: the time is quadratic in it, and a line of dashes can be a word."""


class Tokenizer(ABC):
    """Converts text to tokens and back.

    ``vocabulary`` has the bytes of every token. ``eot`` is the end-of-text token, which precedes every document and
    ends generation, or None.
    """

    def __init__(self, vocabulary: Sequence[bytes], eot: int | None) -> None:
        self.vocabulary = vocabulary
        self.eot = eot

    @property
    def vocab_size(self) -> int:
        """The number of tokens; tokens are 0 to vocab_size - 1."""
        return len(self.vocabulary)

    @property
    def start(self) -> int:
        """The token from which text without a prompt is generated: `eot`, else a newline if it is a token, else 0."""
        if self.eot is not None:
            return self.eot
        return self.vocabulary.index(b"\n") if b"\n" in self.vocabulary else 0

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Encode a text, in which the name of a special token is ordinary text.

        Raises:
            ValueError: if the vocabulary cannot encode this text.
        """

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes of tokens; raise a ValueError for a token outside the vocabulary."""
        return b"".join(map(self._bytes_of, tokens))

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(tokens).decode("utf-8", "replace")

    def save(self, prefix: str | os.PathLike[str]) -> Path:
        """Write the tokenizer to `PREFIX_tokenizer.bin` (llm.c's format) or `.json`, and return that path."""
        path = Path(f"{prefix}_tokenizer.bin")
        write_llmc_tokenizer(path, self)
        return path

    @cached_property
    def _missing(self) -> list[int]:
        """The bytes that are not tokens. They can be encoded only as parts of longer tokens."""
        single = {token for rank, token in enumerate(self.vocabulary) if rank != self.eot}
        return [byte for byte in range(256) if bytes([byte]) not in single]

    def _bytes_of(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary of {self.vocab_size}")
        return self.vocabulary[token]


def stream_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens as they arrive; a character of several tokens is yielded with the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        if text := decoder.decode(tokenizer.decode_bytes([token])):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text


class ByteTokenizer(Tokenizer):
    """A tokenizer for which every byte of the UTF-8 text is a token.

    Bytes that Python decoded with "surrogateescape" are encoded as the original bytes. ``eot`` is 0 for text without
    NUL bytes, and None for text with NUL bytes.
    """

    def __init__(self, eot: int | None = 0) -> None:
        super().__init__([bytes([byte]) for byte in range(256)], eot)

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode("utf-8", "surrogateescape"))


class CharTokenizer(Tokenizer):
    """A tokenizer for which every character is a token; only characters of its vocabulary can be encoded.

    ``vocabulary`` has the UTF-8 encoding of one character for every token other than `eot`. A ValueError is raised if a
    token is not one character, or is in the vocabulary twice.
    """

    def __init__(self, vocabulary: Sequence[bytes], eot: int | None = None) -> None:
        super().__init__(vocabulary, eot)
        self._tokens: dict[str, int] = {}
        for token, data in enumerate(vocabulary):
            character = data.decode("utf-8", "replace")
            if token == eot:
                continue
            if len(character) != 1 or character.encode() != data or character in self._tokens:
                raise ValueError(f"token {token}, {data!r}, is not one character, or is there twice")
            self._tokens[character] = token

    @classmethod
    def of_texts(cls, texts: Iterable[str]) -> CharTokenizer:
        """Make a tokenizer of the texts' characters, ordered by code point; bytes that are not UTF-8 become U+FFFD."""
        characters: set[str] = set()
        for text in texts:
            characters.update(_replace_surrogates(text))
        return cls([character.encode() for character in sorted(characters)])

    def encode(self, text: str) -> list[int]:
        """Encode a text; raise a ValueError for a character that is not in the vocabulary."""
        try:
            return [self._tokens[character] for character in _replace_surrogates(text)]
        except KeyError as error:
            raise ValueError(f"the vocabulary of {self.vocab_size} characters has no {error.args[0]!r}") from error


class LLMCTokenizer(Tokenizer):
    """A tokenizer with the vocabulary of an llm.c tokenizer file, which llm.c uses only for decoding.

    If the tokens are in the order of their merges, as in GPT-2's file, they define a byte-pair encoding, which `encode`
    computes with tiktoken.
    """

    def encode(self, text: str) -> list[int]:
        """Encode a text.

        A ValueError is raised if tiktoken is missing, the vocabulary has the same token twice, or a byte of the text
        has no token.
        """
        tokens = self._encoding.encode_ordinary(_replace_surrogates(text))
        if self._missing and tokens and max(tokens) >= self.vocab_size:
            raise _no_token_for(self._missing[max(tokens) - self.vocab_size])
        return tokens

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        try:
            import tiktoken
        except ImportError as error:
            raise ValueError("encoding with this tokenizer takes tiktoken: pip install tiktoken") from error
        ranks = {token: rank for rank, token in enumerate(self.vocabulary) if rank != self.eot}
        if len(ranks) != self.vocab_size - (self.eot is not None):
            raise ValueError("the vocabulary cannot encode text: it has the same token twice")
        # tiktoken requires every byte to be a token: the missing ones are numbered from vocab_size on.
        ranks |= {bytes([byte]): self.vocab_size + i for i, byte in enumerate(self._missing)}
        return tiktoken.Encoding("llm.c", pat_str=GPT2_SPLIT, mergeable_ranks=ranks, special_tokens={})


class GPT2Tokenizer(LLMCTokenizer):
    """GPT-2's tokenizer, whose 50257 tokens tiktoken downloads and caches."""

    def __init__(self) -> None:
        try:
            import tiktoken

            encoding = tiktoken.get_encoding("gpt2")
        except (ImportError, OSError, ValueError) as error:
            fault = "is not installed" if isinstance(error, ImportError) else "could not download it"
            raise ValueError(
                f"GPT-2's vocabulary is not available: tiktoken {fault} ({type(error).__name__}). Name a local "
                "copy as the tokenizer instead: Hugging Face's tokenizer.json, or vocab.json in the same "
                "folder as merges.txt, or llm.c's gpt2_tokenizer.bin; or set TIKTOKEN_CACHE_DIR to a folder that has it"
            ) from error
        vocabulary = [encoding.decode_single_token_bytes(token) for token in range(encoding.n_vocab)]
        super().__init__(vocabulary, encoding.eot_token)


class BPETokenizer(Tokenizer):
    """A tokenizer that uses a byte-level byte-pair encoding of the `tokenizers` package."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        from tokenizers import decoders

        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            raise ValueError(f"decoder is {type(tokenizer.decoder).__name__}, must be ByteLevel")
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        super().__init__(_vocabulary(tokenizer), tokenizer.token_to_id(END_OF_TEXT))

    def encode(self, text: str) -> list[int]:
        """Encode a text; raise a ValueError if a byte has no token, which `tokenizers` would skip."""
        text = _replace_surrogates(text)
        if self._missing and (bad := set(text.encode()).intersection(self._missing)):
            raise _no_token_for(min(bad))
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def save(self, prefix: str | os.PathLike[str]) -> Path:
        """Write `PREFIX_tokenizer.json` and return that path."""
        path = Path(f"{prefix}_tokenizer.json")
        with replace_file(path) as temporary:
            self._tokenizer.save(str(temporary))
        return path


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """Train a byte-level byte-pair encoding, with text split into words as in GPT-2; end-of-text is token 0.

    `texts` is read once, one piece at a time. There are fewer than `vocab_size` tokens if the text has no more pairs to
    merge. A ValueError says that vocab_size is below 257 (bytes and end-of-text), or that `tokenizers` is missing.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size is {vocab_size}, must be at least 257: bytes and end-of-text")
    tokenizers = _import_tokenizers()
    tokenizer = _byte_level(tokenizers.models.BPE())
    byte_level = tokenizer.pre_tokenizer
    runs = tokenizers.Regex(rf"\S{{{MAX_TRAINING_WORD}}}|\s{{{MAX_TRAINING_WORD}}}")
    cut_runs = tokenizers.pre_tokenizers.Split(runs, "isolated")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([cut_runs, byte_level])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    _run_in_thread(lambda: tokenizer.train_from_iterator(map(_replace_surrogates, texts), trainer))
    tokenizer.pre_tokenizer = byte_level
    return BPETokenizer(tokenizer)


def _run_in_thread(function: Callable[[], object]) -> None:
    """Call a function that may run for minutes outside Python, so that a signal interrupts the caller at once.

    After a signal, the function runs on in its thread until it returns or the process ends.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            function()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    done.result()


def load_tokenizer(source: str | os.PathLike[str]) -> Tokenizer:
    """Load a tokenizer by name or from a file.

    Args:
        source: "bytes"; "gpt2" (tiktoken's); an llm.c tokenizer (`.bin`), also one of bytes or characters; a
            `tokenizer.json`; a `vocab.json` beside a `merges.txt`; or a folder with these JSON files.

    Raises:
        ValueError: if there is no such name or file, or the file is damaged; the message says what is wrong.
    """
    if source == "bytes":
        return ByteTokenizer()
    if source == "gpt2":
        return GPT2Tokenizer()
    path = Path(source)
    if path.is_dir():
        path = path / ("tokenizer.json" if (path / "tokenizer.json").exists() else "vocab.json")
    if not path.is_file():
        raise ValueError(f"no tokenizer {str(path)!r}: takes 'bytes', 'gpt2', or a .bin or .json file")
    if path.suffix == ".json":
        return _load_json(path)
    return _encoder_of(read_llmc_tokenizer(path))


def _encoder_of(tokenizer: LLMCTokenizer) -> Tokenizer:
    if tokenizer.vocabulary == ByteTokenizer().vocabulary and tokenizer.eot in (0, None):
        return ByteTokenizer(tokenizer.eot)
    try:
        return CharTokenizer(tokenizer.vocabulary, tokenizer.eot)
    except ValueError:
        return tokenizer


def _load_json(path: Path) -> BPETokenizer:
    tokenizers = _import_tokenizers()
    try:
        if path.name == "vocab.json":
            check_regular(path.with_name("merges.txt"))
            model = tokenizers.models.BPE.from_file(str(path), str(path.with_name("merges.txt")))
            tokenizer = _byte_level(model)
            tokenizer.add_special_tokens([END_OF_TEXT])
        else:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        return BPETokenizer(tokenizer)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # `tokenizers` raises Exception, and for a panic in Rust a BaseException
        raise ValueError(f"{path}: {error}") from error


def _import_tokenizers():
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError("byte-pair encodings take the tokenizers package: pip install tokenizers") from error
    return tokenizers


def _byte_level(model: tokenizers.models.BPE) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _vocabulary(tokenizer: tokenizers.Tokenizer) -> list[bytes]:
    spelled = {token: text for text, token in tokenizer.get_vocab(with_added_tokens=True).items()}
    if sorted(spelled) != list(range(len(spelled))):
        raise ValueError(f"vocab: the {len(spelled)} tokens are not numbered 0..{len(spelled) - 1}")
    added = tokenizer.get_added_tokens_decoder()
    alphabet = _byte_alphabet()
    vocabulary = []
    for token in range(len(spelled)):
        text = spelled[token]
        if token in added:
            vocabulary.append(text.encode())
        elif alphabet.keys() >= set(text):
            vocabulary.append(bytes(alphabet[letter] for letter in text))
        else:
            raise ValueError(f"vocab: token {token}, {text!r}, is not spelled in bytes")
    return vocabulary


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of GPT-2's alphabet.

    A printable byte is spelled as its Latin-1 character, and the other bytes as U+0100, U+0101, ...
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _no_token_for(byte: int) -> ValueError:
    return ValueError(f"the vocabulary cannot encode this text: it has no token for byte {byte}, {bytes([byte])!r}")


def _replace_surrogates(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def write_llmc_tokenizer(path: str | os.PathLike[str], tokenizer: Tokenizer) -> None:
    """Write an llm.c tokenizer file: version 2, or 1 if there is no end-of-text token."""
    for token, text in enumerate(tokenizer.vocabulary):
        if not 1 <= len(text) <= 255:
            raise ValueError(f"{path}: token {token} has {len(text)} bytes, the format holds 1..255")
    fields = (1, tokenizer.vocab_size) if tokenizer.eot is None else (2, tokenizer.vocab_size, tokenizer.eot)
    with replace_file(path) as temporary, open(temporary, "wb") as file:
        file.write(make_header(TOKENIZER_MAGIC, *fields).data)
        for text in tokenizer.vocabulary:
            file.write(bytes([len(text)]) + text)


def read_llmc_tokenizer(path: str | os.PathLike[str]) -> LLMCTokenizer:
    with open_regular(path) as file:
        size = file_size(file)
        _, version, vocab_size, eot, *_ = read_header(file, path, TOKENIZER_MAGIC, (1, 2))
        if vocab_size < 1:
            raise ValueError(f"{path}: vocab_size is {vocab_size}, must be at least 1")
        if HEADER_BYTES + 2 * vocab_size > size:
            raise ValueError(
                f"{path}: truncated: vocab_size is {vocab_size}, which takes at least "
                f"{HEADER_BYTES + 2 * vocab_size} bytes, the file has {size}"
            )
        if version == 2 and not 0 <= eot < vocab_size:
            raise ValueError(f"{path}: eot_token is {eot}, outside the vocabulary of {vocab_size}")
        vocabulary = []
        for token in range(vocab_size):
            length = int.from_bytes(file.read(1), "little")
            text = file.read(length)
            if length == 0 or len(text) < length:
                fault = "is truncated" if file.tell() == size else "has length 0"
                raise ValueError(f"{path}: token {token} of {vocab_size} {fault}")
            vocabulary.append(text)
        if file.tell() != size:
            raise ValueError(f"{path}: {size - file.tell()} bytes are left over after token {vocab_size - 1}")
    if version == 1:  # the version for GPT-2 only, which does not store the end-of-text token
        return LLMCTokenizer(vocabulary, 50256 if vocab_size == 50257 else None)
    return LLMCTokenizer(vocabulary, eot)
