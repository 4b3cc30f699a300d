"""Reads and writes models in any of the formats of `gptkernels.convert`."""

import dataclasses
import os
from pathlib import Path
from typing import Any, TypeVar

import torch

from gptkernels.checkpoint import save_model
from gptkernels.convert import load
from gptkernels.convert.files import of_state_dict
from gptkernels.convert.hub import local_folder
from gptkernels.convert.huggingface import read_huggingface, write_huggingface
from gptkernels.convert.model import common_dtype
from gptkernels.models.config import GPT2Config

Model = TypeVar("Model", bound="Files")


class Files(torch.nn.Module):
    """The methods of :class:`GPT2` that read and write files."""

    config: GPT2Config

    @classmethod
    def from_checkpoint(
        cls: type[Model], path: str | os.PathLike[str], device: Any = None, dtype: torch.dtype | None = None
    ) -> Model:
        """Load a model, with a dropout of 0, from a file or folder.

        Args:
            path: a ``.safetensors`` (a model or a training state), the folder of a run, llm.c's ``.bin``, a Hugging
                Face folder, or nanoGPT's ``ckpt.pt``, whose pickle is read without running code.
            device: the device of the model; None is the CPU.
            dtype: the dtype of the model. None is the smallest dtype that holds all parameters of the file exactly.

        Raises:
            ValueError: if the file is damaged or of another format, or describes a model that this GPT-2 cannot
                represent.
            OSError: if the file cannot be read.
        """
        config, state = load(path)
        return _build(cls, config, state, 0.0, device, dtype)

    @classmethod
    def from_pretrained(
        cls: type[Model],
        name: str | os.PathLike[str],
        *,
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> Model:
        """Load a Hugging Face GPT-2.

        Args:
            name: a folder that ``save_pretrained`` of this class or of transformers has written, or otherwise a name on
                the Hugging Face hub, for which ``huggingface_hub`` must be installed.
            dropout: the dropout of the new model.
            device, dtype: as in :meth:`from_checkpoint`.

        Raises:
            ValueError: if ``config.json`` describes a model that this GPT-2 cannot represent, a file is missing or
                damaged, or the name is neither a folder nor a possible name on the hub.
            ImportError: if the model must be downloaded and ``huggingface_hub`` is not installed.
            OSError: if a file cannot be read, or the hub cannot be reached.
        """
        model = read_huggingface(local_folder(name))
        state = {**model.state, "lm_head.weight": model.state["transformer.wte.weight"]}
        return _build(cls, model.config, state, dropout, device, dtype)

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Write the model atomically, as ``.safetensors``, or as llm.c's ``.bin`` in float32 or bfloat16.

        Raises:
            ValueError: if the format cannot represent the model.
            OSError: if the file cannot be written.
        """
        save_model(path, self.state_dict(), self.config)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write a folder that Hugging Face's ``GPT2LMHeadModel.from_pretrained`` reads, and replace existing files.

        Biases that the model lacks are written as 0.

        Raises:
            ValueError: if ``folder`` is a file, or the LM head is not the token embedding.
            OSError: if a file cannot be written.
        """
        write_huggingface(Path(folder), of_state_dict(self.state_dict(), dataclasses.asdict(self.config), str(folder)))


def _build(
    cls: type[Model], config: dict[str, Any], state: dict[str, torch.Tensor], dropout: float, device: Any, dtype: Any
) -> Model:
    # On the meta device no weights are drawn, which the state would replace.
    model = cls(GPT2Config(**config, dropout=dropout), "meta", dtype or common_dtype(state.values()))
    model.to_empty(device=torch.get_default_device() if device is None else device)
    model.load_state_dict(state)
    return model
