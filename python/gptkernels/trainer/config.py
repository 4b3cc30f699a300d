"""The trainer's options, each with its default, its flag and its help text."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Preset:
    """The size of the model `--model NAME`, and the defaults that other options have with this model."""

    layers: int
    heads: int
    channels: int
    positions: int | None
    batch_size: int
    sequence_length: int
    learning_rate: float
    steps: int | None


# The learning rates of the GPT-2 sizes are those of the GPT-3 paper (Brown et al., 2020).
PRESETS = {
    "tiny": Preset(4, 4, 128, None, 16, 64, 3e-3, 700),
    "gpt2": Preset(12, 12, 768, 1024, 4, 1024, 6e-4, None),
    "gpt2-medium": Preset(24, 16, 1024, 1024, 4, 1024, 3e-4, None),
    "gpt2-large": Preset(36, 20, 1280, 1024, 4, 1024, 2.5e-4, None),
    "gpt2-xl": Preset(48, 25, 1600, 1024, 4, 1024, 2e-4, None),
}
DTYPES = ("float32", "bfloat16", "autocast")
SHARDS = ("none", "grads", "params")
REDUCE_DTYPES = ("float32", "bfloat16")
SCHEDULES = ("cosine", "linear", "wsd", "constant")
SAMPLINGS = ("epochs", "random-offset")
ACTIVATIONS = ("gelu_tanh", "gelu")
RECOMPUTE = ("none", "gelu", "blocks")
DEFAULT_FINAL_LR_FRACTION = 0.1
FP8_ALIGNMENT = 16  # as in gptkernels.rules.fp8, which is not imported here because it imports torch
MAX_SEED = 2**62 - 1
MAX_SAMPLE_LENGTH = 2**20
MAX_WATCHDOG = 60.0 * 24 * 365


GROUPS = {
    "data": "data and files",
    "model": "model",
    "batch": "batches and steps",
    "optimizer": "learning rate and optimizer",
    "evaluation": "evaluation and samples",
    "checkpoints": "checkpoints",
    "speed": "precision, speed and memory",
    "parallel": "several processes",
}
"""The titles of the groups of flags, in the order of the help."""

# Pairs of options that exclude each other. In a resumed run, an option that is given replaces the other of its pair.
_EXCLUSIVE = (
    ("steps", "epochs"),
    ("data", "train_files"),
    ("grad_accumulation", "total_batch_tokens"),
    ("final_lr_fraction", "min_learning_rate"),
)


def _option(group: str, default: Any, help: str, **metadata: Any) -> Any:
    """In `metadata`, `at_least`, `at_most`, `above` and `below` are bounds of the option's value.

    A `fixed` option cannot change in a resumed run.
    """
    return field(default=default, metadata={"help": help, "group": group, **metadata})


_data, _model, _batch, _optimizer, _evaluation, _checkpoints, _speed, _parallel = (
    partial(_option, group) for group in GROUPS
)


@dataclass
class TrainConfig:
    """The options of `gptkernels train`, a field for each flag except those that resume
    (`batch_size` is `--batch-size`).

    The model's preset replaces a None in `layers`, `heads`, `channels`, `batch_size`, `sequence_length` and
    `learning_rate`. If `steps` and `epochs` are both None, the preset's number of steps is used, or one epoch if the
    preset has none.

    Raises:
        ValueError: if a value is out of its range, or options contradict each other; the message names the flags.
    """

    data: str | None = _data(
        None,
        "data prefix: PREFIX_train.bin and PREFIX_val.bin; or a pattern as in --train-files (default: the sources of "
        "Python's standard library, as bytes)",
        short="-i",
        metavar="PREFIX",
    )
    train_files: str | None = _data(
        None,
        "token files to train on, used as one, such as 'fineweb_train_*.bin'; instead of --data",
        metavar="PATTERN",
    )
    val_files: str | None = _data(
        None, "token files to validate on (default: PREFIX_val.bin of --data)", metavar="PATTERN"
    )
    tokenizer: str | None = _data(
        None,
        "tokenizer of the data: bytes, gpt2 or a file (default: the one of the data prefix; without one, "
        "tokens are assumed to be GPT-2's, and samples are printed as numbers)",
    )
    sampling: str = _data(
        "epochs",
        "every window of the data once in an epoch, shuffled, or windows that begin at random tokens",
        choices=SAMPLINGS,
        fixed=True,
    )
    output: str | None = _data(
        None,
        "folder of the run: checkpoint, logs, plot (default: runs/MODEL, or runs/MODEL-2, ... if taken)",
        metavar="FOLDER",
        fixed=True,
    )
    log_file: str | None = _data(
        None,
        "log of the losses, lines of 's:STEP trl:LOSS', 's:STEP tel:LOSS' and 's:STEP eval:ACCURACY' (default: "
        "main.log in the run's folder)",
        short="-o",
        metavar="FILE",
    )
    tensorboard: bool = _data(False, "also write TensorBoard's files")

    model: str = _model("tiny", "size of the model, and defaults for it", choices=(*PRESETS,), fixed=True)
    layers: int = _model(None, "layers L (default: the model's)", at_least=1, fixed=True)
    heads: int = _model(None, "attention heads NH (default: the model's)", at_least=1, fixed=True)
    channels: int = _model(None, "channels C, a multiple of the heads (default: the model's)", at_least=1, fixed=True)
    bias: bool = _model(True, "biases in linear layers and norms (default: with them)", fixed=True)
    activation: str = _model(
        "gelu_tanh", "the GELU of the feed-forward layers, tanh or exact", choices=ACTIVATIONS, fixed=True
    )
    dropout: float = _model(0.0, "probability with which activations are dropped in training", at_least=0, below=1)
    init_from: str | None = _model(
        None,
        "start with the weights of this run, checkpoint or model, of the same size, in any format that 'gptkernels "
        "convert' reads",
        metavar="FILE",
        fixed=True,
    )

    batch_size: int = _batch(None, "batch size B, sequences (default: 16 for tiny, else 4)", short="-b", at_least=1)
    sequence_length: int = _batch(
        None, "sequence length T, tokens (default: 64 for tiny, else 1024)", short="-t", at_least=1, fixed=True
    )
    grad_accumulation: int | None = _batch(
        None, "batches whose gradients are averaged for one step (default: 1)", at_least=1
    )
    total_batch_tokens: int | None = _batch(
        None,
        "tokens of a step in all processes together, instead of --grad-accumulation: a multiple of B T processes",
        at_least=1,
    )
    steps: int | None = _batch(None, "steps to train (default: 700 for tiny, else one epoch)", at_least=0)
    epochs: float | None = _batch(None, "passes over the training data, instead of --steps", above=0)
    watchdog: float = _batch(
        30.0,
        "end the run with exit status 4 if nothing (a forward or backward pass, a batch of validation, a token of a "
        "sample, a checkpoint) is finished for this many minutes; 0: never",
        metavar="MINUTES",
        at_least=0,
        at_most=MAX_WATCHDOG,
    )
    seed: int = _batch(
        1337, "seed of the weights, the order of the data and the samples", at_least=0, at_most=MAX_SEED, fixed=True
    )

    learning_rate: float = _optimizer(
        None,
        "peak learning rate (default: 3e-3 for tiny; 6e-4, 3e-4, 2.5e-4, 2e-4 for gpt2 ... gpt2-xl)",
        short="-l",
        above=0,
    )
    schedule: str = _optimizer(
        "cosine",
        "how the learning rate decays after its warm-up; wsd keeps the peak, and decays at the end",
        choices=SCHEDULES,
    )
    warmup_steps: int | None = _optimizer(None, "steps of linear warm-up (default: 5%% of the steps)", at_least=0)
    decay_steps: int | None = _optimizer(
        None,
        "cosine and linear reach the minimum at step N (default: the last one); wsd decays in the last N steps "
        "(default: a fifth of all)",
        at_least=1,
    )
    final_lr_fraction: float | None = _optimizer(
        None, "learning rate at the end of the decay, as a fraction of the peak (default: 0.1)", at_least=0
    )
    min_learning_rate: float | None = _optimizer(
        None, "learning rate at the end of the decay, instead of --final-lr-fraction", at_least=0
    )
    weight_decay: float = _optimizer(0.1, "AdamW's weight decay, on matrices only", at_least=0, fixed=True)
    beta1: float = _optimizer(0.9, "AdamW's decay of the first moment", at_least=0, below=1, fixed=True)
    beta2: float = _optimizer(0.95, "AdamW's decay of the second moment", at_least=0, below=1, fixed=True)
    grad_clip: float = _optimizer(1.0, "clip the gradient to this norm; 0: never", at_least=0)
    skip_update_lossz: float = _optimizer(
        0.0,
        "skip the update if the loss is this many standard deviations above the last 128 losses; 0: always update",
        at_least=0,
    )
    skip_update_gradz: float = _optimizer(0.0, "the same for the norm of the gradient; 0: always update", at_least=0)

    val_every: int = _evaluation(50, "validate every N steps and at the end; 0: never", short="-v", at_least=0)
    val_max_batches: int = _evaluation(20, "validate on at most N batches", short="-m", at_least=0)
    eval_file: str | None = _evaluation(
        None,
        "multiple-choice questions in llm.c's format, such as its hellaswag_val.bin, answered at every validation "
        "except at step 0",
        metavar="FILE",
    )
    eval_only: bool = _evaluation(
        False, "validate the model of --init-from or --resume and answer --eval-file; write nothing"
    )
    sample_every: int = _evaluation(200, "print a sample every N steps; 0: only at the end", short="-s", at_least=0)
    sample_length: int = _evaluation(
        256, "tokens of a sample; 0: no sample", short="-g", at_least=0, at_most=MAX_SAMPLE_LENGTH
    )

    checkpoint_every: int = _checkpoints(
        200, "write the checkpoint every N steps and at the end; 0: only at the end", at_least=0
    )
    keep_last: int = _checkpoints(1, "keep the last N checkpoints, with their steps in their names", at_least=1)
    keep_every: int = _checkpoints(0, "keep the checkpoints of every N-th step for good; 0: none", at_least=0)

    dtype: str = _speed(
        "float32", "dtype of the model; autocast is float32 with bfloat16 matmuls", choices=DTYPES, fixed=True
    )
    master_weights: bool = _speed(
        True,
        "float32 copies of bfloat16 parameters in the optimizer; without them parameters and moments are bfloat16, "
        "rounded up or down at random (default: with copies)",
        fixed=True,
    )
    device: str = _speed("auto", "cpu, cuda, cuda:1, ...; auto: cuda if available")
    tf32: bool = _speed(False, "let CUDA round float32 matmuls to TF32")
    fp8: bool = _speed(False, "train with float8 matmuls in the layers; evaluation has the precision of --dtype")
    fp8_head: bool = _speed(False, "train with float8 matmuls for the gradients of the LM head")
    fp8_logits: bool = _speed(False, "with --fp8-head: compute the logits in training by a float8 matmul")
    graph: bool = _speed(
        True, "replay the step as a CUDA graph, which gives the same bits (default: on CUDA, if possible)"
    )
    compile: bool = _speed(False, "compile the model with torch.compile")
    recompute: str = _speed(
        "none",
        "what the backward pass computes again to save memory: the GELUs, or all of each layer",
        choices=RECOMPUTE,
    )

    parallel: str | None = _parallel(
        None,
        "by how many processes the batch (dp), the layers (tp) and the sequences (cp) are divided, such as dp=2,tp=4 "
        "(default: dp is the number of processes)",
        metavar="LAYOUT",
    )
    shard: str = _parallel(
        "none",
        "what else the processes divide: nothing; the gradients and the optimizer's state; these and the parameters",
        choices=SHARDS,
    )
    reduce_dtype: str | None = _parallel(
        None, "dtype in which the processes add gradients (default: the dtype of the gradients)", choices=REDUCE_DTYPES
    )
    deterministic_layout: bool = _parallel(
        False,
        "add the gradients of the processes in a fixed order, so that dp=2, 4 or 8 with one batch per step gives the "
        "same bits as dp=1 with --grad-accumulation 2, 4 or 8, without --dropout and --fp8; not for cp",
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            _check(flag(option.name), getattr(self, option.name), option.metadata)
        for one, other in _EXCLUSIVE:
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ValueError(f"{flag(one)} and {flag(other)} exclude each other")
        preset = PRESETS[self.model]
        for name in ("layers", "heads", "channels", "batch_size", "sequence_length", "learning_rate"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(preset, name))
        if self.steps is None and self.epochs is None:
            self.steps, self.epochs = preset.steps, None if preset.steps else 1.0
        if self.channels % self.heads:
            raise ValueError(f"--channels is {self.channels}, must be a multiple of --heads, {self.heads}")
        for name in ("fp8", "fp8_head"):
            if getattr(self, name) and self.channels % FP8_ALIGNMENT:
                raise ValueError(
                    f"--channels is {self.channels}, must be a multiple of {FP8_ALIGNMENT} for {flag(name)}"
                )
        if self.fp8_logits and not self.fp8_head:
            raise ValueError("--fp8-logits needs --fp8-head")
        if self.fp8 and self.recompute == "gelu":
            raise ValueError("--recompute gelu excludes --fp8, which keeps only 8 bits of the GELU's output")
        if self.keep_every and (not self.checkpoint_every or self.keep_every % self.checkpoint_every):
            raise ValueError(
                f"--keep-every is {self.keep_every}, must be a multiple of --checkpoint-every, {self.checkpoint_every}"
            )
        if not self.master_weights and self.dtype != "bfloat16":
            raise ValueError(f"--no-master-weights is for --dtype bfloat16, --dtype is {self.dtype}")
        if self.deterministic_layout and self.shard != "none" and not self.master_weights:
            raise ValueError(
                f"--deterministic-layout with --shard {self.shard} excludes --no-master-weights: the random rounding "
                "depends on how the parameters are divided"
            )
        self.accumulation(1)
        self._check_schedule()

    def _check_schedule(self) -> None:
        if self.schedule == "constant":
            for name in ("decay_steps", "final_lr_fraction", "min_learning_rate"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{flag(name)} is for schedules that decay, --schedule is constant")
        if self.min_learning_rate is not None and self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"--min-learning-rate is {self.min_learning_rate}, must be at most --learning-rate, "
                f"{self.learning_rate}"
            )

    @property
    def final_learning_rate(self) -> float:
        if self.min_learning_rate is not None:
            return self.min_learning_rate
        fraction = DEFAULT_FINAL_LR_FRACTION if self.final_lr_fraction is None else self.final_lr_fraction
        return fraction * self.learning_rate

    @property
    def batch_tokens(self) -> int:
        return self.batch_size * self.sequence_length

    def accumulation(self, processes: int) -> int:
        if self.total_batch_tokens is None:
            return self.grad_accumulation or 1
        at_a_time = self.batch_tokens * processes
        if self.total_batch_tokens % at_a_time:
            count = f" times {processes} processes" if processes > 1 else ""
            raise ValueError(
                f"--total-batch-tokens is {self.total_batch_tokens}, must be a multiple of {at_a_time}: --batch-size "
                f"{self.batch_size} times --sequence-length {self.sequence_length}{count}"
            )
        return self.total_batch_tokens // at_a_time

    def updated(self, given: dict[str, Any]) -> "TrainConfig":
        saved = asdict(self)
        for option in fields(self):
            name = option.name
            if option.metadata.get("fixed") and name in given and given[name] != saved[name]:
                raise ValueError(f"{flag(name)} was {saved[name]}, cannot become {given[name]} in a resumed run")
        for pair in _EXCLUSIVE:
            for name, other in (pair, pair[::-1]):
                if name in given and other not in given:
                    saved[other] = None
        if given.get("schedule") == "constant":
            saved |= dict.fromkeys(("decay_steps", "final_lr_fraction", "min_learning_rate"))
        return TrainConfig(**(saved | given))


def flag(name: str) -> str:
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
    if "below" in metadata and value >= metadata["below"]:
        raise ValueError(f"{name} is {value}, must be less than {metadata['below']}")
    if "above" in metadata and value <= metadata["above"]:
        raise ValueError(f"{name} is {value}, must be more than {metadata['above']}")
    if "choices" in metadata and value not in metadata["choices"]:
        raise ValueError(f"{name} is {value!r}, must be one of {', '.join(metadata['choices'])}")
