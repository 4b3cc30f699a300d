"""``python -m benchmarks.train_step`` times training steps, or profiles one (``--profile``).

With ``--pages`` it writes the tables into docs/step.md.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import torch

from benchmarks.harness.machine import describe, title
from benchmarks.harness.options import add_device, add_kept, described, names_in
from benchmarks.harness.pages import between
from benchmarks.harness.report import markdown
from benchmarks.train_step import cpu, host, timeline
from benchmarks.train_step.measure import batches, measure
from benchmarks.train_step.variants import PRECISIONS, VARIANTS, fp8_options, make
from gptkernels.models import GPT2, GPT2Config
from gptkernels.models.config import PRESETS

PAGE = Path(__file__).parents[2] / "docs" / "step.md"
HEADER = ["", "parameters", "batch", "ms", "+-", "tokens/s", "MFU", "GiB", "first loss", "last loss"]


def parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_step", description=__doc__)
    add = parser.add_argument
    add("--batch", default="64,4", help="sequences per step, comma-separated (default: %(default)s)")
    add("--variants", default=",".join(VARIANTS), help=described(VARIANTS))
    add("--precisions", default="bf16", help=described(PRECISIONS))
    add("--model", choices=PRESETS, default="gpt2", help="(default: %(default)s, 124M parameters)")
    add("--layers", type=int, help="number of layers (default: the model's)")
    add("--width", type=int, help="channels, in heads of 64 (default: the model's)")
    add("--length", type=int, default=1024, help="tokens of a sequence (default: %(default)s)")
    add(
        "--vocabulary", type=int, default=50304, help="a multiple of 128, which needs no padding (default: %(default)s)"
    )
    add("--warm-up", type=int, default=10, help="steps before the timed ones (default: %(default)s)")
    add("--steps", type=int, default=40, help="timed steps (default: %(default)s)")
    add_device(parser)
    add("--profile", action="store_true", help="show the kernels of one step of each of our variants (CUDA)")
    add("--host", action="store_true", help="measure the host's time for a step's parts and operators, with few tokens")
    add("--cpu", action="store_true", help="measure `make train`'s model and its operators on the CPU")
    add("--turns", type=int, default=30, help="with --cpu, how often each variant runs 5 steps (default: %(default)s)")
    add("--peak", type=float, default=117.0, help="with --cpu, one thread's peak GFLOP/s (default: %(default)s)")
    add(
        "--json", type=Path, metavar="FILE", help="save steps, profile, host or cpu to this file; the others stay in it"
    )
    add_kept(parser)
    add("--pages", action="store_true", help=f"write the tables into docs/{PAGE.name}")
    return parser


def main(arguments=None):
    cli = parser()
    arguments = cli.parse_args(arguments)
    chosen = names_in(arguments.variants, VARIANTS, "variant", cli.error)
    precisions = names_in(arguments.precisions, PRECISIONS, "precision", cli.error)
    if arguments.vocabulary % 128:
        cli.error(f"--vocabulary must be a multiple of 128, got {arguments.vocabulary}")
    sizes = [int(batch) for batch in arguments.batch.split(",")]
    if arguments.kept:
        runs = [json.loads(path.read_text()) for path in arguments.kept]
        print(*_all_tables(runs), sep="\n\n")
    else:
        runs = [_measured(arguments, chosen, precisions, sizes)]
    if arguments.pages:
        PAGE.write_text(between(PAGE.read_text(), "\n\n".join(_all_tables(runs))))
    return 0


def _keep(path, run):
    if path:
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**before, **run}, indent=1) + "\n")
    return run


def _measured(arguments, chosen, precisions, sizes):
    device = torch.device("cpu" if arguments.cpu else arguments.device)
    machine = describe(device)
    print(title(machine), flush=True)
    if arguments.cpu:
        found = cpu.measured([name for name in chosen if name in cpu.VARIANTS], arguments.turns, arguments.peak)
        print(*cpu.tables(found), sep="\n\n")
        return _keep(arguments.json, {"cpu": {"machine": machine, **found}})
    config = _config(arguments)
    torch.manual_seed(0)
    weights = GPT2(config).state_dict()
    if arguments.profile:
        names = dict.fromkeys(name.removesuffix("-graph") for name in chosen if name.startswith("ours"))
        steps = [_profile(name, config, weights, size, precisions[0], device) for size in sizes for name in names]
        return _keep(arguments.json, {"profile": {"machine": machine, "steps": steps}})
    if arguments.host:
        found = host.measured(config, weights, device)
        print(*host.tables(found), sep="\n\n")
        return _keep(arguments.json, {"host": {"machine": machine, **found}})
    rows = []
    run = {"steps": {"machine": machine, "model": arguments.model, "rows": rows}}
    print(markdown(HEADER, [], texts=2), flush=True)
    options = {"warm_up": arguments.warm_up, "steps": arguments.steps}
    for precision, batch, variant in itertools.product(precisions, sizes, chosen):
        rows.append(vars(measure(variant, precision, config, weights, batch, device, **options)))
        print("| " + " | ".join(_cells(rows[-1])) + " |", flush=True)
        _keep(arguments.json, run)
    return run


def _config(arguments):
    shape = PRESETS[arguments.model]
    width = arguments.width or shape["n_embd"]
    sizes = {"n_layer": arguments.layers or shape["n_layer"], "n_head": max(1, width // 64), "n_embd": width}
    return GPT2Config(block_size=arguments.length, vocab_size=arguments.vocabulary, **sizes)


def _profile(variant, config, weights, batch, precision, device):
    speed = timeline.rates(device)
    itemsize = 4 if precision == "tf32" else 2
    count = sum(t.numel() for t in weights.values()) - weights["lm_head.weight"].numel()  # tied to wte
    step = make(variant, precision, config, weights, device)
    (b,) = batches(config, batch, config.block_size, 1, device)
    for _ in range(3 + 1280 // batch):  # seconds of work, so that the clock rate is the same as in a long run
        step(*b)
    launched = timeline.launches(lambda: step(*b))
    logits = fp8_options(variant)["fp8_logits"]
    pieces = timeline.pieces(launched, speed, itemsize=itemsize, parameters=count, fp8_logits=logits)
    found = {"variant": variant, "batch": batch, "precision": precision, "lines": timeline.cells(pieces)}
    print(_profile_table(found), flush=True)
    return found


def _profile_table(step):
    variant = step.get("variant", "")
    fp8 = ", float8 matmuls in the layers" if "fp8" in variant else ""
    fp8 += " and in the LM head's gradients" if "fp8-head" in variant else ""
    fp8 += " and the whole LM head" if "fp8-logits" in variant else ""
    head = f"### One step at B={step['batch']}, {PRECISIONS[step['precision']]}{fp8}"
    return head + "\n\n" + markdown(timeline.HEADER, step["lines"], texts=4)


def _cells(row):
    texts = [row["variant"], row["precision"], str(row["batch"])]
    if row["fault"]:
        return [*texts, row["fault"], *[""] * 6]
    mfu = f"{row['mfu']:.1%}" if row["mfu"] else ""
    speed = [f"{row['milliseconds']:.2f}", f"{row['spread']:.2f}", f"{row['tokens_per_second']:.0f}", mfu]
    return [*texts, *speed, f"{row['gib']:.1f}", f"{row['losses'][0]:.4f}", f"{row['losses'][-1]:.4f}"]


def tables(run) -> list[str]:
    found = []
    if "steps" in run:
        found += [
            f"{run['steps']['model']}; {title(run['steps']['machine'])}.",
            markdown(HEADER, map(_cells, run["steps"]["rows"]), texts=2),
        ]
    if "profile" in run:
        found += [title(run["profile"]["machine"]) + ".", *map(_profile_table, run["profile"]["steps"])]
    return found


def _all_tables(runs):
    return [table for run in runs for table in tables(run)]


if __name__ == "__main__":
    sys.exit(main())
