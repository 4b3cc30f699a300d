"""Explanations for flags of nanoGPT and llm.c: which flag does the same here."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Sequence

NANOGPT, LLMC = "nanoGPT", "llm.c"

# The flags of train.py of nanoGPT, and of train_gpt2.py and train_gpt2.cu of llm.c, with the flag that does the same
# here. None: there is no such flag. Flags with the same name here are not listed.
_TRAIN: dict[str, dict[str, str | None]] = {
    NANOGPT: {
        "--out-dir": "--output",
        "--eval-interval": "--val-every",
        "--log-interval": None,
        "--eval-iters": "--val-max-batches",
        "--always-save-checkpoint": "--checkpoint-every",
        "--wandb-log": "--tensorboard",
        "--wandb-project": None,
        "--wandb-run-name": None,
        "--dataset": "--data",
        "--gradient-accumulation-steps": "--grad-accumulation",
        "--block-size": "--sequence-length",
        "--n-layer": "--layers",
        "--n-head": "--heads",
        "--n-embd": "--channels",
        "--max-iters": "--steps",
        "--decay-lr": "--schedule",
        "--warmup-iters": "--warmup-steps",
        "--lr-decay-iters": "--decay-steps",
        "--min-lr": "--min-learning-rate",
        "--backend": None,
    },
    LLMC: {
        "--input-bin": "--data",
        "--input-val-bin": "--val-files",
        "--output-dir": "--output",
        "--total-batch-size": "--total-batch-tokens",
        "--num-iterations": "--steps",
        "--warmup-iters": "--warmup-steps",
        "--learning-rate-decay-frac": "--final-lr-fraction",
        "--val-loss-every": "--val-every",
        "--val-max-steps": "--val-max-batches",
        "--overfit-single-batch": None,
        "--tensorcores": "--tf32",
        "--flash": None,
        "--zero-stage": None,
        "--write-tensors": None,
        "--inference-only": None,
        "-j": "--val-files",
        "-e": "--init-from",
        "-n": "--checkpoint-every",
        "-nk": "--keep-last",
        "-nm": "--keep-every",
        "-y": "--resume",
        "-d": "--total-batch-tokens",
        "-lg": None,
        "-x": "--steps",
        "-u": "--warmup-steps",
        "-q": "--final-lr-fraction",
        "-c": "--weight-decay",
        "-sl": "--skip-update-lossz",
        "-sg": "--skip-update-gradz",
        "-a": None,
        "-f": "--tf32",
        "-w": "--master-weights",
        "-ge": None,
        "-z": None,
        "-r": "--recompute",
        "-k": "--schedule",
        "-pn": None,
        "-pr": None,
        "-pg": None,
        "-pm": None,
        "-ps": None,
        "-pf": None,
        "-pi": None,
        "-pp": None,
    },
}
# The flags of sample.py of nanoGPT.
_GENERATE: dict[str, dict[str, str | None]] = {
    NANOGPT: {
        "--out-dir": "CHECKPOINT",
        "--init-from": "CHECKPOINT",
        "--start": "--prompt",
        "--num-samples": None,
        "--dtype": None,
        "--compile": None,
    }
}
# Values with a special meaning in these programs, by the flags that take them.
_SIZES = {"d12": "gpt2", "d24": "gpt2-medium", "d36": "gpt2-large", "d48": "gpt2-xl"}
_FROM_THE_HUB = "--init-from FOLDER with --model {}, for a folder of that model"
_VALUES: dict[tuple[str, ...], tuple[str, dict[str, str]]] = {
    ("--init-from",): (
        NANOGPT,
        {
            "resume": "--resume",
            "scratch": "what happens without --init-from",
            **{name: _FROM_THE_HUB.format(name) for name in _SIZES.values()},
        },
    ),
    ("--model", "-e"): (LLMC, {short: f"--model {name}" for short, name in _SIZES.items()}),
}
_NEAR = 0.75


def explain_flag(command: str, arguments: Sequence[str], known: Collection[str]) -> str | None:
    """Explain the first of `arguments` that is a flag of another program or misspelt; None if there is none.

    Args:
        command: "train", "generate", ...
        arguments: the arguments after the command.
        known: the flags of the command.
    """
    before = ""
    for argument, value in zip(arguments, [*arguments[1:], ""], strict=False):
        if argument == "--":
            return None
        name, equals, own_value = argument.partition("=")
        if name.startswith("-") and (sentence := _explain(command, name, own_value if equals else value, known)):
            return sentence
        if equals and f"--no-{name[2:]}" in known:
            return f"{name} takes no value here: {name}/--no-{name[2:]}"
        if command == "train" and name.endswith(".py") and not before.startswith("-"):
            return f"{name}: nanoGPT's configurations are Python: give their settings as flags"
        before = argument
    return None


def _explain(command: str, name: str, value: str, known: Collection[str]) -> str | None:
    dashed = "-" * (len(name) - len(name.lstrip("-"))) + name.lstrip("-").replace("_", "-")
    if command == "train" and (sentence := _explain_value(name, dashed, value)):
        return sentence
    if name in known:
        return None
    if dashed in known:
        return f"did you mean {dashed} instead of {name}?"
    tables = {"train": _TRAIN, "generate": _GENERATE}.get(command, {})
    if owners := [program for program, flags in tables.items() if dashed in flags]:
        ours = tables[owners[0]][dashed]
        answer = f"It is {ours} here" if ours else "There is none here"
        return f"did you mean {' and '.join(owners)}'s {name}? {answer}"
    if not name.startswith("--") or any(flag.startswith(name) for flag in known):  # argparse takes abbreviations
        return None
    near = difflib.get_close_matches(dashed, list(known), 1, _NEAR)
    return f"no flag {name}: did you mean {near[0]}?" if near else None


def _explain_value(name: str, dashed: str, value: str) -> str | None:
    if name == "-h" and value.isdigit():
        return "did you mean llm.c's -h? It is --eval-file here, with the name of a file"
    for flags, (program, meanings) in _VALUES.items():
        if dashed in flags and value in meanings and not os.path.exists(value):
            return f"did you mean {program}'s {name} {value}? It is {meanings[value]} here"
    return None
