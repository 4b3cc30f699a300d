"""``python -m benchmarks``: a table of ours beside torch's kernels. Whether they are right is the tests' part."""

import argparse
import importlib
import json
import pkgutil
import platform
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import benchmarks
import gptkernels
from benchmarks.timing import host_seconds, kernel_seconds

NOT_OPS = {"__main__", "case", "timing"}
OPS = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if m.name not in NOT_OPS)


def parse():
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Ours beside torch's kernels.")
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"which ops (default: all of {', '.join(OPS)})")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32,bfloat16", help="comma-separated (default: %(default)s)")
    parser.add_argument("--host", action="store_true", help="time the host's part of a call on tiny tensors")
    parser.add_argument("--repeats", type=int, default=20, help="timed runs of each (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    unknown = set(arguments.ops) - set(OPS)
    if unknown:
        parser.error(f"no benchmark for {', '.join(sorted(unknown))}; there is {', '.join(OPS)}")
    return arguments


def measure(case, device, arguments):
    """Seconds by name, ours first."""
    names = ["ours", *case.peers]
    functions = [case.ours, *case.peers.values()]
    if arguments.host:
        return dict(zip(names, (host_seconds(f, device) for f in functions), strict=True))
    return dict(zip(names, kernel_seconds(functions, device, arguments.repeats), strict=True))


def row(op, dtype, case, seconds):
    """One measured case as plain data."""
    return {
        "op": op,
        "name": case.name,
        "shape": case.shape,
        "dtype": str(dtype).removeprefix("torch."),
        "seconds": seconds,
        "bytes": case.bytes,
        "flops": case.flops,
    }


def show(rows, host):
    """A table: microseconds, the rate of ours, and how many times as fast as each peer."""
    table = Table(box=None)
    for column in ("name", "shape", "dtype", "ours us", "rate", "beside"):
        table.add_column(column, justify="left" if column in ("name", "shape", "dtype", "beside") else "right")
    for r in rows:
        ours = r["seconds"]["ours"]
        rate = f"{r['flops'] / ours / 1e12:.1f} TFLOP/s" if r["flops"] else f"{r['bytes'] / ours / 1e9:.0f} GB/s"
        beside = ", ".join(f"{n} {s * 1e6:.1f} us ({s / ours:.2f}x)" for n, s in r["seconds"].items() if n != "ours")
        table.add_row(r["name"], r["shape"], r["dtype"], f"{ours * 1e6:.1f}", "" if host else rate, beside)
    Console(width=160).print(table)


def main():
    arguments = parse()
    device = torch.device(arguments.device)
    rows = []
    for op in arguments.ops or OPS:
        module = importlib.import_module(f"benchmarks.{op}")
        for dtype in (getattr(torch, name) for name in arguments.dtype.split(",")):
            for case in module.cases(device, dtype, small=arguments.host):
                rows.append(row(op, dtype, case, measure(case, device, arguments)))
    show(rows, arguments.host)
    if arguments.json:
        machine = {**gptkernels.info(), "platform": platform.platform(), "threads": torch.get_num_threads()}
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
