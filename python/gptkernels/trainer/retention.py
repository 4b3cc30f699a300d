"""The checkpoints that a run keeps in addition to the newest one: the last few, and one for every N-th step."""

import os
import re
import shutil
from pathlib import Path

from gptkernels.files.safetensors import remove_unnamed_shards
from gptkernels.files.writing import replace_file

NUMBERED = "checkpoint-[0-9]*.safetensors"
"""A shell pattern for the names of kept checkpoints."""
_NAME = re.compile(r"checkpoint-(\d{8,})\.safetensors")


def numbered(folder: Path, step: int) -> Path:
    return folder / f"checkpoint-{step:08d}.safetensors"


def is_numbered(path: Path) -> bool:
    return bool(_NAME.fullmatch(path.name))


def kept_steps(folder: Path) -> list[int]:
    return sorted(int(match[1]) for path in folder.glob(NUMBERED) if (match := _NAME.fullmatch(path.name)))


def retain(newest: Path, step: int, keep_last: int, keep_every: int) -> None:
    """Give the newest checkpoint a second name with its step, if it is to be kept, and remove older kept checkpoints.

    Checkpoints whose step is a multiple of `keep_every` are kept for good. If `keep_last` is above 1, the last
    `keep_last` checkpoints are kept, too, and earlier ones are removed. The second name is a hard link, or belongs to a
    copy if the file system has no hard links.
    """
    folder = newest.parent
    if keep_last > 1 or _is_multiple(step, keep_every):
        _link(newest, numbered(folder, step))
    if keep_last > 1:
        # If the run was resumed from an earlier checkpoint, checkpoints of later steps remain.
        earlier = [other for other in kept_steps(folder) if other <= step]
        for other in earlier[:-keep_last]:
            if not _is_multiple(other, keep_every):
                numbered(folder, other).unlink(missing_ok=True)
    remove_unnamed_shards(folder)


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _link(path: Path, name: Path) -> None:
    with replace_file(name) as temporary:
        temporary.unlink()
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)
