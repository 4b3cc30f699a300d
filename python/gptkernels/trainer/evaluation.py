"""A model's loss on held-out data, and its answers to multiple-choice questions."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gptkernels import functional
from gptkernels.data import DataLoader, Question
from gptkernels.models import GPT2
from gptkernels.trainer.processes import Processes
from gptkernels.trainer.run_model import RunModel


class Score(NamedTuple):
    """The number of correct answers and the number of questions."""

    correct: int
    questions: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.questions

    def __str__(self) -> str:
        return f"{self.correct:,} of {self.questions:,} questions answered rightly, accuracy {self.accuracy:.4f}"


@torch.no_grad()
def mean_loss(
    loss: Callable[[Tensor, Tensor], Tensor], data: DataLoader, max_batches: int, processes: Processes
) -> float:
    """Return the mean loss in nats per token over the processes, each of which reads up to `max_batches` batches.

    The batches are the first ones of `data`, and at most those of one epoch.
    """
    data.reset()
    batches = min(data.batches_per_epoch, max_batches)
    total = torch.zeros((), device=processes.device)
    for _ in range(batches):
        total += loss(*(part.to(processes.device, non_blocking=True) for part in data.next_batch()))
    return processes.average(total / batches).item()


def check_questions(questions: Sequence[Question], positions: int, path: str | None) -> None:
    for i, question in enumerate(questions):
        if question.length > positions:
            raise ValueError(f"{path}: question {i} has {question.length} tokens, the model {positions} positions")


@torch.no_grad()
def answer(
    run_model: RunModel,
    questions: Sequence[Question],
    tokens_per_batch: int,
    processes: Processes,
    tick: Callable[[], object] = lambda: None,
) -> Score:
    """Let the model answer the questions, of which each process computes a part, and return the score of all of them.

    The answer to a question is the ending with the lowest mean loss per token, as in llm.c's length-normalised
    accuracy.
    """
    own = questions[processes.batch_rank :: processes.batches]
    batches = list(_batches(own, tokens_per_batch))
    count = processes.largest(len(batches)) if run_model.is_sharded else len(batches)
    losses = []

    def answer_all(model: GPT2) -> None:
        for i in range(count):
            batch = batches[i] if i < len(batches) else questions[:1]
            found = _ending_losses(model, batch, processes.device)
            losses.extend([found] if i < len(batches) else [])
            tick()

    run_model.run(answer_all)
    correct = _count_correct(own, torch.cat(losses).double().cpu().numpy()) if losses else 0
    share = processes.average(torch.tensor(correct, dtype=torch.float64, device=processes.device))
    return Score(round(share.item() * processes.batches), len(questions))


def _batches(questions: Sequence[Question], tokens_per_batch: int) -> Iterator[list[Question]]:
    batch: list[Question] = []
    rows = length = 0
    for question in questions:
        rows, length = rows + len(question.endings), max(length, question.length)
        if batch and rows * length > tokens_per_batch:
            yield batch
            batch, rows, length = [], len(question.endings), question.length
        batch.append(question)
    if batch:
        yield batch


def _ending_losses(model: GPT2, questions: Sequence[Question], device: torch.device) -> Tensor:
    length = max(question.length for question in questions)
    rows = [(question.context, ending) for question in questions for ending in question.endings]
    tokens = np.zeros((len(rows), length), np.int64)
    predicting = []  # where, in the flattened rows, a token of an ending is predicted
    for i, (context, ending) in enumerate(rows):
        tokens[i, : len(context)] = context
        tokens[i, len(context) : len(context) + len(ending)] = ending
        first = i * length + len(context) - 1
        predicting.append(np.arange(first, first + len(ending)))
    targets = np.concatenate([ending for _, ending in rows])
    where, wanted = (torch.from_numpy(part).to(device) for part in (np.concatenate(predicting), targets))
    hidden = model.transformer(torch.from_numpy(tokens).to(device))
    logits = model.lm_head(hidden.flatten(0, 1)[where])[:, : model.config.vocab_size]
    return functional.cross_entropy(logits, wanted, reduction="none")


def _count_correct(questions: Sequence[Question], losses: NDArray[np.float64]) -> int:
    lengths = np.array([len(ending) for question in questions for ending in question.endings])
    starts = np.concatenate([[0], lengths.cumsum()[:-1]])
    means = np.add.reduceat(losses, starts) / lengths
    correct = first = 0
    for question in questions:
        correct += int(means[first : first + len(question.endings)].argmin()) == question.label
        first += len(question.endings)
    return correct
