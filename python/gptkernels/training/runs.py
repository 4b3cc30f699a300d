"""Where runs lie: a folder each, with the checkpoint, the logs and the plot."""

from __future__ import annotations

from pathlib import Path

from gptkernels.data import prepare_standard_library, tokenizer_for_prefix

RUNS = Path("runs")
CHECKPOINT = "checkpoint.safetensors"
TOKENIZER_PREFIX = "checkpoint"
STANDARD_LIBRARY = RUNS / "data" / "standard_library"


def new_run(folder: str | None, model: str) -> Path:
    """Make the folder of a new run: the one named, or the first that is free of runs/MODEL, runs/MODEL-2, ...

    Raises:
        ValueError: the one named holds a checkpoint.
    """
    if folder is not None:
        path = Path(folder)
        if (path / CHECKPOINT).exists():
            raise ValueError(
                f"--output {folder} holds a run: --resume {folder} continues it, another folder starts anew"
            )
        path.mkdir(parents=True, exist_ok=True)
        return path
    RUNS.mkdir(exist_ok=True)
    number = 1
    while True:
        path = RUNS / (model if number == 1 else f"{model}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1


def find_run(folder: str | None) -> Path:
    """The folder of a run to resume: the one named, or the one in runs/ whose checkpoint is the newest.

    Raises:
        ValueError: it holds no checkpoint, or there is none.
    """
    if folder is None:
        checkpoints = sorted(RUNS.glob(f"*/{CHECKPOINT}"), key=lambda path: path.stat().st_mtime)
        if not checkpoints:
            raise ValueError(f"--resume: no run with a checkpoint in {RUNS}/")
        return checkpoints[-1].parent
    if not (Path(folder) / CHECKPOINT).exists():
        raise ValueError(f"--resume: {folder} holds no {CHECKPOINT}")
    return Path(folder)


def standard_library() -> str:
    """The data prefix of the standard library's sources, which are written there if they are not yet."""
    try:
        tokenizer_for_prefix(STANDARD_LIBRARY)  # the last file that is written
    except ValueError:
        prepare_standard_library(STANDARD_LIBRARY)
    return str(STANDARD_LIBRARY)
