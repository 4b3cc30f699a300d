"""``python -m benchmarks`` measures ops, and shows, plots, saves and compares the times (docs/benchmarks.md)."""

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.harness import compare, measure, pages, report
from benchmarks.harness.machine import describe, title
from benchmarks.harness.options import add_device, add_kept, described, names_in
from benchmarks.harness.peers import PEERS, absent
from benchmarks.harness.run import load, save


def parser():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Times this package's kernels and those of other libraries.",
        epilog=f"peers: {described(PEERS)}",
    )
    add = parser.add_argument
    add("ops", nargs="*", metavar="OP", help=f"which ops (default: all of {', '.join(measure.OPS)})")
    add_device(parser)
    add("--peers", help="the baselines, or none (default: all installed ones; on the CPU, and with --host, torch)")
    add("--dtype", help="comma-separated (default: bfloat16,float32; on the CPU float32)")
    add("--shape", help="other sizes, such as 65536x768,4096x1600, for the ops whose sizes have as many numbers")
    add("--host", action="store_true", help="measure the host's time of a call on tiny tensors")
    add("--repeats", type=int, default=20, help="timed runs of each variant (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="save the run to this file")
    add("--plot", type=Path, metavar="DIR", help="write plots and a page of tables into this folder")
    add("--pages", action="store_true", help="write the figures into the pages in docs/")
    add("--compare", type=Path, metavar="OLD.json", help="list the rows that are slower than in this run")
    add_kept(parser)
    return parser


def settings_of(arguments, error):
    device = torch.device(arguments.device)
    missing = absent(device)
    default = "torch" if arguments.host or device.type == "cpu" else ",".join(PEERS)
    asked = default if arguments.peers is None else arguments.peers
    peers = [] if asked == "none" else names_in(asked, PEERS, "peer", error)
    for peer in peers:
        if peer in missing:
            print(f"{peer} left out: {missing[peer]}", file=sys.stderr)
    dtypes = arguments.dtype or ("float32" if device.type == "cpu" else "bfloat16,float32")
    known = ["float64", "float32", "bfloat16", "float16"]
    return measure.Settings(
        device=device,
        dtypes=[getattr(torch, name) for name in names_in(dtypes, known, "dtype", error)],
        peers=[p for p in peers if p not in missing],
        sizes=_sizes(arguments.shape, error),
        host=arguments.host,
        repeats=arguments.repeats,
    )


def _sizes(text, error):
    try:
        return text and [tuple(int(n) for n in size.split("x")) for size in text.split(",")]
    except ValueError:
        error(f"--shape takes sizes such as 65536x768,4096x1600, not {text}")


def run_of(arguments, settings):
    dtypes = [str(dtype).removeprefix("torch.") for dtype in settings.dtypes]
    plain = {**vars(settings), "device": str(settings.device), "dtypes": dtypes}
    run = {"machine": describe(settings.device), "settings": plain, "rows": []}
    print(title(run["machine"]), flush=True)
    ops = arguments.ops or measure.OPS
    measure.warm(ops, settings)
    for op in [*([] if settings.host else ["roof"]), *ops]:
        measured = measure.roof(settings.device, settings.repeats) if op == "roof" else measure.measure(op, settings)
        rows = list(measured)
        run["rows"] += rows
        if rows:
            report.show(rows)
        if arguments.json:
            save(arguments.json, run)
    return run


def main(arguments=None):
    """The exit status is 1 if our kernels are wrong or fail, or are slower than in --compare's run."""
    cli = parser()
    arguments = cli.parse_args(arguments)
    names_in(",".join(arguments.ops), measure.OPS, "benchmark", cli.error)
    if arguments.kept:
        run = load(*arguments.kept)
        for rows in report.by_op(run["rows"]).values():
            report.show(rows)
        if arguments.json:
            save(arguments.json, run)
    else:
        run = run_of(arguments, settings_of(arguments, cli.error))
    if arguments.plot:
        from benchmarks.harness.plot import draw

        draw(run, arguments.plot)
    if arguments.pages:
        pages.fill(Path(__file__).parents[1], run)
    lines = compare.slower(load(arguments.compare)["rows"], run["rows"]) if arguments.compare else []
    print(*lines, sep="\n", end="\n" if lines else "")
    if arguments.compare and not lines:
        print(f"nothing is slower than in {arguments.compare}")
    return int(bool(lines) or any("ours" in row.faults for row in run["rows"]))


if __name__ == "__main__":
    sys.exit(main())
