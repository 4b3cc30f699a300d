"""Runs of the trainer, which write no checkpoint."""

import csv
import gc
import tempfile

import torch
from torch import distributed

from gptkernels.trainer.config import TrainConfig
from gptkernels.trainer.runs import CSV
from gptkernels.trainer.train import Trainer

OPTIONS = {"val_every": 0, "sample_every": 0, "sample_length": 0, "checkpoint_every": 0, "schedule": "constant"}


class _Trainer(Trainer):
    def _finish_run(self):
        """Return at once, without a checkpoint, a validation and a plot."""


def train(options: dict) -> list[dict[str, float]]:
    """Train, and return the numbers of each step, in all processes. The process group exists if there are several."""
    numbers = None
    with tempfile.TemporaryDirectory() as folder:
        trainer = _Trainer(TrainConfig(**OPTIONS | options | {"output": f"{_from_main(folder)}/run"}))
        trainer.run()
        device = trainer.processes.device
        if trainer.processes.is_main:
            with open(trainer.output / CSV, newline="") as file:
                names = "loss", "milliseconds", "tokens_per_second", "memory"
                numbers = [{name: float(row[name]) for name in names} for row in csv.DictReader(file)]
        numbers = _from_main(numbers)
    del trainer
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return numbers


def _from_main(value):
    if distributed.is_initialized():
        values = [value]
        distributed.broadcast_object_list(values, src=0)
        return values[0]
    return value
