"""Runs functions in several processes on the CPU, and programs in forked processes."""

import faulthandler
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

PATIENCE = 150
"""Seconds after which a process is ended."""

# A server forks the processes. It has no threads, does not use CUDA, and imports the modules once for all test files of
# a pytest worker.
forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(
    [
        *("torch._dynamo", "torch.distributed.checkpoint.state_dict", "gptkernels.trainer.train", "pytest"),
        *("transformers.models.gpt2.modeling_gpt2", "transformers.trainer"),
    ]
)


def run_processes(function, count, *args):
    """Return the results of ``function(*args)`` in ``count`` processes, which are a group of gloo.

    An exception in a process, or its end by a signal, ends the others and is raised here. A process that hangs prints
    the stacks of its threads and ends.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, function, count, args)
        torch.multiprocessing.start_processes(_run, arguments, nprocs=count, start_method="forkserver")
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(count)]


def _run(rank, folder, function, count, args):
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=count)
    torch.save(function(*args), f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # With sys.exit, threads of torch that still run may abort the process.


# Forks a process for each program, after the import of torch.
FORK = """
import json, os, sys
from processes import run_program

children = []
for call in json.load(sys.stdin):
    child = os.fork()
    if not child:
        run_program(*call)
    children.append(child)
json.dump([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], sys.stdout)
"""


def run_programs(*programs, from_server=True):
    """Run each (program, arguments, environment) at the same time, in processes forked from the server.

    A variable has no effect if a module that the server has imported reads it at import. If ``from_server`` is false,
    only torch has been imported.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [[f"{folder}/{i}.{name}" for name in ("out", "err")] for i in range(len(programs))]
        calls = [
            (program, arguments, os.environ | environment, paths)
            for (program, arguments, environment), paths in zip(programs, outputs, strict=True)
        ]
        statuses = _fork_from_server(calls) if from_server else _fork_from_new_process(calls)
        return [
            subprocess.CompletedProcess(program, status, *(Path(path).read_text() for path in paths))
            for (program, *_, paths), status in zip(calls, statuses, strict=True)
        ]


def _fork_from_server(calls):
    children = [forked.Process(target=run_program, args=call) for call in calls]
    for child in children:
        child.start()
    for child in children:
        child.join()
    return [child.exitcode for child in children]


def _fork_from_new_process(calls):
    path = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FORK],
        input=json.dumps(calls), capture_output=True, text=True, env=os.environ | path, timeout=2 * PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run_program(program, arguments, environment, outputs):
    """Run a Python program in this process, end the process, and write its output and errors to two files."""
    signal.alarm(PATIENCE)
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
    torch.set_num_threads(1)
    sys.argv = ["-c", *arguments]
    os.environ.update(environment)
    status = 1
    try:
        exec(program, {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_case(name, function, *args):
    """Call a function. An error names the case."""
    try:
        return function(*args)
    except Exception as error:
        raise RuntimeError(f"the case {name} failed") from error
