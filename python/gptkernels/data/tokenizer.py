"""Tokenizers: bytes, characters, GPT-2's, byte-pair encodings trained on the spot, and llm.c's tokenizer files.

llm.c's file is 256 uint32 of header (magic 20240328, version 1, vocabulary size; version 2 adds the
end-of-text token), then for each token a byte with its length and its bytes.
"""

from __future__ import annotations

import codecs
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
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
"""How GPT-2 cuts text into words before it merges bytes (tiktoken's spelling of it)."""
MAX_TRAINING_WORD = 256
"""Characters. Training takes time quadratic in the longest word, and one line of dashes can be a word."""


class Tokenizer(ABC):
    """Text to tokens and back.

    Args:
        vocabulary: the bytes of every token.
        eot: the token that stands before every document and ends a generated one; None where there is none.
    """

    def __init__(self, vocabulary: Sequence[bytes], eot: int | None) -> None:
        self.vocabulary = vocabulary
        self.eot = eot

    @property
    def vocab_size(self) -> int:
        """How many tokens there are: 0..vocab_size-1."""
        return len(self.vocabulary)

    @property
    def start(self) -> int:
        """What a text that continues nothing begins with: `eot`, or else a newline, or else token 0."""
        if self.eot is not None:
            return self.eot
        return self.vocabulary.index(b"\n") if b"\n" in self.vocabulary else 0

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The tokens of a text. Text that spells a special token is text: `eot` never comes of it.

        Raises:
            ValueError: the vocabulary has no tokens for this text.
        """

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        """The bytes of tokens; ValueError for a token outside the vocabulary."""
        return b"".join(map(self._bytes_of, tokens))

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(tokens).decode("utf-8", "replace")

    def save(self, prefix: str | os.PathLike[str]) -> Path:
        """Write the tokenizer to `PREFIX_tokenizer.bin` (llm.c's) or `.json` and return that path."""
        path = Path(f"{prefix}_tokenizer.bin")
        write_llmc_tokenizer(path, self)
        return path

    def _bytes_of(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary of {self.vocab_size}")
        return self.vocabulary[token]


def stream_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of each token as it comes; a character split over tokens waits until it is whole."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        if text := decoder.decode(tokenizer.decode_bytes([token])):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text


class ByteTokenizer(Tokenizer):
    """Every byte of the text's UTF-8 is a token.

    Bytes that Python decoded with "surrogateescape" are encoded as what they were.

    Args:
        eot: the end-of-text token: 0, for text without NUL bytes; None for data in which NUL is a byte like any other.
    """

    def __init__(self, eot: int | None = 0) -> None:
        super().__init__([bytes([byte]) for byte in range(256)], eot)

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode("utf-8", "surrogateescape"))


class CharTokenizer(Tokenizer):
    """Every character is a token. The vocabulary holds the characters of one text, and no others can be encoded.

    Args:
        vocabulary: the UTF-8 of a character for every token, other than `eot`.
        eot: the end-of-text token, or None.

    Raises:
        ValueError: a token is not one character, or is there twice.
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
        """The characters of the texts, in the order of their code points; bytes that are no UTF-8 are U+FFFD."""
        characters: set[str] = set()
        for text in texts:
            characters.update(_replace_surrogates(text))
        return cls([character.encode() for character in sorted(characters)])

    def encode(self, text: str) -> list[int]:
        """The tokens of a text.

        Raises:
            ValueError: a character is not in the vocabulary.
        """
        try:
            return [self._tokens[character] for character in _replace_surrogates(text)]
        except KeyError as error:
            raise ValueError(f"the vocabulary of {self.vocab_size} characters has no {error.args[0]!r}") from error


class LLMCTokenizer(Tokenizer):
    """The vocabulary of an llm.c tokenizer file.

    Such a file was made for decoding. Where its tokens are in the order in which they were merged, as
    GPT-2's are, they are all that byte-pair encoding needs: `encode` does it, with tiktoken.
    """

    def encode(self, text: str) -> list[int]:
        """The tokens of a text.

        Raises:
            ValueError: tiktoken is not installed, the vocabulary has a token twice, or it has no token for a byte of
                the text.
        """
        tokens = self._encoding.encode_ordinary(_replace_surrogates(text))
        if self._missing and tokens and max(tokens) >= self.vocab_size:
            raise _no_token_for(self._missing[max(tokens) - self.vocab_size])
        return tokens

    @cached_property
    def _missing(self) -> list[int]:
        """The bytes that are no tokens. Text with one of them cannot be encoded, unless a merge takes it in."""
        single = {token for rank, token in enumerate(self.vocabulary) if rank != self.eot}
        return [byte for byte in range(256) if bytes([byte]) not in single]

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        try:
            import tiktoken
        except ImportError as error:
            raise ValueError("encoding with this tokenizer takes tiktoken: pip install tiktoken") from error
        ranks = {token: rank for rank, token in enumerate(self.vocabulary) if rank != self.eot}
        if len(ranks) != self.vocab_size - (self.eot is not None):
            raise ValueError("the vocabulary cannot encode text: it has the same token twice")
        # tiktoken wants every byte to be a token: the missing ones are numbered from vocab_size on.
        ranks |= {bytes([byte]): self.vocab_size + i for i, byte in enumerate(self._missing)}
        return tiktoken.Encoding("llm.c", pat_str=GPT2_SPLIT, mergeable_ranks=ranks, special_tokens={})


class GPT2Tokenizer(LLMCTokenizer):
    """GPT-2's 50257 tokens, from tiktoken, which downloads them once and keeps them.

    Raises:
        ValueError: tiktoken is not installed or cannot get the vocabulary; the message says what to do.
    """

    def __init__(self) -> None:
        try:
            import tiktoken

            encoding = tiktoken.get_encoding("gpt2")
        except (ImportError, OSError, ValueError) as error:
            fault = "is not installed" if isinstance(error, ImportError) else "could not download it"
            raise ValueError(
                f"GPT-2's vocabulary cannot be had: tiktoken {fault} ({type(error).__name__}). Name a local "
                "copy as the tokenizer instead: Hugging Face's tokenizer.json, or vocab.json with merges.txt "
                "beside it, or llm.c's gpt2_tokenizer.bin; or set TIKTOKEN_CACHE_DIR to a folder that has it"
            ) from error
        vocabulary = [encoding.decode_single_token_bytes(token) for token in range(encoding.n_vocab)]
        super().__init__(vocabulary, encoding.eot_token)


class BPETokenizer(Tokenizer):
    """A byte-level byte-pair encoding of the `tokenizers` package.

    Raises:
        ValueError: the encoding is not byte-level, or its tokens are not numbered 0, 1, 2, ...
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        from tokenizers import decoders

        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            raise ValueError(f"decoder is {type(tokenizer.decoder).__name__}, must be ByteLevel")
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        super().__init__(_vocabulary(tokenizer), tokenizer.token_to_id(END_OF_TEXT))
        single = {token for rank, token in enumerate(self.vocabulary) if rank != self.eot}
        self._missing = bytes(byte for byte in range(256) if bytes([byte]) not in single)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text.

        Raises:
            ValueError: the vocabulary has no token for a byte of the text, which `tokenizers` would leave out.
        """
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
    """Train a byte-level byte-pair encoding, cut into words as GPT-2's is; end-of-text is token 0.

    Args:
        texts: pieces of text, read once, one at a time.
        vocab_size: at most so many tokens; fewer where the text has no more pairs to merge.

    Raises:
        ValueError: vocab_size is too small for the 256 bytes and end-of-text, or `tokenizers` is missing.
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
    tokenizer.train_from_iterator(map(_replace_surrogates, texts), trainer)
    tokenizer.pre_tokenizer = byte_level
    return BPETokenizer(tokenizer)


def load_tokenizer(source: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a name or a file.

    Args:
        source: "bytes"; "gpt2" (tiktoken's); an llm.c tokenizer (`.bin`), also one of bytes or characters; a
            `tokenizer.json`; a `vocab.json` with `merges.txt` beside it; or a folder with one of these two.

    Raises:
        ValueError: there is no such name or file, or the file is damaged; the message says what is wrong.
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
    """A tokenizer file does not say how to encode: bytes and characters are known by their vocabulary."""
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
    except BaseException as error:  # `tokenizers` raises Exception itself, and a panic in it is a BaseException
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
    """The bytes of every token: byte-level tokens are spelled in GPT-2's alphabet, added ones as they are."""
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
    """GPT-2's spelling of bytes: a printable one is its Latin-1 character, others are U+0100, U+0101, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _no_token_for(byte: int) -> ValueError:
    return ValueError(f"the vocabulary cannot encode this text: it has no token for byte {byte}, {bytes([byte])!r}")


def _replace_surrogates(text: str) -> str:
    """The text as UTF-8 can hold it: bytes decoded with "surrogateescape" become U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def write_llmc_tokenizer(path: str | os.PathLike[str], tokenizer: Tokenizer) -> None:
    """Write an llm.c tokenizer file: version 2, or 1 where there is no end-of-text token.

    Raises:
        ValueError: a token is empty or longer than 255 bytes, which the format cannot hold.
    """
    for token, text in enumerate(tokenizer.vocabulary):
        if not 1 <= len(text) <= 255:
            raise ValueError(f"{path}: token {token} has {len(text)} bytes, the format holds 1..255")
    fields = (1, tokenizer.vocab_size) if tokenizer.eot is None else (2, tokenizer.vocab_size, tokenizer.eot)
    with replace_file(path) as temporary, open(temporary, "wb") as file:
        file.write(make_header(TOKENIZER_MAGIC, *fields).data)
        for text in tokenizer.vocabulary:
            file.write(bytes([len(text)]) + text)


def read_llmc_tokenizer(path: str | os.PathLike[str]) -> LLMCTokenizer:
    """Read an llm.c tokenizer file.

    Raises:
        ValueError: the file is truncated, of another kind, or does not agree with its header; the message
            names the file and the field.
    """
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
    if version == 1:  # was for GPT-2 only, and left its end-of-text token unsaid
        return LLMCTokenizer(vocabulary, 50256 if vocab_size == 50257 else None)
    return LLMCTokenizer(vocabulary, eot)
