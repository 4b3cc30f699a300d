"""Selects text files, finds the sources of Python's standard library, and reads files in pieces."""

import codecs
import os
import sysconfig
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

from gptkernels.files.regular import check_regular, is_regular, open_regular

CHUNK_BYTES = 1 << 20
LINE_BYTES = 1 << 16
"""The largest distance at which the end of a line is searched."""

# folders of tests, tables and installed packages
_NOT_LIBRARY = {
    *("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"),
    *("encodings", "pydoc_data"),
}


@dataclass(frozen=True)
class Document:
    """The bytes start..stop-1 of a file, as a text."""

    path: Path
    start: int
    stop: int

    @classmethod
    def whole(cls, path: Path) -> "Document":
        return cls(path, 0, path.stat().st_size)

    @property
    def size(self) -> int:
        return self.stop - self.start

    def text(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[str]:
        """Yield the text in pieces, decoded as UTF-8 with "surrogateescape".

        A piece ends before whitespace, where GPT-2's words end, too. Encoding the pieces therefore gives the same
        tokens as encoding the whole text. A word is cut only if `chunk_bytes` bytes of text have no whitespace.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        rest = ""
        for chunk in self.chunks(chunk_bytes):
            rest += decoder.decode(chunk)
            cut = _last_break(rest)
            yield rest[:cut]
            rest = rest[cut:]
        rest += decoder.decode(b"", final=True)
        if rest:
            yield rest

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        left = self.size
        with open_regular(self.path) as file:
            file.seek(self.start)
            while left > 0 and (chunk := file.read(min(chunk_bytes, left))):
                yield chunk
                left -= len(chunk)

    def line_end(self, position: int) -> int:
        with open_regular(self.path) as file:
            file.seek(position)
            return min(self.stop, position + len(file.readline(LINE_BYTES)))

    def character_start(self, position: int) -> int:
        first = max(self.start, position - 4)
        with open_regular(self.path) as file:
            file.seek(first)
            data = file.read(min(self.stop, position + 1) - first)
        for back in range(1, len(data) if position < self.stop else 0):
            if data[-back] & 0xC0 != 0x80:
                return position + 1 - back if data[-back] >= 0xC0 else position
        return position


def _last_break(text: str) -> int:
    for i in range(len(text) - 1, 0, -1):
        if text[i] in " \t\r\n" and not text[i - 1].isspace():
            return i
    return len(text)


def find_documents(
    paths: Iterable[str | os.PathLike[str]] | str | os.PathLike[str], outputs: Collection[Path] = ()
) -> list[Document]:
    """Return the named files, and the files in the named folders, as documents.

    A file with several names is used once. A folder's files are in a fixed random order (by a hash of their names), so
    that the last files are a representative sample. In a folder, hidden and binary files, linked folders, tokenizer
    files that `prepare` wrote, and `outputs` are skipped. Empty files are always skipped.

    Raises:
        ValueError: if a path does not exist, is neither a regular file nor a folder, or is one of `outputs`, or if
            there is no text.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not all(map(os.fspath, given)):
        raise ValueError("the name of a file is empty")
    named = [Path(path) for path in given]
    overwritten = {_identity(path): path for path in outputs if path.exists()}
    files: dict[tuple[int, int], Path] = {}
    for path in named:
        if path.is_dir():
            found = [file for file in _walk(path) if not _is_prepared_tokenizer(file) and _is_text(file)]
            found = [file for file in found if _identity(file) not in overwritten]
        elif path.exists():
            check_regular(path)
            found = [path]
            if output := overwritten.get(_identity(path)):
                raise ValueError(f"{path} is an input, and would be overwritten as {output}: choose another output")
        else:
            raise ValueError(f"no such file or folder: {path}")
        for file in found:
            files.setdefault(_identity(file), file)
    documents = [document for document in map(Document.whole, files.values()) if document.size]
    if not documents:
        raise ValueError(f"no text in {', '.join(map(str, named)) or 'no files at all'}")
    return documents


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _is_prepared_tokenizer(file: Path) -> bool:
    prefix = file.name.removesuffix("_tokenizer.json")
    return prefix != file.name and file.with_name(f"{prefix}_train.bin").exists()


def _walk(root: Path, skip: Container[str] = ()) -> list[Path]:
    files = []
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(filter(is_regular, files), key=lambda file: _name_hash(file, root))


def _raise(error: OSError) -> NoReturn:
    """Without this handler, os.walk would skip a folder that it cannot read."""
    raise error


def _name_hash(file: Path, root: Path) -> bytes:
    return sha256(os.fsencode(file.relative_to(root).as_posix())).digest()


def _is_text(file: Path) -> bool:
    with open_regular(file) as opened:
        return b"\0" not in opened.read(8192)


def split(documents: Sequence[Document], val_fraction: float) -> tuple[list[Document], list[Document]]:
    """Split documents into training text and validation text.

    The validation text is about the last `val_fraction` of the bytes. If possible, it begins at the start of a line. A
    ValueError says that val_fraction is not between 0 and 1, or that there are too few bytes for both texts.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction}, must lie between 0 and 1, both excluded")
    total = sum(document.size for document in documents)
    cut = total - max(1, round(total * val_fraction))
    if cut <= 0:
        raise ValueError(f"{total} bytes of text are too few for training and validation")
    i = 0
    while cut >= documents[i].size:
        cut -= documents[i].size
        i += 1
    document = documents[i]
    middle = document.start + cut
    if cut and ((line_end := document.line_end(middle - 1)) < document.stop or i + 1 < len(documents)):
        middle = line_end
    middle = document.character_start(middle)
    train = [*documents[:i], replace(document, stop=middle)]
    val = [replace(document, start=middle), *documents[i + 1 :]]
    return [part for part in train if part.size], [part for part in val if part.size]


def standard_library(max_bytes: int = 16 << 20, val_fraction: float = 0.05) -> tuple[list[Document], list[Document]]:
    """Split the sources of the running Python's standard library into training and validation documents.

    The order and the split depend only on the files' names, not on the order in which the file system lists them.
    `max_bytes` is the largest total size.
    """
    root = Path(sysconfig.get_path("stdlib"))
    train: list[Document] = []
    val: list[Document] = []
    for path in _walk(root, skip=_NOT_LIBRARY):
        document = Document.whole(path)
        if path.suffix == ".py" and 0 < document.size <= max_bytes:
            is_val = int.from_bytes(_name_hash(path, root)[-4:], "big") < val_fraction * 2**32
            (val if is_val else train).append(document)
            max_bytes -= document.size
    if not train or not val:
        raise ValueError(f"{root} holds too little of the standard library's sources")
    return train, val
