"""The trainer's options: each is declared once, with its default, its flag and what it does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Preset:
    """What `--model NAME` stands for: the size, and defaults that suit it."""

    layers: int
    heads: int
    channels: int
    positions: int | None  # None: as many as the sequences are long
    batch_size: int
    sequence_length: int
    learning_rate: float
    steps: int | None  # None: one epoch


# The learning rates of the GPT-2 sizes are those that the GPT-3 paper gives for models of these sizes.
PRESETS = {
    "tiny": Preset(4, 4, 128, None, 16, 64, 3e-3, 700),
    "gpt2": Preset(12, 12, 768, 1024, 4, 1024, 6e-4, None),
    "gpt2-medium": Preset(24, 16, 1024, 1024, 4, 1024, 3e-4, None),
    "gpt2-large": Preset(36, 20, 1280, 1024, 4, 1024, 2.5e-4, None),
    "gpt2-xl": Preset(48, 25, 1600, 1024, 4, 1024, 2e-4, None),
}
DTYPES = ("float32", "bfloat16", "autocast")
MAX_SEED = 2**62 - 1
MAX_SAMPLE_LENGTH = 2**20


def _option(default: Any, help: str, **metadata: Any) -> Any:
    """A field that is also a command-line flag; `metadata` is read by `gptkernels.cli`.

    Keys: `short`, the flag of the original program; `choices`; `metavar`; `at_least`, `at_most` or `above`,
    the bounds of the value; `fixed`, whether a resumed run has to keep it.
    """
    return field(default=default, metadata={"help": help, **metadata})


@dataclass
class TrainConfig:
    """Options of `gptkernels train`, one field a flag (`batch_size` is `--batch-size`).

    What is left out and has no default of its own becomes that of the preset `model`. Of `steps` and `epochs`
    one is set.

    Raises:
        ValueError: a value out of its range; the message names the flag, the value and what it takes.
    """

    data: str | None = _option(
        None,
        "data prefix: PREFIX_train.bin and PREFIX_val.bin (default: the sources of Python's standard "
        "library, as bytes)",
        short="-i",
        metavar="PREFIX",
    )
    tokenizer: str | None = _option(
        None,
        "tokenizer of the data: bytes, gpt2 or a file (default: the one beside the data, or else "
        "tokens are GPT-2's and samples are printed as numbers)",
    )
    output: str | None = _option(
        None,
        "folder of the run: checkpoint, logs, plot (default: runs/MODEL, or runs/MODEL-2, ... if taken)",
        metavar="FOLDER",
        fixed=True,
    )
    log_file: str | None = _option(
        None,
        "log of the losses, lines of 's:STEP trl:LOSS' and 's:STEP tel:LOSS' (default: main.log in the run's folder)",
        short="-o",
        metavar="FILE",
    )

    model: str = _option("tiny", "size of the model, and defaults that suit it", choices=(*PRESETS,), fixed=True)
    layers: int = _option(None, "layers L (default: the model's)", at_least=1, fixed=True)
    heads: int = _option(None, "attention heads NH (default: the model's)", at_least=1, fixed=True)
    channels: int = _option(None, "channels C, a multiple of the heads (default: the model's)", at_least=1, fixed=True)
    init_from: str | None = _option(
        None,
        "begin with the weights of this run, checkpoint or model, of the same size",
        metavar="FILE",
        fixed=True,
    )

    batch_size: int = _option(None, "batch size B, sequences (default: 16 for tiny, else 4)", short="-b", at_least=1)
    sequence_length: int = _option(
        None,
        "sequence length T, tokens (default: 64 for tiny, else 1024)",
        short="-t",
        at_least=1,
        fixed=True,
    )
    grad_accumulation: int = _option(1, "batches whose gradients are averaged for one step", at_least=1)
    steps: int | None = _option(None, "steps to train (default: 700 for tiny, else one epoch)", at_least=0)
    epochs: float | None = _option(None, "passes over the training data, instead of --steps", above=0)
    learning_rate: float = _option(
        None,
        "peak learning rate (default: 3e-3 for tiny; 6e-4, 3e-4, 2.5e-4, 2e-4 for gpt2 ... gpt2-xl)",
        short="-l",
        above=0,
    )
    warmup_steps: int | None = _option(None, "steps of linear warm-up (default: 5%% of the steps)", at_least=0)
    final_lr_fraction: float = _option(
        0.1, "learning rate at the end of the cosine decay, as a fraction of the peak", at_least=0
    )
    weight_decay: float = _option(0.1, "AdamW's weight decay, on matrices only", at_least=0, fixed=True)
    grad_clip: float = _option(1.0, "clip the gradient to this norm; 0: never", at_least=0)
    seed: int = _option(
        1337, "seed of the weights, the order of the data and the samples", at_least=0, at_most=MAX_SEED, fixed=True
    )

    val_every: int = _option(50, "validate every so many steps and at the end; 0: never", short="-v", at_least=0)
    val_max_batches: int = _option(20, "validate on at most so many batches", short="-m", at_least=0)
    sample_every: int = _option(200, "print a sample every so many steps; 0: only at the end", short="-s", at_least=0)
    sample_length: int = _option(
        256, "tokens of a sample; 0: no sample", short="-g", at_least=0, at_most=MAX_SAMPLE_LENGTH
    )
    checkpoint_every: int = _option(
        200, "write the checkpoint every so many steps and at the end; 0: only at the end", at_least=0
    )

    dtype: str = _option(
        "float32",
        "of the model; bfloat16 has float32 copies of the parameters in the optimizer, autocast is "
        "float32 with bfloat16 matmuls",
        choices=DTYPES,
        fixed=True,
    )
    device: str = _option("auto", "cpu, cuda, cuda:1, ...; auto: cuda where there is one")
    tf32: bool = _option(False, "let CUDA round float32 matmuls to TF32")
    tensorboard: bool = _option(False, "write TensorBoard's files too")

    def __post_init__(self) -> None:
        for option in fields(self):
            _check(flag(option.name), getattr(self, option.name), option.metadata)
        if self.steps is not None and self.epochs is not None:
            raise ValueError("--steps and --epochs exclude each other")
        preset = PRESETS[self.model]
        for name in ("layers", "heads", "channels", "batch_size", "sequence_length", "learning_rate"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(preset, name))
        if self.steps is None and self.epochs is None:
            self.steps, self.epochs = preset.steps, None if preset.steps else 1.0
        if self.channels % self.heads:
            raise ValueError(f"--channels is {self.channels}, must be a multiple of --heads, {self.heads}")

    def updated(self, given: dict[str, Any]) -> TrainConfig:
        """The options of a run that is resumed with the options `given`.

        Raises:
            ValueError: one of `given` cannot change in the middle of a run.
        """
        saved = asdict(self)
        for option in fields(self):
            name = option.name
            if option.metadata.get("fixed") and name in given and given[name] != saved[name]:
                raise ValueError(f"{flag(name)} was {saved[name]}, cannot become {given[name]} in a resumed run")
        for name, other in (("steps", "epochs"), ("epochs", "steps")):
            if name in given and other not in given:
                saved[other] = None
        return TrainConfig(**(saved | given))


def flag(name: str) -> str:
    """The long flag of an option: `batch_size` -> `--batch-size`."""
    return "--" + name.replace("_", "-")


def _check(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    if value is None:
        return
    if value == "":
        raise ValueError(f"{name} is empty")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}, must be finite")
    if "at_least" in metadata and value < metadata["at_least"]:
        raise ValueError(f"{name} is {value}, must be at least {metadata['at_least']}")
    if "at_most" in metadata and value > metadata["at_most"]:
        raise ValueError(f"{name} is {value}, must be at most {metadata['at_most']}")
    if "above" in metadata and value <= metadata["above"]:
        raise ValueError(f"{name} is {value}, must be more than {metadata['above']}")
    if "choices" in metadata and value not in metadata["choices"]:
        raise ValueError(f"{name} is {value!r}, must be one of {', '.join(metadata['choices'])}")
