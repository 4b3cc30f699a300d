"""Starts the processes of `gptkernels train --nproc N` on this machine, by torch's elastic launcher."""

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gptkernels.trainer.output import write_error
from gptkernels.trainer.processes import DISCONNECTED


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run `gptkernels ARGUMENTS` in each process, and return 0 or the exit status of a process that failed.

    It is the lowest-numbered process that did not fail only because another one had failed. When a process fails, the
    others are stopped. SIGINT and SIGTERM are sent to all processes. Processes that have not ended 30 seconds later are
    killed.
    """
    logging.disable(logging.ERROR)  # the processes report their errors themselves
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            run_id="gptkernels",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "gptkernels", *arguments)
        except SignalException as stop:
            return 128 + stop.sigval
        except ChildFailedError as error:
            return _status({rank: failure.exitcode for rank, failure in error.failures.items()}, processes)
    return 0


def _status(statuses: dict[int, int], processes: int) -> int:
    """Return the exit status of the process that failed by itself, not because another process failed."""
    rank = min(statuses, key=lambda rank: (statuses[rank] in (DISCONNECTED, -signal.SIGTERM), rank))
    if (status := statuses[rank]) > 0:
        return status
    name = signal.Signals(-status).name
    write_error(f"gptkernels train: error: process {rank} of {processes} was ended by {name}\n")
    return 128 - status
