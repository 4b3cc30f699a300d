"""Tests that conversions between file formats of GPT-2 preserve every bit, or refuse a model."""

import dataclasses
import itertools
import json
import os
import re
import resource
import struct

import pytest
import torch
from safetensors.torch import load_file

from conversions import (
    HEAD,
    TARGETS,
    WTE,
    assert_same_bits,
    expect_one_line_error,
    make_checkpoint,
    make_model,
    make_nanogpt,
    pickle_state,
    unpad,
    write_as,
)
from gptkernels.checkpoint import load_model, save_model, save_training_state
from gptkernels.convert import convert, load
from gptkernels.data import load_tokenizer, write_tokens
from gptkernels.models import GPT2
from gptkernels.models.nanogpt import parameter_groups
from gptkernels.optim import AdamW
from gptkernels.trainer.cli import main
from helpers import assert_raises
from small_runs import error_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", [*TARGETS, "training"])
def test_each_conversion_preserves_every_bit(tmp_path, source, target, dtype):
    model = make_model(dtype=dtype)
    path = write_as(source, tmp_path / "a", model)
    before = path.read_bytes() if path.is_file() else None
    done = convert(path, tmp_path / "b" / TARGETS[target])
    assert done.dtype == dtype
    config, state = load(tmp_path / "b" / TARGETS[target])
    assert_same_bits(state, unpad(model))
    assert config == {"block_size": 8, "vocab_size": 50, "n_layer": 2, "n_head": 2, "n_embd": 16, "bias": True}
    assert before is None or path.read_bytes() == before
    again = GPT2.from_checkpoint(tmp_path / "b" / TARGETS[target])
    assert_same_bits(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("target", ["huggingface", "nanogpt", "gptkernels"])
@pytest.mark.parametrize("source", ["huggingface", "nanogpt", "gptkernels", "training"])
def test_the_exact_gelu_and_missing_biases_are_preserved(tmp_path, source, target):
    """Hugging Face's GPT-2 always has biases. Missing biases become zeros, and config.json gets `"bias": false`."""
    model = make_model(bias=False, activation="gelu")
    path = write_as(source, tmp_path / "a", model)
    convert(path, tmp_path / "b" / TARGETS[target])
    config, state = load(tmp_path / "b" / TARGETS[target])
    assert (config["bias"], config["activation"]) == (False, "gelu")
    assert_same_bits(state, unpad(model))


def convert_in_a_chain(folder, names):
    for one, other in itertools.pairwise(names):
        convert(folder / one, folder / other)


def test_a_chain_of_conversions_ends_with_the_same_file(tmp_path):
    make_model().save_checkpoint(tmp_path / "a.safetensors")
    convert_in_a_chain(tmp_path, ["a.safetensors", "b", "c.pt", "d.bin", "e.pt", "f", "g.bin", "h.safetensors"])
    for one, other in (("a.safetensors", "h.safetensors"), ("d.bin", "g.bin")):
        assert (tmp_path / one).read_bytes() == (tmp_path / other).read_bytes()


def test_special_values_keep_their_bits(tmp_path):
    model = make_model(dtype=torch.bfloat16)
    patterns = torch.tensor([0x8000, 0x0001, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7F81, 0x0080]).to(torch.uint16)
    model.transformer.h[0].mlp.c_fc.weight.data[:4, :8] = patterns.view(torch.bfloat16)
    model.save_checkpoint(tmp_path / "a.safetensors")
    convert_in_a_chain(tmp_path, ["a.safetensors", "b", "c.pt", "d.bin", "e.safetensors"])
    assert_same_bits(load(tmp_path / "e.safetensors")[1], unpad(model))


def test_mixed_dtypes_are_preserved(tmp_path):
    model = make_model()
    state = {name: t.half() if "ln_" in name else t for name, t in unpad(model).items()}
    state[HEAD] = state[WTE]
    save_model(tmp_path / "a.safetensors", state, model.config)
    convert_in_a_chain(tmp_path, ["a.safetensors", "b", "c.pt"])
    assert_same_bits(load(tmp_path / "c.pt")[1], state)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["torch_dtype"] == "float32"
    convert(tmp_path / "c.pt", tmp_path / "d.bin")  # float32 represents float16 exactly
    assert_same_bits(load(tmp_path / "d.bin")[1], {name: tensor.float() for name, tensor in state.items()})
    assert GPT2.from_checkpoint(tmp_path / "c.pt").lm_head.weight.dtype == torch.float32


def test_version_1_of_llmcs_format_is_read(tmp_path):
    """Version 1 (April 2024) has float32 parameters and an unpadded vocabulary."""
    model = make_model()
    save_model(tmp_path / "v3.bin", model.state_dict(), model.config, padded_vocab_size=50)
    raw = (tmp_path / "v3.bin").read_bytes()
    header = struct.pack("<256i", 20240326, 1, 8, 50, 2, 2, 16, *[0] * 249)
    (tmp_path / "v1.bin").write_bytes(header + raw[1024:])
    assert_same_bits(load(tmp_path / "v1.bin")[1], unpad(model))
    (tmp_path / "v1.bin").write_bytes(header + raw[1024:-1])
    assert_raises(ValueError, "truncated", load, tmp_path / "v1.bin")


@pytest.mark.parametrize("version", [0, 2, 4, 6])
def test_other_versions_of_llmcs_format_are_refused(tmp_path, version):
    """Files of versions 2 and 4 do not tell which layout they have."""
    raw = write_as("llm.c", tmp_path, make_model()).read_bytes()
    (tmp_path / "model.bin").write_bytes(raw[:4] + struct.pack("<i", version) + raw[8:])
    message = f"version is {version}, known for a model of llm.c: 1 or 3 or 5|version"
    assert_raises(ValueError, message, load, tmp_path / "model.bin")


def test_numbers_without_a_header_are_refused(tmp_path):
    path = write_as("llm.c", tmp_path, make_model())
    path.write_bytes(path.read_bytes()[1024:])
    message = "numbers without a header do not say what model they are"
    assert_raises(ValueError, message, convert, path, tmp_path / "b.pt")


def test_padded_vocab_size_is_the_padding_of_llmcs_files(tmp_path):
    path = write_as("huggingface", tmp_path, make_model())
    convert(path, tmp_path / "a.bin")
    convert(path, tmp_path / "b.bin", padded_vocab_size=64)
    for name, rows in (("a.bin", 128), ("b.bin", 64)):
        padded = load_model(tmp_path / name, keep_padding=True)[1][WTE]
        assert len(padded) == rows
        assert not padded[50:].any()
    for size in (49, -1):
        assert_raises(ValueError, "padded_vocab_size", convert, path, tmp_path / "c.bin", padded_vocab_size=size)
    message = r"--padded-vocab-size is for llm\.c's \.bin"
    assert_raises(ValueError, message, convert, path, tmp_path / "c.pt", padded_vocab_size=64)


def test_llmcs_format_needs_flags_for_biases_and_gelu(tmp_path):
    model = make_model(bias=False, activation="gelu")
    path = write_as("nanogpt", tmp_path, model)
    assert_raises(ValueError, "--bias gives it biases of 0", convert, path, tmp_path / "a.bin")
    message = "--activation gelu_tanh writes it with the tanh GELU"
    assert_raises(ValueError, message, convert, path, tmp_path / "a.bin", bias=True)
    convert(path, tmp_path / "a.bin", bias=True, activation="gelu_tanh")
    expected = GPT2(dataclasses.replace(model.config, activation="gelu_tanh"))
    expected.load_state_dict(model.state_dict())
    tokens = torch.randint(50, (2, 8))
    torch.testing.assert_close(GPT2.from_checkpoint(tmp_path / "a.bin")(tokens)[0], expected(tokens)[0])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
def test_the_dtype_option_rounds_the_parameters(tmp_path, target, name):
    model = make_model()
    path = write_as("gptkernels", tmp_path / "a", model)
    there = tmp_path / "b" / TARGETS[target]
    if target == "llm.c" and name in ("float16", "float64"):
        message = f"a .bin has float32 or bfloat16, --dtype is {name}"
        assert_raises(ValueError, message, convert, path, there, dtype=name)
        return
    assert convert(path, there, dtype=name).dtype == getattr(torch, name)
    assert_same_bits(load(there)[1], {key: t.to(getattr(torch, name)) for key, t in unpad(model).items()})


def test_nothing_is_rounded_without_the_dtype_option(tmp_path):
    path = write_as("gptkernels", tmp_path, make_model(dtype=torch.float64))
    message = "has float32 or bfloat16, the model float64: --dtype rounds it"
    assert_raises(ValueError, message, convert, path, tmp_path / "a.bin")
    convert(path, tmp_path / "a.bin", dtype="bfloat16")
    half = make_model(1, torch.float16)
    convert(write_as("nanogpt", tmp_path, half), tmp_path / "b.bin")  # float32 represents float16 exactly
    assert_same_bits(load(tmp_path / "b.bin")[1], {name: tensor.float() for name, tensor in unpad(half).items()})


@pytest.mark.parametrize("target", TARGETS)
def test_float32_of_a_bfloat16_run_is_its_master_weights(tmp_path, target):
    model = make_model(dtype=torch.bfloat16)
    optimizer = AdamW(parameter_groups(model, 0.1), lr=1e-4, master_weights=True)
    tokens = torch.randint(50, (2, 8))
    for _ in range(3):
        optimizer.zero_grad()
        model(tokens, tokens.roll(1))[1].backward()
        optimizer.step()
    state, path = optimizer.state_dict(), tmp_path / "checkpoint.safetensors"
    save_training_state(path, config=model.config, model=model, optimizer=state, trainer={"step": 3})
    convert(path, tmp_path / "a" / TARGETS[target])
    assert_same_bits(load(tmp_path / "a" / TARGETS[target])[1], unpad(model))
    convert(path, tmp_path / "b" / TARGETS[target], dtype="float32")
    found = load(tmp_path / "b" / TARGETS[target])[1]
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], optimizer.state[parameter]["master_param"][: len(found[name])]), name
    assert any(not torch.equal(found[name], tensor.float()) for name, tensor in unpad(model).items())


def test_overflow_is_refused(tmp_path):
    model = make_model()
    model.transformer.h[1].mlp.c_fc.bias.data[3] = 1e5
    path = write_as("gptkernels", tmp_path, model)
    message = r"transformer\.h\.1\.mlp\.c_fc\.bias has values beyond float16's largest"
    assert_raises(ValueError, message, convert, path, tmp_path / "a.pt", dtype="float16")


def test_the_source_is_never_overwritten(tmp_path):
    path = write_as("llm.c", tmp_path, make_model())
    raw = path.read_bytes()
    os.link(path, tmp_path / "link.bin")
    (tmp_path / "to").symlink_to(tmp_path)
    message = "is what is read: the target must be another file"
    for target in (path, tmp_path / "link.bin", tmp_path / "to" / "model.bin"):
        assert_raises(ValueError, message, convert, path, target, overwrite=True)
    folder = write_as("huggingface", tmp_path, make_model())
    assert_raises(ValueError, "is what is read", convert, folder, folder, overwrite=True)
    message = "a part of a Hugging Face model"
    assert_raises(ValueError, message, convert, path, folder / "model.safetensors", overwrite=True)
    assert_raises(ValueError, f"{message}: name its folder", load, folder / "model.safetensors")
    model = make_model()
    model.save_checkpoint(folder / "model-own.safetensors")
    assert_same_bits(load(folder / "model-own.safetensors")[1], unpad(model))
    assert path.read_bytes() == raw
    assert GPT2.from_pretrained(folder).config.n_layer == 2


@pytest.mark.parametrize("target", TARGETS)
def test_the_overwrite_option_replaces_the_target(tmp_path, target):
    source = write_as("gptkernels", tmp_path / "a", make_model(1))
    there = write_as(target, tmp_path / "b", make_model(0))
    assert_raises(ValueError, "exists: --overwrite replaces it", convert, source, there)
    assert_same_bits(load(there)[1], unpad(make_model(0)))
    convert(source, there, overwrite=True)
    assert_same_bits(load(there)[1], unpad(make_model(1)))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("there_before", [True, False])
def test_a_full_disk_leaves_the_previous_files(tmp_path, target, there_before):
    source = write_as("gptkernels", tmp_path / "a", make_model(1))
    folder = tmp_path / "b"
    if there_before:
        write_as(target, folder, make_model(0))
    names = sorted(path.name for path in folder.rglob("*"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 100, 1100, 20_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            assert_raises(OSError, "File too large", convert, source, folder / TARGETS[target], overwrite=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert sorted(path.name for path in folder.rglob("*")) == names
    if there_before:
        assert_same_bits(load(folder / TARGETS[target])[1], unpad(make_model(0)))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("model.safetensor", ".safetensor is no form of a model"),
        ("model.gguf", ".gguf is no form of a model"),
        ("link.bin", "a symbolic link, which is not replaced"),
        ("file", "file is a file, must be a folder"),
    ],
)
def test_bad_targets_are_refused(tmp_path, target, message):
    source = write_as("gptkernels", tmp_path / "a", make_model())
    (tmp_path / "link.bin").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file").write_bytes(b"mine")
    assert_raises(ValueError, re.escape(message), convert, source, tmp_path / target, overwrite=True)
    assert (tmp_path / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("source", ["huggingface", "nanogpt", "llm.c", "gptkernels", "old", "huggingface pickle"])
def test_truncated_files_are_refused(tmp_path, source):
    path, file = write_and_find_file(tmp_path, source)
    raw = file.read_bytes()
    for size in sorted({0, 1, 4, 8, 9, 100, 1024, len(raw) // 2, len(raw) - 60, len(raw) - 1}):
        file.write_bytes(raw[:size])
        expect_one_line_error(path, re.escape(str(path)))
    file.unlink()
    assert_raises((OSError, ValueError), None, load, path)


def write_and_find_file(folder, source):
    if source == "huggingface pickle":
        path = write_as("huggingface", folder, make_model())
        pickle_state(load_file(path / "model.safetensors"), path)
        (path / "model.safetensors").unlink()
        return path, path / "pytorch_model.bin"
    if source == "old":
        torch.save(make_checkpoint(make_nanogpt()), folder / "old.pt", _use_new_zipfile_serialization=False)
        return folder / "old.pt", folder / "old.pt"
    path = write_as(source, folder, make_model())
    return path, path / "model.safetensors" if path.is_dir() else path


def test_convert_is_a_command(tmp_path, capsys):
    path = write_as("gptkernels", tmp_path, make_model(activation="gelu", bias=False))
    command = ["convert", str(path), str(tmp_path / "b")]
    assert main(command) == 0
    out = capsys.readouterr().out.splitlines()
    assert "gptkernels' form; block_size 8, vocab_size 50, n_layer 2, n_head 2, n_embd 16, bias False" in out[0]
    assert out[1].endswith("b: Hugging Face's form; float32")
    assert out[2:] == ["note: Hugging Face's GPT-2 has biases: they are written as 0, which computes the same"]
    assert "exists: --overwrite replaces it" in error_of(capsys, *command)
    assert main([*command, "--overwrite", "--dtype", "bfloat16", "--bias"]) == 0
    assert "float16" in capsys.readouterr().out
    assert GPT2.from_pretrained(tmp_path / "b").config.bias


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int8"], "--dtype is 'int8', must be one of float32, bfloat16, float16, float64"),
        (["--vocab-size", "0"], "--vocab-size is 0, must be from 1 to the model's 50"),
        (["--vocab-size", "51"], "--vocab-size is 51, must be from 1 to the model's 50"),
        (["--activation", "relu"], "--activation is 'relu', must be gelu_tanh or gelu"),
    ],
)
def test_bad_options_are_reported(tmp_path, arguments, message, capsys):
    path = write_as("llm.c", tmp_path, make_model())
    assert message in error_of(capsys, "convert", path, tmp_path / "b", *arguments)
    assert not (tmp_path / "b").exists()


def test_generate_and_init_from_accept_each_form(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tokens("data_train.bin", [list(range(200)) * 5])
    load_tokenizer("bytes").save("data")
    for form in ("huggingface", "nanogpt"):
        path = write_as(form, tmp_path / form, make_model(vocab_size=256, block_size=16, n_layer=1))
        assert main(["generate", str(path), "--prompt", "ab", "--max-new-tokens", "3", "--device", "cpu"]) == 0
        size = ["--layers", "1", "--heads", "2", "--channels", "16", "-b", "2", "-t", "16"]
        flags = ["--init-from", str(path), "--steps", "1", "-v", "0", "-s", "0", "-g", "0", "--device", "cpu"]
        assert main(["train", "-i", "data", *size, *flags, "--output", f"run-{form}"]) == 0
    assert main(["convert", "run-nanogpt", "back.pt"]) == 0
    assert torch.load("back.pt", weights_only=True)["iter_num"] == 1
