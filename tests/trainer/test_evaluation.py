"""Tests of the evaluation of models on multiple-choice questions in llm.c's format and on held-out data."""

import re
import struct
from pathlib import Path

import pytest
import torch

from gptkernels.data import read_questions, write_tokens
from gptkernels.models import GPT2, GPT2Config
from gptkernels.trainer.cli import main
from gptkernels.trainer.config import TrainConfig
from gptkernels.trainer.evaluate import evaluate, evaluate_run
from gptkernels.trainer.evaluation import answer
from gptkernels.trainer.processes import Processes
from gptkernels.trainer.run_model import RunModel
from helpers import assert_raises
from small_runs import TEXT, error_of, make_options, read_log, run_flags, train_with, write_questions

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT, ENDINGS = [5, 6, 7], [[1], [2, 3], [4, 5, 6, 7], [8]]


@pytest.fixture
def path(tmp_path):
    questions = [(CONTEXT, ENDINGS, 2), ([9], [[1], [2]], 0), (CONTEXT, ENDINGS, 3)]
    return write_questions(tmp_path / "questions.bin", questions)


def test_questions_are_read(path):
    questions = read_questions(path, 10)
    assert [question.label for question in questions] == [2, 0, 3]
    assert [question.length for question in questions] == [7, 2, 7]
    assert questions[0].context.tolist() == CONTEXT
    assert [ending.tolist() for ending in questions[0].endings] == ENDINGS


HEADER = [
    (0, 20240520, r"magic is 20240520, which is a token file of llm.c, not 20240522"),
    (1, 2, r"version is 2, known for a file of questions: 1"),
    (2, 0, r"number of questions is 0"),
    (2, 4, r"truncated: the file ends before question 3 of 4"),
    (2, 2, r"bytes are left over after question 1|too long"),
    (3, 1, r"too long: 3 questions of at most 1 bytes"),
]
QUESTION = [
    (0, 1, "question 0 begins with 1, must be 65535"),
    (1, 7, "question 0 has 7 bytes"),
    (1, 60000, "question 0 has 60000 bytes, of which the file has"),
    (2, 5, "question 0: its index is 5"),
    (3, 4, "question 0: ending 4 of 4 cannot be the right one"),
    (4, 1, "question 0: ending 2 of 1 cannot be"),
    (4, 3, "question 0: 2 words are left over"),
    (5, 0, "question 0: the context or an ending is empty"),
    (5, 900, "question 0: the context or an ending is empty, or longer than the question"),
    (6, 10, "question 0: token 10 at position 0 is outside the vocabulary of 10"),
]


@pytest.mark.parametrize(
    ("offset", "word", "message"),
    [
        *((4 * place, struct.pack("<i", value), message) for place, value, message in HEADER),
        *((1024 + 2 * place, struct.pack("<H", value), message) for place, value, message in QUESTION),
    ],
)
def test_a_damaged_file_is_refused(path, offset, word, message):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(word)
    assert_raises(ValueError, rf"questions.bin: ({message})", read_questions, path, 10)


def test_a_truncated_file_is_refused(path):
    whole = Path(path).read_bytes()
    for size in (0, 3, 1000, 1024, 1025, 1040, len(whole) - 1, len(whole) - 2):
        Path(path).write_bytes(whole[:size])
        assert_raises(ValueError, r"questions.bin: ", read_questions, path, 10)


def find_answers(model, questions):
    answers = []
    for context, endings in questions:
        losses = []
        for ending in endings:
            tokens = torch.tensor([context + ending], device=next(model.parameters()).device)
            log_probabilities = model(tokens)[0][0, len(context) - 1 :].log_softmax(-1)
            losses.append(-sum(log_probabilities[i, token].item() for i, token in enumerate(ending)) / len(ending))
        answers.append(losses.index(min(losses)))
    return answers


@pytest.mark.parametrize("tokens_per_batch", [1, 40, 10**6])
def test_the_answer_has_the_lowest_mean_loss(tmp_path, device, tokens_per_batch):
    torch.manual_seed(0)
    config = GPT2Config(block_size=24, vocab_size=40, n_layer=2, n_head=2, n_embd=16)
    model = GPT2(config, device, torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    draw = lambda longest: torch.randint(40, (int(torch.randint(1, longest, ())),)).tolist()  # noqa: E731
    questions = [(draw(12), [draw(12) for _ in range(2 + i % 3)]) for i in range(30)]
    answers = find_answers(model, questions)
    assert len(set(answers)) > 2
    labels = [found if i % 3 else (found + 1) % len(questions[i][1]) for i, found in enumerate(answers)]
    labelled = [(*question, label) for question, label in zip(questions, labels, strict=True)]
    path = write_questions(tmp_path / "questions.bin", labelled)
    processes = Processes(str(device))
    assert answer(RunModel(model), read_questions(path, 40), tokens_per_batch, processes) == (20, 30)
    halves = []
    for processes.batch_rank in (0, 1):  # each rank answers every second question
        processes.batches, processes.average = 2, lambda share: halves.append(share.item()) or share
        answer(RunModel(model), read_questions(path, 40), tokens_per_batch, processes)
    assert sum(halves) == 20


@pytest.fixture
def options(tmp_path, device):
    start = list(TEXT[:8])
    questions = [(start, [list(TEXT[8:12]), [0, 1, 2, 3]], 0), (start, [[0, 1], list(TEXT[8:14])], 1)]
    return make_options(tmp_path, device, eval_file=write_questions(tmp_path / "q.bin", questions))


def test_a_run_answers_questions(options, capsys):
    given = options | {"steps": 60, "val_every": 30, "learning_rate": 1e-2, "checkpoint_every": 0, "sample_every": 0}
    result = train_with(given)
    assert result.accuracy == 1
    assert "step 60: 2 of 2 questions answered rightly, accuracy 1.0000" in capsys.readouterr().out
    log = (result.output / "main.log").read_text()
    assert re.findall(r"s:(\d+) eval:\d\.\d{4}\n", log) == ["30", "60"]
    assert "s:60 eval:1.0000\n" in log
    rows = read_log(result.output, "eval")
    assert [(row["step"], row["loss"]) for row in rows] == [("30", ""), ("60", "")]
    assert float(rows[1]["accuracy"]) == 1


def test_questions_do_not_change_the_run(options, tmp_path):
    plain = train_with(options, eval_file=None, output=tmp_path / "plain")
    assert train_with(options).train_loss == plain.train_loss


def test_a_question_that_is_too_long_is_reported(options, tmp_path, capsys):
    write_questions(tmp_path / "q.bin", [([1], [[2], [3]], 0), ([1], [[2], [3] * 16], 0)])
    error = error_of(capsys, "train", *run_flags(options))
    assert "q.bin: question 1 has 17 tokens, the model 16 positions" in error
    assert not (tmp_path / "run").exists()


def test_a_run_is_evaluated_without_training(options, capsys):
    result = train_with(options)
    before = {path.name: path.read_bytes() for path in result.output.iterdir()}
    capsys.readouterr()
    given = TrainConfig(**options | {"init_from": str(result.output), "eval_only": True})
    for found in (evaluate_run(str(result.output)), evaluate(given)):
        assert (found.val_loss, found.score.accuracy) == (result.val_loss, result.accuracy)

    assert capsys.readouterr().out.count(f"validation loss {result.val_loss:.4f} nats per byte\n") == 2
    assert {path.name: path.read_bytes() for path in result.output.iterdir()} == before


def test_evaluation_needs_no_training_data(options, tmp_path, capsys):
    run = str(train_with(options).output)
    size = ["--layers", "1", "--heads", "2", "--channels", "16", "-b", "2", "-t", "16", "--device", options["device"]]
    command = ["train", "--eval-only", "--init-from", run, *size]
    for flags, message in (
        ([*command, "--eval-file", options["eval_file"]], "questions answered rightly"),
        ([*command, "--val-files", str(tmp_path / "text_v*.bin")], "validation loss"),
        (["train", "--resume", run, "--eval-only", "-m", "1"], "validation loss"),
    ):
        assert main(flags) == 0
        assert message in capsys.readouterr().out
    error = error_of(capsys, "train", "--eval-only", *size)
    assert "--eval-only takes the model of --init-from or --resume" in error
    error = error_of(capsys, *command, "-i", options["data"], "-m", "0")
    assert "nothing to evaluate on: not asked for, and no --eval-file" in error


def test_shards_of_held_out_files_have_the_loss_of_one_file(options, tmp_path):
    text = list(TEXT[:300])
    for name, part in {"parts_a": text[:100], "parts_b": text[100:130], "parts_c": text[130:], "whole": text}.items():
        write_tokens(tmp_path / f"{name}.bin", [part])
    losses = {
        train_with(options, val_files=tmp_path / f"{name}.bin", output=tmp_path / f"run_{name[0]}").val_loss
        for name in ("parts_*", "whole")
    }
    assert len(losses) == 1
