"""The command line: its flags, and the answers that bad input gets."""

import dataclasses
import re
import subprocess
import sys

import pytest

import gptkernels
from gptkernels.checkpoint import save_training_state
from gptkernels.cli import main
from gptkernels.data import TokenFile, load_tokenizer, write_tokens
from gptkernels.models import GPT2, GPT2Config
from gptkernels.training.config import TrainConfig, flag

SIZE = ["--layers", "1", "--heads", "2", "--channels", "16", "-b", "2", "-t", "16"]
SMALL = [*SIZE, "--steps", "3", "-v", "2", "-m", "1", "-s", "0", "-g", "4"]


@pytest.fixture
def prefix(tmp_path):
    """The prefix of 5000 tokens of bytes, and 100 for validation."""
    write_tokens(tmp_path / "data_train.bin", [list(range(100)) * 50])
    write_tokens(tmp_path / "data_val.bin", [list(range(100))])
    load_tokenizer("bytes").save(tmp_path / "data")
    return str(tmp_path / "data")


@pytest.fixture
def run_train(prefix, device, tmp_path, monkeypatch):
    """Run `gptkernels train` on the small data, with more flags."""
    monkeypatch.chdir(tmp_path)
    return lambda *flags: main(["train", "-i", prefix, *SMALL, "--device", str(device), *flags])


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for option in dataclasses.fields(TrainConfig):
        assert flag(option.name) in text
        if type(option.default) in (int, float, str):
            assert f"(default: {option.default})" in text
    for short in "iobtlvmsg":
        assert f" -{short} " in text


def test_the_original_flags(run_train, tmp_path):
    assert run_train("-o", "losses.log", "-l", "1e-3") == 0
    lines = (tmp_path / "losses.log").read_text().splitlines()
    assert [line.rsplit(":", 1)[0] for line in lines] == [
        "s:0 tel",
        "s:0 trl",
        "s:1 trl",
        "s:2 tel",
        "s:2 trl",
        "s:3 tel",
    ]


def test_resume_continues_the_latest_run(run_train, tmp_path, capsys):
    assert run_train() == 0
    assert main(["train", "--resume", "--steps", "5"]) == 0
    assert "steps 3 to 5" in capsys.readouterr().out
    assert (tmp_path / "runs" / "tiny" / "main.log").read_text().count("trl") == 5


@pytest.mark.parametrize("flags", [["-v", "0"], ["-m", "0"]])
def test_validation_can_be_switched_off(run_train, tmp_path, flags):
    assert run_train(*flags) == 0
    assert "tel" not in (tmp_path / "runs" / "tiny" / "main.log").read_text()


def test_no_steps_is_a_run(run_train, tmp_path):
    assert run_train("--steps", "0") == 0
    assert (tmp_path / "runs" / "tiny" / "checkpoint.safetensors").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-b", "0"], "--batch-size is 0, must be at least 1"),
        (["-v", "-1"], "--val-every is -1, must be at least 0"),
        (["-t", "2000", "--model", "gpt2"], "--sequence-length is 2000, the model has 1024 positions"),
        (["-b", "1000"], "5000 tokens are too few for a batch of B=1000 sequences of T=16"),
        (["--heads", "3"], "--channels is 16, must be a multiple of --heads, 3"),
        (["-i", "nothing"], "nothing_train.bin"),
        (["--tokenizer", "nothing.bin"], "no tokenizer 'nothing.bin'"),
        (["--device", "abacus"], "device is 'abacus'"),
        (["--device", "cuda:99"], "device is 'cuda:99', this machine has"),
        (["--init-from", "nothing.bin"], "nothing.bin"),
        (["--steps", "1", "--epochs", "1"], "--steps and --epochs exclude each other"),
        (["--resume"], "no run with a checkpoint in runs/"),
        (["--resume", "elsewhere"], "elsewhere holds no checkpoint.safetensors"),
    ],
)
def test_bad_input_gets_a_sentence(run_train, flags, message, capsys):
    assert run_train(*flags) == 2
    captured = capsys.readouterr().err
    assert captured.startswith("gptkernels train: error: ")
    assert message in captured
    assert captured.count("\n") == 1


def test_bad_input_leaves_no_folder(run_train, tmp_path):
    assert run_train("-b", "1000") == 2
    assert not (tmp_path / "runs").exists()


def test_a_token_outside_the_vocabulary_gets_a_sentence(run_train, prefix, capsys):
    write_tokens(f"{prefix}_train.bin", [[300] * 1000])
    assert run_train() == 2
    assert re.search(r"token 300 at position \d+ is outside the vocabulary of 256", capsys.readouterr().err)


def test_a_checkpoint_of_another_trainer_gets_a_sentence(tmp_path, capsys):
    model = GPT2(GPT2Config(block_size=4, vocab_size=8, n_layer=1, n_head=1, n_embd=4))
    save_training_state(tmp_path / "checkpoint.safetensors", config=model.config, model=model, optimizer={}, trainer={})
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert "checkpoint.safetensors: options: not those of this trainer" in capsys.readouterr().err


def test_traceback_when_asked(prefix):
    with pytest.raises(ValueError, match="--batch-size is 0"):
        main(["--traceback", "train", "-i", prefix, "-b", "0"])


def test_prepare_writes_token_files_that_train_takes(tmp_path, capsys, device):
    (tmp_path / "text.txt").write_text("It is a truth universally acknowledged.\n" * 50)
    prefix = str(tmp_path / "out" / "truth")
    assert main(["prepare", str(tmp_path / "text.txt"), "--output", prefix, "--val-fraction", "0.2"]) == 0
    assert f"{prefix}_train.bin: {len(TokenFile(prefix + '_train.bin')):,} tokens" in capsys.readouterr().out
    output = ["--output", str(tmp_path / "run"), "--device", str(device)]
    assert main(["train", "-i", prefix, *SMALL, *output]) == 0


def test_prepare_with_a_missing_file_gets_a_sentence(tmp_path, capsys):
    assert main(["prepare", str(tmp_path / "no.txt"), "--output", str(tmp_path / "x")]) == 2
    assert "gptkernels prepare: error: no such file" in capsys.readouterr().err


def test_info_prints_what_info_returns(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert all(f"{name}: {value}" in text for name, value in gptkernels.info().items())


def test_the_module_runs():
    result = subprocess.run([sys.executable, "-m", "gptkernels", "bake"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "invalid choice" in result.stderr
