"""Tests of models in llm.c's files and in safetensors, and of training states. Damaged files must be refused."""

import dataclasses
import json
import math
import os
import random
import re
import resource
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gptkernels import checkpoint
from gptkernels.files import writing as _files
from gptkernels.files.safetensors import write_safetensors
from gptkernels.models import GPT2, GPT2Config
from helpers import assert_raises

CONFIG = {"block_size": 6, "vocab_size": 11, "n_layer": 2, "n_head": 2, "n_embd": 8, "bias": True}
WTE, LM_HEAD = "transformer.wte.weight", "lm_head.weight"


Config = dataclasses.make_dataclass("Config", [*CONFIG, "dropout"])


def make_state(config=CONFIG, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = checkpoint.parameter_shapes(config)
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {**state, LM_HEAD: state[WTE]}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0, msg=name)


def expect_error(path, *words, load=checkpoint.load_model):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=re.escape(str(path))) as info:
            load(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    for word in words:
        assert word in str(info.value)


configs = st.builds(
    lambda T, V, L, NH, HS: {
        **{"block_size": T, "vocab_size": V, "n_layer": L, "n_head": NH, "n_embd": NH * HS, "bias": True}
    },
    *(st.integers(1, high) for high in (9, 300, 3, 3, 5)),
)


@given(configs, st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_bin_round_trip(tmp_path_factory, config, dtype, seed):
    path = tmp_path_factory.mktemp("bin") / "model.bin"
    state = make_state(config, seed)
    checkpoint.save_model(path, state, config, dtype)
    loaded_config, loaded = checkpoint.load_model(path)
    assert loaded_config == config
    assert_same(loaded, {name: tensor.to(dtype) for name, tensor in state.items()})
    assert loaded[LM_HEAD] is loaded[WTE]


def test_bin_layout(tmp_path):
    path = tmp_path / "model.bin"
    state = make_state()
    checkpoint.save_model(path, state, CONFIG)
    raw = path.read_bytes()
    header = np.frombuffer(raw[:1024], "<i4")
    assert header[:8].tolist() == [20240326, 3, 6, 11, 2, 2, 8, 128]
    assert not header[8:].any()

    wte = torch.zeros(128, 8)
    wte[:11] = state[WTE]
    kinds = (
        *("ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias"),
        *("attn.c_proj.weight", "attn.c_proj.bias", "ln_2.weight", "ln_2.bias"),
        *("mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"),
    )
    tensors = [wte, state["transformer.wpe.weight"]]
    tensors += [state[f"transformer.h.{i}.{kind}"] for kind in kinds for i in range(2)]
    tensors += [state["transformer.ln_f.weight"], state["transformer.ln_f.bias"]]
    assert raw[1024:] == b"".join(tensor.numpy().tobytes() for tensor in tensors)


def test_the_exact_gelu_needs_safetensors(tmp_path):
    config, path = CONFIG | {"activation": "gelu"}, tmp_path / "model.safetensors"
    checkpoint.save_model(path, make_state(), config)
    assert checkpoint.load_model(path)[0] == config
    message = "cannot say that a model has the exact GELU"
    assert_raises(ValueError, message, checkpoint.save_model, tmp_path / "model.bin", make_state(), config)
    message, config = "activation is 'relu', must be one of gelu_tanh, gelu", CONFIG | {"activation": "relu"}
    assert_raises(ValueError, message, checkpoint.save_model, path, make_state(), config)


def test_bin_pads_the_vocabulary_with_zeros(tmp_path):
    path = tmp_path / "model.bin"
    state = make_state()
    padded = torch.cat([state[WTE], torch.ones(5, 8)])
    checkpoint.save_model(
        path,
        {**state, WTE: padded, LM_HEAD: padded},
        Config(**CONFIG, dropout=0.0),
        torch.bfloat16,
        padded_vocab_size=13,
    )
    config, loaded = checkpoint.load_model(path, keep_padding=True)
    assert config == {**CONFIG, "padded_vocab_size": 13}
    assert loaded[WTE].shape == (13, 8)
    assert not loaded[WTE][11:].any()
    assert checkpoint.load_model(path)[1][WTE].shape == (11, 8)


def test_bin_refuses_truncated_and_too_long_files(tmp_path):
    path = tmp_path / "model.bin"
    checkpoint.save_model(path, make_state(), CONFIG)
    raw = path.read_bytes()
    for size in (0, 1, 3, 4, 1023):
        path.write_bytes(raw[:size])
        expect_error(path, "header", "truncated")
    for size in (1024, 1025, 1024 + 128 * 8 * 4, len(raw) - 4, len(raw) - 1):
        path.write_bytes(raw[:size])
        expect_error(path, "truncated", "n_layer 2")
    path.write_bytes(raw + b"\0")
    expect_error(path, "too long")
    huge = 2**31 - 1
    path.write_bytes(_files.make_header(20240326, 3, huge, huge, huge, 1, huge, huge).tobytes())
    expect_error(path, "truncated")


@pytest.mark.parametrize(
    ("index", "value", "field"),
    [
        (0, 20240520, "a token file of llm.c"),
        (0, 0, "magic"),
        (1, 4, "version"),
        *[(index, value, field) for index, field in enumerate(checkpoint._SIZES, 2) for value in (0, -1)],
        (4, 2**31 - 1, "n_layer"),
        (6, 2**31 - 2, "n_embd"),
        (5, 3, "n_head"),
        (7, 10, "padded_vocab_size"),
        (7, -1, "padded_vocab_size"),
        (7, 2**31 - 1, "padded_vocab_size"),
    ],
)
def test_bin_refuses_wrong_headers(tmp_path, index, value, field):
    path = tmp_path / "model.bin"
    checkpoint.save_model(path, make_state(), CONFIG)
    raw = bytearray(path.read_bytes())
    raw[4 * index : 4 * index + 4] = struct.pack("<i", value)
    path.write_bytes(raw)
    expect_error(path, field)


@pytest.mark.parametrize(("dtype", "version"), [(torch.bfloat16, 5), (torch.float32, 3), (torch.float16, 3)])
def test_bin_has_the_models_dtype(tmp_path, dtype, version):
    path = tmp_path / "model.bin"
    model = GPT2(GPT2Config(**CONFIG), dtype=dtype)
    model.save_checkpoint(path)
    assert np.fromfile(path, "<i4", 2).tolist() == [20240326, version]
    saved = checkpoint.load_model(path)[1]
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16 if version == 5 else torch.float32}
    for name, tensor in model.state_dict().items():
        assert saved[name].equal(tensor[: len(saved[name])].to(saved[name].dtype))


def test_bin_refuses_unsupported_models(tmp_path):
    def refuse(message, config=CONFIG, *args, name="model.bin", **options):
        state = make_state(config)
        assert_raises(ValueError, message, checkpoint.save_model, tmp_path / name, state, config, *args, **options)

    refuse(r"no biases: save it as \.safetensors", CONFIG | {"bias": False})
    refuse(r"float16, .bin takes torch.float32 or torch.bfloat16", CONFIG, torch.float16)
    refuse("padded_vocab_size is 10, less than vocab_size 11", padded_vocab_size=10)
    refuse(r"a .bin \(llm.c's\) or a .safetensors file", name="model.pt")
    assert not list(tmp_path.iterdir())


both = pytest.mark.parametrize("suffix", [".bin", ".safetensors"])


@both
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("transformer.ln_f.bias"), "missing parameter transformer.ln_f.bias"),
        (lambda s: s.update(extra=torch.ones(1)), "unknown parameter extra"),
        (lambda s: s.update({LM_HEAD: torch.zeros(11, 8)}), "lm_head.weight differs"),
        (lambda s: s.update({"transformer.wpe.weight": torch.zeros(8, 6)}), r"must have \(6, 8\)"),
        (lambda s: s.update({"transformer.wpe.weight": None}), "NoneType, must be a tensor"),
    ],
)
def test_wrong_state_dicts_are_refused(tmp_path, suffix, change, message):
    state = make_state()
    change(state)
    assert_raises(ValueError, message, checkpoint.save_model, tmp_path / f"model{suffix}", state, CONFIG)


@both
def test_wrong_configurations_are_refused(tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    for change in ({"n_embd": 9}, {"n_layer": 0}, {"n_layer": 2**30}, {"vocab_size": 1.5}, {"n_head": None}):
        assert_raises(ValueError, next(iter(change)), checkpoint.save_model, path, make_state(), {**CONFIG, **change})


@both
def test_buffers_are_not_saved_and_lm_head_is_optional(tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    state = make_state()
    buffers = {"transformer.h.0.attn.bias": torch.ones(6, 6), "transformer.h.0.attn.masked_bias": torch.ones(1)}
    given = {name: tensor for name, tensor in state.items() if name != LM_HEAD}
    checkpoint.save_model(path, {**given, **buffers}, CONFIG)
    assert_same(checkpoint.load_model(path)[1], state)


@both
def test_tied_weights_may_have_nan(tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    state = make_state()
    state[WTE][0, 0] = torch.nan
    checkpoint.save_model(path, state, CONFIG)
    assert checkpoint.load_model(path)[1][WTE][0, 0].isnan()


@given(configs, st.booleans(), st.sampled_from([None, torch.float32, torch.bfloat16, torch.float16]))
@settings(max_examples=30, deadline=None)
def test_safetensors_round_trip(tmp_path_factory, config, bias, dtype):
    path = tmp_path_factory.mktemp("safetensors") / "model.safetensors"
    config = {**config, "bias": bias}
    state = make_state(config)
    checkpoint.save_model(path, state, config, dtype)
    loaded_config, loaded = checkpoint.load_model(path)
    assert loaded_config == config
    assert_same(loaded, {name: tensor.to(dtype or tensor.dtype) for name, tensor in state.items()})


def test_safetensors_have_nanogpts_names_and_a_configuration_in_json(tmp_path):
    path = tmp_path / "model.safetensors"
    checkpoint.save_model(path, make_state(), CONFIG)
    assert load_file(path).keys() == checkpoint.parameter_shapes(CONFIG).keys()
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["config"]) == CONFIG


def test_safetensors_refuse_truncated_and_too_long_files(tmp_path):
    path = tmp_path / "model.safetensors"
    checkpoint.save_model(path, make_state(), CONFIG)
    raw = path.read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    damaged = [raw[:size] for size in (0, 1, 7, 8, 9, header - 1, header, header + 1, len(raw) - 1)]
    for content in (*damaged, raw + b"\0", b"\xff" * 8 + raw[8:]):
        path.write_bytes(content)
        expect_error(path, "not a whole safetensors file")


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        (None, "kind"),
        ({"kind": "gptkernels.other", "version": "2"}, "kind"),
        ({"kind": "gptkernels.model", "version": "1"}, "version"),
        ({"kind": "gptkernels.model", "version": "2"}, "was left out"),
        ({"kind": "gptkernels.model", "version": "2", "checksum": "00000000"}, "was 00000000"),
    ],
)
def test_safetensors_of_other_programs_are_refused(tmp_path, metadata, word):
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(1)}, path, metadata)
    expect_error(path, word)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "config"),
        ({"config": "{"}, "config"),
        ({"config": "[" * 100_000}, "config"),
        ({"config": "[]"}, "config"),
        ({"config": "{}"}, "block_size"),
        ({"config": json.dumps({**CONFIG, "n_layer": 2**31 - 1})}, "n_layer"),
        ({"config": json.dumps({**CONFIG, "bias": 0})}, "bias is 0"),
        ({"config": json.dumps({**CONFIG, "block_size": True})}, "block_size is True"),
    ],
)
def test_safetensors_refuse_wrong_metadata(tmp_path, fields, word):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"x": torch.ones(1)}, "model", fields)
    expect_error(path, word)


def test_safetensors_of_integers_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    state = {name: tensor.to(torch.int32) for name, tensor in make_state().items() if name != LM_HEAD}
    write_safetensors(path, state, "model", {"config": json.dumps(CONFIG)})
    expect_error(path, "is of torch.int32, must be of a floating-point dtype")


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_are_refused(tmp_path, seed):
    path = tmp_path / "model.safetensors"
    checkpoint.save_model(path, make_state(), CONFIG, torch.bfloat16)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    randomness = random.Random(seed)
    bits = [*range(16 * seed, 16 * seed + 16), *(randomness.randrange(8 * header) for _ in range(100))]
    bits += [randomness.randrange(8 * header, 8 * len(whole)) for _ in range(100)]
    for bit in bits:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert_raises(ValueError, re.escape(str(path)), checkpoint.load_model, path)
    path.write_bytes(whole)
    assert_same(checkpoint.load_model(path)[1], {name: t.bfloat16() for name, t in make_state().items()})


def test_a_damaged_tensor_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    checkpoint.save_model(path, make_state(), CONFIG)
    raw = bytearray(path.read_bytes())
    with safe_open(path, "np") as file:
        last = make_state()["transformer.h.1.mlp.c_proj.bias"].numpy().tobytes()
        assert file.get_tensor("transformer.h.1.mlp.c_proj.bias").tobytes() == last
    raw[raw.rindex(last)] ^= 1
    path.write_bytes(raw)
    expect_error(path, "transformer.h.1.mlp.c_proj.bias is damaged: its checksum is")


def save_training_state(path, config=None, model=None, optimizer=None, trainer=None):
    checkpoint.save_training_state(
        path, config=config or {}, model=model or {}, optimizer=optimizer or {}, trainer=trainer or {}
    )


def test_tensors_of_every_dtype_are_aligned(tmp_path):
    path = tmp_path / "state.safetensors"
    dtypes = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    model = {str(dtype): torch.ones(3, dtype=dtype) for dtype in (*dtypes, *checkpoint._DTYPES)}
    save_training_state(path, model=model)
    assert_equal(checkpoint.load_training_state(path).model, model)
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    assert size % 8 == 0
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            assert begin % ((end - begin) // max(1, math.prod(entry["shape"]))) == 0
    message, model = r"model/x has dtype torch\.complex64, which cannot be saved", {"x": torch.ones(1) * 1j}
    assert_raises(ValueError, message, save_training_state, path, model=model)


def test_huggingfaces_names_and_layout_are_converted():
    state = make_state()
    hf = checkpoint.to_huggingface(state)
    assert hf["transformer.h.1.attn.c_attn.weight"].shape == (8, 24)
    assert hf["transformer.h.1.mlp.c_proj.weight"].shape == (32, 8)
    assert_same(checkpoint.from_huggingface(hf), state)

    bare = {name.removeprefix("transformer."): tensor for name, tensor in hf.items() if name != LM_HEAD}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 6, 6)
    assert_same(checkpoint.from_huggingface(bare), state)
    assert_raises(ValueError, r"no wte\.weight", checkpoint.from_huggingface, {"x": torch.ones(1)})


def test_a_training_state_restores_tensors_values_and_random_numbers(tmp_path, device):
    path = tmp_path / "state.safetensors"
    torch.manual_seed(3)
    weight = torch.rand(5, 7, device=device)
    trainer = {"step": 3, "loss": 0.1 + 0.2, "losses": [float("inf"), -0.0], "loader": {"position": 2**61}}
    model, config = {"weight": weight, "tied": weight}, Config(**CONFIG, dropout=0.0)
    save_training_state(path, config, model, {"state": {0: {"step": weight[0]}}}, trainer)
    expected = torch.rand(3), torch.rand(3, device=device)
    state = checkpoint.load_training_state(path)
    assert (state.config, state.trainer) == (dataclasses.asdict(config), trainer)
    assert state.model["weight"].equal(weight.cpu())
    assert state.model["weight"] is state.model["tied"]
    assert state.optimizer["state"][0]["step"].equal(weight[0].cpu())
    checkpoint.restore_rng_state(state.rng)
    assert all(map(torch.equal, (torch.rand(3), torch.rand(3, device=device)), expected))


trees = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from([torch.arange(3), torch.tensor(0.5), torch.empty(0, 2), torch.ones(2, 3, dtype=torch.bool)]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers() | st.sampled_from(["a", "$tensor", "$dict", "é"]), inner, max_size=3)
    ),
    max_leaves=8,
)


def assert_equal(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_equal(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for x, y in zip(one, other, strict=True):
            assert_equal(x, y)
    else:
        assert one == other


@given(trees)
@settings(max_examples=60, deadline=None)
def test_nested_values_round_trip(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("state") / "state.safetensors"
    save_training_state(path, trainer={"tree": tree})
    assert_equal(checkpoint.load_training_state(path).trainer["tree"], tree)


def test_views_round_trip(tmp_path):
    path = tmp_path / "state.safetensors"
    flat = torch.arange(12.0)
    views = {"flat": flat, "square": flat.view(3, 4), "part": flat[2:5], "turned": flat.view(3, 4).t()}
    save_training_state(path, model=views)
    assert_equal(checkpoint.load_training_state(path).model, views)


def test_training_states_refuse_unsupported_values(tmp_path):
    for value, message in (
        ({"a": [torch.device("cpu")]}, r"trainer/a/0: cannot save a device"),
        ({1.5: 0}, "trainer: cannot save keys"),
        ({"a": {"b": torch.ones(1)}, "a/b": torch.ones(1)}, "trainer/a/b: two entries of that name"),
    ):
        assert_raises(ValueError, message, save_training_state, tmp_path / "state.safetensors", trainer=value)
    message = r"a training state is a \.safetensors file"
    assert_raises(ValueError, message, save_training_state, tmp_path / "state.bin")
    assert not list(tmp_path.iterdir())


def test_a_training_state_is_loaded_as_a_model_but_not_the_reverse(tmp_path):
    path = tmp_path / "state.safetensors"
    state = make_state()
    save_training_state(path, Config(**CONFIG, dropout=0.0), state)
    config, loaded = checkpoint.load_model(path)
    assert config == CONFIG
    assert_same(loaded, state)
    checkpoint.save_model(path, state, CONFIG)
    expect_error(path, "kind", "gptkernels.training", load=checkpoint.load_training_state)


@pytest.mark.parametrize(
    "tree", ['{"x": {"$tensor": "absent"}}', '{"$tensor": []}', '{"x": {"$tuple": 1}}', '{"$dict": [[[], 1]]}', "nul"]
)
def test_training_states_refuse_wrong_metadata(tmp_path, tree):
    path = tmp_path / "state.safetensors"
    write_safetensors(path, {"x": torch.ones(1)}, "training", {"config": "{}", "model": tree})
    expect_error(path, "model in the metadata", load=checkpoint.load_training_state)


def test_a_failed_save_leaves_the_previous_file(tmp_path, monkeypatch):
    path = tmp_path / "model.bin"
    checkpoint.save_model(path, make_state(), CONFIG)
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    assert_raises(OSError, "no space left", checkpoint.save_model, path, make_state(seed=1), CONFIG)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.bin"]


@pytest.mark.parametrize("name", ["model.bin", "model.safetensors"])
def test_a_full_disk_leaves_the_previous_file(tmp_path, name):
    """A limit on the size of files simulates a disk that is full after different numbers of bytes."""
    path = tmp_path / name
    checkpoint.save_model(path, make_state(), CONFIG)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 1, 8, 1000, 1024, 5000, len(before) // 2, len(before) - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with pytest.raises(OSError, match=re.escape(f"File too large: '{path}'") + "$"):
                checkpoint.save_model(path, make_state(seed=1), CONFIG)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == before
        assert [file.name for file in tmp_path.iterdir()] == [name]


@both
def test_permissions_follow_the_umask(tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    before = os.umask(0o026)
    try:
        checkpoint.save_model(path, make_state(), CONFIG)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


@both
@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "folder"])
def test_only_a_regular_file_is_replaced(tmp_path, suffix, kind):
    path, target = tmp_path / f"model{suffix}", tmp_path / "target"
    if "link" in kind:
        path.symlink_to(target)
    if kind == "link":
        target.write_text("precious")
    if kind == "fifo":
        os.mkfifo(path)
    if kind == "folder":
        path.mkdir()
    before = path.lstat()
    assert_raises(ValueError, "which is not replaced", checkpoint.save_model, path, make_state(), CONFIG)
    assert path.lstat() == before
    assert kind != "link" or target.read_text() == "precious"
    if kind in ("fifo", "folder"):
        expect_error(path, "must be a regular file")


def test_a_planted_temporary_file_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / f".model.bin.{os.getpid()}.tmp").symlink_to(tmp_path / "precious")
    checkpoint.save_model(tmp_path / "model.bin", make_state(), CONFIG)
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "model.bin").is_symlink()


KILLED_WHILE_SAVING = """
import glob, os, random, signal, sys, time
import torch
from gptkernels import checkpoint

torch.set_num_threads(1)
random.seed(0)
state_path, model_path = (os.path.join(sys.argv[1], name) for name in ("state.safetensors", "model.bin"))
config = {"block_size": 64, "vocab_size": 256, "n_layer": 3, "n_head": 4, "n_embd": 256, "bias": True}
shapes = checkpoint.parameter_shapes(config)


def save(step):
    model = {name: torch.full(shape, float(step)) for name, shape in shapes.items()}
    trainer = {"step": step}
    checkpoint.save_training_state(state_path, config=config, model=model, optimizer={}, trainer=trainer)
    checkpoint.save_model(model_path, model, config)


def check(model, step):
    for name, tensor in model.items():
        assert (tensor == step).all(), (name, step)


step = previous = 1
save(step)
for _ in range(12):
    child = os.fork()
    if child == 0:
        while True:
            step += 1
            save(step)
    time.sleep(random.uniform(0.02, 0.25))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    state = checkpoint.load_training_state(state_path)
    model = checkpoint.load_model(model_path)[1]
    step = state.trainer["step"]
    check(state.model, step)
    saved = model["transformer.wpe.weight"][0, 0]
    check(model, saved)
    assert previous <= saved <= step  # a child may be killed before it writes this file
    previous = saved
print(step, len(glob.glob(os.path.join(sys.argv[1], ".*.tmp"))))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_process_leaves_whole_files(tmp_path):
    """Twelve processes are killed at random moments, mostly while they write a file of 10 MB. Each file must be the old
    or the new one, never a part of one.
    """
    command = [sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    step, unfinished = map(int, result.stdout.split())
    assert step > 1
    assert unfinished > 0
