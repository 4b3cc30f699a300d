"""Tests of token files, the data loader, the corpus and `gptkernels prepare`."""

import itertools
import os
import re
import socket
import struct
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptkernels.data import (
    DataLoader,
    TokenFile,
    TokenFiles,
    find_files,
    load_tokenizer,
    prepare,
    prepare_standard_library,
    tokenizer_for_prefix,
    write_tokens,
)
from gptkernels.data import corpus as corpus_module
from gptkernels.data import tokens as tokens_module
from gptkernels.data.corpus import Document, find_documents, split, standard_library
from gptkernels.data.loader import permute
from gptkernels.data.tokenizer import train_bpe
from helpers import assert_raises

MAGIC = 20240520


@contextmanager
def limit_memory(limit=1 << 20):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def expect_error(path, *words):
    with limit_memory(), pytest.raises(ValueError, match=re.escape(str(path))) as info:
        TokenFile(path)
    for word in words:
        assert word in str(info.value)


def read_text(documents):
    return b"".join(chunk for document in documents for chunk in document.chunks())


def header(*numbers):
    return struct.pack("<256i", *numbers, *[0] * (256 - len(numbers)))


@pytest.fixture
def token_file(tmp_path):
    def write(count, vocab_size=256):
        path = tmp_path / f"{count}.bin"
        write_tokens(path, [np.arange(count) % vocab_size])
        return path

    return write


@given(st.lists(st.lists(st.integers(0, 65535), max_size=20), min_size=1, max_size=6).filter(any))
@settings(max_examples=50, deadline=None)
def test_token_file_round_trip(tmp_path_factory, chunks):
    path = tmp_path_factory.mktemp("tokens") / "new folder" / "tokens.bin"
    flat = [token for chunk in chunks for token in chunk]
    assert write_tokens(path, chunks) == len(flat)
    file = TokenFile(path)
    assert len(file) == len(flat)
    assert file.dtype == np.uint16
    assert file[:].dtype == np.int64
    assert file[:].tolist() == flat
    assert file[1:3].tolist() == flat[1:3]
    assert path.read_bytes()[:1024] == header(MAGIC, 1, len(flat))


@pytest.mark.parametrize("count", [1, 255, 256, 257, 5000])
def test_files_of_int32_without_a_header_are_read(tmp_path, count):
    path = tmp_path / "old.bin"
    (np.arange(count, dtype="<i4") % 50257).tofile(path)
    file = TokenFile(path)
    assert file.dtype == np.int32
    assert file[:].tolist() == [i % 50257 for i in range(count)]


def test_truncated_token_files_are_refused(tmp_path):
    path = tmp_path / "tokens.bin"
    write_tokens(path, [[1, 2, 3]])
    raw = path.read_bytes()
    for size, word in ((0, "empty"), (1, "multiple of 4"), (3, "multiple of 4"), (4, "header"), (1023, "header")):
        path.write_bytes(raw[:size])
        expect_error(path, word)
    for size in (1024, 1025, 1026, len(raw) - 1):
        path.write_bytes(raw[:size])
        expect_error(path, "truncated", "number of tokens is 3")
    path.write_bytes(raw + b"\0\0")
    expect_error(path, "too long", "number of tokens is 3")


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        *(
            (header(MAGIC, 1, n) + bytes(6), f"number of tokens is {n}")
            for n in (0, -1, -(2**31), 4, 2**31 - 1)  # the file has 3 tokens
        ),
        (header(MAGIC, 7, 1) + bytes(2), "version is 7"),
        (header(20240326, 3), "a model of llm.c"),
        (header(20240328, 2), "a tokenizer of llm.c"),
        (header(20240801, 7), "32-bit tokens of llm.c"),
        (b"Once upon a time there was a text....", "multiple of 4"),
        (b"Once upon a time there was a text...", "magic"),
        (np.arange(1, 500, dtype="<u2")[:400].tobytes(), "In place of nanoGPT's .bin files"),  # uint16 without a header
        (np.array([5, 6, 65536, 7], "<i4").tobytes(), "value 65536 at position 2"),
        (np.array([5, -6], "<i4").tobytes(), "value -6 at position 1"),
    ],
)
def test_what_is_no_token_file_is_refused(tmp_path, raw, word):
    path = tmp_path / "tokens.bin"
    path.write_bytes(raw)
    expect_error(path, word)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([[1, 2], [3, 65536]], "token 65536 at position 3 is outside the vocabulary of 65536"),
        ([[-1]], "token -1 at position 0"),
        ([[0.5]], "takes 1-d integers, got float64"),
        ([[[1]]], r"of shape \(1, 1\)"),
        ([], "no tokens to write"),
        ([[], []], "no tokens to write"),
        ([range(5), range(5)], "more than 9 tokens"),
    ],
)
def test_write_tokens_refuses_bad_tokens(tmp_path, monkeypatch, chunks, message):
    monkeypatch.setattr(tokens_module, "MAX_TOKENS", 9)
    path = tmp_path / "tokens.bin"
    assert_raises(ValueError, message, write_tokens, path, chunks)
    assert_raises(ValueError, "vocab_size is 65537: token files hold 16-bit tokens", write_tokens, path, [[1]], 65537)
    assert not list(tmp_path.iterdir())


def test_write_tokens_holds_one_chunk_in_memory(tmp_path):
    with limit_memory():
        write_tokens(tmp_path / "tokens.bin", (np.full(10_000, i) for i in range(200)))
    assert len(TokenFile(tmp_path / "tokens.bin")) == 2_000_000


def test_a_failed_write_leaves_the_previous_file(tmp_path):
    path = tmp_path / "tokens.bin"
    write_tokens(path, [[1, 2, 3]])
    assert_raises(ValueError, "token -1", write_tokens, path, [[4], [-1]])
    assert TokenFile(path)[:].tolist() == [1, 2, 3]
    assert list(tmp_path.iterdir()) == [path]


def test_a_large_file_takes_little_memory(tmp_path):
    path = tmp_path / "large.bin"
    count = 2**31 - 1
    with open(path, "wb") as file:
        file.write(header(MAGIC, 1, count))
        file.truncate(1024 + 2 * count)
    with limit_memory(64 << 20):  # numpy's imports on first use also take memory
        loader = DataLoader(path, 4, 8, 256)
        tokens, _ = loader.next_batch()
        loader.position = 10**12
        loader.next_batch()
    assert tokens.shape == (4, 8)
    assert loader.num_windows == count // 8


@pytest.fixture
def shards(tmp_path):
    for name, tokens in (("a", range(40)), ("b", [40]), ("c", range(41, 100))):
        write_tokens(tmp_path / f"text_{name}.bin", [list(tokens)])
    return str(tmp_path / "text_*.bin")


def test_shards_read_as_one_text(shards):
    files = TokenFiles(find_files(shards))
    assert [path.name for path in files.paths] == ["text_a.bin", "text_b.bin", "text_c.bin"]
    assert len(files) == 100
    everything = np.arange(100)
    for start in range(0, 101, 3):
        for stop in range(0, 104, 3):
            assert files[start:stop].tolist() == everything[start:stop].tolist()
    assert files[:].dtype == np.int64
    assert [(path.name, position) for path, position in map(files.locate, (0, 39, 40, 41, 99))] == [
        *(("text_a.bin", 0), ("text_a.bin", 39), ("text_b.bin", 0), ("text_c.bin", 0), ("text_c.bin", 58))
    ]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("random_offsets", [True, False])
def test_shards_have_the_batches_of_one_file(shards, token_file, shuffle, random_offsets):
    loaders = [
        DataLoader(data, 3, 7, 256, seed=4, shuffle=shuffle, random_offsets=random_offsets)
        for data in (TokenFiles(find_files(shards)), token_file(100))
    ]
    for _ in range(20):
        for one, other in zip(*(loader.next_batch() for loader in loaders), strict=True):
            assert one.equal(other)


def test_an_error_in_a_shard_names_its_file(shards):
    loader = DataLoader(TokenFiles(find_files(shards)), 1, 99, 45)
    assert_raises(ValueError, r"text_c.bin: token 45 at position 4 is outside the vocabulary of 45", loader.next_batch)


def test_find_files_returns_matching_files(shards, tmp_path):
    assert find_files(str(tmp_path / "text_a.bin")) == [tmp_path / "text_a.bin"]
    write_tokens(tmp_path / "odd[1].bin", [[1]])
    assert find_files(str(tmp_path / "odd[1].bin")) == [tmp_path / "odd[1].bin"]
    for name, message in (("no_*.bin", "no file matches"), ("no.bin", "no file is called")):
        assert_raises(ValueError, message, find_files, str(tmp_path / name))
    assert_raises(ValueError, "no token files", TokenFiles, [])


def test_random_offsets_are_uniform(token_file):
    alone = DataLoader(token_file(65), 4, 7, 256, seed=1, random_offsets=True)
    ranks = [DataLoader(alone.data, 2, 7, 256, seed=1, random_offsets=True, rank=rank, world_size=2) for rank in (0, 1)]
    counts = np.zeros(58, int)
    for _ in range(58 * 25):
        tokens, targets = alone.next_batch()
        assert targets.equal(tokens + 1)
        assert torch.cat([loader.next_batch()[0] for loader in ranks]).equal(tokens)
        counts[tokens[:, 0]] += 1
    assert ((counts - 100) ** 2).sum() / 100 < 58 + 6 * (2 * 58) ** 0.5  # chi-squared: mean plus six sigma
    assert not DataLoader(alone.data, 4, 7, 256, seed=2, random_offsets=True).next_batch()[0].equal(tokens)


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_permute_is_a_bijection(n, seed, epoch):
    images = permute(np.arange(n), n, (seed, epoch))
    assert sorted(images) == list(range(n))
    some = np.arange(0, n, 7)
    assert (permute(some, n, (seed, epoch)) == images[some]).all()


@pytest.mark.parametrize("n", [2**20, 10**6 + 3, 2**33 + 1, 2**62])
def test_permute_mixes(n):
    indices = np.arange(5000) + n // 2
    images = permute(indices[indices < n], n, (3, 4)).astype(float) / n
    assert abs(images.mean() - 1 / 2) < 0.03
    assert abs(np.abs(np.diff(images)).mean() - 1 / 3) < 0.03
    assert abs((np.diff(images) > 0).mean() - 1 / 2) < 0.03
    assert abs(np.corrcoef(images[1:], images[:-1])[0, 1]) < 0.06


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_each_order_of_few_windows_is_equally_frequent(n):
    draws = 100 * len(list(itertools.permutations(range(n))))
    counts = dict.fromkeys(itertools.permutations(range(n)), 0)
    for seed in range(draws):
        counts[tuple(permute(np.arange(n), n, (seed, 0)).tolist())] += 1
    deviation = np.array(list(counts.values())) - 100
    assert (deviation**2).sum() / 100 < len(counts) + 6 * len(counts) ** 0.5  # chi-squared: mean plus 4.2 sigma


def test_batches_are_consecutive_windows(token_file):
    loader = DataLoader(token_file(100), 2, 5, 256, shuffle=False)
    assert (loader.num_windows, loader.batches_per_epoch, loader.epoch) == (19, 9, 0)
    tokens, targets = loader.next_batch()
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous()
    assert targets.is_contiguous()
    assert tokens.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert targets.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    loader.next_batch()
    loader.reset()
    assert loader.next_batch()[0].equal(tokens)


@given(
    windows=st.integers(6, 60),
    tail=st.integers(0, 3),
    B=st.integers(1, 3),
    world_size=st.integers(1, 2),
    shuffle=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_ranks_share_every_epoch(tmp_path_factory, windows, tail, B, world_size, shuffle):
    T = 4
    path = tmp_path_factory.mktemp("data") / "tokens.bin"
    write_tokens(path, [np.arange(windows * T + 1 + tail)])
    ranks = [
        DataLoader(path, B, T, 65536, seed=5, shuffle=shuffle, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    alone = DataLoader(path, B * world_size, T, 65536, seed=5, shuffle=shuffle)
    seen = []
    while ranks[0].epoch < 3:
        batches = [loader.next_batch() for loader in ranks]
        tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        assert tokens.equal(alone.next_batch()[0])
        assert targets.equal(tokens + 1)
        seen += (tokens[:, 0] // T).tolist()
    epochs = [seen[i * windows : (i + 1) * windows] for i in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(windows))
    assert (epochs[0] == epochs[1]) != shuffle


@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": False}, {"random_offsets": True}], ids=str)
def test_a_state_resumes_the_batches(token_file, options):
    one = DataLoader(token_file(1000), 3, 7, 256, seed=1, **options)
    for _ in range(60):  # ends in the second epoch
        one.next_batch()
    state = one.state_dict()
    expected = [one.next_batch() for _ in range(60)]
    other = DataLoader(one.data, 3, 7, 256, seed=2, shuffle=not options.get("shuffle"))
    other.load_state_dict(state)
    torch.testing.assert_close([other.next_batch() for _ in range(60)], expected, rtol=0, atol=0)


def test_a_seed_fixes_the_batches(token_file):
    first = [DataLoader(token_file(1000), 8, 4, 256, seed=seed).next_batch()[0] for seed in (0, 0, 1)]
    assert first[0].equal(first[1])
    assert not first[0].equal(first[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequence_length": 8}, "sequence_length was 8, is 7"),
        ({"num_tokens": 1001}, "num_tokens was 1001, is 1000"),
        ({"position": -1}, "position is -1"),
        ({"position": 2**63}, "position is"),
        ({"position": 1.5}, "position is 1.5"),
        ({"seed": None}, "seed is None"),
        ({"shuffle": "no"}, "shuffle is 'no', must be True or False"),
        ({"random_offsets": 1}, "random_offsets is 1, must be True or False"),
    ],
)
def test_states_of_other_loaders_are_refused(token_file, change, message):
    loader = DataLoader(token_file(1000), 3, 7, 256)
    assert_raises(ValueError, message, loader.load_state_dict, {**loader.state_dict(), **change})
    assert_raises(ValueError, "it is a list, must be a mapping", loader.load_state_dict, [])
    incomplete = dict.fromkeys(("shuffle", "sequence_length", "num_tokens"), 1)
    assert_raises(ValueError, "position, seed", loader.load_state_dict, incomplete)


@pytest.mark.parametrize("value", [-3, 256, 2**31 - 1])
def test_tokens_outside_the_vocabulary_are_refused(tmp_path, value):
    path = tmp_path / "old.bin"
    tokens = np.zeros(1000, "<i4")
    tokens[777] = value
    tokens.tofile(path)
    loader = DataLoader(path, 4, 16, 256, shuffle=False)
    for _ in range(777 // 64):
        loader.next_batch()
    assert_raises(ValueError, rf"old.bin: token {value} at position 777 is outside .* of 256", loader.next_batch)
    write_tokens(tmp_path / "tokens.bin", [[1, 2, 3, 4, 300]])  # token 300 is only a target
    assert_raises(ValueError, "token 300 at position 4", DataLoader(tmp_path / "tokens.bin", 1, 4, 256).next_batch)


def test_too_little_data_is_refused(token_file):
    for message, B, options in (
        ("64 tokens are too few for a batch of B=4 sequences of T=16: it takes 65", 4, {}),
        ("T=16 on each of 2 ranks: it takes 65", 2, {"world_size": 2}),
    ):
        assert_raises(ValueError, message, DataLoader, token_file(64), B, 16, 256, **options)
        DataLoader(token_file(65), B, 16, 256, **options).next_batch()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, must be at least 1"),
        ({"sequence_length": -1}, "sequence_length is -1"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"world_size": 0}, "world_size is 0"),
        ({"rank": 1}, r"rank is 1, must be in 0..0 \(world_size 1\)"),
        ({"rank": -1}, "rank is -1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_arguments_of_the_loader_are_refused(token_file, arguments, message):
    arguments = {"batch_size": 1, "sequence_length": 4, "vocab_size": 256, **arguments}
    assert_raises(ValueError, message, DataLoader, token_file(100), **arguments)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs CUDA")
def test_batches_can_be_in_page_locked_memory(token_file):
    tokens, targets = DataLoader(token_file(100), 2, 4, 256, pin_memory=True).next_batch()
    assert tokens.is_pinned()
    assert targets.is_pinned()


WORDS = st.text(st.sampled_from("abз中!'7\N{PILE OF POO}"), min_size=1, max_size=4)
BLANKS = st.text(st.sampled_from(" \t\n\r\x1c\u00a0\u3000"), max_size=3)


@given(
    words=st.lists(st.tuples(WORDS, st.sampled_from(" \n\t"), BLANKS), max_size=60), chunk_bytes=st.integers(64, 200)
)
@settings(max_examples=60, deadline=None)
def test_chunks_of_a_text_have_the_tokens_of_the_text(tmp_path_factory, bpe, words, chunk_bytes):
    text = "".join(part for word in words for part in word)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(text.encode())
    pieces = list(Document.whole(path).text(chunk_bytes))
    assert "".join(pieces) == text
    assert [token for piece in pieces for token in bpe.encode(piece)] == bpe.encode(text)


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(["ab ab\n\nab  \n ab 中 зз 77!! \u3000 " * 20], 320)


def test_a_document_may_have_any_bytes(tmp_path):
    path = tmp_path / "bytes"
    raw = bytes(range(256)) * 5
    path.write_bytes(raw)
    for chunk_bytes in (1, 2, 3, 100, 5000):
        text = "".join(Document(path, 100, 1200).text(chunk_bytes))
        assert text.encode("utf-8", "surrogateescape") == raw[100:1200]


def test_documents_are_found_in_folders_or_by_name(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden", ".git/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "binary").write_bytes(b"\x7fELF\0")
    (tmp_path / "empty").touch()
    found = find_documents([tmp_path])
    names = sorted(document.path.relative_to(tmp_path).as_posix() for document in found)
    assert names == ["a.txt", "b.txt", "sub/c.txt"]
    assert find_documents([tmp_path]) == find_documents(tmp_path) == find_documents(str(tmp_path)) == found
    named = find_documents([tmp_path / "b.txt", tmp_path / "a.txt", tmp_path / ".hidden"])
    assert [document.path.name for document in named] == ["b.txt", "a.txt", ".hidden"]
    assert_raises(ValueError, r"no such file or folder: .*absent", find_documents, [tmp_path / "absent"])
    assert_raises(ValueError, r"no text in .*empty", find_documents, [tmp_path / "empty"])
    assert_raises(ValueError, "no text in no files at all", find_documents, [])


@given(
    texts=st.lists(st.binary(min_size=1, max_size=40) | st.just(b"a line\n" * 9), min_size=1, max_size=5),
    fraction=st.floats(0.01, 0.99),
)
@settings(max_examples=60, deadline=None)
def test_split_keeps_every_byte(tmp_path_factory, texts, fraction):
    folder = tmp_path_factory.mktemp("split")
    for i, text in enumerate(texts):
        (folder / str(i)).write_bytes(text)
    documents = [Document.whole(folder / str(i)) for i in range(len(texts))]
    total = sum(map(len, texts))
    if total == 1 or round(total * fraction) >= total:
        assert_raises(ValueError, "too few for training and validation", split, documents, fraction)
        return
    train, val = split(documents, fraction)
    assert train
    assert val
    assert b"".join(b"".join(document.chunks()) for document in train + val) == b"".join(texts)


def test_split_keeps_characters_whole(tmp_path):
    """With the first two fractions, the search for a newline after the cut ends at its limit, ``LINE_BYTES``. With the
    others, it ends at the end of the text.
    """
    path = tmp_path / "text"
    for character in ("ä", "中", "\N{PILE OF POO}"):
        raw = character.encode() * 100_000
        path.write_bytes(raw)
        for fraction in (0.5, 0.33, 0.101, 1e-9):
            (train,), (val,) = split([Document.whole(path)], fraction)
            for part in (train, val):
                assert set("".join(part.text())) == {character}
            assert b"".join([*train.chunks(), *val.chunks()]) == raw


def test_split_cuts_at_the_end_of_a_line(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"0123456\n" * 100)
    for fraction in (0.1, 0.103):
        (train,), (val,) = split([Document.whole(path)], fraction)
        assert train.stop == val.start == 720
    for fraction in (0, 1, -0.5, float("nan")):
        assert_raises(ValueError, "val_fraction is", split, [Document.whole(path)], fraction)


def test_standard_library_is_a_corpus():
    train, val = standard_library()
    assert (train, val) == standard_library()
    assert {document.path.name for document in train + val} >= {"os.py", "argparse.py"}
    assert not {document.path for document in train} & {document.path for document in val}
    sizes = [sum(document.size for document in part) for part in (train, val)]
    assert sum(sizes) <= 16 << 20
    assert 0.01 < sizes[1] / sum(sizes) < 0.12
    texts = [read_text(part) for part in standard_library(1 << 20)]
    assert sum(map(len, texts)) <= 1 << 20
    assert all(b"import" in text for text in texts)


def test_a_missing_standard_library_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module.sysconfig, "get_path", lambda _: str(tmp_path))
    assert_raises(ValueError, "too little of the standard library", standard_library)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("some text\n" * 20)
    return path


def read_tokens(summary):
    return np.concatenate([TokenFile(summary[name])[:] for name in ("train", "val")])


def test_prepare_bytes(text):
    text.write_bytes("Zoë says:\n".encode() * 100 + b"\xff\n")
    prefix = text.parent / "out" / "data"
    summary = prepare([text], prefix, val_fraction=0.1)
    assert summary == {
        **{"train": f"{prefix}_train.bin", "val": f"{prefix}_val.bin", "tokenizer": f"{prefix}_tokenizer.bin"},
        **{"train_tokens": 1001 + 1, "val_tokens": 101 + 1, "vocab_size": 256, "eot": 0},
    }
    tokens = [TokenFile(summary[name])[:].tolist() for name in ("train", "val")]
    assert [part[0] for part in tokens] == [0, 0]
    assert bytes(tokens[0][1:] + tokens[1][1:]) == text.read_bytes()
    assert tokenizer_for_prefix(prefix).decode(tokens[0][1:10]) == "Zoë says"


def test_prepare_bpe(tmp_path):
    lines = [f"the {i}th of the five texts, and the end of the text" for i in range(5)]
    for i, line in enumerate(lines):
        (tmp_path / f"{i}.txt").write_text(f"{line}\n" * 10)
    prefix = tmp_path / "data"
    summary = prepare([tmp_path], prefix, "bpe", vocab_size=280)
    assert summary["vocab_size"] == 280
    assert summary["tokenizer"] == f"{prefix}_tokenizer.json"
    documents = tokenizer_for_prefix(prefix).decode(read_tokens(summary)).split("<|endoftext|>")[1:]
    assert len(documents) == 6  # the last document is split between both files
    assert sorted(set("".join(documents).split("\n"))) == ["", *lines]

    prepare([tmp_path / "0.txt"], prefix)
    assert not Path(summary["tokenizer"]).exists()
    assert tokenizer_for_prefix(prefix).vocab_size == 256


@pytest.mark.parametrize(
    ("content", "tokenizer", "vocab_size"),
    [
        ("это 中 text\n" * 50 + "\N{PILE OF POO}", "char", 10),
        ("a\0b\n" * 100, "bytes", 256),  # NUL is the end-of-text token only if no text has a NUL
    ],
    ids=["characters", "bytes with NUL"],
)
def test_prepare_without_an_end_of_text_token(text, content, tokenizer, vocab_size):
    text.write_text(content)
    summary = prepare([text], text.parent / "data", tokenizer)
    assert (summary["vocab_size"], summary["eot"]) == (vocab_size, None)
    tokens, tokenizer = read_tokens(summary), tokenizer_for_prefix(text.parent / "data")
    assert tokenizer.eot is None
    assert tokenizer.decode(tokens) == content
    assert len(tokens) == len(content)


def test_prepare_never_overwrites_its_input(tmp_path):
    source = tmp_path / "x_train.bin"
    write_tokens(source, [range(1, 1000)])
    before = source.read_bytes()
    (tmp_path / "link.txt").symlink_to(source)
    for name in ("x_train.bin", "link.txt"):
        message = r"is an input, and would be overwritten as .*x_train\.bin"
        assert_raises(ValueError, message, prepare, [tmp_path / name], tmp_path / "x")
    assert source.read_bytes() == before


def test_prepare_overwrites_only_its_own_files(text, tmp_path):
    for suffix, content in (
        ("train.bin", b"my notes"),
        ("val.bin", header(20240328)),
        ("tokenizer.bin", header(MAGIC)),
        ("tokenizer.json", b'{"mine": 1}'),
        ("tokenizer.json", b"[" * 100_000),
    ):
        path = tmp_path / f"x_{suffix}"
        path.write_bytes(content)
        assert_raises(ValueError, "exists, and prepare did not write it", prepare, [text], tmp_path / "x")
        assert path.read_bytes() == content
        path.unlink()
    (tmp_path / "x_val.bin").mkdir()
    assert_raises(ValueError, r"x_val\.bin is a folder, must be a regular file", prepare, [text], tmp_path / "x")


def test_a_failed_prepare_changes_nothing(text, tmp_path):
    """The call fails late, because the tokenizer has no token for the last character of the text."""
    text.write_text("abc\n" * 100)
    tokenizer = prepare([text], tmp_path / "x", "char")["tokenizer"]
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    other = tmp_path / "other.txt"
    other.write_text("abc\n" * 100 + "Z")
    message = "vocabulary of 4 characters has no 'Z'"
    assert_raises(ValueError, message, prepare, [other], tmp_path / "x", tokenizer)
    other.unlink()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_prepare_of_a_folder_leaves_out_prepared_files(text, tmp_path):
    written = [prepare([tmp_path], tmp_path / name, "bpe", vocab_size=300) for name in ("x", "x", "y")]
    assert len({Path(summary["train"]).read_bytes() for summary in written}) == 1


def test_prepare_writes_through_a_link(text, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "x_train.bin").symlink_to(tmp_path / "disk" / "tokens.bin")
    prepare([text], tmp_path / "x")
    assert (tmp_path / "x_train.bin").is_symlink()
    assert len(TokenFile(tmp_path / "disk" / "tokens.bin")) > 100


def test_the_newest_tokenizer_is_read(text, tmp_path):
    prepare([text], tmp_path / "x")
    stale = (tmp_path / "x_tokenizer.bin").read_bytes()
    prepare([text], tmp_path / "x", "bpe", vocab_size=270)
    (tmp_path / "x_tokenizer.bin").write_bytes(stale)  # simulates a killed run
    os.utime(tmp_path / "x_tokenizer.bin", (1, 1))
    assert tokenizer_for_prefix(tmp_path / "x").vocab_size > 256


def test_a_file_given_twice_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").symlink_to("a.txt")
    os.link(tmp_path / "a.txt", tmp_path / "c.txt")
    (tmp_path / "d.txt").write_text("text")
    given = [tmp_path / "a.txt", tmp_path, tmp_path / "b.txt", f"{tmp_path}/../{tmp_path.name}/a.txt"]
    assert [document.path.name for document in find_documents(given)] == ["a.txt", "d.txt"]


@pytest.fixture
def odd_files(tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(folder / "socket"))  # an absolute path may be too long
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("pool")
    (folder / "pool").symlink_to("loop")
    (folder / "self").symlink_to(".")
    return folder


def test_odd_files_are_skipped_or_refused(odd_files):
    assert_raises(ValueError, "no text in", find_documents, odd_files)
    (odd_files / "text.txt").write_text("text")
    assert [document.path.name for document in find_documents(odd_files)] == ["text.txt"]
    for name, message in (
        ("fifo", "is a FIFO, must be a regular file"),
        ("socket", "is a socket, must be a regular file"),
        ("dangling", "no such file or folder"),
        ("loop", "no such file or folder"),
    ):
        assert_raises(ValueError, message, find_documents, [odd_files / name])
        assert_raises((ValueError, OSError), name, TokenFile, odd_files / name)
        assert_raises((ValueError, OSError), name, load_tokenizer, odd_files / name)
    assert_raises(ValueError, "is a character device", find_documents, ["/dev/zero"])


def test_an_unreadable_folder_is_an_error(text, tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root can read every folder
    assert_raises(PermissionError, "closed", find_documents, tmp_path)


def test_prepare_reports_progress(text, tmp_path):
    calls = []
    prepare([text], tmp_path / "x", "bpe", progress=lambda *call: calls.append(call))
    last = {what: (done, total) for what, done, total in calls}
    assert last == {"reading for byte pairs": (190, 190), "encoding train": (190, 190), "encoding val": (10, 10)}


def test_prepare_with_the_tokenizer_of_other_data(text, tmp_path):
    first = prepare([text], tmp_path / "first", "bpe", vocab_size=262)
    second = prepare([text], tmp_path / "second", first["tokenizer"])
    for name in ("train", "tokenizer"):
        assert Path(first[name]).read_bytes() == Path(second[name]).read_bytes()


def test_prepare_refuses_bad_arguments(text, tmp_path):
    prefix = tmp_path / "data"
    for arguments, message in (
        ({"files": [tmp_path / "absent"]}, "no such file or folder"),
        ({"files": []}, "no text in no files"),
        ({"tokenizer": "bpe", "vocab_size": 65537}, "vocab_size is 65537: .* at most 65536"),
        ({"tokenizer": "bpe", "vocab_size": 100}, "vocab_size is 100, must be at least 257"),
        ({"vocab_size": 100}, "vocab_size is for tokenizer 'bpe'"),
        ({"tokenizer": "other"}, "no tokenizer 'other'"),
        ({"val_fraction": 1.0}, "val_fraction is 1.0"),
        ({"out_prefix": ""}, "output prefix is empty"),
        ({"files": [""]}, "name of a file is empty"),
        ({"tokenizer": ""}, "name of the tokenizer is empty"),
    ):
        assert_raises(ValueError, message, prepare, **{"files": [text], "out_prefix": prefix, **arguments})
    assert list(tmp_path.iterdir()) == [text]
    assert_raises(ValueError, "no tokenizer for the data", tokenizer_for_prefix, prefix)


def test_the_standard_library_can_be_prepared(tmp_path):
    summary = prepare_standard_library(tmp_path / "std", 1 << 20)
    again = prepare_standard_library(tmp_path / "again", 1 << 20)
    assert Path(summary["train"]).read_bytes() == Path(again["train"]).read_bytes()
    tokens = bytes(TokenFile(summary["val"])[:].tolist())
    assert tokens.replace(b"\0", b"") == read_text(standard_library(1 << 20)[1])
    DataLoader(summary["val"], 4, 64, summary["vocab_size"], shuffle=False).next_batch()
