"""Batches of tokens and targets from a token file, in an order that a few integers describe."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .shards import TokenFiles
from .tokens import TokenFile, check_vocabulary, find_outside

MAX_SORTED = 1024
"""Up to so many windows are ordered by sorting random numbers, beyond by `permute`'s keyed bijection."""


class DataLoader:
    """Batches of a token file: `next_batch() -> (tokens, targets)`, both (B, T) int64 on the CPU.

    The file is cut into windows of T tokens and the target after the last of them; targets are the tokens
    shifted by one. The windows follow each other for ever: every epoch gives each window exactly once, in an
    order drawn from (seed, epoch), or in the file's order when `shuffle` is off. A batch may hold the end of
    one epoch and the beginning of the next, so none is left out. With several ranks, B windows in turn go to
    rank 0, rank 1, ...: between them they see what one rank with a batch of `world_size * B` would.

    With `random_offsets` a window begins at any token instead, each drawn from (seed, its place in the order): some
    tokens come up more often than others, as in nanoGPT.

    Nothing but the windows of a batch is read, and no permutation is held: the order is a keyed bijection,
    computed where it is needed, so a file of any size starts at once and resumes at once.

    Args:
        data: a token file or its path, or several as one.
        batch_size: B, the sequences of a batch on this rank.
        sequence_length: T.
        vocab_size: every token handed out is checked to lie in 0..vocab_size-1.
        seed: of the order.
        shuffle: off for validation: `reset()` then gives the same batches again.
        rank: which of the `world_size` loaders this one is.
        world_size: how many loaders share the file.
        random_offsets: windows at random places instead of each window once an epoch.
        pin_memory: batches in page-locked memory, for `.to(device, non_blocking=True)`.

    Raises:
        ValueError: an argument out of its range, or a file too short for one batch on every rank.
    """

    def __init__(
        self,
        data: TokenFile | TokenFiles | str | os.PathLike[str],
        batch_size: int,
        sequence_length: int,
        vocab_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
        pin_memory: bool = False,
        random_offsets: bool = False,
    ) -> None:
        sizes = {
            "batch_size": batch_size,
            "sequence_length": sequence_length,
            "vocab_size": vocab_size,
            "world_size": world_size,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, must be in 0..{world_size - 1} (world_size {world_size})")
        if not 0 <= seed < 2**62:
            raise ValueError(f"seed is {seed}, must be in 0..2^62-1")

        self.data = data if isinstance(data, TokenFile | TokenFiles) else TokenFile(data)
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.world_size = world_size
        self.pin_memory = pin_memory
        self.random_offsets = random_offsets
        self.position = 0
        """Windows handed out so far, on all ranks together."""

        if self.batches_per_epoch == 0:
            needed = world_size * batch_size * sequence_length + 1
            ranks = f" on each of {world_size} ranks" if world_size > 1 else ""
            raise ValueError(
                f"{self.data.path}: {len(self.data)} tokens are too few for a batch of B={batch_size} "
                f"sequences of T={sequence_length}{ranks}: it takes {needed}"
            )

    @property
    def num_windows(self) -> int:
        """Windows of the file; the last tokens, fewer than T, are in none."""
        return (len(self.data) - 1) // self.sequence_length

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches (of all ranks) in one pass over the file, at least 1: what a validation reads."""
        return self.num_windows // (self.batch_size * self.world_size)

    @property
    def epoch(self) -> int:
        """Passes over the file that are complete."""
        return self.position // self.num_windows

    def reset(self) -> None:
        """Go back to the first batch."""
        self.position = 0

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next tokens and targets, (B, T) int64 each.

        Raises:
            ValueError: a token outside the vocabulary; the message has the file, the position and the value.
        """
        B, T = self.batch_size, self.sequence_length
        first = self.position + self.rank * B
        batch = torch.empty(2, B, T, dtype=torch.int64, device="cpu", pin_memory=self.pin_memory)
        tokens, targets = batch.numpy()
        for row, start in enumerate(self._starts(first, first + B)):
            window = self.data[start : start + T + 1]
            if (outside := find_outside(window, self.vocab_size)) is not None:
                path, position = self.data.locate(int(start) + outside)
                check_vocabulary(window[outside:], self.vocab_size, path, position)
            tokens[row], targets[row] = window[:-1], window[1:]
        self.position += self.world_size * B
        return batch[0], batch[1]

    def _starts(self, first: int, last: int) -> NDArray[np.int64]:
        """Where the windows at the places first..last-1 of the endless order begin, in tokens."""
        if not self.random_offsets:
            return self._windows(first, last) * self.sequence_length
        key = np.random.SeedSequence((self.seed, len(self.data))).generate_state(1, np.uint64)
        draws = _hash(_hash(np.arange(first, last, dtype=np.uint64)) ^ key)
        return (draws % np.uint64(len(self.data) - self.sequence_length)).astype(np.int64)

    def _windows(self, start: int, stop: int) -> NDArray[np.int64]:
        """Which windows come at the places start..stop-1 of the endless order."""
        epochs, indices = np.divmod(np.arange(start, stop), self.num_windows)
        if not self.shuffle:
            return indices
        orders = [
            permute(indices[epochs == epoch], self.num_windows, (self.seed, epoch)) for epoch in np.unique(epochs)
        ]
        return np.concatenate(orders)

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands, the same on every rank: plain numbers."""
        return {
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "sequence_length": self.sequence_length,
            "num_tokens": len(self.data),
            "random_offsets": self.random_offsets,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, bit for bit; batch size and number of ranks may have changed.

        Raises:
            ValueError: an entry is missing or out of range, or the sequence length or the data's size differ.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"data loader state: it is a {type(state).__name__}, must be a mapping")
        state = {"random_offsets": False, **state}  # which states of earlier versions do not say
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise ValueError(f"data loader state: {', '.join(sorted(missing))} missing")
        for name, here in (("sequence_length", self.sequence_length), ("num_tokens", len(self.data))):
            if state[name] != here:
                raise ValueError(f"data loader state: {name} was {state[name]}, is {here} ({self.data.path})")
        for name in ("position", "seed"):
            if type(state[name]) is not int or not 0 <= state[name] < 2**62:
                raise ValueError(f"data loader state: {name} is {state[name]!r}, must be in 0..2^62-1")
        for name in ("shuffle", "random_offsets"):
            if type(state[name]) is not bool:
                raise ValueError(f"data loader state: {name} is {state[name]!r}, must be True or False")
        for name in ("position", "seed", "shuffle", "random_offsets"):
            setattr(self, name, state[name])


def permute(indices: NDArray[np.int64], n: int, key: tuple[int, ...]) -> NDArray[np.int64]:
    """The images of `indices`, each in 0..n-1, under a pseudo-random bijection of 0..n-1 chosen by `key`.

    Up to `MAX_SORTED` numbers are put in the order of as many random ones, so that every order can come up. The
    rounds below reach only some of the orders of a small table.

    More numbers are laid out in a table, as nearly square as covers n, and Feistel rounds shift each row by a
    hash of the column and each column by a hash of the row. The few images that fall beyond n are sent
    through again until they fall inside ("cycle walking"), which keeps it a bijection.
    """
    if n <= MAX_SORTED:
        return _sorted_order(n, key)[indices]
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    keys = np.random.SeedSequence(key).generate_state(4, np.uint64)
    images = indices.astype(np.uint64)
    outside = np.ones(len(images), bool)
    while outside.any():
        row, column = np.divmod(images[outside], np.uint64(columns))
        for round_key in keys:
            row = (row + _hash(column ^ round_key) % rows) % rows
            column = (column + _hash(row ^ round_key) % columns) % columns
        images[outside] = row * columns + column
        outside = images >= n
    return images.astype(np.int64)


@functools.lru_cache(maxsize=8)
def _sorted_order(n: int, key: tuple[int, ...]) -> NDArray[np.int64]:
    return np.random.SeedSequence(key).generate_state(n, np.uint64).argsort(kind="stable")


def _hash(values: NDArray[Any]) -> NDArray[np.uint64]:
    """splitmix64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
