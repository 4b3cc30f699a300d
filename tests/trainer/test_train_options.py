"""Tests that options of the trainer have their effect, and that a run with an option is resumed with the same bits."""

import functools
import itertools
import math
import re

import numpy as np
import pytest
import torch

from gptkernels._device import peak_flops
from gptkernels.checkpoint import load_training_state
from gptkernels.data import write_tokens
from gptkernels.trainer import outliers, retention, utilization
from gptkernels.trainer.cli import main
from gptkernels.trainer.config import TrainConfig
from gptkernels.trainer.logs import CSV_COLUMNS, FIRST_COLUMNS, TrainingLog, TrainingStep
from gptkernels.trainer.model import build_model
from gptkernels.trainer.outliers import WINDOW, OutlierDetector, Skipping
from gptkernels.trainer.processes import Processes
from gptkernels.trainer.progress import show_progress
from gptkernels.trainer.retention import kept_steps, numbered, retain
from gptkernels.trainer.train import Trainer, resume
from helpers import assert_raises
from small_runs import (
    TEXT,
    assert_same_run,
    at_step,
    error_of,
    make_options,
    read_log,
    read_losses,
    run_flags,
    train_with,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def options(tmp_path, device):
    return make_options(tmp_path, device, sample_length=0)


def crash():
    raise RuntimeError("power cut")


@pytest.mark.parametrize(
    "given",
    [
        {"schedule": "wsd", "decay_steps": 3, "min_learning_rate": 1e-5},
        {"schedule": "linear", "decay_steps": 5, "final_lr_fraction": 0.0},
        {"schedule": "constant", "warmup_steps": 2},
        {"total_batch_tokens": 128},
        {"sampling": "random-offset", "grad_accumulation": 2},
        {"bias": False, "activation": "gelu"},
        {"beta1": 0.8, "beta2": 0.99},
        {"recompute": "gelu"},
        {"recompute": "blocks", "dtype": "autocast"},
        {"recompute": "blocks", "dtype": "bfloat16"},
        {"skip_update_lossz": 0.5, "skip_update_gradz": 1.0, "learning_rate": 1e-6},
        {"keep_last": 3, "keep_every": 4},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "master_weights": False},
        {"fp8": True, "dtype": "bfloat16"},
        {"fp8": True, "dtype": "autocast", "recompute": "blocks"},
        {"fp8_head": True, "dtype": "autocast"},
        {"fp8": True, "fp8_head": True, "dtype": "bfloat16"},
        {"fp8_head": True, "fp8_logits": True, "dtype": "bfloat16"},
    ],
    ids=lambda given: " ".join(f"{name}={value}" for name, value in given.items()),
)
def test_a_run_with_an_option_is_resumed_bit_for_bit(options, given, tmp_path, monkeypatch):
    monkeypatch.setattr(outliers, "WINDOW", 3)
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 6, crash)
        assert_raises(RuntimeError, "power cut", train_with, options, **given)
    state = load_training_state(tmp_path / "run" / "checkpoint.safetensors")
    assert state.trainer["step"] == 4
    dtype = torch.bfloat16 if given.get("dtype") == "bfloat16" else torch.float32
    assert state.model["transformer.wte.weight"].dtype == dtype
    torch.manual_seed(99)
    resumed = resume(str(tmp_path / "run"))
    whole = train_with(options, **given, output=tmp_path / "whole")
    assert_same_run(resumed.output, whole.output)
    plain = train_with(options, output=tmp_path / "plain")
    changes_nothing = {"keep_last", "recompute"} & given.keys() and "dtype" not in given
    assert (read_losses(plain.output) == read_losses(whole.output)) == bool(changes_nothing)


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
        ({"total_batch_tokens": 100}, "--total-batch-tokens is 100, must be a multiple of 1024: --batch-size 16 times"),
        ({"total_batch_tokens": 1024, "grad_accumulation": 1}, "--grad-accumulation and --total-batch-tokens exclude"),
        ({"data": "a", "train_files": "b"}, "--data and --train-files exclude each other"),
        ({"final_lr_fraction": 0.1, "min_learning_rate": 1e-5}, "--final-lr-fraction and --min-learning-rate exclude"),
        ({"min_learning_rate": 1.0}, "--min-learning-rate is 1.0, must be at most --learning-rate, 0.003"),
        ({"schedule": "cosinus"}, "--schedule is 'cosinus', must be one of cosine, linear, wsd, constant"),
        ({"schedule": "constant", "decay_steps": 5}, "--decay-steps is for schedules that decay, --schedule is const"),
        ({"decay_steps": 0}, "--decay-steps is 0, must be at least 1"),
        ({"beta2": 1.0}, "--beta2 is 1.0, must be less than 1"),
        ({"dropout": 1.0}, "--dropout is 1.0, must be less than 1"),
        ({"dropout": -0.1}, "--dropout is -0.1, must be at least 0"),
        ({"activation": "relu"}, "--activation is 'relu', must be one of gelu_tanh, gelu"),
        ({"skip_update_lossz": -1.0}, "--skip-update-lossz is -1.0, must be at least 0"),
        ({"skip_update_gradz": math.inf}, "--skip-update-gradz is inf, must be finite"),
        ({"keep_last": 0}, "--keep-last is 0, must be at least 1"),
        ({"keep_every": 300}, "--keep-every is 300, must be a multiple of --checkpoint-every, 200"),
        ({"keep_every": 300, "checkpoint_every": 0}, "must be a multiple of --checkpoint-every, 0"),
        ({"master_weights": False}, "--no-master-weights is for --dtype bfloat16, --dtype is float32"),
        ({"sampling": "random"}, "--sampling is 'random', must be one of epochs, random-offset"),
        ({"recompute": "all"}, "--recompute is 'all', must be one of none, gelu, blocks"),
        ({"recompute": "gelu", "fp8": True}, "--recompute gelu excludes --fp8, which keeps only 8 bits"),
        (
            {"shard": "params", "deterministic_layout": True, "dtype": "bfloat16", "master_weights": False},
            "--deterministic-layout with --shard params excludes --no-master-weights: the random rounding",
        ),
        ({"shard": "all"}, "--shard is 'all', must be one of none, grads, params"),
        ({"val_files": ""}, "--val-files is empty"),
        ({"fp8": True, "channels": 24}, "--channels is 24, must be a multiple of 16 for --fp8"),
        ({"fp8_head": True, "channels": 24}, "--channels is 24, must be a multiple of 16 for --fp8-head"),
        ({"fp8_logits": True}, "--fp8-logits needs --fp8-head"),
    ],
)
def test_bad_options_are_refused(given, message):
    assert_raises(ValueError, re.escape(message), TrainConfig, **given)


@pytest.mark.parametrize(
    ("given", "parts", "needed"),
    [
        ({"batch_size": 10**9}, 1, "0.0 GB in training; --batch-size .* take at least 1,310,720.0 GB; "),
        ({"batch_size": 10**9}, 4, "0.0 GB in training; --batch-size .* take at least 327,680.0 GB; "),
        ({"batch_size": 10**9, "recompute": "blocks", "dtype": "autocast"}, 1, "take at least 65,536.0 GB; "),
        ({"channels": 10**6}, 1, "48,000,374,000,000 parameters, which take 768,006.0 GB in training; "),
        ({"channels": 10**6, "shard": "grads"}, 4, "which take 192,001.5 GB in training; "),
        ({"channels": 10**6, "dtype": "bfloat16", "master_weights": False}, 1, "which take 384,003.0 GB in training; "),
    ],
)
def test_training_that_exceeds_the_memory_is_refused(given, parts, needed, device):
    processes = Processes(str(device))
    processes.world_size = parts
    message = f"{needed}.* has .* GB of memory"
    assert_raises(ValueError, message, build_model, TrainConfig(**given), 256, processes=processes)


def test_a_resumed_run_may_change_some_options():
    config = TrainConfig(steps=5)
    assert config.updated({"steps": 9, "layers": 4}) == TrainConfig(steps=9)
    assert config.updated({"epochs": 2.0}) == TrainConfig(epochs=2.0)
    saved = TrainConfig(total_batch_tokens=2048, min_learning_rate=1e-4, train_files="x*")
    new = saved.updated({"grad_accumulation": 3, "final_lr_fraction": 0.5, "data": "y"})
    assert (new.total_batch_tokens, new.min_learning_rate, new.train_files) == (None, None, None)
    assert (new.accumulation(1), new.final_learning_rate, new.data) == (3, 0.0015, "y")
    assert saved.updated({"batch_size": 8}).accumulation(2) == 2
    assert saved.updated({"schedule": "constant"}).min_learning_rate is None
    for name, value in {
        "layers": 2,
        "bias": False,
        "activation": "gelu",
        "beta1": 0.5,
        "sampling": "random-offset",
    }.items():
        message = f"--{name} was .*, cannot become {value} in a resumed run"
        assert_raises(ValueError, message, saved.updated, {name: value})


def test_the_total_batch_is_accumulated(options, tmp_path):
    given = options | {"learning_rate": 1e-2}
    one = train_with(given, batch_size=4, grad_accumulation=2, output=tmp_path / "one")
    trainer = Trainer(TrainConfig(**given | {"total_batch_tokens": 128}))
    assert trainer.accumulation == 4
    assert trainer.run().train_loss == pytest.approx(one.train_loss, rel=1e-4)
    config = TrainConfig(**given | {"total_batch_tokens": 128})
    assert_raises(ValueError, "times --sequence-length 16 times 3 processes", config.accumulation, 3)


@pytest.fixture
def shards(tmp_path):
    text = list(TEXT)
    for name, part in (("0", text[:1000]), ("1", text[1000:1003]), ("2", text[1003:])):
        write_tokens(tmp_path / f"shards_train_{name}.bin", [part])
    return str(tmp_path / "shards_train_*.bin")


@pytest.mark.parametrize("option", ["data", "train_files"])
def test_training_on_shards_is_training_on_one_file(options, shards, option, tmp_path):
    whole = train_with(options)
    given = {"data": None, "tokenizer": "bytes", "val_files": f"{options['data']}_val.bin", option: shards}
    assert_same_run(train_with(options | given, output=tmp_path / "shards").output, whole.output)


def test_changed_shards_are_refused(options, shards, tmp_path, capsys):
    output = train_with(options, data=shards, tokenizer="bytes", steps=2, val_every=0).output
    assert "2,700 tokens" in capsys.readouterr().out
    write_tokens(tmp_path / "shards_train_1.bin", [[1, 2, 3]])
    message = r"shards_train_0.bin ... shards_train_2.bin has changed: it was 3 files"
    assert_raises(ValueError, message, resume, str(output), steps=4)


def test_the_tokenizer_of_shards_is_in_their_folder(options, shards, tmp_path):
    (tmp_path / "text_tokenizer.bin").rename(tmp_path / "shards_tokenizer.bin")
    trainer = Trainer(TrainConfig(**options | {"data": shards, "val_every": 0}))
    assert trainer.data.tokenizer.vocab_size == 256
    one_file = {"data": str(tmp_path / "shards_train_0.bin"), "output": str(tmp_path / "single"), "val_every": 1}
    trainer = Trainer(TrainConfig(**options | one_file))
    assert len(trainer.data.train.data) == 1000
    assert trainer.data.why_no_val == "no --val-files"


@pytest.mark.parametrize("option", ["--data", "--train-files", "--val-files"])
def test_a_pattern_without_a_match_is_reported(options, option, tmp_path, capsys):
    given = options if option == "--val-files" else {name: options[name] for name in options if name != "data"}
    assert "no file matches" in error_of(capsys, "train", *run_flags(given), option, tmp_path / "none_*.bin")


def test_keep_last_and_keep_every(options, tmp_path):
    given = options | {"steps": 11, "checkpoint_every": 1, "keep_last": 3, "keep_every": 4, "val_every": 0}
    output = train_with(given).output
    assert kept_steps(output) == [4, 8, 9, 10, 11]
    for step in kept_steps(output):
        assert load_training_state(numbered(output, step)).trainer["step"] == step
    newest = output / "checkpoint.safetensors"
    assert newest.samefile(numbered(output, 11))
    assert resume(str(output), steps=12).step == 12
    assert kept_steps(output) == [4, 8, 10, 11, 12]
    output = train_with(options, checkpoint_every=2, keep_every=4, val_every=0, output=tmp_path / "other").output
    assert kept_steps(output) == [4, 8]


def test_without_hard_links_checkpoints_are_copied(options, monkeypatch):
    def fail(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(retention.os, "link", fail)
    output = train_with(options, keep_last=2).output
    assert kept_steps(output) == [4, 8]
    assert not (output / "checkpoint.safetensors").samefile(numbered(output, 8))
    assert numbered(output, 8).read_bytes() == (output / "checkpoint.safetensors").read_bytes()


def test_a_resumed_run_keeps_the_checkpoint_of_a_killed_run(options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_retain", lambda self, step: crash())
        assert_raises(RuntimeError, "power cut", train_with, options, keep_every=4)
    assert kept_steps(resume(options["output"]).output) == [4, 8]


def test_only_numbered_checkpoints_are_removed(tmp_path):
    others = [tmp_path / name for name in ("checkpoint-best.safetensors", "checkpoint-1.safetensors", "notes")]
    for path in others:
        path.touch()
    newest = tmp_path / "checkpoint.safetensors"
    for step in range(5):
        newest.unlink(missing_ok=True)
        newest.write_text(str(step))
        retain(newest, step, 2, 0)
    assert kept_steps(tmp_path) == [3, 4]
    assert all(path.exists() for path in others)
    retain(newest, 1, 2, 0)  # a run resumed from step 1 keeps the checkpoints of later steps
    assert kept_steps(tmp_path) == [1, 3, 4]


def test_a_kept_checkpoint_can_be_used_like_the_newest(options, tmp_path):
    output = train_with(options, keep_last=2).output
    kept = numbered(output, 4)
    assert main(["generate", str(kept), "--max-new-tokens", "3", "--device", options["device"]]) == 0
    assert train_with(options, init_from=kept, output=tmp_path / "again").step == 8
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / kept.name).write_text("precious")
    message = r"holds a checkpoint-00000004.safetensors that is not of a run"
    assert_raises(ValueError, message, train_with, options, output=tmp_path / "new")
    message = r"checkpoint-00000004.safetensors: line 1 is not that of a log"
    assert_raises(ValueError, message, resume, str(output), steps=9, log_file=str(kept))


def test_a_run_that_cannot_begin_leaves_the_process_group(options, monkeypatch):
    closed = []
    monkeypatch.setattr(Processes, "close", lambda _, failed: closed.append(failed))
    assert_raises(ValueError, "tokens", train_with, options, sequence_length=2000)
    assert closed == [True]


def llmc_scores(values):
    """Return llm.c's scores: NaN for the first 128 values, then the z-score of each value among the last 128 values."""
    scores = []
    for i, value in enumerate(values):
        window = np.array(values[max(0, i + 1 - 128) : i + 1], np.float64)
        known = i >= 128
        deviation = window.std()
        scores.append((value - window.mean()) / deviation if known and deviation else 0.0 if known else math.nan)
    return scores


def test_z_scores_match_llmc(device):
    assert WINDOW == 128
    generator = np.random.default_rng(0)
    losses = np.float32(generator.normal(3, 0.1, 300))
    norms = np.float32(generator.exponential(1, 300))
    losses[200] = 9
    norms[:] = np.where(np.arange(300) < 150, 2.5, norms)
    detector = OutlierDetector(device)
    pairs = [torch.tensor([*pair], device=device) for pair in zip(losses, norms, strict=True)]
    found = torch.stack([detector.scores(pair) for pair in pairs]).cpu()
    for i, values in enumerate((losses, norms)):
        expected = torch.tensor(llmc_scores(values), dtype=torch.float64)
        torch.testing.assert_close(found[:, i], expected, equal_nan=True, rtol=1e-9, atol=1e-9)
    assert found[200, 0] > 8
    assert not found[128:150, 1].any()


def test_either_score_skips_an_update(device):
    nan = math.nan
    for limits, scores, expected in (
        ((2.0, 3.0), (2.1, 0.0), 1),
        ((2.0, 3.0), (1.9, 2.9), 0),
        ((2.0, 3.0), (-9.0, 3.1), 1),
        ((0.0, 3.0), (99.0, 2.0), 0),
        ((2.0, 0.0), (0.0, 99.0), 0),
        ((2.0, 3.0), (nan, nan), 0),
    ):
        found = Skipping(*limits, device).found(torch.tensor(scores, dtype=torch.float64, device=device))
        assert (found.item(), found.dtype) == (expected, torch.float32)


@pytest.mark.parametrize("option", ["skip_update_lossz", "skip_update_gradz"])
def test_an_update_is_skipped(options, option, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(outliers, "WINDOW", 4)
    loss, states = Trainer._loss, []

    def spike(self, *batch):
        return loss(self, *batch) * (10 if self.step == 6 else 1)

    launch = Trainer._launch_step

    def note(self):
        states.append({name: tensor.clone() for name, tensor in self.model.state_dict().items()})
        states[-1] |= {f"{i}": s["exp_avg"].clone() for i, s in enumerate(self.optimizer.state.values())}
        return launch(self)

    monkeypatch.setattr(Trainer, "_loss", spike)
    monkeypatch.setattr(Trainer, "_launch_step", note)
    train_with(options, **{option: 1.5, "val_every": 0, "graph": False})
    same = [all(torch.equal(one[name], other[name]) for name in one) for one, other in itertools.pairwise(states[1:])]
    assert same == [False] * 5 + [True]
    assert "step 6: no update, z-score of the loss +1.7" in capsys.readouterr().out
    state = load_training_state(tmp_path / "run" / "checkpoint.safetensors")
    assert {state["step"].item() for state in state.optimizer["state"].values()} == {7}
    rows = read_log(tmp_path / "run")
    assert [row["loss_z"] == "" for row in rows] == [True] * 4 + [False] * 4
    assert float(rows[6]["loss_z"]) > 1.5
    assert float(rows[6]["gradient_z"]) > 1.5


def test_scores_are_the_same_with_and_without_skipping(options, monkeypatch, tmp_path):
    """The host computes the z-scores. If updates may be skipped, the device computes them instead."""
    monkeypatch.setattr(outliers, "WINDOW", 3)
    columns = []
    for name, limit in (("off", 0.0), ("on", 1e9)):
        train_with(options, skip_update_lossz=limit, val_every=0, output=tmp_path / name)
        rows = read_log(tmp_path / name)
        columns.append([float(row[z] or "nan") for row in rows for z in ("loss_z", "gradient_z")])
    assert columns[0] == pytest.approx(columns[1], rel=1e-5, abs=1e-5, nan_ok=True)
    assert sum(map(math.isfinite, columns[0])) == 10


def test_a_damaged_window_is_refused(options):
    trainer = Trainer(TrainConfig(**options))
    message = r"outliers: window must be a float64 tensor of shape \(128, 2\)"
    for state in (None, {}, {"window": 1}, {"window": torch.zeros(3, 2)}, {"window": torch.zeros(128, 2)}):
        assert_raises(ValueError, message, trainer._step.outliers.load_state_dict, state)


def test_without_master_weights_the_optimizers_state_is_bfloat16(options, tmp_path):
    given = options | {"dtype": "bfloat16", "steps": 60, "learning_rate": 1e-2, "val_every": 0}
    losses = [
        train_with(given, master_weights=masters, output=tmp_path / str(masters)).train_loss
        for masters in (True, False)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    state = load_training_state(tmp_path / "False" / "checkpoint.safetensors").optimizer["state"]
    dtypes = {"step": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}
    assert {name: tensor.dtype for name, tensor in state[0].items()} == dtypes


def test_a_compiled_run_has_the_losses_of_an_eager_run(options, tmp_path, monkeypatch):
    """The test compiles with aot_eager, because Inductor takes a minute. test_compile.py tests Inductor."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    given = options | {"steps": 3, "val_every": 2, "sample_every": 0}
    plain, compiled = train_with(given), train_with(given, compile=True, output=tmp_path / "compiled")
    losses = [(result.train_loss, result.val_loss) for result in (compiled, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_utilization_is_flops_by_the_devices_peak(options, monkeypatch):
    names = {"NVIDIA H200": 989.4e12, "NVIDIA H100 80GB HBM3": 989.4e12, "NVIDIA H100 PCIe": 756e12, "Abacus": None}
    names |= {"NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA L40S": 362e12, "NVIDIA L4": 121e12, "NVIDIA A10G": 70e12}
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda")) == peak
    assert peak_flops(torch.device("cpu")) is None
    assert utilization.peak_memory(torch.device("cpu")) > 2**20
    monkeypatch.setattr("gptkernels.trainer.train.peak_flops", lambda device: 1e9)
    output = train_with(options, val_every=0).output
    row = read_log(output)[-1]
    flops = Trainer(TrainConfig(**options | {"output": str(output.parent / "x")})).model.flops_per_token(16)
    assert float(row["mfu"]) == pytest.approx(float(row["tokens_per_second"]) * flops / 1e9)
    assert int(row["memory"]) > 2**10


def test_a_step_is_shown_with_all_its_numbers(monkeypatch, capsys):
    record = TrainingStep(4, 1.25, 1e-3, 0.5, 10.0, 12345.0, 0.5, -1.25, 0.456, 3 << 29)
    progress = show_progress(total_steps=5, first_step=0, is_main=True)
    progress.step(record)
    expected = "loss 1.2500 (+0.50z), norm 0.500 (-1.25z), lr 1.00e-03, 10.0 ms, 12,345 tokens/s, 45.6% MFU, 1.50 GiB"
    assert expected in capsys.readouterr().out
    progress.step(record._replace(loss_z=math.nan, gradient_z=math.nan, mfu=None))
    assert "loss 1.2500, norm 0.500, lr 1.00e-03, 10.0 ms, 12,345 tokens/s, 1.50 GiB\n" in capsys.readouterr().out


def test_the_csv_of_an_earlier_version_keeps_its_columns(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(",".join(FIRST_COLUMNS) + "\n0,train,5.0,0.1,1.0,2.0,3.0\n1,train,5.0,0.1,1.0,2.0,3.0\n")
    log = TrainingLog(tmp_path / "main.log", path, first_step=1)
    log.training(TrainingStep(1, 4.0, 0.1, 1.0, 2.0, 3.0, 0.5, 0.5, 0.5, 100))
    log.evaluation(2, 0.25)
    log.close()
    rows = path.read_text().splitlines()[1:]
    assert rows == ["0,train,5.0,0.1,1.0,2.0,3.0", "1,train,4.0,0.1,1.0,2.0,3.0", "2,eval,,,,,"]
    assert (tmp_path / "main.log").read_text() == "s:1 trl:4.0000\ns:2 eval:0.2500\n"
    log = TrainingLog(tmp_path / "main.log", tmp_path / "new.csv")
    log.training(TrainingStep(0, 4.0, 0.1, 1.0, 2.0, 3.0))
    log.evaluation(2, 0.25)
    log.close()
    lines = (tmp_path / "new.csv").read_text().splitlines()
    assert lines == [",".join(CSV_COLUMNS), "0,train,4.0,0.1,1.0,2.0,3.0,,,,0,", "2,eval,,,,,,,,,,0.25"]
