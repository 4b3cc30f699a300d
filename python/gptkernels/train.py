"""Training GPT-2: `train(TrainConfig(...))`, which is `gptkernels train`."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptkernels.checkpoint import (
    TrainingState,
    load_training_state,
    restore_rng_state,
    save_training_state,
)
from gptkernels.data import DataLoader
from gptkernels.optim import AdamW
from gptkernels.training.config import TrainConfig
from gptkernels.training.corpus import Corpus
from gptkernels.training.logs import TrainingLog, TrainingStep
from gptkernels.training.model import build_model, parameter_groups
from gptkernels.training.plot import plot_losses
from gptkernels.training.processes import Processes
from gptkernels.training.progress import show_progress
from gptkernels.training.runs import CHECKPOINT, TOKENIZER_PREFIX, find_run, new_run
from gptkernels.training.schedule import cosine_schedule
from gptkernels.training.signals import stop_on_signals

BETAS = (0.9, 0.95)
SAMPLE_TEMPERATURE = 0.8
SAMPLE_TOP_K = 40


class TrainResult(NamedTuple):
    """How a run ended. Losses are in nats per token, None where there is none.

    `train_loss` is that of the last step, before its update; `val_loss` that of the model as saved.
    `signal` is the number of the signal that stopped the run, 0 when it went to its end.
    """

    step: int
    train_loss: float | None
    val_loss: float | None
    sample: str | None
    output: Path
    signal: int


def train(config: TrainConfig) -> TrainResult:
    """Train a new model.

    Raises:
        ValueError: an option, or the data, cannot be used; the message is a sentence for the user.
        OSError: a file cannot be read or written.
        FloatingPointError: the loss is no longer finite. The last checkpoint is kept.
    """
    return Trainer(config).run()


def resume(run: str | None = None, **given: Any) -> TrainResult:
    """Continue a run from its checkpoint, bit for bit as if it had not stopped.

    Args:
        run: its folder; None is the latest in runs/.
        given: options of TrainConfig to change, such as `steps`.

    Raises:
        ValueError: there is no such run, an option in `given` cannot change, or as `train`.
    """
    folder = find_run(run)
    saved = load_training_state(folder / CHECKPOINT)
    try:
        config = TrainConfig(**saved.trainer["options"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / CHECKPOINT}: options: not those of this trainer: {error}") from error
    return Trainer(config.updated(given), folder, saved).run()


class Trainer:
    """A run: the model, its data, the optimizer, and where they stand.

    Everything is checked when it is made; `run()` trains. It can be run once.

    Args:
        config: the options.
        output: the folder of the run that is resumed; None makes that of a new one.
        saved: the state that is resumed.
    """

    def __init__(self, config: TrainConfig, output: Path | None = None, saved: TrainingState | None = None) -> None:
        self.config = config
        self.processes = processes = Processes(config.device)
        if config.tf32:
            torch.backends.cuda.matmul.allow_tf32 = True
        torch.manual_seed(config.seed)
        self.corpus = corpus = Corpus(config, processes)
        self.model = build_model(config, corpus.vocab_size, saved).to(processes.device)
        groups = parameter_groups(self.model, config.weight_decay)
        clip = config.grad_clip or math.inf
        self.optimizer = AdamW(groups, lr=config.learning_rate, betas=BETAS, master_weights=True, max_grad_norm=clip)
        self.total_steps = self._count_steps()
        self.step = 0  # updates made
        self._pending: _PendingStep | None = None
        self._train_loss: float | None = None
        self._stop = False
        if saved is not None:
            self._restore(saved)
        self.output = output or Path(
            processes.from_main(str(new_run(config.output, config.model)) if processes.is_main else "")
        )
        if corpus.tokenizer and processes.is_main:
            corpus.tokenizer.save(self.output / TOKENIZER_PREFIX)

    def _count_steps(self) -> int:
        if self.config.steps is not None:
            return self.config.steps
        assert self.config.epochs is not None
        windows_per_step = self.processes.world_size * self.config.batch_size * self.config.grad_accumulation
        return math.ceil(self.config.epochs * self.corpus.train.num_windows / windows_per_step)

    def _restore(self, saved: TrainingState) -> None:
        self.optimizer.load_state_dict(saved.optimizer)
        self.corpus.train.load_state_dict(saved.trainer["data"])
        self.step = saved.trainer["step"]
        restore_rng_state(saved.rng)

    # Training.

    def run(self) -> TrainResult:
        """Train to the end, or until Ctrl-C or SIGTERM; in both cases write the checkpoint and the plot."""
        self._progress = show_progress(self.total_steps, self.step, self.processes.is_main)
        self._log = self._open_log() if self.processes.is_main else None
        try:
            with stop_on_signals() as self._request:
                self._introduce()
                self._train()
                return self._stop_early() if self._stop else self._finish_run()
        finally:
            self._progress.close()
            if self._log:
                self._log.close()
            self.processes.close()

    def _train(self) -> None:
        config = self.config
        self._restart_clock()
        while self.step < self.total_steps and not self._stop:
            if _is_due(self.step, config.val_every):
                self._validate()
            if self.step and _is_due(self.step, config.sample_every):
                self._sample()
            # On a GPU the numbers of a step are read when the next one is launched: the GPU never idles.
            previous, self._pending = self._pending, self._launch_step()
            self._finish(previous)
            if self.processes.device.type == "cpu":
                self._finish_pending()
            if self.step < self.total_steps and _is_due(self.step, config.checkpoint_every):
                self._save()
        self._finish_pending()

    def _launch_step(self) -> _PendingStep:
        """Make the next update, without waiting for the device."""
        config = self.config
        rate = self._learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros((), device=self.processes.device)
        for _ in range(config.grad_accumulation):
            loss = self._loss(*self._next_batch(self.corpus.train)) / config.grad_accumulation
            loss.backward()
            total += loss.detach()
        self.processes.average_gradients(self.model.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()
        stop = torch.full_like(total, self._request.signal)
        norm = self.optimizer.grad_norm
        assert norm is not None
        numbers = self.processes.average(torch.stack([total, norm, stop]))
        self.step += 1
        return _PendingStep(self.step - 1, rate, numbers)

    def _learning_rate(self) -> float:
        config = self.config
        warmup = self.total_steps // 20 if config.warmup_steps is None else config.warmup_steps
        return cosine_schedule(self.step, self.total_steps, warmup, config.learning_rate, config.final_lr_fraction)

    def _next_batch(self, data: DataLoader) -> Iterator[Tensor]:
        return (part.to(self.processes.device, non_blocking=True) for part in data.next_batch())

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self._autocast():
            return self.model(tokens, targets, return_logits=False)[1]

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.processes.device.type, torch.bfloat16, enabled=self.config.dtype == "autocast")

    def _finish_pending(self) -> None:
        pending, self._pending = self._pending, None
        self._finish(pending)

    def _finish(self, pending: _PendingStep | None) -> None:
        """Wait for a step's numbers, then log and show them."""
        if pending is None:
            return
        loss, norm, stop = pending.read()
        if not math.isfinite(loss + norm):
            raise FloatingPointError(
                f"the loss is {loss} and the gradient's norm {norm} at step {pending.step}: training has "
                "diverged; a lower --learning-rate may help. The last checkpoint is as it was"
            )
        self._stop = self._stop or stop > 0
        self._train_loss = loss
        seconds = time.perf_counter() - self._clock
        self._restart_clock()
        record = TrainingStep(
            pending.step, loss, pending.learning_rate, norm, 1e3 * seconds, self._tokens_per_step() / seconds
        )
        self._progress.step(record)
        if self._log:
            self._log.training(record)

    def _restart_clock(self) -> None:
        self._clock = time.perf_counter()

    def _tokens_per_step(self) -> int:
        config = self.config
        sequences = self.processes.world_size * config.grad_accumulation * config.batch_size
        return sequences * config.sequence_length

    # Between steps.

    @torch.no_grad()
    def _validate(self) -> float | None:
        """The loss on the validation data, in nats per token, logged and shown; None without such data."""
        if self.corpus.val is None:
            return None
        self._finish_pending()
        self.model.eval()
        self.corpus.val.reset()
        batches = min(self.corpus.val.batches_per_epoch, self.config.val_max_batches)
        total = torch.zeros((), device=self.processes.device)
        for _ in range(batches):
            total += self._loss(*self._next_batch(self.corpus.val))
        self.model.train()
        loss = self.processes.average(total / batches).item()
        self._progress.say(f"step {self.step}: validation loss {loss:.4f} {self.corpus.unit}")
        if self._log:
            self._log.validation(self.step, loss)
        self._restart_clock()
        return loss

    @torch.no_grad()
    def _sample(self) -> str | None:
        """Text that the model writes from nothing, the same for the same seed and step, shown."""
        if not self.config.sample_length or not self.processes.is_main:
            return None
        self._finish_pending()
        device = self.processes.device
        generator = torch.Generator(device).manual_seed(self.config.seed + self.step)
        start = torch.tensor([[self.corpus.first_token]], device=device)
        self.model.eval()
        with self._autocast():
            tokens = self.model.generate(start, self.config.sample_length, SAMPLE_TEMPERATURE, SAMPLE_TOP_K, generator)
        self.model.train()
        text = self.corpus.text(tokens[0, 1:].tolist())
        self._progress.say(f"--- sample at step {self.step} ---\n{text}\n---")
        self._restart_clock()
        return text

    def _save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        self._finish_pending()
        if self.processes.is_main:
            save_training_state(
                self.output / CHECKPOINT,
                config=self.model.config,
                model=self.model,
                optimizer=self.optimizer.state_dict(),
                trainer={
                    "step": self.step,
                    "data": self.corpus.train.state_dict(),
                    "options": asdict(self.config),
                },
            )
        self._restart_clock()

    # Beginning and end.

    def _open_log(self) -> TrainingLog:
        config = self.config
        return TrainingLog(
            Path(config.log_file) if config.log_file else self.output / "main.log",
            self.output / "log.csv",
            self.step,
            self.output / "tensorboard" if config.tensorboard else None,
        )

    def _introduce(self) -> None:
        config, size = self.config, self.model.config
        processes = f" x {self.processes.world_size} processes" if self.processes.world_size > 1 else ""
        validation = f"{len(self.corpus.val.data):,}" if self.corpus.val else f"none, {self.corpus.why_no_val}"
        self._progress.say(
            f"model: {size.n_layer} layers, {size.n_head} heads, {size.n_embd} channels, "
            f"{self.model.num_parameters():,} parameters, "
            f"{config.dtype} on {self.processes.device}{processes}\n"
            f"data: {self.corpus.train.data.path}, {len(self.corpus.train.data):,} tokens; "
            f"validation: {validation}\n"
            f"run: steps {self.step} to {self.total_steps} of {self._tokens_per_step():,} tokens, "
            f"in {self.output}"
        )

    def _finish_run(self) -> TrainResult:
        self._save()
        val_loss = self._validate()
        sample = self._sample()
        self._plot()
        self._progress.say(f"checkpoint: {self.output / CHECKPOINT}")
        return TrainResult(self.step, self._train_loss, val_loss, sample, self.output, 0)

    def _stop_early(self) -> TrainResult:
        self._save()
        self._plot()
        self._progress.say(
            f"stopped at step {self.step} of {self.total_steps}; to go on: gptkernels train --resume {self.output}"
        )
        number = self._request.signal or signal.SIGTERM  # another process may have had the signal
        return TrainResult(self.step, self._train_loss, None, None, self.output, number)

    def _plot(self) -> None:
        if not self._log:
            return
        try:
            plot_losses(self.output / "log.csv", self.output / "loss.png", self.corpus.unit)
        except ImportError:
            self._progress.say("no loss plot: it takes matplotlib (pip install matplotlib)")
        else:
            self._progress.say(f"loss plot: {self.output / 'loss.png'}")


class _PendingStep:
    """The loss, gradient norm and request to stop of a step, on their way from the device."""

    def __init__(self, step: int, learning_rate: float, numbers: Tensor) -> None:
        self.step = step
        self.learning_rate = learning_rate
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if numbers.is_cuda else None
        if self._arrived:
            self._arrived.record()

    def read(self) -> list[float]:
        """The numbers, once they are there."""
        if self._arrived:
            self._arrived.synchronize()
        return self._numbers.tolist()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
