"""A fingerprint of the training data, by which a resumed run knows that it goes on with the same."""

from __future__ import annotations

import zlib
from pathlib import Path

BLOCK_BYTES = 1 << 18
MAX_BLOCKS = 1 << 10
"""A file of up to this many blocks, 256 MiB, is read whole."""


def fingerprint(path: Path) -> str:
    """The file's size and the CRC-32 of its bytes; of more than 256 MiB, that of as much in evenly spaced blocks.

    Raises:
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    blocks = -(-size // BLOCK_BYTES)
    read = min(blocks, MAX_BLOCKS)
    checksum = 0
    with open(path, "rb", buffering=0) as file:
        for i in range(read):
            file.seek(i * blocks // read * BLOCK_BYTES)
            checksum = zlib.crc32(file.read(BLOCK_BYTES), checksum)
    return f"{size} bytes, crc32 {checksum:08x}"
