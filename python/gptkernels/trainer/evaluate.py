"""Evaluates a model without training it: `gptkernels train --eval-only`."""

from contextlib import closing
from typing import Any, NamedTuple

import torch

from gptkernels.checkpoint import CHECKPOINT, TrainingState, load_training_state
from gptkernels.trainer.config import TrainConfig
from gptkernels.trainer.evaluation import Score, answer, check_questions, mean_loss
from gptkernels.trainer.model import BatchLoss, build_model
from gptkernels.trainer.processes import Processes
from gptkernels.trainer.progress import show_progress
from gptkernels.trainer.run_data import HeldOutData
from gptkernels.trainer.run_model import RunModel
from gptkernels.trainer.runs import find_run
from gptkernels.trainer.saved import naming, saved_options


class Evaluation(NamedTuple):
    """The validation loss in nats per token, and the score on the questions of `eval_file`.

    The loss is None without validation data, and the score is None without `eval_file`.
    """

    val_loss: float | None
    score: Score | None


def evaluate(config: TrainConfig) -> Evaluation:
    """Evaluate the model of `init_from` on the options' validation data and questions, and print the results.

    Raises:
        ValueError: if there is no `init_from` or nothing to evaluate on, or an option or the data is invalid.
        OSError: if a file cannot be read.
    """
    if config.init_from is None:
        raise ValueError("--eval-only takes the model of --init-from or --resume")
    return _evaluate(config, None)


def evaluate_run(run: str | None = None, **given: Any) -> Evaluation:
    """Evaluate the model of a run's checkpoint on the run's data, and print the results. The run may still be training.

    Args:
        run: the folder of the run; None means the folder in runs/ with the newest checkpoint.
        given: options of TrainConfig to change, such as `val_max_batches`.

    Raises:
        ValueError: if there is no such run or nothing to evaluate on, or an option or the data is invalid.
        OSError: if a file cannot be read.
    """
    checkpoint = find_run(run) / CHECKPOINT
    saved = load_training_state(checkpoint)
    config = saved_options(saved, checkpoint).updated({**given, "eval_only": True})
    with naming(checkpoint):
        return _evaluate(config, saved)


def _evaluate(config: TrainConfig, saved: TrainingState | None) -> Evaluation:
    with Processes(config.device) as processes, closing(show_progress(0, 0, processes.is_main)) as progress:
        if config.tf32:
            torch.backends.cuda.matmul.allow_tf32 = True
        model = build_model(config, 1, saved).eval()
        if saved is not None:
            model.to_empty(device="cpu").load_state_dict(saved.model)
        model.to(processes.device)
        data = HeldOutData(config, processes, model.config.vocab_size)
        if data.val is None and not data.questions:
            raise ValueError(f"nothing to evaluate on: {data.why_no_val}, and no --eval-file")
        check_questions(data.questions, model.config.block_size, config.eval_file)
        batch_loss = BatchLoss(model, config)
        val_loss = score = None
        if data.val is not None:
            val_loss = mean_loss(batch_loss, data.val, config.val_max_batches, processes)
            progress.say(f"validation loss {val_loss:.4f} {data.unit}")
        if data.questions:
            with batch_loss.precision(processes.device):
                score = answer(RunModel(model), data.questions, config.batch_tokens, processes)
            progress.say(str(score))
        return Evaluation(val_loss, score)
