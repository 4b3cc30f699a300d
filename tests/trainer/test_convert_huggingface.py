"""Tests that transformers and GPT2 compute the same logits from a folder, and that unsupported models are refused."""

import json
import re
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from conversions import HEAD, WTE, assert_same_bits, expect_one_line_error, make_model, pickle_state, unpad
from gptkernels.checkpoint import to_huggingface
from gptkernels.convert import convert
from gptkernels.models import GPT2
from helpers import assert_raises
from swapped import needs_transformers, transformers


def make_their_model(**changes):
    sizes = {"n_positions": 8, "vocab_size": 50, "n_layer": 2, "n_head": 2, "n_embd": 16}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def assert_same_logits(ours, theirs):
    tokens = torch.randint(50, (2, 8))
    expected = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens)[0], expected.detach(), rtol=1e-5, atol=2e-5)


def pickle_as_before_1_6(state, folder):
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def pickle_in_shards(state, folder):
    names = sorted(state)
    shards = {f"pytorch_model-0000{i}-of-00003.bin": names[i - 1 :: 3] for i in (1, 2, 3)}
    for shard, part in shards.items():
        torch.save({name: state[name] for name in part}, folder / shard)
    places = {name: shard for shard, part in shards.items() for name in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def save_without_prefix(state, folder):
    """Write a file like OpenAI's on the hub: without the prefix "transformer.", and with attention's buffers."""
    mask = torch.ones(8, 8, dtype=torch.uint8).tril().view(1, 1, 8, 8)
    state = {name.removeprefix("transformer."): t for name, t in state.items()}
    state |= {f"h.{i}.attn.bias": mask.clone() for i in (0, 1)}
    save_file(state | {"h.0.attn.masked_bias": torch.tensor(-1e4)}, folder / "model.safetensors", {"format": "pt"})


@needs_transformers
@pytest.mark.parametrize(
    "kind", [None, pickle_state, pickle_as_before_1_6, pickle_in_shards, save_without_prefix, "shards"]
)
@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "gelu"])
def test_models_of_transformers_have_the_same_logits_here(tmp_path, kind, activation):
    theirs = make_their_model(activation_function=activation)
    theirs.save_pretrained(tmp_path, **({"max_shard_size": "8KB"} if kind == "shards" else {}))
    if callable(kind):
        state = load_file(tmp_path / "model.safetensors")
        (tmp_path / "model.safetensors").unlink()
        kind(state, tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() == (kind == "shards")
    ours = GPT2.from_pretrained(tmp_path, dropout=0.3)
    assert ours.config.activation == ("gelu" if activation == "gelu" else "gelu_tanh")
    assert ours.config.dropout == 0.3
    assert_same_logits(ours.eval(), theirs)


@needs_transformers
@pytest.mark.parametrize("changes", [{}, {"activation": "gelu"}, {"bias": False}], ids=str)
def test_our_models_have_the_same_logits_in_transformers(tmp_path, changes):
    ours = make_model(dropout=0.25, **changes).eval()
    ours.save_pretrained(tmp_path / "model")
    theirs, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values())
    assert (theirs.config.resid_pdrop, theirs.config.attn_pdrop, theirs.config.embd_pdrop) == (0.25,) * 3
    assert_same_logits(ours, theirs)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.float32


@needs_transformers
def test_bfloat16_parameters_are_bfloat16_in_transformers(tmp_path):
    model = make_model(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert theirs.dtype == torch.bfloat16
    assert_same_bits(to_huggingface(unpad(model)), dict(theirs.state_dict()))


@needs_transformers
def test_biases_that_transformers_added_are_loaded(tmp_path):
    make_model(bias=False).save_pretrained(tmp_path)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    theirs.transformer.h[0].attn.c_attn.bias.data.fill_(0.5)
    theirs.save_pretrained(tmp_path)
    ours = GPT2.from_pretrained(tmp_path)
    assert ours.config.bias
    assert_same_logits(ours.eval(), theirs.eval())


@needs_transformers
def test_a_saved_model_replaces_the_previous_one(tmp_path):
    for seed in (0, 1):
        model = make_model(seed)
        model.save_pretrained(tmp_path / "model")
        assert sorted(file.name for file in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]
    assert_same_bits(GPT2.from_pretrained(tmp_path / "model").state_dict(), model.state_dict())
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def write_their_folder(folder, **changes):
    make_model().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', a GPT-2 here has 'gpt2'"),
        ({"activation_function": "relu"}, "activation_function is 'relu', a GPT-2 here has one of gelu_new,"),
        ({"activation_function": None}, "activation_function is None"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06, a GPT-2 here has 1e-05"),
        ({"n_inner": 48}, "n_inner is 48, a GPT-2 here has 4 n_embd"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False, a GPT-2 here has True"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"tie_word_embeddings": [[]]}, "tie_word_embeddings is a list"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"resid_pdrop": "much"}, "resid_pdrop is 'much', must be from 0 to 1"),
        ({"n_layer": 0}, "n_layer is 0, must be an integer in 1..2^31-1"),
        ({"n_layer": 10**9}, "n_layer is 1000000000, but there are 29 parameters"),
        ({"n_layer": 3}, "missing parameter transformer.h.2.attn.c_attn.bias and 11 more"),
        ({"n_layer": 1}, "unknown parameter transformer.h.1.attn.c_attn.bias and 11 more"),
        ({"n_head": 3}, "n_embd 16 is not divisible by n_head 3"),
        ({"n_embd": "16"}, "n_embd is '16', must be an integer"),
        ({"vocab_size": 51}, "transformer.wte.weight has shape (50, 16), must have (51, 16)"),
        ({"n_positions": 9}, "transformer.wpe.weight has shape (8, 16), must have (9, 16)"),
    ],
)
def test_unsupported_configurations_are_refused(tmp_path, changes, message):
    folder = write_their_folder(tmp_path / "model", **changes)
    for read in (GPT2.from_pretrained, GPT2.from_checkpoint, lambda path: convert(path, tmp_path / "b.bin")):
        expect_one_line_error(folder, re.escape(message), read)
    assert not (tmp_path / "b.bin").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("transformer.ln_f.bias"), "missing parameter transformer.ln_f.bias"),
        (lambda t: t.update({"score.weight": torch.ones(2, 16)}), "score.weight"),
        (lambda t: t.update({HEAD: t[WTE] + 1}), "lm_head.weight differs from transformer.wte.weight: GPT-2 ties them"),
        (lambda t: t.update({"transformer.h.0.mlp.c_fc.weight": torch.ones(4, 4, 64)}), "must have two dimensions"),
        (lambda t: t.update({"transformer.h.0.mlp.c_fc.weight": torch.ones(64, 16)}), "must have (64, 16)"),
        (lambda t: t.update({"transformer.ln_f.bias": torch.ones(16).char()}), "of torch.int8, must be of a"),
        (lambda t: t.clear(), "no wte.weight"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path, change, message):
    folder = write_their_folder(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert_raises(ValueError, re.escape(message), GPT2.from_pretrained, folder)


def write_shards(folder, **changes):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"model-{i % 2 + 1}-of-2.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file)
    index = {"weight_map": {**places, **changes}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("place", ["../other.safetensors", "/etc/passwd", "..", "", "a/b", 7, None, ["x"]])
def test_a_shard_outside_of_the_folder_is_refused(tmp_path, place):
    folder = write_their_folder(tmp_path / "model")
    write_shards(folder, **{WTE: place})
    assert_raises(ValueError, "is no name of a file in this folder", GPT2.from_pretrained, folder)


def test_missing_shards_and_parameters_are_refused(tmp_path):
    folder = write_their_folder(tmp_path / "model")
    write_shards(folder)
    assert GPT2.from_pretrained(folder).config.n_layer == 2
    (folder / "model-2-of-2.safetensors").unlink()
    assert_raises(OSError, re.escape("model-2-of-2.safetensors"), GPT2.from_pretrained, folder)
    save_file(load_file(folder / "model-1-of-2.safetensors"), folder / "model-2-of-2.safetensors")
    message = r"is missing, which model.safetensors.index.json says is there"
    assert_raises(ValueError, message, GPT2.from_pretrained, folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"n_embd"', "[" * 100_000])
def test_malformed_configurations_are_refused(tmp_path, text):
    folder = write_their_folder(tmp_path / "model")
    (folder / "config.json").write_text(text)
    assert_raises(ValueError, r"config\.json: ", GPT2.from_pretrained, folder)


def test_a_folder_without_weights_is_refused(tmp_path):
    folder = write_their_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    message = r"no model\.safetensors or pytorch_model\.bin, whole or in shards"
    assert_raises(ValueError, message, GPT2.from_pretrained, folder)
    assert_raises(ValueError, "no model: neither config", GPT2.from_checkpoint, tmp_path)


def test_a_name_on_the_hub_is_downloaded_by_its_library(tmp_path, monkeypatch):
    """The test replaces huggingface_hub. Pickles are requested only if the hub has no safetensors."""
    folder = tmp_path / "cache"
    make_model().save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        if "pytorch_model.bin" in allow_patterns:
            pickle_state(state, folder)
        return str(folder)

    monkeypatch.setitem(sys.modules, "huggingface_hub", type("Hub", (), {"snapshot_download": snapshot_download}))
    model = GPT2.from_pretrained("somebody/gpt2-small")
    assert_same_bits(model.state_dict(), make_model().state_dict())
    assert [name for name, _ in asked] == ["somebody/gpt2-small"] * 2
    assert "model.safetensors" in asked[0][1]


def test_a_missing_hub_library_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = "gpt2 is no folder here; as a name on the Hugging Face hub it takes"
    assert_raises(ImportError, message, GPT2.from_pretrained, "gpt2")


@pytest.mark.parametrize("name", ["", "../gpt2", "a/b/c", "model.bin", "/nowhere", "x y"])
def test_bad_names_of_models_are_refused(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"x")
    assert_raises(ValueError, "no folder of a Hugging Face model", GPT2.from_pretrained, name)
