"""Damages files at random. Every damaged file must load, or raise a ValueError or an OSError with a message.

`python -m fuzz.files --calls N --seed S` (in tests/) damages models (`.bin` of versions 3 and 5, `.safetensors`),
training states, nanoGPT's checkpoints, Hugging Face's files, token files, tokenizers and loader states.

A finding is any other exception, a crash, a load that takes more than `SECONDS` or `EXTRA_BYTES` of address space, or,
for a file with checksums, content that differs from the intact file's. `--only CALL` repeats a finding's call.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from gptkernels.checkpoint import load_model, load_training_state, save_model, save_training_state, to_huggingface
from gptkernels.convert import convert, load
from gptkernels.data import DataLoader, TokenFile, load_tokenizer, write_tokens
from gptkernels.data.tokenizer import CharTokenizer, train_bpe, write_llmc_tokenizer
from gptkernels.models import GPT2, GPT2Config
from gptkernels.optim import AdamW

SECONDS = 20
EXTRA_BYTES = 1 << 30
TEXT = "The quick brown fox; \N{PILE OF POO} 中\n"
INTEGERS = [0, 1, -1, 2, 3, 5, 255, 256, 65535, 65536, 2**31 - 1, -(2**31), 20240326, 20240328, 20240520]
VALUES = [None, True, False, 0, -1, 1.5, 1e308, 2**31, 2**63, 2**64, 10**30, "", "x", "\0", [], {}, [[]], {"a": 1}]


class Kind(NamedTuple):
    name: str
    data: bytes
    load: Callable[[Path], Any]
    checksummed: bool = False


class Call(NamedTuple):
    kind: Kind
    data: bytes


# ---- intact files ----------------------------------------------------------------------------------------------------


def make_kinds(folder: Path) -> list[Kind]:
    torch.manual_seed(0)
    model = GPT2(GPT2Config(block_size=4, vocab_size=10, n_layer=2, n_head=2, n_embd=8))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    model(torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.int64))[1].backward()
    optimizer.step()
    state = model.state_dict()
    write_tokens(folder / "tokens.bin", [np.arange(300) % 256])
    np.arange(300, dtype="<i4").tofile(folder / "headerless.bin")
    save_model(folder / "v3.bin", state, model.config, padded_vocab_size=12)
    save_model(folder / "v5.bin", state, model.config, torch.bfloat16, padded_vocab_size=12)
    save_model(folder / "model.safetensors", state, model.config)
    trainer = {"step": 1, "data": DataLoader(folder / "tokens.bin", 2, 8, 256).state_dict()}
    save_training_state(
        folder / "state.safetensors",
        config=model.config,
        model=model,
        optimizer=optimizer.state_dict(),
        trainer=trainer,
    )
    convert(folder / "state.safetensors", folder / "ckpt.pt")
    checkpoint = torch.load(folder / "ckpt.pt", weights_only=True)
    torch.save(checkpoint, folder / "old.pt", _use_new_zipfile_serialization=False)
    hugging_face = folder / "hugging_face"
    model.save_pretrained(hugging_face)
    (folder / "their.safetensors").write_bytes((hugging_face / "model.safetensors").read_bytes())
    (folder / "config.json").write_bytes((hugging_face / "config.json").read_bytes())
    torch.save(to_huggingface(checkpoint["model"]), folder / "their.bin")
    bpe = train_bpe([TEXT * 3], 280)
    bpe.save(folder / "bpe")
    write_llmc_tokenizer(folder / "llmc_tokenizer.bin", bpe)
    CharTokenizer.of_texts([TEXT]).save(folder / "char")
    (folder / "loader.json").write_text(json.dumps(_loader_configuration()))
    readers: list[tuple[str, Callable[[Path], Any]]] = [
        ("v3.bin", load_model),
        ("v5.bin", load_model),
        ("model.safetensors", load_model),
        ("state.safetensors", load_model),
        ("state.safetensors", _load_training_state),
        ("state.safetensors", _build_model),
        ("ckpt.pt", load),
        ("old.pt", load),
        ("their.safetensors", _Folder(hugging_face, "model.safetensors")),
        ("their.bin", _Folder(hugging_face, "pytorch_model.bin")),
        ("config.json", _Folder(hugging_face, "config.json")),
        ("tokens.bin", _read_tokens),
        ("headerless.bin", _read_tokens),
        ("bpe_tokenizer.json", _use_tokenizer),
        ("llmc_tokenizer.bin", _use_tokenizer),
        ("char_tokenizer.bin", _use_tokenizer),
        ("loader.json", _Loader(folder / "tokens.bin")),
    ]
    return [_kind(folder / name, load) for name, load in readers]


def _kind(path: Path, load: Callable[[Path], Any]) -> Kind:
    data = path.read_bytes()
    checksummed = path.suffix == ".safetensors" and any(word in data for word in (b"checksum", b"digest", b"crc"))
    return Kind(path.name, data, load, checksummed)


def _loader_configuration() -> dict[str, Any]:
    arguments = {"batch_size": 2, "sequence_length": 8, "vocab_size": 256, "seed": 0, "rank": 0, "world_size": 1}
    state = {"position": 10, "seed": 0, "shuffle": True, "sequence_length": 8, "num_tokens": 300}
    return {"arguments": arguments, "state": state}


def _load_training_state(path: Path) -> Any:
    state = load_training_state(path)
    return state.config, state.model, state.optimizer, state.trainer, state.rng


def _build_model(path: Path) -> Any:
    model = GPT2.from_checkpoint(path)
    return model.config.n_layer, model.config.n_head, model.state_dict()


def _read_tokens(path: Path) -> Any:
    DataLoader(path, 2, 8, 256).next_batch()
    return TokenFile(path)[:].tolist()


def _use_tokenizer(path: Path) -> Any:
    tokenizer = load_tokenizer(path)
    tokenizer.decode(range(min(tokenizer.vocab_size, 1000)))
    tokens = tokenizer.encode(TEXT)
    if any(not 0 <= token < tokenizer.vocab_size for token in (*tokens, tokenizer.start)):
        raise AssertionError(f"a token outside the vocabulary of {tokenizer.vocab_size}: {tokens}")
    return tokenizer.vocabulary, tokenizer.eot, tokens


class _Folder:
    """Loads a Hugging Face folder in which a damaged file replaces the intact file ``name``."""

    def __init__(self, sound: Path, name: str) -> None:
        self._sound, self._name = sound, name

    def __call__(self, path: Path) -> Any:
        with tempfile.TemporaryDirectory(dir=path.parent) as name:
            folder = Path(name)
            shutil.copy(self._sound / "config.json", folder)
            if self._name == "config.json":
                shutil.copy(self._sound / "model.safetensors", folder)
            shutil.copy(path, folder / self._name)
            return load(folder)


class _Loader:
    """Makes a DataLoader from a JSON file of arguments and state, with defaults for arguments that are not integers."""

    def __init__(self, tokens: Path) -> None:
        self._tokens = tokens

    def __call__(self, path: Path) -> Any:
        configuration = json.loads(path.read_bytes())  # raises a JSONDecodeError, which is a ValueError
        defaults = _loader_configuration()
        if not isinstance(configuration, dict):
            return None
        given = configuration.get("arguments")
        given = given if isinstance(given, dict) else {}
        arguments = {
            name: given[name] if type(given.get(name)) is int else default
            for name, default in defaults["arguments"].items()
        }
        loader = DataLoader(self._tokens, **arguments)
        loader.load_state_dict(configuration.get("state"))  # type: ignore[arg-type]
        return [part.tolist() for part in loader.next_batch()]


# ---- damaged files ---------------------------------------------------------------------------------------------------


def make_call(kinds: list[Kind], seed: int, number: int) -> Call:
    """The seed and the call's number determine the kind and the damage."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choice(kinds)
    mutations: list[Callable[[random.Random, bytes], bytes]] = [_flip, _overwrite, _cut, _insert, _remove, _integer]
    if kind.name.endswith("json"):
        mutations = [_flip, _cut, *[_json_value] * 6]
    elif kind.name.endswith("safetensors"):
        mutations += [_safetensors_header] * 6
    data = kind.data
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        data = rng.choice(mutations)(rng, data)
    if rng.random() < 0.03:
        data = data[: rng.randrange(64)] + rng.choice(kinds).data
    return Call(kind, data)


def _place(rng: random.Random, data: bytes) -> int:
    end = len(data) if rng.random() < 0.5 else min(len(data), 64)
    return rng.randrange(end + 1)


def _flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 3, 20]) if data else 0):
        changed[min(_place(rng, data), len(data) - 1)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _overwrite(rng: random.Random, data: bytes) -> bytes:
    at, new = _place(rng, data), rng.randbytes(rng.randrange(1, 40))
    return data[:at] + new + data[at + len(new) :]


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: _place(rng, data)]


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.choice([_place(rng, data), len(data)])
    return data[:at] + rng.randbytes(rng.randrange(1, 40)) + data[at:]


def _remove(rng: random.Random, data: bytes) -> bytes:
    at = _place(rng, data)
    return data[:at] + data[at + rng.randrange(1, 40) :]


def _integer(rng: random.Random, data: bytes) -> bytes:
    """Replace one of the file's first ten int32, which in llm.c's formats are in the header."""
    at = 4 * rng.randrange(10)
    return data[:at] + struct.pack("<i", rng.choice(INTEGERS)) + data[at + 4 :]


def _json_value(rng: random.Random, data: bytes) -> bytes:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return data
    places = list(_places(tree))
    if not places:
        return json.dumps(rng.choice(VALUES)).encode()
    parent, key = rng.choice(places)
    action = rng.random()
    if action < 0.2:
        del parent[key]
    elif action < 0.4:
        other, name = rng.choice(places)
        parent[key] = json.loads(json.dumps(other[name])) if name in other or isinstance(other, list) else None
    elif isinstance(parent[key], str) and action < 0.7:
        parent[key] = _json_value(rng, parent[key].encode()).decode()  # strings of the metadata may contain JSON
    else:
        parent[key] = rng.choice(VALUES)
    return json.dumps(tree).encode()


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _places(value)


def _safetensors_header(rng: random.Random, data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data) - 8:
        return data
    header = _json_value(rng, data[8 : 8 + length])
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


# ---- outcomes --------------------------------------------------------------------------------------------------------


def judge(call: Call, folder: Path) -> tuple[str, str]:
    """Load a damaged file, and return (outcome, description).

    The outcome is "refused" after a ValueError or an OSError with a message, "same" if the content equals the intact
    file's, "other" if the content differs and the file has no checksums, or else "finding". Only a finding has a
    description.
    """
    path = folder / call.kind.name
    _replace_file(path, call.data)
    try:
        content = call.kind.load(path)
    except (ValueError, OSError) as error:
        return ("refused", "") if str(error).strip() else ("finding", f"{type(error).__name__} without a message")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in a Rust library is a BaseException
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "finding", f"{type(error).__name__} in {Path(where.filename).name} {where.name}: {str(error)[:200]}"
    _replace_file(path, call.kind.data)
    if digest(content) == digest(call.kind.load(path)):
        return "same", ""
    return ("finding", "other content despite checksums") if call.kind.checksummed else ("other", "")


def _replace_file(path: Path, data: bytes) -> None:
    """Write a new file, because tensors loaded before may be views of the mapped old file."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def digest(content: Any) -> bytes:
    found = hashlib.sha256()
    _feed(found, content)
    return found.digest()


def _feed(found: Any, content: Any) -> None:
    if isinstance(content, torch.Tensor):
        found.update(repr((content.dtype, tuple(content.shape))).encode())
        found.update(content.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(content, Mapping):
        found.update(b"{")
        for key in sorted(content, key=repr):
            _feed(found, key)
            _feed(found, content[key])
    elif isinstance(content, list | tuple):
        found.update(f"[{len(content)}".encode())
        for item in content:
            _feed(found, item)
    else:
        found.update(repr(content).encode() + b"\0")


# ---- the campaign ----------------------------------------------------------------------------------------------------


def _work(pipe: Connection, seed: int, numbers: range) -> None:
    """Send (the kind's name, None) before a file is loaded, and (the name, (outcome, description)) afterwards."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.set_num_threads(1)
        kinds = make_kinds(folder)
        mutants = folder / "mutants"
        mutants.mkdir()
        for kind in kinds:  # so that libraries allocate their memory before the limit is set
            judge(Call(kind, kind.data), mutants)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + EXTRA_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Libraries in Rust print their panics to stderr.
        for number in numbers:
            call = make_call(kinds, seed, number)
            pipe.send((call.kind.name, None))
            pipe.send((call.kind.name, judge(call, mutants)))
    pipe.close()


def run(calls: range, seed: int) -> tuple[Counter[str], list[str]]:
    counts: Counter[str] = Counter()
    findings: list[str] = []
    start = calls.start
    while start < calls.stop:
        start = _run_child(range(start, calls.stop), seed, counts, findings)
    return counts, findings


def _run_child(calls: range, seed: int, counts: Counter[str], findings: list[str]) -> int:
    """Run calls in one child process until it ends or hangs. Return the first call that was not started."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(there, seed, calls), daemon=True)
    child.start()
    there.close()
    number, name, fault = calls.start - 1, "no call yet", ""
    try:
        while number + 1 < calls.stop or name:
            seconds = SECONDS if name != "no call yet" else 300
            if not here.poll(seconds):
                fault = f"takes more than {SECONDS} s"
                break
            name, answer = here.recv()
            if answer is None:
                number += 1
                continue
            outcome, found = answer
            counts[outcome] += 1
            if found:
                findings.append(f"call {number} of seed {seed}, {name}: {found}")
            name = "" if number + 1 == calls.stop else name
    except EOFError:
        child.join()
        fault = f"ends the process with status {child.exitcode}"
    if fault:
        if number < calls.start:
            raise RuntimeError(f"the child {fault} before its first call")
        counts["finding"] += 1
        findings.append(f"call {number} of seed {seed}, {name}: {fault}")
        child.kill()
    child.join()
    return number + 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("fuzz.files", description=__doc__)
    parser.add_argument("--calls", type=int, default=1000, metavar="N", help="number of damaged files (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the campaign (default: 0)")
    parser.add_argument("--only", type=int, metavar="CALL", help="repeat a call in this process, with its traceback")
    options = parser.parse_args(arguments)
    if options.only is not None:
        with tempfile.TemporaryDirectory() as name:
            call = make_call(make_kinds(Path(name)), options.seed, options.only)
            path = Path(name, call.kind.name)
            path.write_bytes(call.data)
            print(call.kind.name, len(call.data), "bytes", flush=True)
            print(call.kind.load(path))
        return 0
    counts, findings = run(range(options.calls), options.seed)
    for finding in findings:
        print(finding)
    outcomes = ", ".join(f"{counts[name]} {name}" for name in ("same", "other", "refused"))
    print(f"files: {sum(counts.values())} calls, seed {options.seed}: {outcomes}, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
