"""Compares the trainer's losses in every layout with those of one process that has the same data and seed.

``torchrun -m benchmarks.scaling.losses OPTIONS FILE`` trains in the layouts of its number of processes, one after the
other, and writes the losses to the file. ``run`` starts it for each number of processes.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed

from benchmarks.harness.machine import describe, title
from benchmarks.harness.report import markdown
from benchmarks.scaling.training import train
from gptkernels._device import pick_device
from gptkernels.trainer.runs import standard_library

STEPS, BATCH = 50, 8  # sequences of all processes
DTYPES = ("float32", "bfloat16")
ONE = "one process"
ORDERED = {"deterministic_layout": True}
LAYOUTS = {
    1: {ONE: {}} | {f"{ONE}, {n} batches of {BATCH // n}": {"grad_accumulation": n} for n in (2, 4)},
    2: {
        "dp=2": {},
        "dp=2, deterministic layout": ORDERED,
        "dp=2, shard grads": {"shard": "grads"},
        "dp=2, shard params": {"shard": "params"},
        "tp=2": {"parallel": "tp=2"},
        "cp=2": {"parallel": "cp=2"},
    },
    4: {
        "dp=4": {},
        "dp=4, deterministic layout": ORDERED,
        "dp=2,tp=2, shard grads": {"parallel": "dp=2,tp=2", "shard": "grads"},
        "cp=2,tp=2, shard grads": {"parallel": "cp=2,tp=2", "shard": "grads"},
    },
}
SMALL, LARGE = {"model": "tiny", "device": "cpu"}, {"model": "gpt2", "device": "cuda"}


def options_of(layout: str, processes: int, dtype: str) -> dict:
    changes = LAYOUTS[processes][layout]
    sizes = dict(part.split("=") for part in changes.get("parallel", f"dp={processes}").split(","))
    batches = int(sizes.get("dp", 1)) * changes.get("grad_accumulation", 1)
    return changes | {"dtype": dtype, "batch_size": BATCH // batches}


def run(gpus: int) -> dict:
    """Train in the layouts of 1, 2 and, if there are as many GPUs, 4 processes; without GPUs, of a tiny model on CPUs.

    The processes of different numbers run at the same time if there are enough GPUs.
    """
    options = (LARGE if gpus else SMALL) | {"data": standard_library(), "steps": STEPS, "learning_rate": 6e-4}
    waiting, started, runs = [n for n in LAYOUTS if n <= (gpus or 4)], {}, []
    with tempfile.TemporaryDirectory() as folder:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        free = visible.split(",") if visible else [str(i) for i in range(gpus)]
        while waiting or started:
            while waiting and (waiting[0] <= len(free) if gpus else not started):
                count = waiting.pop(0)
                used, free = free[:count], free[count:]
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
                command += ["-m", "benchmarks.scaling.losses", json.dumps(options), f"{folder}/{count}.json"]
                environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(used)} if gpus else {})
                started[count] = subprocess.Popen(command, env=environment), used
            for count, (process, used) in list(started.items()):
                if process.poll() is not None:
                    del started[count]
                    free += used
                    if process.returncode:
                        for other, _ in started.values():
                            other.terminate()
                        raise RuntimeError(f"the layouts of {count} processes ended with status {process.returncode}")
                    runs += json.loads(Path(f"{folder}/{count}.json").read_text())
            time.sleep(0.1)
    runs.sort(key=lambda run: run["processes"])
    machine = describe(pick_device(options["device"], 0))
    return {"machine": machine | {"gpus": gpus}, "model": options["model"], "steps": STEPS, "runs": runs}


def differences(losses, others) -> str:
    if losses == others:
        return "same bits"
    return f"{max(abs(a / b - 1) for a, b in zip(losses, others, strict=True)):.1e}"


def table(run: dict) -> str:
    """Compare each layout with one process, and deterministic layouts with one process that has as many batches."""
    found = {(r["layout"], r["dtype"]): r["losses"] for r in run["runs"]}
    lines = []
    for layout, processes in {r["layout"]: r["processes"] for r in run["runs"] if r["layout"] != ONE}.items():
        ordered = "deterministic" in layout
        other = f"{ONE}, {processes} batches of {BATCH // processes}" if ordered else ONE
        cells = [differences(found[layout, dtype], found[other, dtype]) for dtype in DTYPES]
        lines.append([layout, other, *cells])
    gpus = run["machine"]["gpus"]
    head = f"{gpus} x {title(run['machine'])}" if gpus else title(run["machine"])
    what = f"{run['model']}, {run['steps']} steps of {BATCH} sequences."
    return f"{head}; {what}\n\n" + markdown(["layout", "compared with", *DTYPES], lines, texts=2)


def save(path: Path, run: dict) -> None:
    lines = ",\n".join("  " + json.dumps(r) for r in run["runs"])
    rest = json.dumps({**run, "runs": []}, indent=1).removesuffix("[]\n}")
    path.write_text(f"{rest}[\n{lines}\n ]\n}}\n")


def main(options: str, path: str) -> None:
    given, processes = json.loads(options), int(os.environ["WORLD_SIZE"])
    if processes > 1:
        if given["device"] == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl" if given["device"] == "cuda" else "gloo")
    runs = []
    for layout in LAYOUTS[processes]:
        for dtype in DTYPES:
            numbers = train(given | options_of(layout, processes, dtype))
            losses = [step["loss"] for step in numbers]
            runs.append({"processes": processes, "layout": layout, "dtype": dtype, "losses": losses})
    if int(os.environ["RANK"]) == 0:
        Path(path).write_text(json.dumps(runs))
    if processes > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
