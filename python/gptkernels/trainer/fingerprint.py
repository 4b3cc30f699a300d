"""A fingerprint of the training data, by which a resumed run notices that its data has changed."""

import zlib
from collections.abc import Sequence
from pathlib import Path

from gptkernels.files.regular import open_regular

BLOCK_BYTES = 1 << 18
MAX_BLOCKS = 1 << 10
"""Files of up to this many blocks, 256 MiB, are read completely."""


def fingerprint(paths: Sequence[Path]) -> str:
    """Return a description of the files' contents. The names of the files have no effect.

    For one file it has the size, and a CRC-32 of the file, or of 256 MiB in evenly spaced blocks if the file is larger.
    For several files it has their number, and a CRC-32 of the files' own descriptions. The 256 MiB are then divided
    among the files, but at least one block of each file is read.
    """
    if len(paths) == 1:
        return _of_file(paths[0], MAX_BLOCKS)
    each = "\n".join(_of_file(path, max(1, MAX_BLOCKS // len(paths))) for path in paths)
    return f"{len(paths)} files, crc32 of their fingerprints {zlib.crc32(each.encode()):08x}"


def _of_file(path: Path, max_blocks: int) -> str:
    size = path.stat().st_size
    blocks = -(-size // BLOCK_BYTES)
    read = min(blocks, max_blocks)
    checksum = 0
    with open_regular(path) as file:
        for i in range(read):
            file.seek(i * blocks // read * BLOCK_BYTES)
            checksum = zlib.crc32(file.read(BLOCK_BYTES), checksum)
    return f"{size} bytes, crc32 {checksum:08x}"
