"""Reads multiple-choice questions in llm.c's format, such as `hellaswag_val.bin` of llm.c's dev/data/hellaswag.py.

A file (`write_evalfile` in llm.c's dev/data/data_common.py) has a header of 256 int32 (magic 20240522, version 1, the
number of questions, the bytes of the longest question), and then each question in uint16:

    65535, the question's number of bytes, its index, the index of the right ending, the number of endings,
    the context's length and tokens, and for each ending its length and tokens
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gptkernels.files.regular import open_regular
from gptkernels.files.writing import HEADER_BYTES, QUESTIONS_MAGIC, file_size, read_header

from .tokens import check_vocabulary

VERSION = 1
BEGIN = 65535
"""The first word of a question, which is not a token."""


class Question(NamedTuple):
    """A context, its possible endings (int64 tokens, none of them empty), and the index of the right one."""

    context: NDArray[np.int64]
    endings: list[NDArray[np.int64]]
    label: int

    @property
    def length(self) -> int:
        """The number of tokens of the context and the longest ending."""
        return len(self.context) + max(map(len, self.endings))


def read_questions(path: str | os.PathLike[str], vocab_size: int) -> list[Question]:
    """Read a file of questions.

    Raises:
        ValueError: if the file is damaged or of another format, or a token is outside 0..vocab_size-1.
        OSError: if the file cannot be read.
    """
    path = Path(path)
    with open_regular(path) as file:
        _, _, count, longest, *_ = read_header(file, path, QUESTIONS_MAGIC, (VERSION,))
        if count < 1:
            raise ValueError(f"{path}: number of questions is {count}, must be at least 1")
        if (size := file_size(file) - HEADER_BYTES) > count * max(longest, 0):
            raise ValueError(f"{path}: too long: {count} questions of at most {longest} bytes, but {size} bytes follow")
        stream = np.frombuffer(file.read(size // 2 * 2), "<u2").astype(np.int64)
    questions = [_question(words, f"{path}: question {i}", i) for i, words in enumerate(_split(stream, count, path))]
    for i, question in enumerate(questions):
        for tokens in (question.context, *question.endings):
            check_vocabulary(tokens, vocab_size, f"{path}: question {i}", 0)
    return questions


def _split(stream: NDArray[np.int64], count: int, path: Path) -> Iterator[NDArray[np.int64]]:
    position = 0
    for i in range(count):
        words = stream[position:]
        if len(words) < 2:
            raise ValueError(f"{path}: truncated: the file ends before question {i} of {count}")
        if words[0] != BEGIN:
            raise ValueError(f"{path}: question {i} begins with {words[0]}, must be {BEGIN}")
        if words[1] % 2 or not 2 * 8 <= words[1] <= 2 * len(words):
            raise ValueError(f"{path}: question {i} has {words[1]} bytes, of which the file has {2 * len(words)}")
        yield words[: words[1] // 2]
        position += int(words[1]) // 2
    if position != len(stream):
        raise ValueError(f"{path}: {2 * (len(stream) - position)} bytes are left over after question {count - 1}")


def _question(words: NDArray[np.int64], where: str, index: int) -> Question:
    _, _, found, label, number = words[:5].tolist()
    if found != index:
        raise ValueError(f"{where}: its index is {found}")
    if number < 2 or not 0 <= label < number:
        raise ValueError(f"{where}: ending {label} of {number} cannot be the right one")
    parts, position = [], 5
    for _ in range(1 + number):
        length = int(words[position]) if position < len(words) else 0
        part = words[position + 1 : position + 1 + length]
        if length == 0 or len(part) < length:
            raise ValueError(f"{where}: the context or an ending is empty, or longer than the question")
        parts.append(part)
        position += 1 + length
    if position != len(words):
        raise ValueError(f"{where}: {len(words) - position} words are left over")
    return Question(parts[0], parts[1:], label)
