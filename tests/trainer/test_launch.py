"""Tests of ``gptkernels train --nproc``: its exit status, its errors, and its end by signals and faults."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gptkernels.trainer.cli import DISK_ERROR
from gptkernels.trainer.launch import _status
from gptkernels.trainer.processes import DISCONNECTED
from gptkernels.trainer.signals import ACKNOWLEDGEMENT
from small_runs import error_of, load_step, make_options, run_flags

pytestmark = pytest.mark.usefixtures("on_cpu")

# Python imports this module at its start. Process 1 runs the statement when there is a checkpoint.
ACTING = """
import os, threading, time

def act():
    while not os.path.exists(os.environ["CHECKPOINT"]):
        time.sleep(0.05)
    exec(os.environ["STATEMENT"])

if os.environ.get("RANK") == "1":
    threading.Thread(target=act, daemon=True).start()
"""
STATEMENTS = {
    "SIGKILL": "os.kill(os.getpid(), 9)",
    "SIGINT": "os.kill(os.getppid(), 2)",
    "full": "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))",
}


@pytest.fixture
def ended(tmp_path):
    """Return a finished run for each of ``STATEMENTS``."""
    (tmp_path / "sitecustomize.py").write_text(ACTING)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    running = {}
    for name, statement in STATEMENTS.items():
        output = tmp_path / name
        changes = {"steps": 10**6, "checkpoint_every": 10, "val_every": 0, "sample_every": 0, "output": str(output)}
        changes |= {"shard": "params"} if name == "full" else {}
        flags = run_flags(make_options(tmp_path, "cpu", **changes))
        running[name] = subprocess.Popen(
            [sys.executable, "-m", "gptkernels", "train", "--nproc", "2", *flags],
            env=os.environ | {"PYTHONPATH": path, "CHECKPOINT": f"{output}/checkpoint.safetensors"}
            | {"STATEMENT": statement, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    return {name: (process, *process.communicate(timeout=150)) for name, process in running.items()}


def test_signals_and_faults(ended, tmp_path):
    killed, _, errors = ended["SIGKILL"]
    assert killed.returncode == 128 + signal.SIGKILL
    lost, cause = errors.splitlines()
    assert lost.startswith("gptkernels train: error: process 0 of 2: the exchange with other processes failed, maybe")
    assert "The checkpoint of step " in lost
    assert cause == "gptkernels train: error: process 1 of 2 was ended by SIGKILL"
    assert load_step(tmp_path / "SIGKILL") % 10 == 0

    stopped, output, errors = ended["SIGINT"]
    assert stopped.returncode == 128 + signal.SIGINT
    assert errors == ACKNOWLEDGEMENT
    assert output.count("model: ") == output.count("stopped at step ") == 1
    assert f"stopped at step {load_step(tmp_path / 'SIGINT')} of " in output

    full, _, errors = ended["full"]
    assert full.returncode == DISK_ERROR
    assert errors
    for line in errors.splitlines():
        assert re.match(r"gptkernels train: error: process \d of 2: \[Errno 27\] File too large in process 1: ", line)
    assert load_step(tmp_path / "full") % 10 == 0  # the last checkpoint is whole

    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if str(tmp_path).encode() in command]


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        ({0: 2, 1: 2}, 2),
        ({0: DISCONNECTED, 1: 4}, 4),
        ({0: -signal.SIGTERM, 1: -signal.SIGKILL}, 137),
        ({0: DISCONNECTED}, DISCONNECTED),
    ],
)
def test_the_status_is_that_of_the_cause(statuses, status):
    assert _status(statuses, 2) == status


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--nproc", "0"], "--nproc is 0, must be at least 1"),
        (["--nproc", "2", "--parallel", "dp=3"], "layout 'dp=3' is for 3 processes, but there are 2"),
        (["--nproc", "2", "-b", "0"], "--batch-size is 0, must be at least 1"),
    ],
)
def test_invalid_options_are_reported_once(capsys, options, error):
    assert error_of(capsys, "train", *options) == f"gptkernels train: error: {error}\n"
