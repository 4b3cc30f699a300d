"""The data of a run: its training and validation tokens, and the tokenizer."""

import os
from pathlib import Path
from typing import NamedTuple

from gptkernels.data import (
    DataLoader,
    TokenFiles,
    Tokenizer,
    find_files,
    find_tokenizer_file,
    is_pattern,
    load_tokenizer,
    read_questions,
)
from gptkernels.trainer.config import TrainConfig
from gptkernels.trainer.processes import Processes
from gptkernels.trainer.progress import printable
from gptkernels.trainer.runs import standard_library

GPT2_VOCAB_SIZE = 50257


class HeldOutData:
    """The data on which a model is evaluated.

    Attributes:
        tokenizer: the tokenizer of the data, or None; without a tokenizer, tokens are assumed to be GPT-2's.
        vocab_size: the size of the vocabulary, by default the tokenizer's.
        val: the validation data of this process, or None; `why_no_val` is then the reason.
        questions: the questions of `eval_file`.
    """

    def __init__(self, config: TrainConfig, processes: Processes, vocab_size: int | None = None) -> None:
        self._config = config
        self._processes = processes
        self._files = files = _find_files(config, processes)
        source: str | Path | None = config.tokenizer
        if source is None and files.prefix is not None:
            source = find_tokenizer_file(files.prefix)
        self.tokenizer: Tokenizer | None = None if source is None else load_tokenizer(source)
        self.vocab_size = vocab_size or (self.tokenizer.vocab_size if self.tokenizer else GPT2_VOCAB_SIZE)
        self.why_no_val = self._reason_not_to_validate(files.val)
        self.val = None if self.why_no_val else self._loader(files.val, is_training=False)
        self.questions = [] if config.eval_file is None else read_questions(config.eval_file, self.vocab_size)

    @property
    def unit(self) -> str:
        return "nats per byte" if self.tokenizer and self.tokenizer.vocab_size == 256 else "nats per token"

    @property
    def first_token(self) -> int:
        """The token before a sample: the tokenizer's `start`, or GPT-2's end-of-text token without a tokenizer."""
        return self.tokenizer.start if self.tokenizer else GPT2_VOCAB_SIZE - 1

    def text(self, tokens: list[int]) -> str:
        return printable(self.tokenizer.decode(tokens)) if self.tokenizer else " ".join(map(str, tokens))

    def _loader(self, paths: list[Path], is_training: bool) -> DataLoader:
        return DataLoader(
            TokenFiles(paths),
            self._config.batch_size,
            self._config.sequence_length,
            self.vocab_size,
            seed=self._config.seed,
            shuffle=is_training,
            rank=self._processes.batch_rank,
            world_size=self._processes.batches,
            pin_memory=self._processes.device.type == "cuda",
            random_offsets=is_training and self._config.sampling == "random-offset",
        )

    def _reason_not_to_validate(self, paths: list[Path]) -> str:
        if not self._config.val_max_batches or not (self._config.val_every or self._config.eval_only):
            return "not asked for"
        if not paths:
            return "no --val-files"
        if not paths[0].exists():
            return f"{paths[0]} is missing"
        if not paths[0].stat().st_size:
            return f"{paths[0]} is empty"
        data = TokenFiles(paths)
        wanted = self._processes.batches * self._config.batch_size * self._config.sequence_length + 1
        return f"{data.path} holds {len(data):,} tokens, a batch takes {wanted:,}" if len(data) < wanted else ""


class RunData(HeldOutData):
    """The data of a run, with the training data of this process, `train`."""

    def __init__(self, config: TrainConfig, processes: Processes) -> None:
        super().__init__(config, processes)
        if not (first := self._files.train[0]).exists():
            prefix = self._files.prefix
            text = prefix if prefix and os.path.exists(prefix) else "TEXT"
            raise ValueError(f"{first} is missing: 'gptkernels prepare {text} -o {prefix}' writes it from a text file")
        self.train = self._loader(self._files.train, is_training=True)


class _Files(NamedTuple):
    prefix: str | None
    train: list[Path]
    val: list[Path]


def _find_files(config: TrainConfig, processes: Processes) -> _Files:
    val = [] if config.val_files is None else find_files(config.val_files)
    if pattern := _pattern(config):
        return _Files(pattern.rpartition("_train")[0] or None, find_files(pattern), val)
    if config.eval_only and config.data is None and (val or config.eval_file):
        return _Files(None, [], val)
    prefix = config.data or processes.from_main(standard_library() if processes.is_main else "")
    return _Files(prefix, [Path(f"{prefix}_train.bin")], val or [Path(f"{prefix}_val.bin")])


def _pattern(config: TrainConfig) -> str | None:
    if config.train_files is not None or config.data is None:
        return config.train_files
    is_files = (is_pattern(config.data) or config.data.endswith(".bin")) and not os.path.exists(
        f"{config.data}_train.bin"
    )
    return config.data if is_files else None
