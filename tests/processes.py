"""Runs functions in several processes on the CPU, and programs in forked processes."""

import faulthandler
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
"""The seconds after which a process ends if it hangs."""

# A server forks the processes. It has no threads, does not use CUDA, and imports the modules once for all test files.
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


def run_programs(*programs):
    """Run each (program, arguments, environment) at the same time, in a process that is forked from the server.

    A variable that a module reads when it is imported has no effect.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [[Path(folder, f"{i}.{name}") for name in ("out", "err")] for i in range(len(programs))]
        processes = [
            forked.Process(target=_run_program, args=(program, arguments, os.environ | environment, paths))
            for (program, arguments, environment), paths in zip(programs, outputs, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [
            subprocess.CompletedProcess(program, process.exitcode, *(path.read_text() for path in paths))
            for (program, *_), process, paths in zip(programs, processes, outputs, strict=True)
        ]


def _run_program(program, arguments, environment, outputs):
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
