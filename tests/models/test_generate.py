"""Text from a checkpoint is reproducible and streamed; what cannot be generated gets an error of one sentence."""

import io
import os
import re
import subprocess
import sys

import pytest
import torch

from gptkernels.checkpoint import save_model
from gptkernels.data import load_tokenizer
from gptkernels.data.tokenizer import CharTokenizer
from gptkernels.models import GPT2, GPT2Config
from gptkernels.trainer.cli import main
from gptkernels.trainer.generate import Sampling, Writer
from gptkernels.trainer.progress import printable


def make_model(**sizes):
    given = {"block_size": 32, "vocab_size": 256, "n_layer": 1, "n_head": 2, "n_embd": 16} | sizes
    torch.manual_seed(0)
    return GPT2(GPT2Config(**given))


@pytest.fixture
def checkpoint(tmp_path):
    """Save an untrained model of bytes as llm.c's file."""
    model = make_model()
    save_model(tmp_path / "model.bin", model.state_dict(), model.config)
    return tmp_path / "model.bin"


def write(checkpoint, device, seed=0, prompt="ab", **sampling):
    writer = Writer(checkpoint, device=str(device), seed=seed)
    return "".join(writer.write(prompt, Sampling(**{"max_new_tokens": 20} | sampling)))


def test_a_seed_fixes_the_text(checkpoint, device):
    assert write(checkpoint, device, seed=3) == write(checkpoint, device, seed=3)
    assert write(checkpoint, device, seed=3) != write(checkpoint, device, seed=4)


def test_temperature_zero_and_top_1_are_greedy(checkpoint, device):
    greedy = write(checkpoint, device, seed=1, temperature=0.0)
    assert greedy == write(checkpoint, device, seed=2, temperature=0.0)
    assert greedy == write(checkpoint, device, seed=2, top_k=1)


def test_top_p(checkpoint, device):
    """A tiny share leaves only the likeliest token; all of the probability leaves every token."""
    assert write(checkpoint, device, seed=1, top_p=1e-6) == write(checkpoint, device, temperature=0.0)
    assert write(checkpoint, device, seed=1, top_p=1.0) == write(checkpoint, device, seed=1)


def test_an_empty_prompt_begins_a_document(checkpoint, device):
    assert write(checkpoint, device, prompt="") == write(checkpoint, device, prompt="\0")


class Script:
    """A model that generates the same bytes for every prompt."""

    def __init__(self, data):
        self.data = data

    def stream(self, tokens, max_new_tokens, temperature, top_k, generator):
        yield from (torch.tensor([byte]) for byte in self.data[:max_new_tokens])


def make_scripted(checkpoint, data):
    writer = Writer(checkpoint, device="cpu")
    writer.model = Script(data)
    return writer


def test_characters_are_streamed_whole(checkpoint):
    pieces = list(make_scripted(checkpoint, "añ€".encode()).write())
    assert pieces == ["a", "ñ", "€"]


def test_invalid_bytes_become_replacement_characters(checkpoint):
    assert "".join(make_scripted(checkpoint, b"a\xffb\xe2\x82").write()) == "a\ufffdb\ufffd"


def test_the_end_of_text_token_ends_the_text(checkpoint):
    assert "".join(make_scripted(checkpoint, b"over\0and out").write()) == "over"


@pytest.fixture
def character_checkpoint(tmp_path):
    """Save an untrained model of five characters with its tokenizer."""
    model = make_model(vocab_size=5)
    path = tmp_path / "chars[1].safetensors"
    save_model(path, model.state_dict(), model.config)
    CharTokenizer([b"\n", b"a", b"b", "é".encode(), "中".encode()]).save(path.with_suffix(""))
    return path


def test_character_vocabulary(character_checkpoint, device):
    text = write(character_checkpoint, device, prompt="")
    assert text
    assert set(text) <= set("\nabé中")
    assert text == write(character_checkpoint, device, prompt="\n")


def test_a_prompt_that_cannot_be_encoded_is_not_echoed(character_checkpoint, capsys):
    assert main(["generate", str(character_checkpoint), "--prompt", "abc", "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "gptkernels generate: error: the vocabulary of 5 characters has no 'c'\n"


def test_interactive_survives_bad_lines(character_checkpoint, monkeypatch, capsys):
    """Invalid UTF-8 and an unknown character are reported, and the next line is answered."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\n\xff\xfe\nz\nb\n"), encoding="utf-8"))
    arguments = ["generate", str(character_checkpoint), "--interactive", "--device", "cpu", "--max-new-tokens", "1"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err.count("error: the vocabulary of 5 characters has no") == 2
    assert captured.out.count("> ") == 5


def test_a_prompt_may_have_invalid_utf8(checkpoint, device):
    assert write(checkpoint, device, prompt="a\udcff") != write(checkpoint, device, prompt="a\ufffd")


def test_control_characters_of_a_prompt_are_replaced(checkpoint, capsys):
    arguments = ["--prompt", "a\x1b[2J\udcff", "--max-new-tokens", "0", "--device", "cpu"]
    assert main(["generate", str(checkpoint), *arguments]) == 0
    assert capsys.readouterr().out == "a\ufffd[2J\ufffd\n"


def test_interactive_begins_with_the_prompt_given(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    arguments = ["--prompt", "ab", "--interactive", "--max-new-tokens", "0", "--device", "cpu"]
    assert main(["generate", str(checkpoint), *arguments]) == 0
    assert capsys.readouterr().out == "ab\n> \n"


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero"])
def test_a_checkpoint_must_be_a_regular_file(tmp_path, capsys, kind):
    os.mkfifo(tmp_path / "fifo")
    assert main(["generate", str(tmp_path / kind)]) == 2
    assert "must be a regular file" in capsys.readouterr().err


def test_interactive_answers_every_line(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    make_scripted(checkpoint, b"!").converse(Sampling())
    assert re.findall(r"> (\w+!)\n", capsys.readouterr().out) == ["one!", "two!"]


def test_the_tokenizer_must_fit_the_vocabulary(tmp_path, device):
    model = make_model(vocab_size=300)
    save_model(tmp_path / "m.safetensors", model.state_dict(), model.config)
    with pytest.raises(ValueError, match="no tokenizer in its folder for its vocabulary of 300"):
        Writer(tmp_path / "m.safetensors", device=str(device))
    load_tokenizer("bytes").save(tmp_path / "m")
    with pytest.raises(ValueError, match="a vocabulary of 300, the tokenizer 256"):
        Writer(tmp_path / "m.safetensors", device=str(device))


def test_the_command_prints_the_prompt_and_its_continuation(checkpoint, device, capsys):
    command = ["generate", str(checkpoint), "--prompt", "ab", "--max-new-tokens", "20", "--device", str(device)]
    assert main([*command, "--seed", "3"]) == 0
    assert capsys.readouterr().out == f"ab{printable(write(checkpoint, device, seed=3))}\n"


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
    """Errors are reported before GPT-2's tokenizer is downloaded."""
    monkeypatch.setattr("gptkernels.data.tokenizer.GPT2Tokenizer", None)
    assert main(["generate", str(checkpoint), *flags]) == 2
    assert re.search(rf"gptkernels generate: error: (\S+: )?{re.escape(message)}", capsys.readouterr().err)


def test_weights_that_are_not_finite_are_reported(tmp_path, capsys, device):
    model = make_model()
    model.transformer.ln_f.weight.data[3] = torch.nan
    save_model(tmp_path / "model.bin", model.state_dict(), model.config)
    assert main(["generate", str(tmp_path / "model.bin"), "--device", str(device)]) == 2
    assert "model.bin: transformer.ln_f.weight holds NaN or infinity: the model has" in capsys.readouterr().err


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


def test_a_missing_checkpoint_is_reported(tmp_path, capsys):
    assert main(["generate", str(tmp_path)]) == 2
    assert "checkpoint.safetensors" in capsys.readouterr().err
