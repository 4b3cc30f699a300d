"""``python -m benchmarks.curves`` trains GPT-2 with and without float8 matmuls from one seed, and compares the losses.

Several processes may divide the variants and seeds, each with a different ``--json`` file. ``--from A.json B.json``
joins the files.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from benchmarks.curves.show import draw, tables
from benchmarks.curves.train import VARIANTS, train
from benchmarks.harness.options import add_device, add_kept, described, names_in
from benchmarks.harness.pages import between
from gptkernels.data import find_files
from gptkernels.files.writing import replace_file

ROOT = Path(__file__).parents[2]
PAGE, PICTURE = ROOT / "docs" / "fp8.md", ROOT / "benchmarks" / "results" / "fp8_curves.png"
PLACE = "the kept curves"


def parser():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    add = parser.add_argument
    add("--train", metavar="PATTERN", help="token files to train on, as for `gptkernels train --train-files`")
    add("--val", metavar="PATTERN", help="token files for validation at the end")
    add("--variants", default=",".join(VARIANTS), help=described(VARIANTS))
    add("--steps", type=int, default=1000, help="(default: %(default)s)")
    add("--batch", type=int, default=32, help="sequences per step (default: %(default)s)")
    add("--length", type=int, default=1024, help="tokens of a sequence (default: %(default)s)")
    add("--layers", type=int, default=12, help="number of layers (default: %(default)s, as in GPT-2 124M)")
    add("--width", type=int, default=768, help="channels (default: %(default)s)")
    add("--vocabulary", type=int, default=50257, help="number of token ids (default: %(default)s)")
    add("--learning-rate", type=float, default=6e-4, help="peak learning rate (default: %(default)s)")
    add("--schedule", choices=["cosine", "constant"], default="cosine", help="cosine decays to a tenth of the peak")
    add("--warm-up", type=int, default=100, help="steps (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    add("--val-batches", type=int, default=1000, help="largest number of batches of validation (default: %(default)s)")
    add_device(parser)
    add("--json", type=Path, metavar="FILE", help="save the curves to this file")
    add_kept(parser)
    add("--plot", type=Path, metavar="PNG", help="plot the curves")
    add("--pages", action="store_true", help=f"write tables and plot into docs/{PAGE.name}")
    return parser


def main(arguments=None):
    cli = parser()
    arguments = cli.parse_args(arguments)
    curves = joined(arguments.kept, cli.error) if arguments.kept else _trained(arguments, cli.error)
    if arguments.json:
        save(arguments.json, curves)
    print(*tables(curves), sep="\n\n", flush=True)
    if arguments.plot:
        draw(curves, arguments.plot)
    if arguments.pages:
        draw(curves, PICTURE)
        PAGE.write_text(between(PAGE.read_text(), section(curves), PLACE))
    return 0


def section(curves) -> str:
    return "\n\n".join([*tables(curves), f"![Losses](../{PICTURE.relative_to(ROOT)})"])


def save(path, curves):
    with replace_file(path) as temporary:
        temporary.write_text(json.dumps({"curves": curves}) + "\n")


def joined(paths, error):
    """Only the seed may differ in the curves' settings."""
    curves = [curve for path in paths for curve in json.loads(path.read_text())["curves"]]
    for curve in curves[1:]:
        if {**curve["settings"], "seed": None} != {**curves[0]["settings"], "seed": None}:
            error(f"the files have different settings: {curves[0]['settings']} and {curve['settings']}")
    order = list(VARIANTS)
    return sorted(curves, key=lambda curve: (curve["settings"]["seed"], order.index(curve["variant"])))


def _trained(arguments, error):
    chosen = names_in(arguments.variants, VARIANTS, "variant", error)
    if not arguments.train or not arguments.val:
        error("--train and --val, or --from, must be given")
    names = "steps batch length layers width vocabulary learning_rate schedule warm_up seed val_batches"
    settings = {name: getattr(arguments, name) for name in names.split()}
    files = {name: find_files(getattr(arguments, name)) for name in ("train", "val")}
    curves: list[dict] = []

    def keep(curve):
        if arguments.json:
            save(arguments.json, [*curves, curve])
        losses, seconds = curve["losses"], curve["seconds"]
        print(f"{curve['variant']}: {len(losses)} steps, loss {losses[-1]:.4f}, {seconds:.1f} s", flush=True)

    for variant in chosen:
        curves.append(train(variant, settings, files, torch.device(arguments.device), keep))
    return curves


if __name__ == "__main__":
    sys.exit(main())
