"""Downloads models from the Hugging Face hub with `huggingface_hub`."""

import os
import re
from pathlib import Path

from gptkernels.convert.huggingface import CONFIG, INDEX, PICKLE, WEIGHTS

_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")
_SAFETENSORS = [CONFIG, WEIGHTS, WEIGHTS + INDEX, "model-*-of-*.safetensors"]
_PICKLES = [CONFIG, PICKLE, PICKLE + INDEX, "pytorch_model-*-of-*.bin"]


def local_folder(name: str | os.PathLike[str]) -> Path:
    folder = Path(name)
    if os.fspath(name) and folder.is_dir():
        return folder
    if folder.exists() or not isinstance(name, str) or not _NAME.fullmatch(name) or name.startswith("."):
        raise ValueError(f"{os.fspath(name)}: no folder of a Hugging Face model")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(
            f"{name} is no folder here; as a name on the Hugging Face hub it takes huggingface_hub, which is not "
            "installed"
        ) from error
    folder = Path(snapshot_download(name, allow_patterns=_SAFETENSORS))
    if any((folder / file).exists() for file in (WEIGHTS, WEIGHTS + INDEX)):
        return folder
    return Path(snapshot_download(name, allow_patterns=_PICKLES))
