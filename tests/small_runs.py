"""Small runs of the trainer and comparisons of runs."""

import csv
import struct
import sys
from pathlib import Path

import torch

from gptkernels.checkpoint import load_training_state
from gptkernels.data import load_tokenizer, write_tokens
from gptkernels.trainer.cli import main
from gptkernels.trainer.config import TrainConfig
from gptkernels.trainer.logs import CSV_COLUMNS
from gptkernels.trainer.train import Trainer, train

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

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def make_options(folder, device, **changes):
    files = {"data": write_text(folder / "text"), "output": str(folder / "run")}
    return SMALL | files | {"device": str(device)} | changes


def train_with(options, **changes):
    given = {name: str(value) if isinstance(value, Path) else value for name, value in (options | changes).items()}
    return train(TrainConfig(**given))


def make_words(context, endings, label, index):
    """Return a question as 16-bit words, as `write_evalfile` in llm.c's dev/data/data_common.py writes it."""
    words = [65535, 0, index, label, len(endings)]
    for part in (context, *endings):
        words += [len(part), *part]
    words[1] = 2 * len(words)
    return words


def write_questions(path, questions, **changes):
    streams = [make_words(*question, i) for i, question in enumerate(questions)]
    header = {"magic": 20240522, "version": 1, "count": len(streams), "longest": 2 * max(map(len, streams))} | changes
    flat = [word for stream in streams for word in stream]
    path.write_bytes(struct.pack("<256i", *header.values(), *[0] * 252) + struct.pack(f"<{len(flat)}H", *flat))
    return str(path)


def write_text(prefix):
    write_tokens(f"{prefix}_train.bin", [list(TEXT)])
    write_tokens(f"{prefix}_val.bin", [list(TEXT[:200])])
    load_tokenizer("bytes").save(prefix)
    return str(prefix)


def read_losses(run):
    """Return (step, split, loss, learning rate, gradient norm) of each row of a run's CSV."""
    return [tuple(row[name] for name in CSV_COLUMNS[:5]) for row in read_log(run)]


def read_log(run, split=None):
    with open(run / "log.csv", newline="") as file:
        return [row for row in csv.DictReader(file) if split in (None, row["split"])]


def load_step(run):
    return load_training_state(run / "checkpoint.safetensors").trainer["step"]


def assert_same_run(one, other):
    assert read_losses(one) == read_losses(other)
    states = [load_training_state(run / "checkpoint.safetensors") for run in (one, other)]
    for field in ("model", "optimizer", "rng"):
        torch.testing.assert_close(*(getattr(state, field) for state in states), rtol=0, atol=0)
    torch.testing.assert_close(*(state.trainer["outliers"] for state in states), rtol=0, atol=0, equal_nan=True)
    for name in ("step", "data"):
        assert states[0].trainer[name] == states[1].trainer[name]


def at_step(monkeypatch, step, act):
    launch = Trainer._launch_step

    def launch_and_act(self):
        if self.step == step:
            act()
        return launch(self)

    monkeypatch.setattr(Trainer, "_launch_step", launch_and_act)


def run_flags(options):
    """Return the flags of `gptkernels train`. A boolean option becomes --name or --no-name."""
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


def error_of(capsys, *command, status=2):
    assert main([str(part) for part in command]) == status
    return capsys.readouterr().err
