"""Tests that nanoGPT and GPT2 exchange models and runs, and that malicious pickles are refused."""

import dataclasses
import os
import pickle
import re
import shlex
import struct
import zipfile
from pathlib import Path

import pytest
import torch

import published
from conversions import (
    CONFIG,
    WTE,
    assert_same_bits,
    expect_one_line_error,
    make_checkpoint,
    make_model,
    make_nanogpt,
    nanogpt_groups,
    unpad,
    write_as,
)
from gptkernels.checkpoint import load_model, save_training_state
from gptkernels.convert import convert, load
from gptkernels.data.tokenizer import LLMCTokenizer
from gptkernels.models import GPT2
from gptkernels.trainer.cli import main
from helpers import assert_raises


def save_checkpoint(folder, checkpoint, **options):
    torch.save(checkpoint, folder / "ckpt.pt", **options)
    return folder / "ckpt.pt"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [published.GPT, published.SlowGPT])
def test_nanogpts_checkpoint_has_the_same_logits_here(tmp_path, bias, kind):
    theirs = kind(make_nanogpt(bias).config)
    path = save_checkpoint(tmp_path, make_checkpoint(theirs))
    ours = GPT2.from_checkpoint(path)
    assert (ours.config.bias, ours.config.activation) == (bias, "gelu")
    tokens = torch.randint(50, (2, 8))
    torch.testing.assert_close(ours(tokens)[0], theirs(tokens, tokens)[0], rtol=1e-5, atol=1e-5)
    assert_same_bits(GPT2.from_checkpoint(tmp_path).state_dict(), ours.state_dict())


@pytest.mark.parametrize(("page", "count"), [("from-nanogpt", 5), ("convert", 4)])
def test_the_commands_of_the_pages_run(page, count, tmp_path, monkeypatch, capsys):
    """Small files stand in for those that the pages name: a checkpoint with nanoGPT's padded vocabulary, a model of
    characters, a run, a Hugging Face folder and a model of llm.c.

    GPT-2's tokenizer, which would be downloaded, is replaced by one of the same size.
    """
    monkeypatch.chdir(tmp_path)
    numbers = [str(token).encode() for token in range(50257)]
    monkeypatch.setattr("gptkernels.data.tokenizer.GPT2Tokenizer", lambda: LLMCTokenizer(numbers, 50256))
    text = Path("nanoGPT/data/shakespeare_char/input.txt")
    text.parent.mkdir(parents=True)
    text.write_text("".join(map(chr, range(32, 82))) * 4)
    for folder, vocab_size in (("out", 50304), ("out-shakespeare-char", 50)):
        model = published.GPT(published.Config(8, vocab_size, n_layer=1, n_head=2, n_embd=16))
        (tmp_path / "nanoGPT" / folder).mkdir()
        save_checkpoint(tmp_path / "nanoGPT" / folder, make_checkpoint(model))
    Path("runs/gpt2").mkdir(parents=True)
    make_model().save_checkpoint("runs/gpt2/checkpoint.safetensors")
    make_model().save_pretrained("gpt2")
    Path("log124M").mkdir()
    make_model().save_checkpoint("log124M/model_00019560.bin")
    page_text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text()
    commands = [line for block in re.findall(r"```sh\n(.*?)```", page_text, re.S) for line in block.splitlines()]
    commands = [shlex.split(command, comments=True)[1:] for command in commands if command != "gptkernels convert A B"]
    assert len(commands) == count
    for command in commands:
        assert main(command) == 0, capsys.readouterr().err
    assert main(["generate", "nanoGPT/out", "--tokenizer", "gpt2"]) == 2
    assert "gptkernels convert nanoGPT/out/ckpt.pt model.safetensors --vocab-size 50257" in capsys.readouterr().err


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpt_loads_our_checkpoint(tmp_path, bias):
    ours = make_model(bias=bias, activation="gelu", dropout=0.125)
    ours.save_checkpoint(tmp_path / "model.safetensors")
    done = convert(tmp_path / "model.safetensors", tmp_path / "ckpt.pt")
    assert done.notes == ("the optimizer's state is that before the first step",)
    checkpoint = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    theirs = published.GPT(published.Config(**checkpoint["model_args"]))
    theirs.load_state_dict(checkpoint["model"])
    optimizer = torch.optim.AdamW(nanogpt_groups(theirs))
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert (checkpoint["iter_num"], checkpoint["best_val_loss"]) == (0, 1e9)
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    tokens = torch.randint(50, (2, 8))
    torch.testing.assert_close(theirs(tokens, tokens)[0], ours.eval()(tokens)[0], rtol=1e-5, atol=1e-5)


def test_nanogpt_continues_our_run(tmp_path):
    """Three steps here and three in nanoGPT have the result of six steps here.

    The conversion removes the padding of the vocabulary, also from the moments of the embedding.
    """
    config = dataclasses.replace(CONFIG, activation="gelu", dropout=0.5)
    ours = make_model(activation="gelu")
    optimizer = ours.configure_optimizers(0.1, 1e-2, (0.9, 0.95), "cpu")
    for group in optimizer.param_groups:
        # The gradient of the keys' bias is 0, except for rounding errors, which Adam would amplify with a smaller eps.
        group["eps"] = 1e-3
    batches = torch.randint(50, (6, 2, 8))

    def train(model, optimizer, batches):
        for tokens in batches:
            optimizer.zero_grad()
            model(tokens, tokens.roll(1))[1].backward()
            optimizer.step()

    train(ours, optimizer, batches[:3])
    path = tmp_path / "checkpoint.safetensors"
    save_training_state(path, config=config, model=ours, optimizer=optimizer.state_dict(), trainer={"step": 3})
    assert convert(tmp_path, tmp_path / "ckpt.pt").notes == ()
    train(ours, optimizer, batches[3:])

    checkpoint = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert checkpoint["iter_num"] == 3
    assert checkpoint["model_args"].pop("dropout") == 0.5
    theirs = published.GPT(published.Config(**checkpoint["model_args"]))
    theirs.load_state_dict(checkpoint["model"])
    their_optimizer = torch.optim.AdamW(nanogpt_groups(theirs))
    their_optimizer.load_state_dict(checkpoint["optimizer"])
    train(theirs, their_optimizer, batches[3:])
    for name, tensor in unpad(ours).items():
        torch.testing.assert_close(theirs.state_dict()[name], tensor, rtol=1e-4, atol=1e-4, msg=name)

    # A conversion from nanoGPT to nanoGPT renames a compiled model's parameters, and shortens the vocabulary.
    checkpoint["model"] = {f"_orig_mod.{name}": tensor for name, tensor in checkpoint["model"].items()}
    checkpoint["model_args"]["dropout"] = 0.0
    torch.save({**checkpoint, "best_val_loss": torch.tensor(2.5)}, tmp_path / "compiled.pt")
    assert convert(tmp_path / "compiled.pt", tmp_path / "cut.pt", vocab_size=40).notes == ()
    cut = torch.load(tmp_path / "cut.pt", weights_only=True)
    assert (cut["iter_num"], cut["best_val_loss"], cut["model_args"]["vocab_size"]) == (3, 2.5, 40)
    assert torch.equal(cut["optimizer"]["state"][0]["exp_avg"], checkpoint["optimizer"]["state"][0]["exp_avg"][:40])
    assert set(cut["model"]) == {name.removeprefix("_orig_mod.") for name in checkpoint["model"]}


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o.clear(),
        lambda o: o.update(param_groups=None),
        lambda o: o["param_groups"].pop(),
        lambda o: o["param_groups"].reverse(),
        lambda o: o["param_groups"][0].update(params=[torch.ones(2)] * 10),
        lambda o: o["state"].pop(3),
        lambda o: o["state"].update({3: None}),
        lambda o: o["state"][3].pop("exp_avg"),
        lambda o: o["state"][3].update(step=5),
        lambda o: o["state"][3].update(exp_avg=o["state"][3]["exp_avg"].to_sparse()),
        lambda o: o["state"][3].update(exp_avg=o["state"][3]["exp_avg"].to("meta")),
        lambda o: o["state"][3].update(exp_avg_sq=torch.ones(7)),
        lambda o: o["state"][0].update(exp_avg=torch.ones(49, 16)),
    ],
)
def test_another_optimizers_state_is_left_out(tmp_path, change):
    model = make_nanogpt()
    optimizer = torch.optim.AdamW(nanogpt_groups(model))
    tokens = torch.randint(50, (2, 8))
    model(tokens, tokens)[1].backward()
    optimizer.step()
    checkpoint = make_checkpoint(model, optimizer=optimizer.state_dict())
    assert convert(save_checkpoint(tmp_path, checkpoint), tmp_path / "a.pt").notes == ()
    change(checkpoint["optimizer"])
    notes = convert(save_checkpoint(tmp_path, checkpoint), tmp_path / "b.pt").notes
    assert notes[0] == "the state of its optimizer is not AdamW's for this model: it is left out"
    assert torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"]["state"] == {}


def test_a_parameter_with_two_names_is_refused(tmp_path):
    checkpoint = make_checkpoint(make_nanogpt())
    checkpoint["model"]["transformer.ln_f.weight"] = torch.ones(16)
    message = r"parameters both with and without '_orig_mod\.'"
    assert_raises(ValueError, message, load, save_checkpoint(tmp_path, checkpoint))


def test_the_optimizers_state_has_torchs_options(tmp_path):
    make_model().save_checkpoint(tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "b.pt")
    groups = torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"]["param_groups"]
    expected = torch.optim.AdamW(nanogpt_groups(make_nanogpt())).state_dict()["param_groups"]
    assert [set(group) for group in groups] == [set(group) for group in expected]
    assert [group["params"] for group in groups] == [group["params"] for group in expected]


def test_an_old_checkpoint_has_biases(tmp_path):
    checkpoint = make_checkpoint(make_nanogpt())
    del checkpoint["model_args"]["bias"], checkpoint["model_args"]["dropout"]
    assert GPT2.from_checkpoint(save_checkpoint(tmp_path, checkpoint)).config.bias


def test_vocab_size_removes_nanogpts_padding(tmp_path):
    """nanoGPT pads the vocabulary to 50304. Its files do not say how many of the tokens are padding."""
    model = make_model(vocab_size=50304, n_embd=2)
    path = write_as("nanogpt", tmp_path / "a", model)
    done = convert(path, tmp_path / "model.safetensors")
    assert done.config["vocab_size"] == 50304
    note = "if 50304 is GPT-2's vocabulary of 50257 with padding, --vocab-size 50257 takes the padding off"
    assert done.notes == (note,)
    done = convert(path, tmp_path / "b.bin", vocab_size=50257)
    assert done.config["vocab_size"] == 50257
    assert torch.equal(load_model(tmp_path / "b.bin")[1][WTE], model.lm_head.weight[:50257])


class Payload:
    def __reduce__(self):
        return (os.system, ("touch /tmp/gptkernels_has_run_code",))


def with_tensor(tensor):
    checkpoint = make_checkpoint(make_nanogpt())
    checkpoint["model"]["_orig_mod.transformer.ln_f.weight"] = tensor
    return checkpoint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: make_checkpoint(make_nanogpt(), config=Payload()), "holds posix.system, which is no tensor and no"),
        (lambda: Payload(), "holds posix.system"),
        (lambda: {"model": {}}, "it has no 'model_args'"),
        (lambda: make_nanogpt().state_dict(), "it has no 'model'"),
        (lambda: [1, 2], "it has no 'model'"),
        (lambda: {"model": {1: torch.ones(1)}, "model_args": {}}, "it has no 'model' with names"),
        (lambda: make_checkpoint(make_nanogpt(), model_args={"n_layer": 2}), "block_size is None, must be an integer"),
        (lambda: make_checkpoint(make_nanogpt(), model={}), "but there are 0 parameters"),
        (lambda: with_tensor("x"), "is no dense tensor"),
        # From torch 2.15 on, the second message is raised.
        (lambda: with_tensor(torch.ones(16).to_sparse()), "is no dense tensor|no whole file of torch.save"),
        (lambda: with_tensor(torch.ones(16, device="meta")), "is no dense tensor"),
        (lambda: with_tensor(torch.ones(16, dtype=torch.int64)), "torch.int64, must be of a floating-point dtype"),
        (lambda: with_tensor(torch.ones(17)), "has shape (17,), must have (16,)"),
        (lambda: make_checkpoint(make_nanogpt(), config={"activation": "relu"}), "activation is 'relu', must be one"),
    ],
)
def test_other_pickles_are_refused(tmp_path, content, message):
    message = "|".join(map(re.escape, message.split("|")))
    for is_old in (False, True):
        path = save_checkpoint(tmp_path, content(), _use_new_zipfile_serialization=not is_old)
        expect_one_line_error(path, message)
    assert not os.path.exists("/tmp/gptkernels_has_run_code")


@pytest.mark.parametrize("arguments", [{"rotary": True}, {"dropout": 2.0}, {"dropout": None}, {"bias": "yes"}])
def test_unsupported_arguments_are_refused(tmp_path, arguments):
    checkpoint = make_checkpoint(make_nanogpt())
    checkpoint["model_args"] |= arguments
    assert_raises(ValueError, next(iter(arguments)), load, save_checkpoint(tmp_path, checkpoint))


def test_tensors_larger_than_the_file_are_refused(tmp_path):
    """A file may contain an expanded tensor, be compressed, or declare a wrong size (in torch's older format)."""
    C, huge = 2**14, torch.ones(1)
    config = {"block_size": 1, "vocab_size": 1, "n_layer": 1, "n_head": 1, "n_embd": C, "bias": False}
    names = {"wte": (1, C), "wpe": (1, C), "ln_f": (C,), "h.0.ln_1": (C,), "h.0.ln_2": (C,)}
    names |= {"h.0.attn.c_attn": (3 * C, C), "h.0.attn.c_proj": (C, C)}
    names |= {"h.0.mlp.c_fc": (4 * C, C), "h.0.mlp.c_proj": (C, 4 * C)}
    state = {f"transformer.{name}.weight": huge.expand(shape) for name, shape in names.items()}
    path = save_checkpoint(tmp_path, {"model": state, "model_args": config})
    assert path.stat().st_size < 10_000
    assert_raises(ValueError, r"the parameters take 12\d+ bytes, the files have", load, path)

    path = save_checkpoint(tmp_path, make_checkpoint(make_nanogpt()))
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(tmp_path / "small.pt", "w", 8) as compressed:
        for entry in whole.infolist():
            compressed.writestr(entry.filename, whole.read(entry))
    assert_raises(ValueError, "compressed", load, tmp_path / "small.pt")

    path = save_checkpoint(tmp_path, make_checkpoint(make_nanogpt()), _use_new_zipfile_serialization=False)
    raw = path.read_bytes()
    storage = pickle.dumps(50 * 16, 2)[2:-1]  # encodes the number of elements of the embedding
    assert raw.count(storage) >= 1
    path.write_bytes(raw.replace(storage, b"J" + struct.pack("<i", 2**31 - 1)))
    assert_raises(ValueError, "bytes of tensors, the file has", load, path)


def test_a_run_can_be_converted_before_its_first_step(tmp_path):
    model = make_model(dropout=0.25)
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95)).state_dict()
    path = tmp_path / "checkpoint.safetensors"
    save_training_state(path, config=model.config, model=model, optimizer=optimizer, trainer={"step": 0})
    done = convert(path, tmp_path / "ckpt.pt", dtype="float32")
    assert done.notes[-1] == "the optimizer's state is that before the first step"
    assert torch.load(tmp_path / "ckpt.pt", weights_only=True)["model_args"]["dropout"] == 0.25
