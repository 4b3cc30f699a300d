"""Reads batches of tokens and targets from token files, in an order that a seed and a position define."""

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
"""The largest number of windows that are ordered by sorting random numbers; see `permute`."""


class DataLoader:
    """Batches of a token file: `next_batch() -> (tokens, targets)`, both (B, T) int64 on the CPU.

    The file is cut into windows of T tokens and the token after them; targets are the tokens shifted by one. Each epoch
    contains every window once, in an order that depends on (seed, epoch), or in the file's order without `shuffle`.
    Rank 0 gets the first B windows, rank 1 the next B, and so on, as from one batch of `world_size * B`.

    If `random_offsets` is true, a window starts at a random token, which depends only on the seed, the number of tokens
    and the window's index. Some tokens then occur more often than others, as in nanoGPT.

    Args:
        data: a token file or its path, or several files as one.
        batch_size: B, the sequences of a batch on this rank.
        sequence_length: T.
        vocab_size: every returned token is checked to be in 0..vocab_size-1.
        seed: the seed of the order, or of the random offsets.
        shuffle: False returns the windows in the file's order, as for validation.
        rank, world_size: the index of this loader, and the number of loaders that share the file.
        random_offsets: draw windows at random offsets instead of each window once in an epoch.
        pin_memory: return batches in page-locked memory, for `.to(device, non_blocking=True)`.

    Raises:
        ValueError: if an argument is out of its range, or the file is too short for one batch on every rank.
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
        """The number of windows that were returned so far, on all ranks together."""

        if self.batches_per_epoch == 0:
            needed = world_size * batch_size * sequence_length + 1
            ranks = f" on each of {world_size} ranks" if world_size > 1 else ""
            raise ValueError(
                f"{self.data.path}: {len(self.data)} tokens are too few for a batch of B={batch_size} "
                f"sequences of T={sequence_length}{ranks}: it takes {needed}"
            )

    @property
    def num_windows(self) -> int:
        """The number of windows; up to T - 1 tokens at the file's end are in no window."""
        return (len(self.data) - 1) // self.sequence_length

    @property
    def batches_per_epoch(self) -> int:
        """The number of whole batches that each rank gets in one pass over the file."""
        return self.num_windows // (self.batch_size * self.world_size)

    @property
    def epoch(self) -> int:
        """The number of complete passes over the file."""
        return self.position // self.num_windows

    def reset(self) -> None:
        """Go back to the first batch."""
        self.position = 0

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next tokens and targets, (B, T) int64 each.

        Raises:
            ValueError: if a token is outside the vocabulary; the message names the file, the position and the value.
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
        if not self.random_offsets:
            return self._windows(first, last) * self.sequence_length
        key = np.random.SeedSequence((self.seed, len(self.data))).generate_state(1, np.uint64)
        draws = _hash(_hash(np.arange(first, last, dtype=np.uint64)) ^ key)
        return (draws % np.uint64(len(self.data) - self.sequence_length)).astype(np.int64)

    def _windows(self, start: int, stop: int) -> NDArray[np.int64]:
        epochs, indices = np.divmod(np.arange(start, stop), self.num_windows)
        if not self.shuffle:
            return indices
        orders = [
            permute(indices[epochs == epoch], self.num_windows, (self.seed, epoch)) for epoch in np.unique(epochs)
        ]
        return np.concatenate(orders)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the options that define the sequence of windows. They are equal on every rank."""
        return {
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "sequence_length": self.sequence_length,
            "num_tokens": len(self.data),
            "random_offsets": self.random_offsets,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state` with the same windows; the batch size and the number of ranks may differ.

        Raises:
            ValueError: if an entry is missing or out of range, or the sequence length or the data's size differ.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"data loader state: it is a {type(state).__name__}, must be a mapping")
        state = {"random_offsets": False, **state}
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
    """Map `indices`, each in 0..n-1, by a pseudo-random permutation of 0..n-1 that `key` selects.

    An index is written as a row number and a column number of a nearly square table. Each of four rounds adds a hash of
    the column number to the row number, and then a hash of the row number to the column number. Results that are not
    below n are mapped again until they are ("cycle walking"). For small n, random numbers are sorted instead, because
    the rounds would yield only some of the permutations.
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
    """The hash function is splitmix64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
