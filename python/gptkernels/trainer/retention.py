"""Which checkpoints a run keeps besides the newest one: the last few, and those of every so many steps."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from gptkernels.files.writing import replace_file

NUMBERED = "checkpoint-[0-9]*.safetensors"
"""The names of kept checkpoints, as a pattern of the shell's."""
_NAME = re.compile(r"checkpoint-(\d{8,})\.safetensors")


def numbered(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is kept."""
    return folder / f"checkpoint-{step:08d}.safetensors"


def is_numbered(path: Path) -> bool:
    """Whether a file has the name of a kept checkpoint."""
    return bool(_NAME.fullmatch(path.name))


def kept_steps(folder: Path) -> list[int]:
    """The steps whose checkpoints lie in a folder under their own names, in order."""
    return sorted(int(match[1]) for path in folder.glob(NUMBERED) if (match := _NAME.fullmatch(path.name)))


def retain(newest: Path, step: int, keep_last: int, keep_every: int) -> None:
    """Keep the newest checkpoint under a name with its step, if it is to be kept, and remove those that are not.

    The name is a second one for the same file (a hard link), which takes no space; where the file system has none, it
    is a copy. It appears once the file is whole.

    Args:
        newest: the checkpoint of `step`.
        step: updates made.
        keep_last: keep so many checkpoints, the newest among them; with 1 nothing is ever removed.
        keep_every: keep those of steps that are multiples of this for good; 0: of none.

    Raises:
        OSError: a file cannot be written or removed.
    """
    folder = newest.parent
    if keep_last > 1 or _is_multiple(step, keep_every):
        _link(newest, numbered(folder, step))
    if keep_last > 1:
        earlier = [other for other in kept_steps(folder) if other <= step]  # later ones: of a run that went back
        for other in earlier[:-keep_last]:
            if not _is_multiple(other, keep_every):
                numbered(folder, other).unlink(missing_ok=True)


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _link(path: Path, name: Path) -> None:
    with replace_file(name) as temporary:
        temporary.unlink()
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)
