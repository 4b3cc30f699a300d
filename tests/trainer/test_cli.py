"""Tests that the command line accepts the documented flags, and reports bad input."""

import dataclasses
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import gptkernels
from gptkernels._command import accept_signals
from gptkernels.checkpoint import save_training_state
from gptkernels.data import TokenFile, load_tokenizer, write_tokens
from gptkernels.models import GPT2, GPT2Config
from gptkernels.trainer import cli
from gptkernels.trainer.cli import main
from gptkernels.trainer.config import TrainConfig, flag
from helpers import assert_raises
from small_runs import error_of

README = Path(__file__).parents[2] / "README.md"
SIZE = ["--layers", "1", "--heads", "2", "--channels", "16", "-b", "2", "-t", "16"]
SMALL = [*SIZE, "--steps", "3", "-v", "2", "-m", "1", "-s", "0", "-g", "4"]


@pytest.fixture
def prefix(tmp_path):
    write_tokens(tmp_path / "data_train.bin", [list(range(100)) * 50])
    write_tokens(tmp_path / "data_val.bin", [list(range(100))])
    load_tokenizer("bytes").save(tmp_path / "data")
    return str(tmp_path / "data")


@pytest.fixture
def run_train(prefix, device, tmp_path, monkeypatch):
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


def test_llmcs_short_flags_are_known(run_train, tmp_path):
    assert run_train("-o", "losses.log", "-l", "1e-3") == 0
    lines = [line.rsplit(":", 1)[0] for line in (tmp_path / "losses.log").read_text().splitlines()]
    assert lines == ["s:0 tel", "s:0 trl", "s:1 trl", "s:2 tel", "s:2 trl", "s:3 tel"]


def test_resume_continues_the_latest_run(run_train, tmp_path, capsys):
    assert run_train() == 0
    assert main(["train", "--resume", "--steps", "5"]) == 0
    assert "steps 3 to 5" in capsys.readouterr().out
    assert (tmp_path / "runs" / "tiny" / "main.log").read_text().count("trl") == 5


def test_auto_resume_begins_a_run_and_continues_it(run_train, capsys):
    assert run_train("--auto-resume") == 2
    assert "--auto-resume takes --output" in capsys.readouterr().err
    for steps, message in ((3, "steps 0 to 3"), (5, "steps 3 to 5")):
        assert run_train("--auto-resume", "--output", "run", "--steps", str(steps)) == 0
        assert message in capsys.readouterr().out


def test_the_printed_commands_can_be_typed(run_train, tmp_path, device, monkeypatch, capsys):
    def typed(label, *more):
        line = re.findall(rf"^{label}: (.*)", capsys.readouterr().out, re.M)[-1]
        start, arguments = re.fullmatch("(.*?gptkernels) (.*)", line).groups()
        commands.append(start)
        return main([*shlex.split(arguments), *more])

    commands = []
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "gptkernels"])
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "text.txt").write_text("some text\n" * 500)
    assert main(["prepare", "text.txt", "-o", "a folder/mine"]) == 0
    assert typed("to train on it", *SMALL, "--device", str(device)) == 0
    monkeypatch.setattr(sys, "argv", [".venv/bin/gptkernels"])
    assert main(["train", "--resume"]) == 0
    assert typed("to continue a text", "--max-new-tokens", "4") == 0
    (tmp_path / "gptkernels").touch(mode=0o755)
    assert main(["train", "--resume"]) == 0
    assert typed("to train on") == 0
    assert "steps 3 to 6" in capsys.readouterr().out
    assert commands == ["python3 -m gptkernels", ".venv/bin/gptkernels", "gptkernels"]
    lines = re.findall(r"`(?:\.venv/bin/)?gptkernels ((?:generate|prepare|train) .*?)`", README.read_text())
    assert len(lines) == 3
    for line in lines:
        more = [*SMALL, "--device", str(device)] if line.startswith("train") else []
        assert main([*shlex.split(line), *more]) == 0


@pytest.mark.parametrize("flags", [["-v", "0"], ["-m", "0"]])
def test_validation_can_be_switched_off(run_train, tmp_path, flags):
    assert run_train(*flags) == 0
    assert "tel" not in (tmp_path / "runs" / "tiny" / "main.log").read_text()


def test_a_run_of_zero_steps_writes_a_checkpoint(run_train, tmp_path):
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
        (["-i", "nothing"], "nothing_train.bin is missing: 'gptkernels prepare TEXT -o nothing' writes it"),
        (["--tokenizer", "nothing.bin"], "no tokenizer 'nothing.bin'"),
        (["-i", "."], "._train.bin is missing: 'gptkernels prepare . -o .' writes it"),
        (["--device", "abacus"], "device is 'abacus'"),
        (["--device", "cuda:99"], "device is 'cuda:99', this machine has"),
        (["--init-from", "nothing.bin"], "nothing.bin"),
        (["--steps", "1", "--epochs", "1"], "--steps and --epochs exclude each other"),
        (["--channels", "2000000000"], "GB of memory"),
        (["--layers", "1000000000"], "--layers 1000000000 and --channels 16 are"),
        (["--seed", str(2**62)], f"--seed is {2**62}, must be at most {2**62 - 1}"),
        (["-g", str(10**20)], f"--sample-length is {10**20}, must be at most"),
        (["-i", ""], "--data is empty"),
        (["--output", ""], "--output is empty"),
        (["--init-from", "."], "checkpoint.safetensors"),
        (["--init-from", "/dev/zero"], "/dev/zero is a character device, must be a regular file"),
        (["--resume", ""], "--resume is empty"),
        (["--resume"], "no run with a checkpoint in runs/"),
        (["--resume", "elsewhere"], "elsewhere holds no checkpoint.safetensors"),
    ],
)
def test_bad_input_is_reported_at_once(run_train, flags, message, tmp_path, capsys):
    started = time.process_time()
    assert run_train(*flags) == 2
    assert time.process_time() - started < 1
    captured = capsys.readouterr().err
    assert captured.startswith("gptkernels train: error: ")
    assert message in captured
    assert captured.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_token_outside_the_vocabulary_is_reported(run_train, prefix, capsys):
    write_tokens(f"{prefix}_train.bin", [[300] * 1000])
    assert run_train() == 2
    assert re.search(r"token 300 at position \d+ is outside the vocabulary of 256", capsys.readouterr().err)


def test_a_checkpoint_of_another_trainer_is_reported(tmp_path, capsys):
    model = GPT2(GPT2Config(block_size=4, vocab_size=8, n_layer=1, n_head=1, n_embd=4))
    save_training_state(tmp_path / "checkpoint.safetensors", config=model.config, model=model, optimizer={}, trainer={})
    error = error_of(capsys, "train", "--resume", tmp_path)
    assert "checkpoint.safetensors: options: not those of this trainer" in error


def test_the_traceback_flag_raises_errors(prefix):
    assert_raises(ValueError, "--batch-size is 0", main, ["--traceback", "train", "-i", prefix, "-b", "0"])


@pytest.mark.parametrize(
    ("text", "flags", "vocabulary"),
    [
        ("It is a truth universally acknowledged.\n" * 50, ["--val-fraction", "0.2"], 256),
        ("zwei mal drei macht fünf\n" * 100, ["--tokenizer", "char"], 17),
    ],
    ids=["bytes", "characters"],
)
def test_prepared_files_can_be_used(tmp_path, device, capsys, text, flags, vocabulary):
    (tmp_path / "text.txt").write_text(text)
    prefix, run = str(tmp_path / "out" / "data"), str(tmp_path / "run")
    assert main(["prepare", str(tmp_path / "text.txt"), "--output", prefix, *flags]) == 0
    out = capsys.readouterr().out
    assert f"{prefix}_train.bin: {len(TokenFile(prefix + '_train.bin')):,} tokens" in out
    assert f"a vocabulary of {vocabulary}" in out
    on = ["--device", str(device)]
    assert main(["train", "-i", prefix, *SMALL, "--output", run, *on]) == 0
    assert main(["generate", run, "--max-new-tokens", "4", *on]) == 0
    assert main(["train", "-i", prefix, *SMALL, "--output", str(tmp_path / "other"), "--init-from", run, *on]) == 0


def test_prepare_reports_missing_files_and_nul_bytes(tmp_path, capsys):
    error = error_of(capsys, "prepare", tmp_path / "no.txt", "--output", tmp_path / "x")
    assert "gptkernels prepare: error: no such file" in error
    (tmp_path / "binary").write_bytes(b"a\0b" * 100)
    assert main(["prepare", str(tmp_path / "binary"), "-o", str(tmp_path / "x")]) == 0
    assert "the text has NUL bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("train", ["--batch_size=3"], "unrecognized arguments: --batch_size=3: did you mean --batch-size?"),
        ("train", ["--leanring-rate", "3"], "unrecognized arguments: --leanring-rate 3: did you mean --learning-rate?"),
        ("train", ["--eval_only=True"], "did you mean --eval-only?"),
        ("generate", ["x", "--max_new_tokens", "3"], "did you mean --max-new-tokens?"),
        ("train", ["--nonsense"], "unrecognized arguments: --nonsense\n"),
        ("train", ["-j", "x_val_*.bin"], "unrecognized arguments: -j x_val_*.bin\n"),
        ("train", ["config/train_gpt2.py"], "unrecognized arguments: config/train_gpt2.py\n"),
        ("train", ["--bias=False"], "argument --bias/--no-bias: ignored explicit argument 'False'"),
    ],
)
def test_unknown_options_have_suggestions(command, flags, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, *flags])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("command", "advice"), [("info", "\n"), ("train", ". A smaller --batch-size")])
@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_out_of_memory_is_reported(error, command, advice, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr(cli, f"_{command}", fail)
    assert f"gptkernels {command}: error: out of memory{advice}" in error_of(capsys, command)


@pytest.mark.parametrize(
    "command",
    [
        "train --init-from memory.bin --steps 1",
        "train --tokenizer memory.bin",
        "train --eval-file memory.bin",
        "prepare texts --output x",
        "prepare text.txt --output memory",
        "generate memory.bin",
        "generate hugging_face",
        "convert memory.bin x.pt",
    ],
)
def test_a_failing_read_names_the_file(command, prefix, tmp_path, monkeypatch, capsys):
    """The first bytes of /proc/self/mem, a regular file, cannot be read."""
    monkeypatch.chdir(tmp_path)
    for folder in ("texts", "hugging_face"):
        (tmp_path / folder).mkdir()
    (tmp_path / "text.txt").write_text("text\n" * 10)
    for name in ("memory.bin", "memory_train.bin", "texts/memory.txt", "hugging_face/config.json"):
        (tmp_path / name).symlink_to("/proc/self/mem")
    data = ["-i", prefix] if command.startswith("train") else []
    error = error_of(capsys, *command.split(), *data, status=3)
    assert re.search(r"error: \[Errno 5\] Input/output error: '\S*(memory|config)\S*'", error)


def test_internal_errors_keep_their_traceback(monkeypatch):
    def fail():
        raise RuntimeError("a fault of this program")

    monkeypatch.setattr(cli, "_info", fail)
    assert_raises(RuntimeError, "a fault of this program", main, ["info"])


class Unwritable(io.StringIO):
    def __init__(self, error):
        super().__init__()
        self._error = error

    def write(self, text):
        raise self._error


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (BrokenPipeError(), 141, ""),
        (OSError(28, "No space left on device"), 3, "gptkernels info: error: [Errno 28] No space left on device\n"),
    ],
)
def test_a_failing_stdout_ends_a_command(error, status, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Unwritable(error))
    assert error_of(capsys, "info", status=status) == message


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "No space left on device")])
def test_training_continues_with_a_failing_stdout(run_train, tmp_path, monkeypatch, error):
    monkeypatch.setattr(sys, "stdout", Unwritable(error))
    assert run_train("-s", "1") == 0
    assert (tmp_path / "runs" / "tiny" / "main.log").read_text().count("trl") == 3
    assert (tmp_path / "runs" / "tiny" / "checkpoint.safetensors").exists()


def test_training_continues_in_an_ascii_locale(run_train, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert run_train("-s", "1", "-g", "64", "--output", "é") == 0
    assert b"in \\xe9" in raw.getvalue()
    assert b"\\ufffd" in raw.getvalue()  # from the sample, which an untrained model generated


def test_commands_run_without_streams(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(["info"]) == 0
    assert main(["prepare", "nothing", "-o", "x"]) == 2


def test_info_prints_what_info_returns(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert all(f"{name}: {value}" in text for name, value in gptkernels.info().items())


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"gptkernels {gptkernels.__version__}\n"


def test_ctrl_c_during_the_imports_has_no_traceback(tmp_path):
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    path = os.pathsep.join([str(tmp_path), str(Path(gptkernels.__file__).parents[1])])
    with subprocess.Popen(
        [sys.executable, "-m", "gptkernels", "info"],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    ) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""
    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_after_the_imports_ends_a_command_with_a_sentence(number, name, monkeypatch, capsys):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        monkeypatch.setattr(cli, "_info", lambda: signal.raise_signal(number))
        assert main(["info"]) == 128 + number
        assert capsys.readouterr().err == f"\ngptkernels info: stopped by {name}\n"
    finally:
        signal.signal(number, before)


def test_sigterm_keeps_its_action_in_one_of_several_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        accept_signals()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("bake", "choose from"),
        ("trian", "did you mean train?"),
        ("--verson", "unrecognized arguments: --verson: did you mean --version?"),
        ("--verson train", "unrecognized arguments: --verson: did you mean --version?"),
        ("train --model gpt2-medum", "did you mean gpt2-medium?"),
        ("train --dtype bf16", "did you mean bfloat16?"),
    ],
)
def test_unknown_names_have_suggestions(line, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    assert message in capsys.readouterr().err
