"""The command line: `gptkernels train|prepare|generate|convert|check|demo|info`."""

import argparse
import errno
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from json import dumps
from pathlib import Path
from typing import Any

import torch

from gptkernels._command import Terminated, accept_signals
from gptkernels._info import info
from gptkernels._library import build
from gptkernels.checkpoint import CHECKPOINT
from gptkernels.convert import convert
from gptkernels.data import prepare
from gptkernels.parallel import Layout
from gptkernels.testing import gradcheck_ops
from gptkernels.testing.report import HEADER, Result, row
from gptkernels.trainer import demo
from gptkernels.trainer.config import GROUPS, TrainConfig, flag
from gptkernels.trainer.evaluate import evaluate, evaluate_run
from gptkernels.trainer.generate import Sampling, Writer
from gptkernels.trainer.output import SafeOutput, command_line, flush_streams, prepare_streams
from gptkernels.trainer.processes import DISCONNECTED, connection, process_name, process_rank
from gptkernels.trainer.progress import ByteProgress
from gptkernels.trainer.train import resume, train

USAGE_ERROR = 2
FAILURE = 1
DISK_ERROR = 3
INTERRUPTED = 130
UNREAD = 141
TERMINATED = 143
METAVARS = {int: "N", float: "X", str: "NAME"}
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    - 0: success
    - 1: the training diverged, a model computed NaN or infinite logits, or a check failed
    - 2: the command or its input is wrong, or there is not enough memory
    - 3: the disk is full or failing
    - 4: the training hung; the watchdog then ends the process, so that this function does not return
    - 5: the connection to another process of the training is lost
    - 141: the program that reads the output has closed the pipe
    - 128 + N: signal N stopped the command, for example 130 for Ctrl-C
    """
    prepare_streams()
    try:
        accept_signals()
        return _run(arguments)
    finally:
        flush_streams()


def _run(arguments: Sequence[str] | None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = vars(_parse(arguments))
    run: Callable[..., int] = args.pop("run")
    command, traceback = args.pop("command"), args.pop("traceback")
    try:
        if (processes := args.pop("nproc", 1)) != 1 and not process_name():
            return _launch(processes, arguments, **args)
        with connection():
            status = run(**args)
        if run is not _train:  # for training, output that cannot be written is no error
            sys.stdout.flush()
        return status
    except (KeyboardInterrupt, Terminated) as stop:
        name, status = ("SIGTERM", TERMINATED) if isinstance(stop, Terminated) else ("Ctrl-C", INTERRUPTED)
        if process_rank() == 0:
            print(f"\ngptkernels {command}: stopped by {name}", file=SafeOutput(sys.stderr))
        return status
    except BrokenPipeError:  # as in `gptkernels generate ... | head`
        return UNREAD
    except (ValueError, OSError, FloatingPointError, MemoryError, RuntimeError) as error:
        sentence = _sentence(command, error)
        if traceback or sentence is None:
            raise
        who = f"{name}: " if (name := process_name()) else ""
        # One write, because several processes may fail at the same time.
        SafeOutput(sys.stderr).write(f"gptkernels {command}: error: {who}{sentence}\n")
        return _status(error)


def _status(error: Exception) -> int:
    if isinstance(error, FloatingPointError):
        return FAILURE
    if isinstance(error, ConnectionError):
        return DISCONNECTED
    return DISK_ERROR if isinstance(error, OSError) and error.errno in _DISK_ERRORS else USAGE_ERROR


def _sentence(command: str, error: Exception) -> str | None:
    if _is_out_of_memory(error):
        if command != "train":
            return "out of memory"
        return (
            "out of memory. A smaller --batch-size with more --grad-accumulation, a shorter --sequence-length or a "
            "smaller model takes less"
        )
    if isinstance(error, RuntimeError):
        return None
    return " ".join(str(error).splitlines())


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


class _Parser(argparse.ArgumentParser):
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = _suggestion(value, action.choices or ())
            raise argparse.ArgumentError(action, error.message + near) from None


def _suggestion(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    return "".join(f": did you mean {near}?" for near in get_close_matches(word, list(known), 1, cutoff))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser, commands = _parser()
    args, unknown = parser.parse_known_args(arguments)
    command = commands.get(args.command, parser)
    if unknown:
        option = unknown[0].partition("=")[0].replace("_", "-")
        known = (*command._option_string_actions, *parser._option_string_actions)
        near = _suggestion(option, known, 0.75) if option.startswith("--") else ""
        command.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
    if args.command is None:
        parser.error("the following arguments are required: COMMAND")
    return args


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser("gptkernels", description="GPT-2's training kernels at work.")
    parser.add_argument("--version", action="version", version=f"gptkernels {build()['version']}")
    parser.add_argument("--traceback", action="store_true", help="show where in the program an error came from")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, add_arguments, run, summary in (
        ("train", _train_arguments, _train, "train a GPT-2, or continue a run"),
        ("prepare", _prepare_arguments, _prepare, "turn text into token files"),
        ("generate", _generate_arguments, _generate, "continue a text with a trained model"),
        ("convert", _convert_arguments, _convert, "write a model in another format, bit for bit"),
        ("check", _check_arguments, _check, "compare every op with torch's on this machine"),
        ("demo", demo.add_arguments, demo.run, "compare a few ops with torch's, train, and swap a Hugging Face model"),
        ("info", lambda parser: None, _info, "versions, libraries, devices"),
    ):
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        add_arguments(command)
        command.set_defaults(run=run)
    commands.choices["train"].usage = "gptkernels train [OPTION ...]"
    return parser, commands.choices


def _add_number(parser: argparse.ArgumentParser, name: str, default: float, help: str) -> None:
    kind = type(default)
    parser.add_argument(name, type=kind, default=default, metavar=METAVARS[kind], help=f"{help} (default: {default})")


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    types = typing.get_type_hints(TrainConfig)
    groups = {name: parser.add_argument_group(title) for name, title in GROUPS.items()}
    for option in fields(TrainConfig):
        _add_option(groups[option.metadata["group"]], option, types[option.name])
    groups["checkpoints"].add_argument(
        "--resume",
        nargs="?",
        const=None,
        default=argparse.SUPPRESS,
        metavar="FOLDER",
        help="continue the run in FOLDER from its checkpoint, bit for bit, with its options except those given here "
        "(without FOLDER: the run in --output, else the latest in runs/)",
    )
    groups["checkpoints"].add_argument(
        "--auto-resume",
        action="store_true",
        default=argparse.SUPPRESS,
        help="continue the run in --output if it has a checkpoint, otherwise begin it",
    )
    groups["parallel"].add_argument(
        "--nproc",
        type=int,
        default=1,
        metavar="N",
        help="start N processes on this machine, as torchrun does (default: 1)",
    )


def _add_option(parser: argparse._ArgumentGroup, option: Field, kind: Any) -> None:
    metadata = option.metadata
    names = [name for name in (metadata.get("short"), flag(option.name)) if name]
    keywords: dict[str, Any] = {"default": argparse.SUPPRESS, "help": metadata["help"]}
    if kind is bool:
        parser.add_argument(*names, action=argparse.BooleanOptionalAction, **keywords)
        return
    if option.default not in (None, MISSING):
        keywords["help"] += f" (default: {option.default})"
    scalar = next((part for part in typing.get_args(kind) if part is not type(None)), kind)
    keywords["metavar"] = metadata.get("metavar", METAVARS[scalar])
    if "choices" in metadata:
        keywords["choices"] = metadata["choices"]
        keywords["metavar"] = "NAME"
        keywords["help"] = f"{', '.join(metadata['choices'])}: {keywords['help']}"
    parser.add_argument(*names, type=scalar, **keywords)


def _launch(processes: int, arguments: Sequence[str], **options: Any) -> int:
    if processes < 1:
        raise ValueError(f"--nproc is {processes}, must be at least 1")
    Layout.parse(options.get("parallel"), processes)
    if not options.pop("auto_resume", "resume" in options):
        TrainConfig(**options)  # reports an invalid option once, not in each process
    from gptkernels.trainer.launch import launch  # imports torch's launcher, which other commands do not need

    return launch(processes, arguments)


def _train(**options: Any) -> int:
    folder: str | None = None
    if options.pop("auto_resume", False):
        if "output" not in options or "resume" in options:
            raise ValueError("--auto-resume takes --output, the folder of the run, and excludes --resume")
        if (Path(options["output"]) / CHECKPOINT).exists():
            options["resume"] = None
    if resumes := "resume" in options:
        folder = options.pop("resume")
        if folder == "":
            raise ValueError("--resume is empty: name the folder of a run, or nothing for the latest")
        folder = folder or options.pop("output", None)
    if options.get("eval_only"):
        if resumes:
            evaluate_run(folder, **options)
        else:
            evaluate(TrainConfig(**options))
        return 0
    result = resume(folder, **options) if resumes else train(TrainConfig(**options))
    return 128 + result.signal if result.signal else 0


def _prepare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="text files, and folders of text files")
    parser.add_argument(
        "--output",
        "-o",
        required=True,
        metavar="PREFIX",
        help="write PREFIX_train.bin, PREFIX_val.bin and the tokenizer, for 'gptkernels train -i PREFIX'",
    )
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="NAME",
        help="bytes; char, the characters of the text; gpt2; bpe, byte pairs learnt from the text; or a tokenizer "
        "file (default: bytes)",
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="for bpe: at most N tokens (default: 4096)")
    _add_number(parser, "--val-fraction", 0.05, "fraction of the text for validation")


def _prepare(files: list[str], output: str, tokenizer: str, vocab_size: int | None, val_fraction: float) -> int:
    progress = ByteProgress()
    if tokenizer == "bpe":
        print("learning byte pairs from the text", file=SafeOutput(sys.stderr))
    try:
        written = prepare(files, output, tokenizer, vocab_size=vocab_size, val_fraction=val_fraction, progress=progress)
    finally:
        progress.close()
    print(f"{written['train']}: {written['train_tokens']:,} tokens")
    print(f"{written['val']}: {written['val_tokens']:,} tokens")
    print(f"{written['tokenizer']}: a vocabulary of {written['vocab_size']:,}")
    if tokenizer == "bytes" and written["eot"] is None:
        print("the text has NUL bytes: no end-of-text token stands between the files")
    print(f"to train on it: {command_line('train', '-i', output)}")
    return 0


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a run's folder or checkpoint, or a model in any format that 'gptkernels convert' reads",
    )
    parser.add_argument("--prompt", default="", help="the text to continue (default: none, a new document)")
    parser.add_argument("--interactive", action="store_true", help="ask for prompts, until Ctrl-D")
    _add_number(parser, "--max-new-tokens", 256, "at most N tokens")
    _add_number(parser, "--temperature", 0.8, "divisor of the logits; 0: always the likeliest token")
    _add_number(parser, "--top-k", 40, "draw from the N likeliest tokens; 0: from all")
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="X",
        help="of these, draw from the smallest set of likeliest tokens with this total probability (default: from all)",
    )
    _add_number(parser, "--seed", 1337, "seed of the draws")
    parser.add_argument("--tokenizer", metavar="NAME", help="bytes, gpt2 or a file (default: the checkpoint's)")
    parser.add_argument("--device", default="auto", metavar="NAME", help="cpu, cuda, ... (default: auto)")


def _generate(checkpoint: str, prompt: str, interactive: bool, seed: int, **options: Any) -> int:
    writer = Writer(checkpoint, options.pop("tokenizer"), options.pop("device"), seed)
    sampling = Sampling(**options | {"top_k": options["top_k"] or None})
    if prompt or not interactive:
        writer.print(prompt, sampling)
    if interactive:
        writer.converse(sampling)
    return 0


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="A",
        help="a Hugging Face folder; nanoGPT's ckpt.pt; llm.c's .bin; a .safetensors or the folder of a run of "
        "gptkernels",
    )
    parser.add_argument(
        "target",
        metavar="B",
        help="NAME.bin for llm.c, NAME.pt for nanoGPT, NAME.safetensors for gptkernels, NAME for a Hugging Face folder",
    )
    parser.add_argument(
        "--dtype",
        metavar="NAME",
        help="float32, bfloat16, float16 or float64: convert the parameters to it (default: as they are)",
    )
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="keep N rows of the embedding; the others are padding"
    )
    parser.add_argument(
        "--padded-vocab-size", type=int, metavar="N", help="rows of a .bin (default: a multiple of 128)"
    )
    parser.add_argument("--activation", metavar="NAME", help="gelu_tanh or gelu: the GELU of the model")
    parser.add_argument(
        "--bias", action="store_true", help="give a model without biases biases of 0, which computes the same"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing B")


def _convert(source: str, target: str, **options: Any) -> int:
    done = convert(source, target, **options)
    sizes = ", ".join(f"{name} {value}" for name, value in done.config.items())
    print(f"{source}: {done.source.value} form; {sizes}")
    print(f"{target}: {done.target.value} form; {str(done.dtype).removeprefix('torch.')}")
    for note in done.notes:
        print(f"note: {note}")
    return 0


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", metavar="NAME", help="cpu, cuda, ... (default: auto)")
    parser.add_argument("--op", action="append", metavar="NAME", help="check only this op; may be given several times")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")


def _check(device: str, op: list[str] | None, json: bool) -> int:
    shown = [HEADER]  # printed with the first row, so that an error about the arguments has no header

    def show(results: list[Result]) -> None:
        print("\n".join([*shown, row(results)]), flush=True)
        shown.clear()

    report = gradcheck_ops(op, device=device, progress=None if json else show)
    print(dumps(report.as_dict(), indent=2) if json else report.summary())
    return 0 if report.passed else FAILURE


def _info() -> int:
    for name, value in info().items():
        print(f"{name}: {value}")
    return 0
