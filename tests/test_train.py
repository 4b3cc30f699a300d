"""The trainer: its parts, a run from end to end, and runs that are interrupted and resumed."""

import csv
import dataclasses
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from gptkernels.checkpoint import load_training_state
from gptkernels.data import load_tokenizer, write_tokens
from gptkernels.models import GPT2Config
from gptkernels.train import Trainer, resume, train
from gptkernels.training.config import PRESETS, TrainConfig
from gptkernels.training.logs import CSV_COLUMNS, TrainingLog, TrainingStep
from gptkernels.training.model import parameter_groups
from gptkernels.training.plot import plot_losses
from gptkernels.training.progress import printable, show_progress
from gptkernels.training.schedule import cosine_schedule
from gptkernels.training.signals import stop_on_signals

TEXT = b"the quick brown fox jumps over the lazy dog; " * 60
SMALL = {
    "layers": 1,
    "heads": 2,
    "channels": 16,
    "batch_size": 2,
    "sequence_length": 16,
    "steps": 8,
    "val_every": 3,
    "val_max_batches": 2,
    "sample_every": 4,
    "sample_length": 5,
    "checkpoint_every": 4,
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """These models are too small for more, and processes are started from here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A data prefix: text in bytes, with its tokenizer."""
    prefix = tmp_path_factory.mktemp("data") / "text"
    write_tokens(f"{prefix}_train.bin", [list(TEXT)])
    write_tokens(f"{prefix}_val.bin", [list(TEXT[:200])])
    load_tokenizer("bytes").save(prefix)
    return str(prefix)


@pytest.fixture
def options(data, tmp_path, device):
    """The options of a small run in a folder of its own."""
    return SMALL | {"data": data, "output": str(tmp_path / "run"), "device": str(device)}


def read_losses(run):
    """What a run's CSV says, but for the times: (step, split, loss, learning rate, gradient norm)."""
    with open(run / "log.csv", newline="") as file:
        return [tuple(row[name] for name in CSV_COLUMNS[:5]) for row in csv.DictReader(file)]


def assert_same_run(one, other):
    """The two runs have the same parameters, optimizer, data order and losses, to the bit."""
    assert read_losses(one) == read_losses(other)
    states = [load_training_state(run / "checkpoint.safetensors") for run in (one, other)]
    for field in ("model", "optimizer", "rng"):
        pair = [getattr(state, field) for state in states]
        torch.testing.assert_close(*pair, rtol=0, atol=0)
    for name in ("step", "data"):
        assert states[0].trainer[name] == states[1].trainer[name]


# The parts.


def test_schedule_warms_up_to_the_peak_and_decays_to_a_fraction_of_it():
    rates = [cosine_schedule(step, 100, 10, 1e-3, 0.1) for step in range(101)]
    assert rates[0] == pytest.approx(1e-4)
    assert rates[9] == rates[10] == pytest.approx(1e-3)
    assert rates[55] == pytest.approx(0.55e-3)
    assert rates[100] == pytest.approx(1e-4)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert cosine_schedule(1000, 100, 10, 1e-3, 0.1) == rates[100]


@pytest.mark.parametrize(("total", "warmup"), [(0, 0), (1, 0), (5, 5), (5, 9)])
def test_schedule_at_its_edges(total, warmup):
    assert all(0 < cosine_schedule(step, total, warmup, 1.0, 0.5) <= 1 for step in range(total + 2))


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
    with open(tmp_path / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
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


def test_plot_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    log_three_steps(tmp_path)
    plot_losses(tmp_path / "log.csv", tmp_path / "loss.png", "nats per byte")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_bar_is_shown_on_a_terminal_and_lines_elsewhere(monkeypatch, capsys):
    record = TrainingStep(4, 1.25, 1e-3, 0.5, 10.0, 12345.0)
    for is_terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        progress = show_progress(total_steps=5, first_step=0, is_main=True)
        progress.step(record)
        progress.say("hello [bold]")
        progress.close()
        text = capsys.readouterr().out
        assert all(part in text for part in ("step", "5/5", "loss 1.25", "12,345 tokens/s", "hello [bold]"))
        assert ("\x1b[" in text) == is_terminal


def test_other_processes_show_nothing(capsys):
    progress = show_progress(total_steps=5, first_step=0, is_main=False)
    progress.say("hello")
    progress.close()
    assert capsys.readouterr().out == ""


def test_control_characters_are_not_printed():
    assert printable("a\tb\n\x1b[2Jé") == "a\tb\n\ufffd[2Jé"


def test_first_signal_is_noted_and_the_second_one_interrupts():
    before = signal.getsignal(signal.SIGINT)
    with stop_on_signals() as request:
        assert not request.signal
        signal.raise_signal(signal.SIGINT)
        assert request.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


# The options.


def test_a_preset_fills_in_what_is_not_given():
    config = TrainConfig(model="gpt2", learning_rate=1e-4)
    assert (config.layers, config.heads, config.channels) == (12, 12, 768)
    assert (config.batch_size, config.sequence_length, config.learning_rate) == (4, 1024, 1e-4)
    assert (config.steps, config.epochs) == (None, 1.0)
    assert TrainConfig().steps == PRESETS["tiny"].steps


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "tiny"])
def test_presets_are_those_of_the_model(preset):
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
def test_an_option_out_of_its_range(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TrainConfig(**given)


def test_a_resumed_run_keeps_its_size_but_may_be_longer():
    config = TrainConfig(steps=5)
    assert config.updated({"steps": 9, "layers": 4}) == TrainConfig(steps=9)
    assert config.updated({"epochs": 2.0}) == TrainConfig(epochs=2.0)
    with pytest.raises(ValueError, match="--layers was 4, cannot become 2 in a resumed run"):
        config.updated({"layers": 2})


# Runs.


def test_a_run_from_end_to_end(options, capsys, tmp_path):
    result = train(TrainConfig(**options))
    assert (result.step, result.signal, result.output) == (8, 0, tmp_path / "run")

    text = capsys.readouterr().out
    for expected in (
        "1 layers, 2 heads, 16 channels",
        "nats per byte",
        "sample at step 4",
        "sample at step 8",
    ):
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


def test_the_same_seed_gives_the_same_run_and_another_seed_another(options, tmp_path):
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


def test_tensorboard_is_written_when_asked(options, tmp_path):
    pytest.importorskip("tensorboard")
    train(TrainConfig(**options | {"tensorboard": True}))
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_init_from_begins_with_the_weights_of_another_run(options, tmp_path):
    first = train(TrainConfig(**options))
    checkpoint = str(first.output / "checkpoint.safetensors")
    given = options | {"init_from": checkpoint, "output": str(tmp_path / "second"), "val_every": 1}
    train(TrainConfig(**given))
    assert float(read_losses(tmp_path / "second")[0][2]) == first.val_loss
    with pytest.raises(ValueError, match=r"n_layer 1 .* the options say n_layer 2"):
        train(TrainConfig(**given | {"layers": 2, "output": str(tmp_path / "third")}))


def test_data_without_tokenizer_is_gpt2s(data, options, tmp_path, capsys):
    for part in ("train", "val"):
        os.link(f"{data}_{part}.bin", tmp_path / f"plain_{part}.bin")
    result = train(TrainConfig(**options | {"data": str(tmp_path / "plain")}))
    assert re.fullmatch(r"\d+( \d+){4}", result.sample)
    assert "nats per token" in capsys.readouterr().out


def test_validation_is_switched_off_where_there_is_nothing_to_validate_on(options, tmp_path, capsys):
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


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_checkpoint(options, monkeypatch, tmp_path):
    loss = Trainer._loss

    def diverge(self, *batch):
        return loss(self, *batch) * (math.nan if self.step == 5 else 1)

    monkeypatch.setattr(Trainer, "_loss", diverge)
    with pytest.raises(FloatingPointError, match=r"the loss is nan .* at step 5"):
        train(TrainConfig(**options | {"val_every": 0}))
    assert load_training_state(tmp_path / "run" / "checkpoint.safetensors").trainer["step"] == 4


def test_an_output_that_holds_a_run_is_not_overwritten(options):
    train(TrainConfig(**options))
    with pytest.raises(ValueError, match="holds a run: --resume"):
        train(TrainConfig(**options))


def test_runs_have_folders_of_their_own(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outputs = [train(TrainConfig(**options | {"output": None, "steps": 1})).output for _ in range(2)]
    assert [str(output) for output in outputs] == ["runs/tiny", "runs/tiny-2"]
    assert resume(steps=2).output == outputs[1]


# Interruptions.


def at_step(monkeypatch, step, act):
    """Have the trainer call `act` before it makes update number `step`."""
    launch = Trainer._launch_step

    def launch_and_act(self):
        if self.step == step:
            act()
        return launch(self)

    monkeypatch.setattr(Trainer, "_launch_step", launch_and_act)


@pytest.fixture
def whole_run(options, tmp_path):
    return train(TrainConfig(**options | {"output": str(tmp_path / "whole")})).output


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_crashed_run_is_resumed_bit_for_bit(options, dtype, tmp_path):
    def crash():
        raise RuntimeError("power cut")

    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 6, crash)
        with pytest.raises(RuntimeError, match="power cut"):
            train(TrainConfig(**options, dtype=dtype))
    assert load_training_state(tmp_path / "run" / "checkpoint.safetensors").trainer["step"] == 4
    torch.manual_seed(99)
    result = resume(str(tmp_path / "run"))
    assert result.step == 8
    whole = train(TrainConfig(**options | {"dtype": dtype, "output": str(tmp_path / "whole")}))
    assert_same_run(result.output, whole.output)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_is_resumed_bit_for_bit(options, whole_run, number, tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 2, lambda: signal.raise_signal(number))
        stopped = train(TrainConfig(**options))
    assert stopped.signal == number
    assert 3 <= stopped.step <= 4  # the step at hand, and on a GPU the one behind it
    assert f"gptkernels train --resume {tmp_path / 'run'}" in capsys.readouterr().out
    assert_same_run(resume(str(stopped.output)).output, whole_run)


def start_training(options, tmp_path):
    """`gptkernels train` in a process of its own, once it has written a checkpoint."""
    given = options | {"steps": 10**6, "checkpoint_every": 1, "val_every": 0, "sample_every": 0}
    given |= {"warmup_steps": 0, "final_lr_fraction": 1.0, "output": str(tmp_path / "run")}
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
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
    time.sleep(0.3)  # into the middle of some step, or of writing some checkpoint
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


def test_two_processes_train_as_one_with_twice_the_batch(options, device, tmp_path):
    if device.type != "cpu":
        pytest.skip("two processes on one GPU")
    given = options | {"output": str(tmp_path / "two"), "learning_rate": 1e-2, "steps": 4}
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*torchrun, "-m", "gptkernels", "train", *flags],
        check=True,
        capture_output=True,
        timeout=120,
    )
    train(TrainConfig(**given | {"batch_size": 4, "val_max_batches": 1, "output": str(tmp_path / "one")}))
    two, one = (
        [float(loss) for _, split, loss, *_ in read_losses(tmp_path / name) if split == "train"]
        for name in ("two", "one")
    )
    assert two == pytest.approx(one, rel=1e-4)


def test_every_option_is_a_plain_value():
    """So that a checkpoint can hold them."""
    for value in dataclasses.asdict(TrainConfig()).values():
        assert value is None or type(value) in (int, float, str, bool)
