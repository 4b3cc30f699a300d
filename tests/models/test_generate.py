"""Tests that `gptkernels generate` streams reproducible text, and reports bad input in one sentence."""

import io
import os
import re
import subprocess
import sys
from contextlib import suppress

import pytest
import torch

from gptkernels.checkpoint import save_model
from gptkernels.data import load_tokenizer
from gptkernels.data.tokenizer import CharTokenizer
from gptkernels.models import GPT2, GPT2Config
from gptkernels.trainer.cli import main
from gptkernels.trainer.generate import Sampling, Writer
from gptkernels.trainer.progress import printable
from helpers import assert_raises
from small_runs import error_of


def save_model_of(path, **sizes):
    torch.manual_seed(0)
    model = GPT2(GPT2Config(**{"block_size": 32, "vocab_size": 256, "n_layer": 1, "n_head": 2, "n_embd": 16} | sizes))
    save_model(path, model.state_dict(), model.config)
    return model


@pytest.fixture
def checkpoint(tmp_path):
    save_model_of(tmp_path / "model.bin")
    return tmp_path / "model.bin"


@pytest.fixture
def generate(checkpoint, capsys):
    def run(*flags, path=checkpoint, device="cpu"):
        status = main(["generate", str(path), *flags, "--device", str(device)])
        return status, *capsys.readouterr()

    return run


def write(checkpoint, device, seed=0, prompt="ab", **sampling):
    writer = Writer(checkpoint, device=str(device), seed=seed)
    return "".join(writer.write(prompt, Sampling(**{"max_new_tokens": 20} | sampling)))


def test_a_seed_fixes_the_text(checkpoint, device):
    assert write(checkpoint, device, seed=3) == write(checkpoint, device, seed=3)
    assert write(checkpoint, device, seed=3) != write(checkpoint, device, seed=4)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}], ids=str)
def test_temperature_0_top_1_and_a_tiny_top_p_are_greedy(checkpoint, device, options):
    assert write(checkpoint, device, seed=2, **options) == write(checkpoint, device, seed=1, temperature=0.0)


def test_top_p_of_1_leaves_every_token(checkpoint, device):
    assert write(checkpoint, device, seed=1, top_p=1.0) == write(checkpoint, device, seed=1)


def test_an_empty_prompt_begins_a_document(checkpoint, device):
    assert write(checkpoint, device, prompt="") == write(checkpoint, device, prompt="\0")


class Script:
    """Generates the given bytes after every prompt, in place of a model."""

    def __init__(self, data):
        self.data = data

    def stream(self, tokens, max_new_tokens, temperature, top_k, generator):
        yield from (torch.tensor([byte]) for byte in self.data[:max_new_tokens])


def make_scripted(checkpoint, data):
    writer = Writer(checkpoint, device="cpu")
    writer.model = Script(data)
    return writer


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        ("añ€".encode(), ["a", "ñ", "€"]),
        (b"a\xffb\xe2\x82", ["a", "\ufffd", "b", "\ufffd"]),
        (b"over\0and out", ["o", "v", "e", "r"]),
    ],
    ids=["whole characters", "invalid bytes", "the end-of-text token"],
)
def test_text_is_streamed_by_characters_up_to_its_end(checkpoint, data, pieces):
    assert [piece for piece in make_scripted(checkpoint, data).write() if piece] == pieces


@pytest.fixture
def character_checkpoint(tmp_path):
    path = tmp_path / "chars[1].safetensors"
    save_model_of(path, vocab_size=5)
    CharTokenizer([b"\n", b"a", b"b", "é".encode(), "中".encode()]).save(path.with_suffix(""))
    return path


def test_the_text_has_only_characters_of_the_vocabulary(character_checkpoint, device):
    text = write(character_checkpoint, device, prompt="")
    assert text
    assert set(text) <= set("\nabé中")
    assert text == write(character_checkpoint, device, prompt="\n")


def test_a_prompt_that_cannot_be_encoded_is_not_echoed(character_checkpoint, generate):
    error = "gptkernels generate: error: the vocabulary of 5 characters has no 'c'\n"
    assert generate("--prompt", "abc", path=character_checkpoint) == (2, "", error)


def test_interactive_mode_continues_after_bad_lines(character_checkpoint, generate, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\n\xff\xfe\nz\nb\n"), encoding="utf-8"))
    status, out, err = generate("--interactive", "--max-new-tokens", "1", path=character_checkpoint)
    assert (status, out.count("> ")) == (0, 5)
    assert err.count("error: the vocabulary of 5 characters has no") == 2


def test_a_prompt_may_have_invalid_utf8(checkpoint, device):
    assert write(checkpoint, device, prompt="a\udcff") != write(checkpoint, device, prompt="a\ufffd")


def test_control_characters_of_a_prompt_are_replaced(generate):
    assert generate("--prompt", "a\x1b[2J\udcff", "--max-new-tokens", "0") == (0, "a\ufffd[2J\ufffd\n", "")


def test_interactive_mode_begins_with_the_given_prompt(generate, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert generate("--prompt", "ab", "--interactive", "--max-new-tokens", "0") == (0, "ab\n> \n", "")


@pytest.mark.parametrize(
    ("path", "message"),
    [("fifo", "a regular file"), ("/dev/zero", "a regular file"), ("", "checkpoint.safetensors")],
)
def test_what_is_no_checkpoint_is_reported(tmp_path, path, message, capsys):
    os.mkfifo(tmp_path / "fifo")
    assert message in error_of(capsys, "generate", tmp_path / path)


def test_a_model_of_the_hub_must_be_downloaded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    error = error_of(capsys, "generate", "openai-community/gpt2")
    assert "download it first: hf download openai-community/gpt2 --local-dir gpt2\n" in error


def test_interactive_mode_has_line_editing(checkpoint):
    controller, terminal = os.openpty()
    command = [sys.executable, "-m", "gptkernels", "generate", checkpoint, "--interactive", "--max-new-tokens", "0"]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        os.write(controller, b"bc\x01a\n")
        shown, is_ended = b"", False
        with suppress(OSError):  # after the last byte
            while data := os.read(controller, 1024):
                shown += data
                if shown.count(b"> ") >= 2 and not is_ended:
                    is_ended = os.write(controller, b"\x04") == 1
    os.close(controller)
    assert process.returncode == 0
    assert b"\nabc\r\n" in shown


def test_interactive_mode_answers_every_line(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    make_scripted(checkpoint, b"!").converse(Sampling())
    assert re.findall(r"> (\w+!)\n", capsys.readouterr().out) == ["one!", "two!"]


def test_the_tokenizer_must_fit_the_vocabulary(tmp_path):
    save_model_of(tmp_path / "m.safetensors", vocab_size=300)
    message = "no tokenizer in its folder for its vocabulary of 300: name one by --tokenizer. For a model of characters"
    assert_raises(ValueError, message, Writer, tmp_path / "m.safetensors", device="cpu")
    load_tokenizer("bytes").save(tmp_path / "m")
    message = "a vocabulary of 300, the tokenizer 256"
    assert_raises(ValueError, message, Writer, tmp_path / "m.safetensors", device="cpu")


def test_the_command_prints_the_prompt_and_its_continuation(checkpoint, generate, device):
    found = generate("--prompt", "ab", "--max-new-tokens", "20", "--seed", "3", device=device)
    assert found == (0, f"ab{printable(write(checkpoint, device, seed=3))}\n", "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "1e-45"], "--temperature is 1e-45, must be 0 or at least 1e-06"),
        (["--seed", str(2**63)], f"--seed is {2**63}, must be in"),
        (["--temperature", "-1"], "--temperature is -1.0, must be finite and at least 0"),
        (["--top-p", "0"], "--top-p is 0.0, must be above 0 and at most 1"),
        (["--top-k", "-2"], "--top-k is -2, must be at least 1"),
        (["--max-new-tokens", "-1"], "--max-new-tokens is -1, must be at least 0"),
        (["--device", "abacus"], "device is 'abacus'"),
        (["--tokenizer", "nothing.bin"], "no tokenizer 'nothing.bin'"),
        (["--tokenizer", "gpt2"], "the model has a vocabulary of 256, the tokenizer 50257"),
    ],
)
def test_bad_options_are_reported(checkpoint, flags, message, monkeypatch, capsys):
    monkeypatch.setattr("gptkernels.data.tokenizer.GPT2Tokenizer", None)  # its files would be downloaded
    error = error_of(capsys, "generate", checkpoint, *flags)
    assert re.match(rf"gptkernels generate: error: (\S+: )?{re.escape(message)}", error)


def test_weights_that_are_not_finite_are_reported(checkpoint, device, capsys):
    model = save_model_of(checkpoint)
    model.transformer.ln_f.weight.data[3] = torch.nan
    save_model(checkpoint, model.state_dict(), model.config)
    error = error_of(capsys, "generate", checkpoint, "--device", device)
    assert "model.bin: transformer.ln_f.weight holds NaN or infinity: the model has" in error


@pytest.mark.parametrize(
    ("redirection", "status", "errors"),
    [("| true", 141, 0), ("> /dev/full", 3, 1), ("--interactive <&- >&- 2>&-", 0, 0)],
)
def test_closed_output_ends_the_command(checkpoint, redirection, status, errors):
    command = f"{sys.executable} -m gptkernels generate {checkpoint} --device cpu {redirection}"
    result = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == status
    assert result.stderr.count("\n") == errors
