"""What a run reads: its training and validation tokens, and what they stand for."""

from __future__ import annotations

from pathlib import Path

from gptkernels.data import DataLoader, TokenFile, Tokenizer, find_tokenizer_file, load_tokenizer
from gptkernels.training.config import TrainConfig
from gptkernels.training.processes import Processes
from gptkernels.training.progress import printable
from gptkernels.training.runs import standard_library

GPT2_VOCAB_SIZE = 50257


class RunData:
    """The data of a run, as its options name it.

    Attributes:
        tokenizer: None where the data has none: its tokens are then taken for GPT-2's.
        vocab_size: tokens are 0..vocab_size-1.
        train: the training data of this process.
        val: the validation data of this process, or None.
        why_no_val: in words.

    Raises:
        ValueError: a file is damaged or too small, or the tokenizer cannot be had.
        OSError: a file cannot be read.
    """

    def __init__(self, config: TrainConfig, processes: Processes) -> None:
        self._config = config
        self._processes = processes
        prefix = config.data or processes.from_main(standard_library() if processes.is_main else "")
        self.tokenizer = _find_tokenizer(config.tokenizer, prefix)
        self.vocab_size = self.tokenizer.vocab_size if self.tokenizer else GPT2_VOCAB_SIZE
        self.train = self._loader(Path(f"{prefix}_train.bin"), shuffle=True)
        val_path = Path(f"{prefix}_val.bin")
        self.why_no_val = self._reason_not_to_validate(val_path)
        self.val = None if self.why_no_val else self._loader(val_path, shuffle=False)

    @property
    def unit(self) -> str:
        """The unit of losses."""
        return "nats per byte" if self.tokenizer and self.tokenizer.vocab_size == 256 else "nats per token"

    @property
    def first_token(self) -> int:
        """The token that a text begins with: end-of-text, which stands before every document, where there is one."""
        return self.tokenizer.start if self.tokenizer else GPT2_VOCAB_SIZE - 1

    def text(self, tokens: list[int]) -> str:
        """The tokens for people to read: as text, or as numbers where there is no tokenizer."""
        return printable(self.tokenizer.decode(tokens)) if self.tokenizer else " ".join(map(str, tokens))

    def _loader(self, path: Path, shuffle: bool) -> DataLoader:
        return DataLoader(
            path,
            self._config.batch_size,
            self._config.sequence_length,
            self.vocab_size,
            seed=self._config.seed,
            shuffle=shuffle,
            rank=self._processes.rank,
            world_size=self._processes.world_size,
            pin_memory=self._processes.device.type == "cuda",
        )

    def _reason_not_to_validate(self, path: Path) -> str:
        """Why there is nothing to validate on, or ""; ValueError when the data is damaged."""
        if not self._config.val_every or not self._config.val_max_batches:
            return "not asked for"
        if not path.exists():
            return f"{path} is missing"
        if not path.stat().st_size:
            return f"{path} is empty"
        have = len(TokenFile(path))
        wanted = self._processes.world_size * self._config.batch_size * self._config.sequence_length + 1
        return f"{path} holds {have:,} tokens, a batch takes {wanted:,}" if have < wanted else ""


def _find_tokenizer(name: str | None, prefix: str) -> Tokenizer | None:
    """The tokenizer named, or that beside the data, or None where there is none."""
    if name is not None:
        return load_tokenizer(name)
    path = find_tokenizer_file(prefix)
    return None if path is None else load_tokenizer(path)
