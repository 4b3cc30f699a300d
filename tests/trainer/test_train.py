"""The trainer: its parts, whole runs, and runs that are interrupted and resumed."""

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
from pathlib import Path

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
from gptkernels.trainer.plot import read_losses as csv_losses
from gptkernels.trainer.schedule import Schedule
from gptkernels.trainer.signals import stop_on_signals
from gptkernels.trainer.train import Trainer, resume, train
from helpers import assert_raises
from small_runs import SMALL, TEXT, assert_same_run, at_step, read_log, read_losses, run_flags, write_text


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Use one thread, here and in child processes, because the models are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Write text in bytes and its tokenizer; return the data prefix."""
    return write_text(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture
def options(data, tmp_path, device):
    """Return the options of a small run in a folder of its own."""
    return SMALL | {"data": data, "output": str(tmp_path / "run"), "device": str(device)}


# ---- parts -----------------------------------------------------------------------------------------------------------


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
        ("wsd", {10: 1, 79: 1, 80: 1, 85: 0.55, 100: 0.1}),  # llm.c: 1 - sqrt(progress) in the last fifth
        ("constant", {10: 1, 100: 1}),
    ],
)
def test_schedules_in_between(kind, expected):
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
def test_schedules_of_few_steps(kind, total, warmup, decay):
    schedule = Schedule(kind, 1.0, 0.5, warmup, total, decay)
    assert all(0 < schedule.rate(step) <= 1 for step in range(total + 2))


def test_weight_decay_is_on_matrices_only():
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


def test_log_has_the_lines_of_llmc(tmp_path):
    log_three_steps(tmp_path)
    lines = (tmp_path / "main.log").read_text().splitlines()
    assert lines[:4] == ["s:0 tel:2.0000", "s:0 trl:1.0000", "s:1 tel:3.0000", "s:1 trl:2.0000"]


def test_csv_has_a_row_for_each_loss(tmp_path):
    log_three_steps(tmp_path)
    rows = read_log(tmp_path)
    assert tuple(rows[0]) == CSV_COLUMNS
    assert [row["split"] for row in rows] == ["val", "train"] * 3
    assert [float(row["loss"]) for row in rows] == [2, 1, 3, 2, 4, 3]


def test_log_is_continued_from_the_step_of_the_checkpoint(tmp_path):
    log_three_steps(tmp_path)
    texts = [(tmp_path / name).read_text() for name in ("main.log", "log.csv")]
    with open(tmp_path / "log.csv", "a") as file:
        file.write("3,train,0.")  # killed within a line
    log_three_steps(tmp_path, first_step=1)
    assert [(tmp_path / name).read_text() for name in ("main.log", "log.csv")] == texts


def test_a_resumed_log_keeps_earlier_runs(tmp_path):
    """Lines before the last run's are an earlier run's."""
    log = tmp_path / "main.log"
    log.write_text("s:0 trl:9.0\ns:7 trl:9.0\ns:0 trl:5.0\ns:1 trl:5.0\ns:2 tel:5.0\ns:3 tr")
    TrainingLog(log, tmp_path / "log.csv", first_step=1).close()
    assert log.read_text() == "s:0 trl:9.0\ns:7 trl:9.0\ns:0 trl:5.0\n"


def test_a_log_of_other_runs_is_appended_to(tmp_path):
    log = tmp_path / "main.log"
    log.write_text("s:0 trl:9.0\ns:7 trl:nan\ns:8")
    opened = TrainingLog(log, tmp_path / "log.csv", keep_log=True)
    opened.validation(0, 1.0)
    opened.close()
    assert log.read_text() == "s:0 trl:9.0\ns:7 trl:nan\ns:0 tel:1.0000\n"


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
        train(TrainConfig(**options | {"log_file": str(log)}))
    assert not (tmp_path / "nothing").exists()
    assert not (tmp_path / "run").exists()


def test_a_log_behind_a_link_is_appended_to_and_the_link_stays(options, tmp_path):
    log, link = tmp_path / "real.log", tmp_path / "link.log"
    log.write_text("s:0 trl:9.0000\n")
    link.symlink_to(log)
    train(TrainConfig(**options | {"log_file": str(link)}))
    assert link.is_symlink()
    assert log.read_text().startswith("s:0 trl:9.0000\ns:0 tel:")


def test_training_data_is_not_written_as_a_log(options, data):
    path = Path(f"{data}_train.bin")
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"text_train.bin: line 1 is not that of a log"):
        train(TrainConfig(**options | {"log_file": str(path)}))
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["log.csv", "checkpoint.safetensors", "loss.png"])
def test_another_file_of_the_run_is_not_written_as_a_log(options, tmp_path, name):
    with pytest.raises(ValueError, match="is another file of this run"):
        train(TrainConfig(**options | {"log_file": str(tmp_path / "run" / name)}))


@pytest.mark.parametrize("name", ["main.log", "log.csv", "loss.png", "checkpoint_tokenizer.bin"])
def test_a_folder_with_other_files_is_refused(options, tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("precious")
    assert_raises(ValueError, f"holds a {name} that is not of a run", train, TrainConfig(**options))
    assert [(file.name, file.read_text()) for file in (tmp_path / "run").iterdir()] == [(name, "precious")]


def test_the_plot_skips_malformed_rows(tmp_path):
    log_three_steps(tmp_path)
    with open(tmp_path / "log.csv", "ab") as file:
        file.write(b"9,test,1.0\nx,train,1.0,,,,\n9,val\n9,train,x\n\xff\n\n3,train,7.0,1,1,1,1\n")
    assert csv_losses(tmp_path / "log.csv") == {"train": ([0, 1, 2, 3], [1, 2, 3, 7]), "val": ([0, 1, 2], [2, 3, 4])}


def test_plot_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    log_three_steps(tmp_path)
    plot_losses(tmp_path / "log.csv", tmp_path / "loss.png", "nats per byte")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_second_signal_interrupts(capfd):
    before = signal.default_int_handler
    inherited = signal.signal(signal.SIGINT, before)  # a shell's background processes begin with SIGINT ignored
    try:
        with stop_on_signals() as request:
            assert not request.signal
            signal.raise_signal(signal.SIGINT)
            assert request.signal == signal.SIGINT
            assert "stopping after this step, with a checkpoint" in capfd.readouterr().err
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, inherited)


# ---- options ---------------------------------------------------------------------------------------------------------


def test_a_preset_fills_in_what_is_not_given():
    config = TrainConfig(model="gpt2", learning_rate=1e-4)
    assert (config.layers, config.heads, config.channels) == (12, 12, 768)
    assert (config.batch_size, config.sequence_length, config.learning_rate) == (4, 1024, 1e-4)
    assert (config.steps, config.epochs) == (None, 1.0)
    assert TrainConfig().steps == PRESETS["tiny"].steps


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "tiny"])
def test_presets_have_the_models_sizes(preset):
    ours, model = PRESETS[preset], GPT2Config.preset(preset)
    assert (ours.layers, ours.heads, ours.channels) == (model.n_layer, model.n_head, model.n_embd)
    assert ours.positions == model.block_size


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 0}, "--batch-size is 0, must be at least 1"),
        ({"learning_rate": 0.0}, "--learning-rate is 0.0, must be more than 0"),
        ({"learning_rate": math.nan}, "--learning-rate is nan, must be finite"),
        ({"val_every": -1}, "--val-every is -1, must be at least 0"),
        ({"dtype": "int8"}, "--dtype is 'int8', must be one of float32, bfloat16, autocast"),
        ({"model": "gpt5"}, "--model is 'gpt5', must be one of tiny, gpt2"),
        ({"heads": 3}, "--channels is 128, must be a multiple of --heads, 3"),
        ({"steps": 5, "epochs": 1.0}, "--steps and --epochs exclude each other"),
    ],
)
def test_option_errors(given, message):
    assert_raises(ValueError, re.escape(message), TrainConfig, **given)


def test_a_resumed_run_keeps_its_size_but_may_be_longer():
    config = TrainConfig(steps=5)
    assert config.updated({"steps": 9, "layers": 4}) == TrainConfig(steps=9)
    assert config.updated({"epochs": 2.0}) == TrainConfig(epochs=2.0)
    assert_raises(ValueError, "--layers was 4, cannot become 2 in a resumed run", config.updated, {"layers": 2})


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_from_end_to_end(options, capsys, tmp_path):
    result = train(TrainConfig(**options))
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
    assert (result.output / "loss.png").exists()
    state = load_training_state(result.output / "checkpoint.safetensors")
    assert state.trainer["step"] == 8


def test_a_run_learns(options):
    result = train(TrainConfig(**options | {"steps": 60, "learning_rate": 1e-2, "val_every": 0, "sample_every": 0}))
    assert result.val_loss is None
    assert result.train_loss < 3.5  # from log 256 = 5.5; the text repeats itself


def test_a_seed_fixes_the_run(options, tmp_path):
    runs = [
        train(TrainConfig(**options | {"output": str(tmp_path / name), "seed": seed}))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert_same_run(runs[0].output, runs[1].output)
    assert runs[0].sample == runs[1].sample
    assert read_losses(runs[0].output) != read_losses(runs[2].output)


def test_grad_accumulation_is_a_larger_batch(options, tmp_path):
    given = options | {"learning_rate": 1e-2, "output": str(tmp_path / "one")}
    one = train(TrainConfig(**given | {"batch_size": 4}))
    given["output"] = str(tmp_path / "two")
    two = train(TrainConfig(**given | {"batch_size": 2, "grad_accumulation": 2}))
    assert two.train_loss == pytest.approx(one.train_loss, rel=1e-4)


def test_epochs_become_steps(options):
    run = Trainer(TrainConfig(**options | {"steps": None, "epochs": 0.5}))
    windows = (len(TEXT) - 1) // 16
    assert run.total_steps == math.ceil(0.5 * windows / 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "autocast"])
def test_lower_precision_runs(options, dtype):
    result = train(TrainConfig(**options | {"dtype": dtype}))
    assert math.isfinite(result.val_loss)
    weight = load_training_state(result.output / "checkpoint.safetensors").model["transformer.wte.weight"]
    assert weight.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)


def test_tensorboard_option(options, tmp_path):
    pytest.importorskip("tensorboard")
    train(TrainConfig(**options | {"tensorboard": True}))
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_init_from_starts_with_another_runs_weights(options, tmp_path):
    first = train(TrainConfig(**options))
    checkpoint = str(first.output / "checkpoint.safetensors")
    given = options | {"init_from": checkpoint, "output": str(tmp_path / "second"), "val_every": 1}
    train(TrainConfig(**given))
    assert float(read_losses(tmp_path / "second")[0][2]) == first.val_loss
    with pytest.raises(ValueError, match=r"n_layer 1 .* the options say n_layer 2"):
        train(TrainConfig(**given | {"layers": 2, "output": str(tmp_path / "third")}))


def test_data_without_a_tokenizer_has_gpt2s_tokens(data, options, tmp_path, capsys):
    for part in ("train", "val"):
        os.link(f"{data}_{part}.bin", tmp_path / f"plain_{part}.bin")
    result = train(TrainConfig(**options | {"data": str(tmp_path / "plain")}))
    assert re.fullmatch(r"\d+( \d+){4}", result.sample)
    assert "nats per token" in capsys.readouterr().out


def test_validation_is_off_without_data(options, tmp_path, capsys):
    prefix = tmp_path / "own"
    write_tokens(f"{prefix}_train.bin", [list(TEXT)])
    load_tokenizer("bytes").save(prefix)
    for prepare, why in (
        (lambda path: None, "is missing"),
        (lambda path: path.touch(), "is empty"),
        (lambda path: write_tokens(path, [[1, 2, 3]]), "holds 3 tokens, a batch takes 33"),
    ):
        prepare(tmp_path / "own_val.bin")
        output = str(tmp_path / why.split()[1])
        result = train(TrainConfig(**options | {"data": str(prefix), "output": output}))
        assert result.val_loss is None
        assert why in capsys.readouterr().out


def test_a_nan_loss_keeps_the_last_checkpoint(options, monkeypatch, tmp_path):
    loss = Trainer._loss

    def diverge(self, *batch):
        return loss(self, *batch) * (math.nan if self.step == 5 else 1)

    monkeypatch.setattr(Trainer, "_loss", diverge)
    with pytest.raises(FloatingPointError, match=r"the loss is nan .* at step 5"):
        train(TrainConfig(**options | {"val_every": 0, "graph": False}))
    assert load_training_state(tmp_path / "run" / "checkpoint.safetensors").trainer["step"] == 4


def test_weights_that_are_not_finite_are_not_saved(options, tmp_path):
    """The loss before the first update is finite, the weights after it are not."""
    with pytest.raises(FloatingPointError, match=r"not finite after 1 steps: .* There is no checkpoint yet"):
        train(TrainConfig(**options | {"steps": 1, "learning_rate": 1e38, "warmup_steps": 0, "weight_decay": 1e3}))
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()


@pytest.mark.parametrize(
    ("weight_decay", "sample_every", "what"),
    [
        (1e300, 0, "a weight or a moment is not finite"),
        (1e300, 1, "the logits of a sample are NaN or infinite"),
        (1e30, 0, "the logits of a sample are NaN or infinite"),
    ],
)
def test_diverged_weights_are_reported(options, capsys, weight_decay, sample_every, what):
    """The weights are NaN, or finite but so large that the logits are not."""
    given = {"steps": 2 if sample_every else 1, "warmup_steps": 0, "val_every": 0, "val_max_batches": 0}
    given |= {"weight_decay": weight_decay, "sample_every": sample_every, "sample_length": 4}
    assert main(["train", *run_flags(options | given)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"gptkernels train: error: {what} after 1 steps: training has diverged")
    assert error.count("\n") == 1


def test_the_last_of_many_checkpoints_is_finite(options, tmp_path):
    def spoil():
        with torch.no_grad():
            run[0].model.transformer.ln_f.weight[3] = math.inf

    run = []
    make = Trainer._train

    def remember(self):
        run.append(self)
        make(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_train", remember)
        at_step(patch, 5, spoil)
        with pytest.raises(FloatingPointError, match="The checkpoint of step 5 is kept"):
            train(TrainConfig(**options | {"checkpoint_every": 1, "val_every": 0}))
    state = load_training_state(tmp_path / "run" / "checkpoint.safetensors")
    assert state.trainer["step"] == 5
    assert find_non_finite(state.model) is None


def test_a_nan_validation_loss_ends_the_run(options, monkeypatch):
    monkeypatch.setattr(Trainer, "_loss", lambda self, *batch: torch.tensor(math.nan))
    assert_raises(FloatingPointError, "the validation loss is nan after 0 steps", train, TrainConfig(**options))


def test_every_step_is_logged_with_its_own_time(options, device, monkeypatch, tmp_path):
    """As on a GPU, the next step is launched before a step is read; the last two are read together."""
    launch, make = Trainer._launch_step, Trainer.__init__

    def make_ahead(self, *args, **options):
        make(self, *args, **options)
        self._runs_ahead = True

    def slow_launch(self):
        time.sleep(0.03)
        return launch(self)

    monkeypatch.setattr(Trainer, "__init__", make_ahead)
    monkeypatch.setattr(Trainer, "_launch_step", slow_launch)
    train(TrainConfig(**options))
    times = [float(row["milliseconds"]) for row in read_log(tmp_path / "run", "train")]
    assert len(times) == 8
    # On a busy GPU a delayed step is longer and the next one shorter.
    assert sum(times) > 8 * 30
    assert min(times) > (30 if device.type == "cpu" else 1)


# ---- a full disk -----------------------------------------------------------------------------------------------------


def fill_disk(monkeypatch, count):
    """Raise ENOSPC from the `count`th open, write, flush or rename on."""
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
    monkeypatch.setattr(_files, "_fsync", failing(lambda path: None))
    monkeypatch.setattr(os, "replace", failing(os.replace))
    monkeypatch.setattr(_safetensors, "_tensor_checksum", failing(_safetensors._tensor_checksum))
    monkeypatch.setattr("gptkernels.trainer.logs._continue", failing(logs._continue))
    return calls


def test_a_full_disk_leaves_the_last_checkpoint(options, tmp_path, capsys):
    """The disk is full at each point at which a run writes."""
    given = options | {"steps": 2, "val_every": 1, "sample_every": 0, "checkpoint_every": 1}
    with pytest.MonkeyPatch.context() as patch:
        total = fill_disk(patch, 10**9)
        assert main(["train", *run_flags(given)]) == 0
    steps = set()
    for count in range(1, total[0] + 1, 3):
        output = tmp_path / f"run{count}"
        with pytest.MonkeyPatch.context() as patch:
            fill_disk(patch, count)
            assert main(["train", *run_flags(given | {"output": str(output)})]) == 3
        assert "gptkernels train: error: [Errno 28] No space left on device" in capsys.readouterr().err
        assert not list(output.glob(".*.tmp"))
        if (output / "checkpoint.safetensors").exists():
            steps.add(load_training_state(output / "checkpoint.safetensors").trainer["step"])
    assert steps == {1, 2}


# ---- the folder of a run ---------------------------------------------------------------------------------------------


def test_two_runs_do_not_share_a_folder(options, tmp_path):
    def begin_another():
        with pytest.raises(ValueError, match=f"run is in use: process {os.getpid()} is training there"):
            train(TrainConfig(**options))

    def resume_it():
        with pytest.raises(ValueError, match=f"run is in use: process {os.getpid()} is training there"):
            resume(str(tmp_path / "run"))

    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 0, begin_another)
        at_step(patch, 5, resume_it)
        assert train(TrainConfig(**options)).step == 8
    assert resume(str(tmp_path / "run"), steps=9).step == 9


def test_unfinished_files_of_a_killed_run_are_removed(options, tmp_path):
    train(TrainConfig(**options))
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
        train(TrainConfig(**options))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "run").iterdir() if path.is_file()}
    assert set(modes.values()) == {0o640}, modes


def test_another_run_is_not_overwritten(options):
    train(TrainConfig(**options))
    assert_raises(ValueError, "holds a run: --resume", train, TrainConfig(**options))


def test_runs_have_folders_of_their_own(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outputs = [train(TrainConfig(**options | {"output": None, "steps": 1})).output for _ in range(2)]
    assert [str(output) for output in outputs] == ["runs/tiny", "runs/tiny-2"]
    assert resume(steps=2).output == outputs[1]


# ---- interruptions ---------------------------------------------------------------------------------------------------


@pytest.fixture
def whole_run(options, tmp_path):
    return train(TrainConfig(**options | {"output": str(tmp_path / "whole")})).output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_is_resumed_bit_for_bit(options, whole_run, number, tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 2, lambda: signal.raise_signal(number))
        stopped = train(TrainConfig(**options))
    assert stopped.signal == number
    assert 3 <= stopped.step <= 4  # the current step and, on a GPU, the next one
    assert f"gptkernels train --resume {tmp_path / 'run'}" in capsys.readouterr().out
    assert_same_run(resume(str(stopped.output)).output, whole_run)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_finished_run_is_resumed_bit_for_bit(options, is_stopped):
    with pytest.MonkeyPatch.context() as patch:
        if is_stopped:
            at_step(patch, options["steps"] - 1, lambda: signal.raise_signal(signal.SIGTERM))
        checkpoint = train(TrainConfig(**options)).output / "checkpoint.safetensors"
    before = checkpoint.read_bytes()
    assert resume(str(checkpoint.parent)).step == options["steps"]
    assert checkpoint.read_bytes() == before


def start_training(options, tmp_path):
    """Start `gptkernels train` in a process, and wait until it has written a checkpoint."""
    given = options | {"steps": 10**6, "checkpoint_every": 1, "val_every": 0, "sample_every": 0}
    given |= {"warmup_steps": 0, "final_lr_fraction": 1.0, "output": str(tmp_path / "run")}
    flags = run_flags(given)
    process = subprocess.Popen(
        [sys.executable, "-m", "gptkernels", "train", *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "checkpoint.safetensors").exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)  # the process is then in a step, or writes a checkpoint
    return process, given


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_killed_process_leaves_a_whole_checkpoint(options, tmp_path, number, status):
    process, given = start_training(options, tmp_path)
    process.send_signal(number)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == status
    assert "Traceback" not in errors
    steps = load_training_state(tmp_path / "run" / "checkpoint.safetensors").trainer["step"] + 2
    resumed = resume(str(tmp_path / "run"), steps=steps)
    whole = train(TrainConfig(**given | {"steps": steps, "output": str(tmp_path / "whole")}))
    assert_same_run(resumed.output, whole.output)


@pytest.mark.parametrize("redirection", ["| head -1", ">&- 2>&-"])
def test_a_run_outlives_its_output(options, tmp_path, redirection):
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
    assert load_training_state(tmp_path / "run" / "checkpoint.safetensors").trainer["step"] == 8


def test_two_processes_train_as_one_with_twice_the_batch(options, device, tmp_path):
    if device.type != "cpu":
        pytest.skip("two processes on one GPU")
    given = options | {"output": str(tmp_path / "two"), "learning_rate": 1e-2, "steps": 4}
    given |= {"total_batch_tokens": 128, "skip_update_lossz": 1e9}
    flags = run_flags(given)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*torchrun, "-m", "gptkernels", "train", *flags], check=True, capture_output=True, timeout=120)
    train(TrainConfig(**given | {"batch_size": 4, "val_max_batches": 1, "output": str(tmp_path / "one")}))
    two, one = (
        [float(loss) for _, split, loss, *_ in read_losses(tmp_path / name) if split == "train"]
        for name in ("two", "one")
    )
    assert two == pytest.approx(one, rel=1e-4)


def test_every_option_is_a_plain_value():
    """A checkpoint holds the options as plain values."""
    for value in dataclasses.asdict(TrainConfig()).values():
        assert value is None or type(value) in (int, float, str, bool)
