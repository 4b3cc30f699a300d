"""``python -m benchmarks.swap`` times training steps of third-party GPT-2 models, unswapped and swapped.

A step has bfloat16 autocast, T=1024 (``--length``), gradient clipping and torch's fused AdamW.
"""

import argparse
import dataclasses
import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from benchmarks.harness.machine import describe, title
from benchmarks.harness.options import add_kept, names_in
from benchmarks.harness.run import save
from benchmarks.swap import table
from benchmarks.swap.measure import measure, measure_in_processes, profile, until_told
from benchmarks.swap.variants import LOGITS, SIZES, Variant, variant_of

ROOT = Path(__file__).parents[2]
ROWS = (
    *("huggingface/eager/32/0", "huggingface/eager/32/0.1", "huggingface/compiled/32/0", "huggingface/compiled/32/0.1"),
    *("huggingface/eager/4/0", "huggingface/eager/4/0.1", "huggingface/compiled/4/0", "huggingface/compiled/4/0.1"),
    *("huggingface/graphs/4/0", "huggingface/graphs/4/0.1", "nanogpt/eager/32/0", "nanogpt/compiled/32/0"),
)


def parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swap", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rows", default="*", help=f"MODEL/MODE/BATCH/DROPOUT, ...; * and ? match the table's: {', '.join(ROWS)}")
    add("--swapped", default="no,yes", help=f"comma-separated, of {', '.join(LOGITS)} (default: %(default)s)")
    add("--size", default="gpt2", choices=SIZES)
    add("--length", type=int, default=1024, help="T (default: %(default)s)")
    add("--seconds", type=float, default=2, help="duration of each variant's timed steps (default: %(default)s)")
    add("--losses", type=int, default=50, help="number of steps whose losses are compared (default: %(default)s)")
    add("--at-once", type=int, default=1, metavar="N", help="compile N variants in parallel; each is timed alone")
    add("--profile", action="store_true", help="show the kernels of each variant's step instead of times (CUDA)")
    add("--json", type=Path, metavar="FILE", help="save the run to this file after each variant")
    add_kept(parser)
    add("--pages", action="store_true", help="write the table into docs/swap.md")
    add("--one", help=argparse.SUPPRESS)
    return parser


def main(arguments=None):
    cli = parser()
    options = cli.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    if options.one:
        variant = Variant(**json.loads(options.one))
        print(json.dumps(measure(variant, device, options.seconds, options.losses, until_told)))
        return 0
    if options.kept:
        run = table.load(options.kept)
        if options.json:
            save(options.json, run)
    else:
        variants = _variants(options, cli.error)
        if options.profile:
            for variant in variants:
                profile(variant, device)
            return 0
        run = _measured(variants, options, device)
    print(table.text(run))
    if options.pages:
        for path, text in table.filled(ROOT, run).items():
            path.write_text(text)
    return int(any(row["fault"] for row in run["rows"]))


def _variants(options, error):
    names = []
    for given in options.rows.split(","):
        found = [row for row in ROWS if fnmatchcase(row, given)] if set(given) & set("*?") else [given]
        if not found:
            error(f"--rows: {given} is none of {', '.join(ROWS)}")
        names += [name for name in found if name not in names]
    swapped = names_in(options.swapped, LOGITS, "value of --swapped", error)
    try:
        rows = [variant_of(name, size=options.size, length=options.length) for name in names]
    except ValueError as wrong:
        error(f"--rows: {wrong}")
    return [dataclasses.replace(row, swapped=how) for row in rows for how in swapped]


def _measured(variants, options, device):
    run = {"machine": describe(device), "rows": []}
    print(title(run["machine"]), flush=True)
    for row in measure_in_processes(variants, options):
        run["rows"].append(row)
        print(json.dumps({name: value for name, value in row.items() if name != "losses"}), flush=True)
        if options.json:
            save(options.json, run)
    return run


if __name__ == "__main__":
    sys.exit(main())
