"""``python -m benchmarks``: measures, shows, plots, saves and compares. ``docs/benchmarks.md`` is its page."""

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.harness import compare, measure, pages, report, roof
from benchmarks.harness.machine import describe, title
from benchmarks.harness.peers import PEERS, absent
from benchmarks.harness.run import load, save
from benchmarks.harness.warm import warm


def parser():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Times our kernels and those of other libraries.",
        epilog="peers: " + "; ".join(f"{name}: {what}" for name, what in PEERS.items()),
    )
    add = parser.add_argument
    add("ops", nargs="*", metavar="OP", help=f"which ops (default: all of {', '.join(measure.OPS)})")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--peers", help="comma-separated, or none (default: all installed ones; on the CPU, and with --host, torch)")
    add("--dtype", help="comma-separated (default: bfloat16,float32; on the CPU float32)")
    add("--shape", help="sizes instead of an op's own, e.g. 65536x768,4096x1600, for ops with as many dimensions")
    add("--host", action="store_true", help="measure the host's time for a call on tiny tensors")
    add("--repeats", type=int, default=20, help="timed runs of each (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="save the run to this file")
    add("--plot", type=Path, metavar="DIR", help="plot each op and a roofline, with a Markdown page of tables")
    add("--pages", action="store_true", help="write the figures into the README and docs/, as those of the kept run")
    add("--compare", type=Path, metavar="OLD.json", help="list what became slower than in this run; then exit with 1")
    add("--from", type=Path, nargs="+", dest="kept", metavar="FILE", help="load these kept runs instead of measuring")
    return parser


def settings_of(arguments, error):
    """Convert the command line to ``measure.Settings``; prints a line for each peer that is not installed."""
    device = torch.device(arguments.device)
    missing = absent(device)
    default = "torch" if arguments.host or device.type == "cpu" else ",".join(PEERS)
    peers = _list(arguments.peers if arguments.peers is not None else default, PEERS, "peer", error, also=["none"])
    for peer in peers:
        if peer in missing:
            print(f"{peer} left out: {missing[peer]}", file=sys.stderr)
    dtypes = arguments.dtype or ("float32" if device.type == "cpu" else "bfloat16,float32")
    known = {"float64", "float32", "bfloat16", "float16"}
    return measure.Settings(
        device=device,
        dtypes=[getattr(torch, name) for name in _list(dtypes, known, "dtype", error)],
        peers=[p for p in peers if p not in missing],
        sizes=_sizes(arguments.shape, error),
        host=arguments.host,
        repeats=arguments.repeats,
    )


def _list(text, known, what, error, also=()):
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known and name not in also:
            error(f"no {what} {name}; there is {', '.join(known)}")
    return [name for name in names if name not in also]


def _sizes(text, error):
    try:
        return text and [tuple(int(n) for n in size.split("x")) for size in text.split(",")]
    except ValueError:
        error(f"--shape takes sizes such as 65536x768,4096x1600, not {text}")


def run_of(arguments, settings):
    """Measure all ops; each op's table is shown, and the file updated, when the op is measured."""
    run = {"machine": describe(settings.device), "settings": _plain(settings), "rows": []}
    print(title(run["machine"]), flush=True)
    ops = arguments.ops or measure.OPS
    warm(ops, settings)
    for op in ["roof", *ops]:
        if op == "roof":
            rows = [] if settings.host else roof.rows(settings.device, settings.repeats)
        else:
            rows = list(measure.measure(op, settings))
        run["rows"] += rows
        if rows:
            report.show(rows)
        if arguments.json:
            save(arguments.json, run)
    return run


def _plain(settings):
    return {name: str(value) if name == "device" else value for name, value in vars(settings).items()} | {
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in settings.dtypes]
    }


def main(arguments=None):
    """Return the exit status: 1 if one of our kernels is wrong or became slower."""
    cli = parser()
    arguments = cli.parse_args(arguments)
    unknown = sorted(set(arguments.ops) - set(measure.OPS))
    if unknown:
        cli.error(f"no benchmark for {', '.join(unknown)}; there is {', '.join(measure.OPS)}")
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
