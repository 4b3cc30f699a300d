"""The formats in which a GPT-2 is stored."""

import enum
import os
from pathlib import Path

from gptkernels.checkpoint import CHECKPOINT
from gptkernels.convert.huggingface import CONFIG, is_huggingface
from gptkernels.convert.pickles import is_pickle
from gptkernels.files.regular import open_regular
from gptkernels.files.safetensors import is_own_safetensors
from gptkernels.files.writing import MODEL_MAGIC, describe_magic

NANOGPT_FILE = "ckpt.pt"


class Form(enum.Enum):
    """A format in which a GPT-2 is stored; the value is its name in messages."""

    HUGGING_FACE = "Hugging Face's"
    NANOGPT = "nanoGPT's"
    LLMC = "llm.c's"
    OWN = "gptkernels'"


_BY_SUFFIX = {".bin": Form.LLMC, ".pt": Form.NANOGPT, ".safetensors": Form.OWN}


def find(path: str | os.PathLike[str]) -> tuple[Form, Path]:
    """Recognise the format at a path; for a folder of a run or of nanoGPT, return the file in it.

    A path with none of the formats raises a ValueError.
    """
    path = Path(path)
    if path.is_dir():
        return _find_in(path)
    if not path.suffix and not path.exists():
        raise ValueError(
            f"{path}: no such file or folder. If it is a model on the Hugging Face hub, download it first: hf download "
            f"{path} --local-dir {path.name}"
        )
    with open_regular(path) as file:
        beginning = file.read(8)
    if is_pickle(beginning):
        return Form.NANOGPT, path
    if path.suffix == ".safetensors":
        if not is_own_safetensors(path):
            _refuse_part(path)
        return Form.OWN, path
    if path.suffix != ".bin" and not beginning.startswith(MODEL_MAGIC.to_bytes(4, "little")):
        raise ValueError(f"{path}: no model: neither a .bin of llm.c, a ckpt.pt of nanoGPT nor a .safetensors file")
    _refuse_headerless(path, beginning)
    return Form.LLMC, path


def _refuse_part(path: Path) -> None:
    if is_huggingface(path.parent) and path.name.startswith("model"):
        raise ValueError(f"{path}: a part of a Hugging Face model: name its folder, {path.parent}")


def _find_in(folder: Path) -> tuple[Form, Path]:
    if is_huggingface(folder):
        return Form.HUGGING_FACE, folder
    if (folder / CHECKPOINT).exists():
        return Form.OWN, folder / CHECKPOINT
    if (folder / NANOGPT_FILE).exists():
        return Form.NANOGPT, folder / NANOGPT_FILE
    raise ValueError(
        f"{folder}: no model: neither {CONFIG} (Hugging Face), {CHECKPOINT} (a run) nor {NANOGPT_FILE} (nanoGPT)"
    )


def _refuse_headerless(path: Path, beginning: bytes) -> None:
    """Raise a ValueError for a file without a header of llm.c: numbers alone do not give the shapes of the model."""
    magic = int.from_bytes(beginning[:4], "little", signed=True)
    if len(beginning) >= 4 and magic != MODEL_MAGIC and describe_magic(magic) == str(magic):
        raise ValueError(
            f"{path}: it begins with {magic} instead of llm.c's {MODEL_MAGIC}: numbers without a header do not say "
            "what model they are"
        )


def form_to_write(path: str | os.PathLike[str]) -> Form:
    suffix = Path(path).suffix
    if suffix in _BY_SUFFIX and not Path(path).is_dir():
        _refuse_part(Path(path))
        return _BY_SUFFIX[suffix]
    if Path(path).is_dir() or os.fspath(path).endswith(os.sep) or not suffix[1:].isalpha():
        return Form.HUGGING_FACE
    raise ValueError(
        f"{path}: {suffix} is no form of a model: .bin is llm.c's, .pt nanoGPT's, .safetensors gptkernels' own, a name "
        f"without suffix or with {os.sep} at its end a Hugging Face folder"
    )
