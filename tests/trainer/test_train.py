"""Tests of the trainer's parts, of whole runs, and of runs that are interrupted and resumed."""

import dataclasses
import errno
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch

from gptkernels.checkpoint import find_non_finite, load_training_state
from gptkernels.data import load_tokenizer, write_tokens
from gptkernels.files import safetensors as _safetensors
from gptkernels.files import writing as _files
from gptkernels.models import GPT2Config
from gptkernels.models.nanogpt import parameter_groups
from gptkernels.trainer import logs
from gptkernels.trainer.cli import main
from gptkernels.trainer.config import PRESETS, TrainConfig
from gptkernels.trainer.logs import CSV_COLUMNS, TrainingLog, TrainingStep
from gptkernels.trainer.plot import plot_losses
from gptkernels.trainer.plot import read_losses as read_losses_to_plot
from gptkernels.trainer.schedule import Schedule
from gptkernels.trainer.signals import stop_on_signals
from gptkernels.trainer.train import Trainer, resume
from helpers import assert_raises
from processes import run_programs
from small_runs import (
    SMALL,
    TEXT,
    assert_same_run,
    at_step,
    error_of,
    load_step,
    read_log,
    read_losses,
    run_flags,
    train_with,
    write_text,
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture
def options(data, tmp_path, device):
    return SMALL | {"data": data, "output": str(tmp_path / "run"), "device": str(device)}


KINDS = ["cosine", "linear", "wsd", "constant"]


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_warm_up_to_the_peak_and_decay_to_the_minimum(kind):
    schedule = Schedule(kind, 1e-3, 1e-4, warmup_steps=10, total_steps=100)
    rates = [schedule.rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(1e-4)
    assert rates[9] == rates[10] == pytest.approx(1e-3)
    assert rates[100] == schedule.rate(1000) == pytest.approx(1e-3 if kind == "constant" else 1e-4)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("cosine", {10: 1, 55: 0.55, 100: 0.1}),
        ("linear", {10: 1, 55: 0.55, 73: 0.37, 100: 0.1}),
        ("wsd", {10: 1, 79: 1, 80: 1, 85: 0.55, 100: 0.1}),  # the last fifth follows llm.c: 1 - sqrt(progress)
        ("constant", {10: 1, 100: 1}),
    ],
)
def test_schedules_between_the_peak_and_the_minimum(kind, expected):
    schedule = Schedule(kind, 1.0, 0.1, warmup_steps=10, total_steps=100)
    assert {step: schedule.rate(step) for step in expected} == pytest.approx(expected)


def test_the_decay_may_be_shorter_than_the_run():
    for kind in ("cosine", "linear"):
        schedule = Schedule(kind, 1.0, 0.1, warmup_steps=10, total_steps=100, decay_steps=50)
        assert [schedule.rate(step) for step in (10, 30, 50, 99)] == pytest.approx([1, 0.55, 0.1, 0.1])
    schedule = Schedule("wsd", 1.0, 0.1, warmup_steps=10, total_steps=100, decay_steps=40)
    assert [schedule.rate(step) for step in (60, 70, 100)] == pytest.approx([1, 0.55, 0.1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("total", "warmup", "decay"), [(0, 0, None), (1, 0, 1), (5, 5, 3), (5, 9, 20), (5, 0, 9)])
def test_rates_of_short_schedules_are_from_0_to_1(kind, total, warmup, decay):
    schedule = Schedule(kind, 1.0, 0.5, warmup, total, decay)
    assert all(0 < schedule.rate(step) <= 1 for step in range(total + 2))


def test_only_matrices_have_weight_decay():
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 5))
    model[2].weight = model[0].weight
    decayed, others = parameter_groups(model, 0.3)
    assert decayed["weight_decay"] == 0.3
    assert [p.shape for p in decayed["params"]] == [(5, 4)]
    assert others["weight_decay"] == 0.0
    assert [p.shape for p in others["params"]] == [(4,), (4,), (5,)]


def log_three_steps(folder, first_step=0):
    log = TrainingLog(folder / "main.log", folder / "log.csv", first_step)
    for step in range(first_step, 3):
        log.validation(step, 2.0 + step)
        log.training(TrainingStep(step, 1.0 + step, 1e-3, 0.5, 10.0, 100.0))
    log.close()


def test_a_log_has_llmcs_lines_and_a_csv_row_for_each_loss(tmp_path):
    log_three_steps(tmp_path)
    lines = (tmp_path / "main.log").read_text().splitlines()
    assert lines[:4] == ["s:0 tel:2.0000", "s:0 trl:1.0000", "s:1 tel:3.0000", "s:1 trl:2.0000"]
    rows = read_log(tmp_path)
    assert tuple(rows[0]) == CSV_COLUMNS
    assert [row["split"] for row in rows] == ["val", "train"] * 3
    assert [float(row["loss"]) for row in rows] == [2, 1, 3, 2, 4, 3]


def test_a_log_is_continued_from_the_step_of_the_checkpoint(tmp_path):
    log_three_steps(tmp_path)
    texts = [(tmp_path / name).read_text() for name in ("main.log", "log.csv")]
    with open(tmp_path / "log.csv", "a") as file:
        file.write("3,train,0.")  # as if the run had been killed while it wrote a line
    log_three_steps(tmp_path, first_step=1)
    assert [(tmp_path / name).read_text() for name in ("main.log", "log.csv")] == texts


@pytest.mark.parametrize(
    ("text", "options", "kept"),
    [
        # The last run's lines from first_step on are removed. Lines of the run before it are kept.
        (
            "s:0 trl:9.0\ns:7 trl:9.0\ns:0 trl:5.0\ns:1 trl:5.0\ns:2 tel:5.0\ns:3 tr",
            {"first_step": 1},
            "s:0 trl:9.0\ns:7 trl:9.0\ns:0 trl:5.0\n",
        ),
        ("s:0 trl:9.0\ns:7 trl:nan\ns:8", {"keep_log": True}, "s:0 trl:9.0\ns:7 trl:nan\n"),
    ],
    ids=["resumed", "keep_log"],
)
def test_a_log_keeps_the_lines_of_earlier_runs(tmp_path, text, options, kept):
    (tmp_path / "main.log").write_text(text)
    log = TrainingLog(tmp_path / "main.log", tmp_path / "log.csv", **options)
    log.validation(0, 1.0)
    log.close()
    assert (tmp_path / "main.log").read_text() == kept + "s:0 tel:1.0000\n"


@pytest.mark.parametrize("text", ["my notes\n", "s:0 trl:1.0\nmy notes\n", "notes", "step,split\n1,2\n", "\0" * 9000])
def test_other_files_are_not_written_as_logs(tmp_path, text):
    for log, csv_file in ((tmp_path / "foreign", tmp_path / "log.csv"), (tmp_path / "main.log", tmp_path / "foreign")):
        (tmp_path / "foreign").write_text(text)
        assert_raises(ValueError, r"foreign: .* not written to", TrainingLog, log, csv_file)
        assert (tmp_path / "foreign").read_text() == text


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "dangling link", "loop"])
def test_a_log_must_be_a_regular_file(options, tmp_path, kind, monkeypatch):
    log = tmp_path / "log"
    if kind == "fifo":
        os.mkfifo(log)
    elif kind == "folder":
        log.mkdir()
    elif kind == "device":
        log = "/dev/full"
    else:
        log.symlink_to(log if kind == "loop" else tmp_path / "nothing")
    with pytest.raises(OSError if kind == "loop" else ValueError, match=re.escape(str(log))):
        train_with(options, log_file=log)
    assert not (tmp_path / "nothing").exists()
    assert not (tmp_path / "run").exists()


def test_a_log_behind_a_link_is_appended_to_and_the_link_stays(options, tmp_path):
    log, link = tmp_path / "real.log", tmp_path / "link.log"
    log.write_text("s:0 trl:9.0000\n")
    link.symlink_to(log)
    train_with(options, log_file=link)
    assert link.is_symlink()
    assert log.read_text().startswith("s:0 trl:9.0000\ns:0 tel:")


@pytest.mark.parametrize("name", ["log.csv", "checkpoint.safetensors", "loss.png"])
def test_another_file_of_the_run_is_not_written_as_a_log(options, tmp_path, name):
    log = tmp_path / "run" / name
    assert_raises(ValueError, "is another file of this run", train_with, options, log_file=log)


@pytest.mark.parametrize("name", ["main.log", "log.csv", "loss.png", "checkpoint_tokenizer.bin"])
def test_a_folder_with_other_files_is_refused(options, tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("precious")
    assert_raises(ValueError, f"holds a {name} that is not of a run", train_with, options)
    assert [(file.name, file.read_text()) for file in (tmp_path / "run").iterdir()] == [(name, "precious")]


def test_the_plot_skips_malformed_rows(tmp_path):
    log_three_steps(tmp_path)
    with open(tmp_path / "log.csv", "ab") as file:
        file.write(b"9,test,1.0\nx,train,1.0,,,,\n9,val\n9,train,x\n\xff\n\n3,train,7.0,1,1,1,1\n")
    found = read_losses_to_plot(tmp_path / "log.csv")
    assert found == {"train": ([0, 1, 2, 3], [1, 2, 3, 7]), "val": ([0, 1, 2], [2, 3, 4])}


def test_the_second_signal_interrupts(capfd):
    before = signal.default_int_handler
    inherited = signal.signal(signal.SIGINT, before)  # a shell's background processes ignore SIGINT
    ending = signal.getsignal(signal.SIGTERM)
    try:
        with stop_on_signals() as request:
            assert not request.signal
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGTERM) is ending
            assert request.signal == signal.SIGINT
            assert "stopping after this step, with a checkpoint" in capfd.readouterr().err
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, inherited)


def test_a_preset_sets_the_options_that_are_not_given():
    config = TrainConfig(model="gpt2", learning_rate=1e-4)
    assert (config.layers, config.heads, config.channels) == (12, 12, 768)
    assert (config.batch_size, config.sequence_length, config.learning_rate) == (4, 1024, 1e-4)
    assert (config.steps, config.epochs) == (None, 1.0)
    assert TrainConfig().steps == PRESETS["tiny"].steps
    # Checkpoints can store only plain values.
    assert {type(value) for value in dataclasses.asdict(TrainConfig()).values()} <= {int, float, str, bool, type(None)}


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "tiny"])
def test_presets_have_the_models_sizes(preset):
    ours, model = PRESETS[preset], GPT2Config.preset(preset)
    assert (ours.layers, ours.heads, ours.channels) == (model.n_layer, model.n_head, model.n_embd)
    assert ours.positions == model.block_size


def test_a_run_from_end_to_end(options, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("gptkernels.trainer.train.plot_losses", plot_losses)
    result = train_with(options)
    assert (result.step, result.signal, result.output) == (8, 0, tmp_path / "run")

    text = capsys.readouterr().out
    for expected in ("1 layers, 2 heads, 16 channels", "nats per byte", "sample at step 4", "sample at step 8"):
        assert expected in text
    assert result.sample in text

    losses = [float(loss) for _, split, loss, *_ in read_losses(result.output) if split == "train"]
    assert len(losses) == 8
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert losses[-1] == result.train_loss < losses[0]
    validated = [int(step) for step, split, *_ in read_losses(result.output) if split == "val"]
    assert validated == [0, 3, 6, 8]

    log = (result.output / "main.log").read_text()
    assert re.fullmatch(r"(s:\d+ (trl|tel):\d+\.\d{4}\n)+", log)
    assert f"s:8 tel:{result.val_loss:.4f}\n" in log
    assert (result.output / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert load_step(result.output) == 8


def test_a_seed_fixes_the_run(options, tmp_path):
    runs = [train_with(options, output=tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    assert_same_run(runs[0].output, runs[1].output)
    assert runs[0].sample == runs[1].sample
    assert read_losses(runs[0].output) != read_losses(runs[2].output)


def test_epochs_become_steps(options):
    run = Trainer(TrainConfig(**options | {"steps": None, "epochs": 0.5}))
    windows = (len(TEXT) - 1) // 16
    assert run.total_steps == math.ceil(0.5 * windows / 2)


def test_tensorboards_files_are_written(options, tmp_path):
    pytest.importorskip("tensorboard")
    train_with(options, tensorboard=True)
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_init_from_starts_with_another_runs_weights(options, tmp_path):
    first = train_with(options)
    given = options | {"init_from": str(first.output / "checkpoint.safetensors"), "val_every": 1}
    train_with(given, output=tmp_path / "second")
    assert float(read_losses(tmp_path / "second")[0][2]) == first.val_loss
    message = r"n_layer 1 .* the options say n_layer 2"
    assert_raises(ValueError, message, train_with, given, layers=2, output=tmp_path / "third")


def test_data_without_a_tokenizer_has_gpt2s_tokens(data, options, tmp_path, capsys):
    for part in ("train", "val"):
        os.link(f"{data}_{part}.bin", tmp_path / f"plain_{part}.bin")
    result = train_with(options, data=str(tmp_path / "plain"))
    assert re.fullmatch(r"\d+( \d+){4}", result.sample)
    assert "nats per token" in capsys.readouterr().out


def test_validation_is_off_without_data(options, tmp_path, capsys):
    prefix = tmp_path / "own"
    write_tokens(f"{prefix}_train.bin", [list(TEXT)])
    load_tokenizer("bytes").save(prefix)
    for prepare, reason in (
        (lambda path: None, "is missing"),
        (lambda path: path.touch(), "is empty"),
        (lambda path: write_tokens(path, [[1, 2, 3]]), "holds 3 tokens, a batch takes 33"),
    ):
        prepare(tmp_path / "own_val.bin")
        result = train_with(options, data=prefix, output=tmp_path / reason.split()[1])
        assert result.val_loss is None
        assert reason in capsys.readouterr().out


def test_a_nan_loss_keeps_the_last_checkpoint(options, monkeypatch, tmp_path):
    loss = Trainer._loss

    def diverge(self, *batch):
        return loss(self, *batch) * (math.nan if self.step == 5 else 1)

    monkeypatch.setattr(Trainer, "_loss", diverge)
    message = r"the loss is nan .* at step 5"
    assert_raises(FloatingPointError, message, train_with, options, val_every=0, graph=False)
    assert load_step(tmp_path / "run") == 4


def test_weights_that_are_not_finite_are_not_saved(options, tmp_path):
    """The last step's loss is finite, but its update makes weights that are not."""
    message = r"not finite after 1 steps: .* There is no checkpoint yet"
    given = options | {"steps": 1, "learning_rate": 1e38, "warmup_steps": 0, "weight_decay": 1e3}
    assert_raises(FloatingPointError, message, train_with, given)
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()


@pytest.mark.parametrize(
    ("weight_decay", "sample_every", "message"),
    [
        (1e300, 0, "a weight or a moment is not finite"),
        (1e300, 1, "the logits of a sample are NaN or infinite"),
        (1e30, 0, "the logits of a sample are NaN or infinite"),  # the weights stay finite
    ],
)
def test_diverged_weights_are_reported(options, capsys, weight_decay, sample_every, message):
    given = {"steps": 2 if sample_every else 1, "warmup_steps": 0, "val_every": 0, "val_max_batches": 0}
    given |= {"weight_decay": weight_decay, "sample_every": sample_every, "sample_length": 4}
    error = error_of(capsys, "train", *run_flags(options | given), status=1)
    assert error.startswith(f"gptkernels train: error: {message} after 1 steps: training has diverged")
    assert error.count("\n") == 1


def test_the_last_of_many_checkpoints_is_finite(options, tmp_path):
    trainers = []
    make = Trainer._train

    def remember(self):
        trainers.append(self)
        make(self)

    def spoil():
        with torch.no_grad():
            trainers[0].model.transformer.ln_f.weight[3] = math.inf

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_train", remember)
        at_step(patch, 5, spoil)
        message = "The checkpoint of step 5 is kept"
        assert_raises(FloatingPointError, message, train_with, options, checkpoint_every=1, val_every=0)
    state = load_training_state(tmp_path / "run" / "checkpoint.safetensors")
    assert state.trainer["step"] == 5
    assert find_non_finite(state.model) is None


def test_non_finite_values_are_found_among_tensors_of_several_devices(device):
    tensors = {"steps": torch.zeros(()), "finite": torch.zeros(3, device=device), "none": torch.zeros(0)}
    assert find_non_finite(tensors) is None
    assert (
        find_non_finite(tensors | {"nan": torch.tensor([0, math.nan], device=device), "step": torch.zeros(())}) == "nan"
    )


def test_a_nan_validation_loss_ends_the_run(options, monkeypatch):
    monkeypatch.setattr(Trainer, "_loss", lambda self, *batch: torch.tensor(math.nan))
    assert_raises(FloatingPointError, "the validation loss is nan after 0 steps", train_with, options)


def test_each_step_is_logged_with_its_time(options, device, monkeypatch, tmp_path):
    """On a GPU, a step is launched before the previous loss is read. The test makes every device do so."""
    launch, make = Trainer._launch_step, Trainer.__init__

    def make_ahead(self, *args, **options):
        make(self, *args, **options)
        self._runs_ahead = True

    def slow_launch(self):
        time.sleep(0.03)
        return launch(self)

    monkeypatch.setattr(Trainer, "__init__", make_ahead)
    monkeypatch.setattr(Trainer, "_launch_step", slow_launch)
    train_with(options)
    times = [float(row["milliseconds"]) for row in read_log(tmp_path / "run", "train")]
    assert len(times) == 8
    # On a busy GPU, the end of a step may be delayed. The time of the next step is then shorter.
    assert sum(times) > 8 * 30
    assert min(times) > (30 if device.type == "cpu" else 1)


def fill_disk(monkeypatch, count):
    calls = [0]

    def failing(function):
        def call(*args, **options):
            calls[0] += 1
            if calls[0] >= count:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(*args, **options)

        return call

    for name in ("training", "validation"):
        monkeypatch.setattr(TrainingLog, name, failing(getattr(TrainingLog, name)))
    monkeypatch.setattr(_files, "fsync", failing(lambda path: None))
    monkeypatch.setattr(os, "replace", failing(os.replace))
    monkeypatch.setattr(_safetensors, "_tensor_checksum", failing(_safetensors._tensor_checksum))
    monkeypatch.setattr("gptkernels.trainer.logs._continue", failing(logs._continue))
    return calls


def test_a_full_disk_leaves_the_last_checkpoint(options, tmp_path, capsys):
    given = options | {"steps": 2, "val_every": 1, "sample_every": 0, "checkpoint_every": 1}
    with pytest.MonkeyPatch.context() as patch:
        total = fill_disk(patch, 10**9)
        assert main(["train", *run_flags(given)]) == 0
    steps = set()
    for count in (*range(1, total[0], 3), total[0]):  # the last call follows the last checkpoint
        output = tmp_path / f"run{count}"
        with pytest.MonkeyPatch.context() as patch:
            fill_disk(patch, count)
            error = error_of(capsys, "train", *run_flags(given | {"output": output}), status=3)
        assert "gptkernels train: error: [Errno 28] No space left on device" in error
        assert not list(output.glob(".*.tmp"))
        if (output / "checkpoint.safetensors").exists():
            steps.add(load_step(output))
    assert steps == {1, 2}


def test_two_runs_do_not_share_a_folder(options, tmp_path):
    message = f"run is in use: process {os.getpid()} is training there"
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 0, lambda: assert_raises(ValueError, message, train_with, options))
        at_step(patch, 5, lambda: assert_raises(ValueError, message, resume, str(tmp_path / "run")))
        assert train_with(options).step == 8
    assert resume(str(tmp_path / "run"), steps=9).step == 9


def test_unfinished_files_of_a_killed_run_are_removed(options, tmp_path):
    train_with(options)
    left = [tmp_path / "run" / name for name in (".checkpoint.safetensors.123.tmp", ".loss.png.9.tmp")]
    others = [tmp_path / "run" / name for name in (".notes.tmp", "checkpoint.tmp")]
    for path in (*left, *others):
        path.touch()
    resume(str(tmp_path / "run"), steps=9)
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in others)


def test_the_files_of_a_run_follow_the_umask(options, tmp_path):
    before = os.umask(0o027)
    try:
        train_with(options)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "run").iterdir() if path.is_file()}
    assert set(modes.values()) == {0o640}, modes


def test_another_run_is_not_overwritten(options):
    train_with(options)
    assert_raises(ValueError, "holds a run: --resume", train_with, options)


def test_each_run_has_a_new_folder_by_default(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outputs = [train_with(options, output=None, steps=1).output for _ in range(2)]
    assert [str(output) for output in outputs] == ["runs/tiny", "runs/tiny-2"]
    assert resume(steps=2).output == outputs[1]


@pytest.fixture
def whole_run(options, tmp_path):
    return train_with(options, output=tmp_path / "whole").output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_is_resumed_bit_for_bit(options, whole_run, number, tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 2, lambda: signal.raise_signal(number))
        stopped = train_with(options)
    assert stopped.signal == number
    assert 3 <= stopped.step <= 4  # on a GPU, the next step was already launched
    assert f"gptkernels train --resume {tmp_path / 'run'}" in capsys.readouterr().out
    assert_same_run(resume(str(stopped.output)).output, whole_run)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_finished_run_is_resumed_bit_for_bit(options, is_stopped):
    with pytest.MonkeyPatch.context() as patch:
        if is_stopped:
            at_step(patch, options["steps"] - 1, lambda: signal.raise_signal(signal.SIGTERM))
        checkpoint = train_with(options).output / "checkpoint.safetensors"
    before = checkpoint.read_bytes()
    assert resume(str(checkpoint.parent)).step == options["steps"]
    assert checkpoint.read_bytes() == before


# Runs `gptkernels`, and sends a signal to the process in the middle of a step, or of writing a checkpoint.
KILLED = """
import os, runpy, sys, threading, time

number, checkpoint, *sys.argv[1:] = sys.argv[1:]

def kill():
    while not os.path.exists(checkpoint):
        time.sleep(0.05)
    time.sleep(0.3)
    os.kill(os.getpid(), int(number))

threading.Thread(target=kill, daemon=True).start()
runpy.run_module("gptkernels", run_name="__main__")
"""


def test_a_killed_process_leaves_a_whole_checkpoint(options, tmp_path):
    given = options | {"steps": 10**6, "checkpoint_every": 1, "val_every": 0, "sample_every": 0}
    given |= {"warmup_steps": 0, "final_lr_fraction": 1.0}
    statuses = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
    folders = [tmp_path / number.name for number in statuses]
    processes = run_programs(
        *(
            (
                KILLED,
                [str(int(number)), f"{folder}/checkpoint.safetensors", "train", *run_flags(given | {"output": folder})],
                {},
            )
            for number, folder in zip(statuses, folders, strict=True)
        )
    )
    for folder, process, status in zip(folders, processes, statuses.values(), strict=True):
        assert process.returncode == status, process.stderr
        assert "Traceback" not in process.stderr
        steps = load_step(folder) + 2
        resumed = resume(str(folder), steps=steps)
        whole = train_with(given, steps=steps, output=tmp_path / "whole" / folder.name)
        assert_same_run(resumed.output, whole.output)


@pytest.mark.parametrize("redirection", ["| head -1", ">&- 2>&-"])
def test_a_run_continues_without_its_output(options, tmp_path, redirection):
    flags = shlex.join(run_flags(options))
    command = f"{sys.executable} -m gptkernels train {flags} {redirection}; echo ${{PIPESTATUS[0]}} >&3"
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    with open(tmp_path / "status", "w") as status:
        result = subprocess.run(
            ["bash", "-c", f"exec 3>&{status.fileno()}; {command}"],
            pass_fds=[status.fileno()],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert (tmp_path / "status").read_text() == "0\n", result.stderr
    assert result.stderr == ""
    assert load_step(tmp_path / "run") == 8


def run_together(count, options):
    """The processes have the variables of torchrun, and a store of this process for their addresses, as torchrun's."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(count)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    code = 'import runpy; runpy.run_module("gptkernels", run_name="__main__")'
    arguments = ["train", *run_flags(options)]
    ranks = (shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count))
    done = run_programs(*((code, arguments, rank) for rank in ranks))
    assert [process.returncode for process in done] == [0] * count, "\n".join(process.stderr for process in done)


@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (4, {"dtype": "bfloat16"}),
        (2, {"dtype": "float32"}),
        (2, {"shard": "params"}),
        (4, {"shard": "params", "grad_clip": 0.5}),
    ],
)
def test_the_layout_changes_no_bit(options, device, tmp_path, count, changes):
    if device.type == "cuda" and torch.cuda.device_count() < count:
        pytest.skip("needs a GPU for each process")
    given = options | {"output": str(tmp_path / "divided"), "val_every": 0, "skip_update_gradz": 1e9} | changes
    run_together(count, given | {"deterministic_layout": True})
    train_with(given, shard="none", grad_accumulation=count, output=tmp_path / "one")
    assert_same_run(tmp_path / "divided", tmp_path / "one")


def test_the_division_of_the_batch_changes_no_bit_of_divided_layers(options, device, tmp_path):
    if device.type == "cuda" and torch.cuda.device_count() < 4:
        pytest.skip("needs a GPU for each process")
    given = options | {"output": str(tmp_path / "divided"), "val_every": 0, "sample_every": 0, "sample_length": 0}
    given |= {"deterministic_layout": True}
    run_together(4, given | {"parallel": "dp=2,tp=2", "shard": "params"})
    run_together(2, given | {"parallel": "tp=2", "grad_accumulation": 2, "output": str(tmp_path / "one")})
    assert_same_run(tmp_path / "divided", tmp_path / "one")


def test_eight_processes_divide_batches_sequences_and_layers(options, device, tmp_path):
    if device.type == "cuda" and torch.cuda.device_count() < 8:
        pytest.skip("needs a GPU for each process")
    given = options | {"sample_every": 0, "sample_length": 0}
    run_together(8, given | {"parallel": "dp=2,cp=2,tp=2", "shard": "params", "output": str(tmp_path / "divided")})
    train_with(given, batch_size=2 * options["batch_size"], output=tmp_path / "one")
    divided, one = (read_log(tmp_path / run) for run in ("divided", "one"))
    for found, expected in zip(divided, one, strict=True):
        assert (found["step"], found["split"]) == (expected["step"], expected["split"])
        assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-6)
        if found["split"] == "train":
            assert float(found["gradient_norm"]) == pytest.approx(float(expected["gradient_norm"]), rel=1e-5)
