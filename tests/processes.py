"""Runs functions in several processes on the CPU."""

import faulthandler
import multiprocessing
import os
import tempfile

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


def run_case(name, function, *args):
    """Call a function. An error names the case."""
    try:
        return function(*args)
    except Exception as error:
        raise RuntimeError(f"the case {name} failed") from error
