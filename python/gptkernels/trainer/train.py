"""Trains GPT-2, by `train(TrainConfig(...))` or `gptkernels train`."""

import faulthandler
import logging
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptkernels import _dtensor, functional, parallel
from gptkernels._device import device_name, peak_flops
from gptkernels._library import build
from gptkernels.checkpoint import (
    CHECKPOINT,
    TrainingState,
    find_non_finite,
    restore_rng_state,
    save_training_state,
)
from gptkernels.models import GPT2
from gptkernels.models.nanogpt import parameter_groups
from gptkernels.optim import AdamW
from gptkernels.trainer.config import TrainConfig, flag
from gptkernels.trainer.evaluation import answer, check_questions, mean_loss
from gptkernels.trainer.fingerprint import fingerprint
from gptkernels.trainer.logs import TrainingLog, TrainingStep, check_log
from gptkernels.trainer.model import BatchLoss, build_model
from gptkernels.trainer.output import command_line, flush_streams, write_error
from gptkernels.trainer.pending import Mark, PendingStep
from gptkernels.trainer.plot import plot_losses
from gptkernels.trainer.processes import Processes, connection, process_name, process_rank
from gptkernels.trainer.progress import show_progress
from gptkernels.trainer.retention import retain
from gptkernels.trainer.run_data import RunData
from gptkernels.trainer.run_model import RunModel, move
from gptkernels.trainer.runs import (
    CSV,
    LOG,
    PLOT,
    TOKENIZER_PREFIX,
    find_run,
    is_other_file,
    log_of_run,
    new_run,
    open_run,
)
from gptkernels.trainer.saved import check_optimizer, check_values, naming, saved_options
from gptkernels.trainer.schedule import Schedule
from gptkernels.trainer.signals import LATE_SECONDS, stop_on_signals
from gptkernels.trainer.step import Step
from gptkernels.trainer.utilization import peak_memory
from gptkernels.trainer.watchdog import Watchdog

SAMPLE_TEMPERATURE = 0.8
SAMPLE_TOP_K = 40
MASK_KEY = 0x5851F42D4C957F2D
"""Any large odd number; processes with different batches have different multiples as dropout's key."""
MEMORY_EVERY = 16
"""The number of steps between queries of torch's memory statistics, which take 0.1 ms of host time."""


class TrainResult(NamedTuple):
    """The result of a run. Losses are in nats per token; a value that was not computed is None.

    `train_loss` is the last step's loss, computed before its update. `val_loss` and `accuracy`, the fraction of
    correctly answered questions of `eval_file`, are those of the saved model. `signal` is the signal that stopped the
    run, or 0.
    """

    step: int
    train_loss: float | None
    val_loss: float | None
    sample: str | None
    output: Path
    signal: int
    accuracy: float | None = None


def train(config: TrainConfig) -> TrainResult:
    """Train a new model.

    If no work (such as a forward pass) is finished for `config.watchdog` minutes, the process ends with status 4.

    Raises:
        ValueError: if an option or the data is invalid; the message is a sentence for the user.
        OSError: if a file cannot be read or written. The last checkpoint is kept.
        FloatingPointError: if training diverges, so that for example the loss is NaN. The last checkpoint is kept.
    """
    trainer = Trainer(config)
    with open_run(trainer.output, trainer.processes.is_main):
        return trainer.run()


def resume(run: str | None = None, **given: Any) -> TrainResult:
    """Continue a run from its checkpoint. With the same options, the results are bitwise those of a run without a stop.

    Args:
        run: the folder of the run; None means the folder in runs/ with the newest checkpoint.
        given: options of TrainConfig to change, such as `steps`.

    Raises:
        ValueError: if there is no such run, an option in `given` cannot change, or an option or the data is invalid.
        OSError: if a file cannot be read or written. The last checkpoint is kept.
        FloatingPointError: if training diverges, so that for example the loss is NaN. The last checkpoint is kept.
    """
    folder = find_run(run)
    checkpoint = folder / CHECKPOINT
    with open_run(folder, is_main=process_rank() == 0):
        saved = parallel.read_checkpoint(folder)
        options = saved_options(saved, checkpoint)
        begun_in = options.log_file or folder / LOG
        options.log_file = log_of_run(options.log_file, folder)
        config = options.updated(given)
        keep_log = config.log_file is not None and os.path.realpath(config.log_file) != os.path.realpath(begun_in)
        with naming(checkpoint):
            trainer = Trainer(config, folder, saved, keep_log=keep_log)
        del saved  # frees the memory of the loaded tensors
        return trainer.run()


class Trainer:
    """A run: the model, its data, the optimizer, and their progress.

    The constructor checks the options and the data. ``saved`` describes the state to resume, which is in the folder
    ``output``: it is a result of `read_checkpoint` that `saved_options` has checked.
    """

    def __init__(
        self,
        config: TrainConfig,
        output: Path | None = None,
        saved: TrainingState | None = None,
        *,
        keep_log: bool = False,
    ) -> None:
        self.config = config
        self.processes = Processes(config.device, config.deterministic_layout, config.parallel, config.watchdog)
        try:
            self._prepare(output, saved, keep_log)
        except BaseException:
            self.processes.close(failed=True)
            raise

    def _prepare(self, output: Path | None, saved: TrainingState | None, keep_log: bool) -> None:
        config, processes = self.config, self.processes
        if config.tf32:
            torch.backends.cuda.matmul.allow_tf32 = True
        torch.manual_seed(config.seed)
        self.data = data = RunData(config, processes)
        self._fingerprint = fingerprint(data.train.data.paths)
        versions = {"the version of gptkernels": build()["version"], "the version of torch": torch.__version__}
        options = {flag(name): value for name, value in asdict(config).items()}
        step = {"the step of the checkpoint": saved and saved.trainer["step"]}
        processes.check_equal(versions | options | step | {"the training data": self._fingerprint})
        self.model = build_model(config, data.vocab_size, saved, processes)
        self._run_model = self._distribute()
        self._batch_loss = BatchLoss(self._run_model.module, config, self._run_model.context_group)
        check_questions(data.questions, self.model.config.block_size, config.eval_file)
        self.optimizer = AdamW(
            parameter_groups(self.model, config.weight_decay),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            master_weights=config.master_weights,
            max_grad_norm=config.grad_clip or math.inf,
            rounding_seed=None if config.master_weights else config.seed,
        )
        self.optimizer.gathers_norm = config.deterministic_layout
        self.accumulation = config.accumulation(processes.batches)
        if config.graph and processes.device.type == "cuda" and not self._run_model.can_be_captured:
            logging.getLogger("gptkernels.graphs").warning(
                "the training step runs eagerly: CUDA graphs of FSDP2 need torch 2.11"
            )
        limits = (config.skip_update_lossz, config.skip_update_gradz)
        self._step = Step(
            lambda *batch: self._loss(*batch),
            self.optimizer,
            processes,
            limits,
            config.graph and self._run_model.can_be_captured,
            self._run_model.no_sync,
            self._run_model.recover,
        )
        self.total_steps = self._count_steps()
        self._schedule = self._make_schedule()
        self._watchdog = Watchdog(config.watchdog, self._report_stall)
        self.step = 0  # the number of launched steps
        self._finished_step: int | None = None
        self._saved_step: int | None = None
        self._written_step: int | None = None  # that of a checkpoint which is being written
        self._runs_ahead = processes.device.type != "cpu"
        self._pending: PendingStep | None = None
        self._train_loss: float | None = None
        self._stop = False
        if saved is not None and output is not None:
            self._restore(saved, output)
        self._keep_log = keep_log or (saved is None and config.log_file is not None)
        if config.log_file is not None and processes.is_main:
            check_log(Path(config.log_file))
        self.output = output or Path(
            processes.from_main(str(new_run(config.output, config.model)) if processes.is_main else "")
        )
        self._log_path = self.output / LOG if config.log_file is None else Path(config.log_file)
        if is_other_file(str(self._log_path), self.output):
            raise ValueError(f"--log-file {self._log_path} is another file of this run")
        has_own_buffers = processes.world_size > 1 and next(self.model.buffers(), None) is not None
        writes_shards = self._run_model.is_sharded or has_own_buffers
        self._writer = parallel.CheckpointWriter(self.output, processes.timeout) if writes_shards else None

    def _distribute(self) -> RunModel:
        functional.mask_key = self.processes.batch_rank * MASK_KEY % 2**63
        if self.processes.mesh is None:
            return RunModel(move(self.model, self.processes.device))
        from gptkernels.trainer.data_parallel import distribute  # imports FSDP2, which takes seconds

        return distribute(self.model, self.config, self.processes)

    def _count_steps(self) -> int:
        if self.config.steps is not None:
            return self.config.steps
        assert self.config.epochs is not None
        windows_per_step = self.processes.batches * self.config.batch_size * self.accumulation
        steps = self.config.epochs * self.data.train.num_windows / windows_per_step
        if not math.isfinite(steps):
            raise ValueError(f"--epochs is {self.config.epochs}, which is too many")
        return math.ceil(steps)

    def _restore(self, saved: TrainingState, folder: Path) -> None:
        step, data, path = saved.trainer["step"], self.data.train.data.path, folder / CHECKPOINT
        check_optimizer(saved.optimizer, self.optimizer, step, path)
        if saved.trainer["fingerprint"] != self._fingerprint:
            raise ValueError(
                f"{data} has changed: it was {saved.trainer['fingerprint']}, is {self._fingerprint}. A run is resumed "
                "with the training data it had"
            )
        self.data.train.load_state_dict(saved.trainer["data"])
        rng = parallel.load_checkpoint(folder, self.model, self.optimizer).rng
        check_values(self.model, self.optimizer, path)
        if step:  # if no further step is made, the checkpoint has the last step's learning rate
            self._set_learning_rate(step - 1)
        if "outliers" in saved.trainer:
            self._step.outliers.load_state_dict(saved.trainer["outliers"])
        self.step = self._saved_step = step
        restore_rng_state(rng)

    # ---- training ----------------------------------------------------------------------------------------------------

    def run(self) -> TrainResult:
        """Train to the end, or until Ctrl-C or SIGTERM, and then write the checkpoint and the plot.

        This method can be called only once.
        """
        with self.processes:
            self._progress = show_progress(self.total_steps, self.step, self.processes.is_main)
            self._log: TrainingLog | None = None
            try:
                self._peak_flops = peak_flops(self.processes.device)
                self._memory = 0
                if self.processes.is_main:
                    self._open_files()
                    if self._saved_step is not None:  # the run may have been killed before it removed old checkpoints
                        self._retain(self._saved_step)
                signals = stop_on_signals(self.processes.is_main, _say_late)
                with self._watchdog, signals as self._request, self._connection():
                    self._introduce()
                    try:
                        self._train()
                        return self._stop_early() if self._stop else self._finish_run()
                    finally:
                        self._finish_save()
            finally:
                self._progress.close()
                if self._log:
                    self._log.close()
                self._step.close()

    @contextmanager
    def _connection(self) -> Iterator[None]:
        try:
            with connection():
                yield
        except ConnectionError as error:
            raise ConnectionError(f"{error}. Step {self.step} was not finished. {self._kept_checkpoint()}") from error

    def _train(self) -> None:
        config = self.config
        self._restart_clock()
        while self.step < self.total_steps and not self._stop:
            if _is_due(self.step, config.val_every):
                self._validate()
                if self.step:
                    self._answer()
            if self.step and _is_due(self.step, config.sample_every):
                self._sample()
            # On a GPU the numbers of a step are read after the launch of the next step, which the GPU can then begin at
            # once.
            previous, self._pending = self._pending, self._launch_step()
            self._finish(previous)
            if not self._runs_ahead:
                self._finish_pending()
            if self.step < self.total_steps and _is_due(self.step, config.checkpoint_every):
                self._save()
        self._finish_pending()

    def _launch_step(self) -> PendingStep:
        rate = self._set_learning_rate(self.step)
        with self._watchdog.watch("reading the training data"):
            batches = [self.data.train.next_batch() for _ in range(self.accumulation)]
        how = "replaying its CUDA graph" if self._step.is_captured else "in its forward pass, backward pass or update"
        with self._watchdog.watch(how):
            numbers = self._step(batches)
            stop = numbers.new_full((1,), self._request.signal)
            numbers = self.processes.average(torch.cat([numbers, stop]))
            self.step += 1
            return PendingStep(self.step - 1, rate, numbers)

    def _set_learning_rate(self, step: int) -> float:
        rate = self._schedule.rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _make_schedule(self) -> Schedule:
        config, steps = self.config, self.total_steps
        warmup = steps // 20 if config.warmup_steps is None else config.warmup_steps
        final = config.final_learning_rate
        return Schedule(config.schedule, config.learning_rate, final, warmup, steps, config.decay_steps)

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self._watchdog.tick()
        loss = self._batch_loss(tokens, targets)
        self._watchdog.tick()
        return loss

    def _finish_pending(self) -> None:
        pending, self._pending = self._pending, None
        self._finish(pending)

    def _finish(self, pending: PendingStep | None) -> None:
        if pending is None:
            return
        with self._watchdog.watch(f"waiting for {self.processes.device}, which does not answer"):
            loss, norm, *more, stop = pending.read()
        self._finished_step = pending.step
        if not math.isfinite(loss + norm):
            raise self._diverged(f"the loss is {loss} and the gradient's norm {norm} at step {pending.step}")
        self._stop = self._stop or stop > 0
        self._train_loss = loss
        scores = more[:2] or self._step.outliers.scores(torch.tensor([loss, norm])).tolist()
        record = self._record(pending, loss, norm, scores)
        if more and more[2]:
            z = f"z-score of the loss {scores[0]:+.2f}, of the gradient's norm {scores[1]:+.2f}"
            self._progress.say(f"step {pending.step}: no update, {z}")
        self._progress.step(record)
        if self._log:
            self._log.training(record)

    def _record(self, pending: PendingStep, loss: float, norm: float, scores: list[float]) -> TrainingStep:
        seconds = pending.end.seconds_since(self._clock)
        self._clock: Mark = pending.end
        rate = self._tokens_per_step() / seconds
        if not self._memory or pending.step % MEMORY_EVERY == 0:
            self._memory = peak_memory(self.processes.device)
        return TrainingStep(
            step=pending.step,
            loss=loss,
            learning_rate=pending.learning_rate,
            gradient_norm=norm,
            milliseconds=1e3 * seconds,
            tokens_per_second=rate,
            loss_z=scores[0],
            gradient_z=scores[1],
            mfu=self._utilization(rate),
            memory=self._memory,
        )

    def _utilization(self, tokens_per_second: float) -> float | None:
        if self._peak_flops is None:
            return None
        flops = tokens_per_second * self.model.flops_per_token(self.config.sequence_length)
        return flops / (self._peak_flops * self.processes.world_size)

    def _restart_clock(self) -> None:
        self._clock = Mark(self.processes.device)

    def _diverged(self, what: str) -> FloatingPointError:
        self._finish_save()
        return FloatingPointError(
            f"{what}: training has diverged; a lower --learning-rate may help. {self._kept_checkpoint()}"
        )

    def _kept_checkpoint(self) -> str:
        if self._saved_step is None:
            return "There is no checkpoint yet"
        return f"The checkpoint of step {self._saved_step} is kept"

    def _report_stall(self, what: str) -> None:
        config, processes = self.config, self.processes
        finished = "" if self._finished_step is None else f", whose last finished step is {self._finished_step}"
        who = f"{process_name()}, " if processes.world_size > 1 else ""
        goes_on = "" if self._saved_step is None else f"; {self._resume_line()} goes on from it"
        write_error(
            f"\ngptkernels train: error: nothing was finished for {config.watchdog:g} minutes at step {self.step} of "
            f"{self.total_steps}, {what} ({who}B={config.batch_size}, T={config.sequence_length}, on "
            f"{processes.device}{finished}). {self._kept_checkpoint()}{goes_on}. Where a machine needs longer, raise "
            "--watchdog\n"
        )
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback(sys.__stderr__)
        if self._log:
            self._log.close()
        self._progress.close()
        flush_streams()

    def _tokens_per_step(self) -> int:
        return self.processes.batches * self.accumulation * self.config.batch_tokens

    # ---- between steps -----------------------------------------------------------------------------------------------

    @contextmanager
    def _evaluation(self, what: str) -> Iterator[None]:
        self._finish_pending()
        self.model.eval()
        with self._watchdog.watch(what):
            yield
            self._run_model.release()
        self.model.train()

    def _validate(self) -> float | None:
        if self.data.val is None:
            return None
        with self._evaluation("validating"):
            loss = mean_loss(self._loss, self.data.val, self.config.val_max_batches, self.processes)
        if not math.isfinite(loss):
            raise self._diverged(f"the validation loss is {loss} after {self.step} steps")
        self._progress.say(f"step {self.step}: validation loss {loss:.4f} {self.data.unit}")
        if self._log:
            self._log.validation(self.step, loss)
        self._restart_clock()
        return loss

    def _answer(self) -> float | None:
        if not self.data.questions:
            return None
        with self._evaluation("answering questions"), self._batch_loss.precision(self.processes.device):
            tick = self._watchdog.tick
            score = answer(self._run_model, self.data.questions, self.config.batch_tokens, self.processes, tick)
        self._progress.say(f"step {self.step}: {score}")
        if self._log:
            self._log.evaluation(self.step, score.accuracy)
        self._restart_clock()
        return score.accuracy

    @torch.no_grad()
    def _sample(self) -> str | None:
        if not self.config.sample_length or not (self.processes.is_main or self._run_model.is_sharded):
            return None
        try:
            with self._evaluation("sampling"), self._batch_loss.precision(self.processes.device):
                tokens = self._run_model.run(self._draw)
        except FloatingPointError as error:
            raise self._diverged(f"the logits of a sample are NaN or infinite after {self.step} steps") from error
        text = self.data.text(tokens)
        self._progress.say(f"--- sample at step {self.step} ---\n{text}\n---")
        self._restart_clock()
        return text

    def _draw(self, model: GPT2) -> list[int]:
        device, length = self.processes.device, self.config.sample_length
        generator = torch.Generator(device).manual_seed(self.config.seed + self.step)
        start = torch.tensor([[self.data.first_token]], device=device)
        tokens = []
        for (token,) in model.stream(start, length, SAMPLE_TEMPERATURE, SAMPLE_TOP_K, generator).on_host():
            tokens.append(token)
            self._watchdog.tick()
        return tokens

    def _save(self) -> None:
        """Write a checkpoint. If several processes write it, it is complete after `_finish_save`."""
        self._finish_pending()
        self._finish_save()
        with self._watchdog.watch("saving the checkpoint"):
            state = (tensor for state in self.optimizer.state.values() for tensor in state.values())
            held = map(_dtensor.held, [*self.model.parameters(), *state])
            if self.processes.largest(find_non_finite(dict(enumerate(held))) is not None):
                raise self._diverged(f"a weight or a moment is not finite after {self.step} steps")
            values: dict[str, Any] = {
                "config": self.model.config,
                "model": self.model,
                "trainer": {
                    "step": self.step,
                    "data": self.data.train.state_dict(),
                    "fingerprint": self._fingerprint,
                    "options": asdict(self.config),
                    "outliers": self._step.outliers.state_dict(),
                },
            }
            if self._writer is not None:
                self._writer.save(optimizer=self.optimizer, **values)
                self._written_step = self.step
            else:
                if self.processes.is_main:
                    save_training_state(self.output / CHECKPOINT, optimizer=self.optimizer.state_dict(), **values)
                    self._retain(self.step)
                    self._saved_step = self.step
                self._saved_step = self.processes.from_main(self.step)  # the others wait until process 0 has saved
        self._restart_clock()

    def _finish_save(self) -> None:
        """Wait until this process's shards are written and the checkpoint is complete."""
        step, self._written_step = self._written_step, None
        if self._writer is None or step is None:
            return
        with self._watchdog.watch("writing the checkpoint"):
            self._writer.wait()
        self._saved_step = step
        if self.processes.is_main:
            self._retain(step)

    def _retain(self, step: int) -> None:
        retain(self.output / CHECKPOINT, step, self.config.keep_last, self.config.keep_every)

    # ---- start and end -----------------------------------------------------------------------------------------------

    def _open_files(self) -> None:
        self._log = TrainingLog(
            self._log_path,
            self.output / CSV,
            self.step,
            self.output / "tensorboard" if self.config.tensorboard else None,
            keep_log=self._keep_log,
        )
        if self.data.tokenizer:
            self.data.tokenizer.save(self.output / TOKENIZER_PREFIX)

    def _introduce(self) -> None:
        config, size = self.config, self.model.config
        processes = f" x {self.processes.world_size} processes" if self.processes.world_size > 1 else ""
        validation = f"{len(self.data.val.data):,}" if self.data.val else f"none, {self.data.why_no_val}"
        self._progress.say(
            f"model: {size.n_layer} layers, {size.n_head} heads, {size.n_embd} channels, "
            f"{self.model.num_parameters():,} parameters, "
            f"{config.dtype} on {self._describe_device()}{processes}\n"
            f"data: {self.data.train.data.path}, {len(self.data.train.data):,} tokens; "
            f"validation: {validation}\n"
            f"run: steps {self.step} to {self.total_steps} of {self._tokens_per_step():,} tokens, "
            f"in {self.output}, log in {self._log_path}"
        )
        first, *others = self.processes.gather(device_name(self.processes.device))
        for rank, name in enumerate(others, 1):
            if name != first:
                self._progress.say(
                    f"warning: process {rank} has {name}, process 0 {first}; all processes wait for the slowest one"
                )
                break

    def _describe_device(self) -> str:
        device, threads = self.processes.device, torch.get_num_threads()
        return f"{device} ({threads} thread{'s' * (threads > 1)})" if device.type == "cpu" else str(device)

    def _finish_run(self) -> TrainResult:
        self._save()
        val_loss = self._validate()
        accuracy = self._answer()
        sample = self._sample()
        self._finish_save()
        self._plot()
        self._progress.say(
            f"checkpoint: {self.output / CHECKPOINT}\n"
            f"to continue a text: {command_line('generate', self.output)}\n"
            f"to train on: {self._resume_line()} --steps {2 * self.step or 1}"
        )
        return TrainResult(self.step, self._train_loss, val_loss, sample, self.output, 0, accuracy)

    def _stop_early(self) -> TrainResult:
        self._save()
        self._finish_save()
        self._plot()
        self._progress.say(f"stopped at step {self.step} of {self.total_steps}; to go on: {self._resume_line()}")
        number = self._request.signal or signal.SIGTERM
        return TrainResult(self.step, self._train_loss, None, None, self.output, number)

    def _resume_line(self) -> str:
        return command_line("train", "--resume", self.output)

    def _plot(self) -> None:
        if not self._log:
            return
        try:
            plot_losses(self.output / CSV, self.output / PLOT, self.data.unit)
        except ImportError:
            self._progress.say("no loss plot: it takes matplotlib (pip install matplotlib)")
        else:
            self._progress.say(f"loss plot: {self.output / PLOT}")


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _say_late() -> None:
    who = process_name()
    unless = ", unless it waits for a process that has ended" if who else ""
    write_error(
        f"\ngptkernels train: {who or 'the run'} has not ended {LATE_SECONDS:g} seconds after the signal. It finishes "
        f"its step and writes a checkpoint{unless}\n"
    )
