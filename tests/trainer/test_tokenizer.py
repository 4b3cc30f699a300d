"""Tests that tokenizers encode and decode text, and are saved and loaded in our formats and in llm.c's."""

import json
import os
import re
import signal
import struct
import sys
import threading
import time
import tracemalloc

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from gptkernels.data import load_tokenizer, stream_text
from gptkernels.data import tokenizer as module
from gptkernels.data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    GPT2Tokenizer,
    LLMCTokenizer,
    read_llmc_tokenizer,
    train_bpe,
    write_llmc_tokenizer,
)
from helpers import assert_raises

MAGIC = 20240328
SAMPLE = "The quick brown fox isn't here; それは 12 привет\n\n    indented\t'twas \N{PILE OF POO}.\n"


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([SAMPLE * 20, SAMPLE.upper()], 340)


@pytest.fixture(scope="module")
def llmc(bpe, tmp_path_factory):
    path = tmp_path_factory.mktemp("llmc") / "tokenizer.bin"
    write_llmc_tokenizer(path, bpe)
    return read_llmc_tokenizer(path)


@pytest.fixture(params=["bytes", "bpe", "llmc"])
def tokenizer(request):
    return ByteTokenizer() if request.param == "bytes" else request.getfixturevalue(request.param)


def test_round_trip(tokenizer):
    @given(st.text() | st.text(st.sampled_from(SAMPLE)))
    @settings(max_examples=80, deadline=None)
    def check(text):
        tokens = tokenizer.encode(text)
        assert all(0 <= token < tokenizer.vocab_size for token in tokens)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.decode_bytes(tokens) == text.encode()
        assert "".join(stream_text(tokenizer, tokens)) == text

    check()


def test_text_never_encodes_to_special_tokens(tokenizer):
    text = "a<|endoftext|>b"
    tokens = tokenizer.encode(text)
    assert tokenizer.eot == 0
    assert tokenizer.eot not in tokens
    assert tokenizer.decode(tokens) == text


def test_tokens_outside_the_vocabulary_are_refused(tokenizer):
    for token in (-1, tokenizer.vocab_size, 2**40):
        message = f"token {token} is outside the vocabulary of {tokenizer.vocab_size}"
        assert_raises(ValueError, message, tokenizer.decode, [token])


def test_invalid_utf8_can_be_encoded():
    text = b"\xff\xfea".decode("utf-8", "surrogateescape")
    assert ByteTokenizer().decode_bytes(ByteTokenizer().encode(text)) == b"\xff\xfea"
    for tokenizer in (train_bpe([text], 300), CharTokenizer.of_texts([text])):
        assert tokenizer.decode(tokenizer.encode(text)) == "\ufffd\ufffda"


def test_stream_text_waits_for_whole_characters():
    tokens = ByteTokenizer().encode("aé中")
    assert list(stream_text(ByteTokenizer(), tokens)) == ["a", "é", "中"]
    assert list(stream_text(ByteTokenizer(), tokens[:-1])) == ["a", "é", "�"]
    assert list(stream_text(ByteTokenizer(), [0xE4, 0x61])) == ["�a"]


def test_training_is_reproducible_and_compresses(bpe):
    assert bpe.vocab_size == 340
    assert len(bpe.encode(SAMPLE)) < len(SAMPLE.encode()) / 2
    again = train_bpe([SAMPLE * 20, SAMPLE.upper()], 340)
    assert again.vocabulary == bpe.vocabulary
    assert_raises(ValueError, "vocab_size is 256, must be at least 257", train_bpe, [SAMPLE], 256)
    assert train_bpe([], 300).vocab_size == 257


class Interrupting:
    """An iterator that interrupts the main thread, and then takes five seconds."""

    interrupted = False

    def __iter__(self):
        return self

    def __next__(self):
        if not self.interrupted:
            self.interrupted = True
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            threading.Event().wait(5)
        raise StopIteration


def test_ctrl_c_ends_the_training_at_once():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            train_bpe(Interrupting(), 300)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - started < 4


def test_training_on_long_runs_takes_linear_time(bpe):
    """Each run is a word of 1 MB, which training splits."""
    # SAMPLE has no word that is long enough to be split. The trained tokenizer does not split long words.
    assert max(map(len, (SAMPLE * 20).split())) < module.MAX_TRAINING_WORD
    assert json.loads(bpe._tokenizer.to_str())["pre_tokenizer"]["type"] == "ByteLevel"
    started = time.process_time()
    tokenizer = train_bpe(["-" * 1_000_000, " " * 1_000_000], 300)
    assert time.process_time() - started < 10  # without the split, more than 10 minutes
    assert b"-" * 64 in tokenizer.vocabulary
    assert len(tokenizer.encode("-" * 1_000_000)) < 10_000


def test_a_byte_without_a_token_is_an_error(bpe, tmp_path):
    """The library `tokenizers` would drop the byte silently."""
    path = bpe.save(tmp_path / "data")
    spec = json.loads(path.read_text())
    spec["model"]["vocab"]["qQq"] = spec["model"]["vocab"].pop("Q")
    spec["model"]["merges"] = [pair for pair in spec["model"]["merges"] if "Q" not in "".join(pair)]
    path.write_text(json.dumps(spec))
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode("quick")) == "quick"
    assert_raises(ValueError, "no token for byte 81", tokenizer.encode, "Quick")


def test_byte_pairs_are_saved_and_loaded_in_both_forms(bpe, tmp_path):
    path = bpe.save(tmp_path / "data")
    assert path == tmp_path / "data_tokenizer.json"
    loaded = load_tokenizer(path)
    assert isinstance(loaded, BPETokenizer)
    assert loaded.vocabulary == bpe.vocabulary
    assert loaded.encode(SAMPLE) == bpe.encode(SAMPLE)

    folder = tmp_path / "gpt2"
    folder.mkdir()
    model = json.loads(path.read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    assert_raises(ValueError, r"vocab\.json", load_tokenizer, folder)
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    for source in (folder, folder / "vocab.json", str(folder)):
        loaded = load_tokenizer(source)
        assert loaded.encode(SAMPLE) == bpe.encode(SAMPLE)
        assert loaded.eot == bpe.eot


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda spec: spec.pop("model"), "Model missing"),
        (lambda spec: spec.update(decoder=None), "decoder is NoneType, must be ByteLevel"),
        (lambda spec: spec["model"]["vocab"].update(hole=1000), "341 tokens are not numbered"),
        (lambda spec: spec["model"]["vocab"].update(hole=2**32 - 1), "341 tokens are not numbered"),
        (lambda spec: spec["model"]["vocab"].update({"a b": 340}), "token 340, 'a b', is not spelled in bytes"),
    ],
)
def test_damaged_json_is_refused(bpe, tmp_path, change, message):
    path = bpe.save(tmp_path / "data")
    spec = json.loads(path.read_text())
    change(spec)
    path.write_text(json.dumps(spec))
    assert_raises(ValueError, f"{re.escape(str(path))}: .*{message}", load_tokenizer, path)
    path.write_text("")
    assert_raises(ValueError, re.escape(str(path)), load_tokenizer, path)


def test_a_vocabulary_of_characters_is_saved_and_loaded(tmp_path):
    text = "añ中\N{PILE OF POO}\nb"
    tokenizer = CharTokenizer.of_texts([text, "ba"])
    assert tokenizer.vocabulary == [character.encode() for character in sorted(text)]
    loaded = load_tokenizer(tokenizer.save(tmp_path / "data"))
    assert isinstance(loaded, CharTokenizer)
    assert loaded.vocabulary == tokenizer.vocabulary
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.vocabulary[loaded.start] == b"\n"
    assert loaded.encode("") == []
    assert_raises(ValueError, "vocabulary of 6 characters has no 'Z'", loaded.encode, "aZ")


def test_a_vocabulary_of_characters_may_have_an_end_of_text(tmp_path):
    write_llmc_tokenizer(tmp_path / "t.bin", LLMCTokenizer([b"a", b"<|endoftext|>", "中".encode()], 1))
    tokenizer = load_tokenizer(tmp_path / "t.bin")
    assert isinstance(tokenizer, CharTokenizer)
    assert (tokenizer.start, tokenizer.encode("a中")) == (1, [0, 2])
    for vocabulary in ([b"ab"], [b"a", b"a"], [b"\xff"], [b""]):
        assert_raises(ValueError, "is not one character, or is there twice", CharTokenizer, vocabulary)


def test_a_tokenizer_read_from_llmcs_file_encodes_as_its_source(bpe, llmc):
    @given(st.text() | st.text(st.sampled_from(SAMPLE)))
    @settings(max_examples=80, deadline=None)
    def check(text):
        assert llmc.encode(text) == bpe.encode(text)

    check()
    assert (llmc.vocabulary, llmc.eot) == (bpe.vocabulary, bpe.eot)


def test_the_pattern_that_splits_words_is_tiktokens():
    from tiktoken_ext.openai_public import r50k_pat_str

    assert r50k_pat_str == module.GPT2_SPLIT


def test_llmc_layout(tmp_path):
    path = tmp_path / "tokenizer.bin"
    write_llmc_tokenizer(path, LLMCTokenizer([b"a", b"bc"], eot=1))
    assert path.read_bytes() == struct.pack("<256I", MAGIC, 2, 2, 1, *[0] * 252) + b"\1a\2bc"
    write_llmc_tokenizer(path, LLMCTokenizer([b"a", b"bc"], eot=None))
    assert path.read_bytes() == struct.pack("<256I", MAGIC, 1, 2, 0, *[0] * 252) + b"\1a\2bc"
    loaded = read_llmc_tokenizer(path)
    assert (loaded.vocabulary, loaded.eot) == ([b"a", b"bc"], None)
    assert loaded.decode([1, 0]) == "bca"


@given(
    st.lists(st.binary(min_size=1, max_size=255), min_size=1, max_size=20).flatmap(
        lambda vocabulary: st.tuples(st.just(vocabulary), st.none() | st.integers(0, len(vocabulary) - 1))
    )
)
@settings(max_examples=40, deadline=None)
def test_llmc_round_trip(tmp_path_factory, case):
    vocabulary, eot = case
    path = tmp_path_factory.mktemp("llmc") / "tokenizer.bin"
    write_llmc_tokenizer(path, LLMCTokenizer(vocabulary, eot))
    loaded = read_llmc_tokenizer(path)
    assert (loaded.vocabulary, loaded.eot) == (vocabulary, eot)


def test_gpt2s_file_of_version_1_has_an_end_of_text(tmp_path):
    path = tmp_path / "tokenizer.bin"
    write_llmc_tokenizer(path, LLMCTokenizer([b"x"] * 50257, None))
    assert read_llmc_tokenizer(path).eot == 50256


def test_byte_tokenizers_are_recognised(tmp_path):
    for eot in (0, None):
        loaded = load_tokenizer(ByteTokenizer(eot).save(tmp_path / "data"))
        assert isinstance(loaded, ByteTokenizer)
        assert loaded.eot == eot


def test_a_fifo_is_refused(bpe, tmp_path):
    model = json.loads(bpe.save(tmp_path / "data").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    os.mkfifo(tmp_path / "merges.txt")
    assert_raises(ValueError, r"merges\.txt is a FIFO", load_tokenizer, tmp_path)
    assert_raises(ValueError, r"merges\.txt is a FIFO", read_llmc_tokenizer, tmp_path / "merges.txt")


def raw_file(*fields, tokens=b"\1a\2bc"):
    return struct.pack("<256i", *fields, *[0] * (256 - len(fields))) + tokens


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"", "header is truncated"),
        (raw_file(MAGIC, 2, 2, 1)[:1023], "header is truncated"),
        (raw_file(0, 2, 2, 1), "magic is 0"),
        (raw_file(20240520, 1, 2), "a token file of llm.c"),
        (raw_file(MAGIC, 3, 2, 1), "version is 3"),
        (raw_file(MAGIC, 2, 0, 0), "vocab_size is 0"),
        (raw_file(MAGIC, 2, -1, 0), "vocab_size is -1"),
        (raw_file(MAGIC, 2, 2**31 - 1, 0), "vocab_size is 2147483647"),
        (raw_file(MAGIC, 2, 3, 0), "vocab_size is 3"),
        (raw_file(MAGIC, 2, 2, 2), "eot_token is 2"),
        (raw_file(MAGIC, 2, 2, -1), "eot_token is -1"),
        (raw_file(MAGIC, 2, 2, 0, tokens=b"\1a\0bc"), "token 1 of 2 has length 0"),
        (raw_file(MAGIC, 2, 2, 0, tokens=b"\1a\3bc"), "token 1 of 2 is truncated"),
        (raw_file(MAGIC, 2, 2, 0, tokens=b"\1a\xff" + bytes(254)), "token 1 of 2 is truncated"),
        (raw_file(MAGIC, 2, 2, 0, tokens=b"\3abc"), "token 1 of 2 is truncated"),
        (raw_file(MAGIC, 2, 2, 0) + b"x", "1 bytes are left over"),
    ],
)
def test_damaged_llmc_files_are_refused_with_little_memory(tmp_path, raw, word):
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        assert_raises(ValueError, f"{re.escape(str(path))}: .*{word}", read_llmc_tokenizer, path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_llmc_files_refuse_long_and_empty_tokens(tmp_path):
    for token in (b"", b"x" * 256):
        tokenizer = LLMCTokenizer([b"a", token], None)
        message = f"token 1 has {len(token)} bytes"
        assert_raises(ValueError, message, write_llmc_tokenizer, tmp_path / "tokenizer.bin", tokenizer)
    assert not list(tmp_path.iterdir())


def test_incomplete_vocabularies_encode_what_they_can(monkeypatch):
    every = [bytes([byte]) for byte in range(256)]
    lacking = LLMCTokenizer([*every[:97], *every[98:], b"bc"], None)
    assert lacking.encode("xbc") == [119, 255]
    assert lacking.encode("") == []
    assert_raises(ValueError, "no token for byte 97", lacking.encode, "bca")
    assert_raises(ValueError, "same token twice", LLMCTokenizer([*every, b"a"], None).encode, "a")
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert_raises(ValueError, "pip install tiktoken", LLMCTokenizer(every, None).encode, "a")


def test_gpt2s_tokenizer_has_tiktokens_tokens(bpe, monkeypatch, tmp_path):
    """In this test, tiktoken has a small vocabulary."""
    ranks = {token: i for i, token in enumerate(bpe.vocabulary[1:])}
    encoding = tiktoken.Encoding(
        "gpt2", pat_str=module.GPT2_SPLIT, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    gpt2 = load_tokenizer("gpt2")
    assert isinstance(gpt2, GPT2Tokenizer)
    assert (gpt2.vocab_size, gpt2.eot) == (340, 339)
    assert gpt2.encode(SAMPLE) == encoding.encode_ordinary(SAMPLE)
    assert gpt2.decode([339]) == "<|endoftext|>"

    monkeypatch.undo()
    saved = load_tokenizer(gpt2.save(tmp_path / "data"))
    assert saved.encode(SAMPLE) == encoding.encode_ordinary(SAMPLE)


def test_a_gpt2_tokenizer_that_cannot_be_downloaded_is_reported(monkeypatch):
    def fail(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    assert_raises(ValueError, r"could not download it \(ConnectionError\).*tokenizer\.json", load_tokenizer, "gpt2")
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert_raises(ValueError, "tiktoken is not installed", load_tokenizer, "gpt2")


def test_unknown_tokenizers_are_refused(tmp_path):
    for source in ("gpt3", tmp_path / "absent.bin", tmp_path):
        assert_raises(ValueError, r"takes 'bytes', 'gpt2', or a \.bin or \.json file", load_tokenizer, source)
