"""Tests that the watchdog ends a run that hangs, prints an error and the main thread's stack, and keeps the last
checkpoint.
"""

import os
import subprocess
import threading

import pytest

from gptkernels.trainer import watchdog
from gptkernels.trainer.train import resume
from gptkernels.trainer.watchdog import INTERVALS, STALLED, Watchdog
from processes import run_programs
from small_runs import TORCHRUN, assert_same_run, load_step, make_options, run_flags, train_with

pytestmark = pytest.mark.usefixtures("one_thread")

# Runs `gptkernels`. As soon as a checkpoint exists, each call of the function `path` of `module` begins with
# `statement`.
CHILD = """
import functools, importlib, os, sys, time
import torch
from gptkernels.trainer.cli import main

module, path, statement, checkpoint, rank, *arguments = sys.argv[1:]
*parents, name = path.split(".")
owner = functools.reduce(getattr, parents, importlib.import_module(module))
original = getattr(owner, name)

def call(*args, **kwargs):
    if os.path.exists(checkpoint) and os.environ.get("RANK", rank) == rank:
        exec(statement)
    return original(*args, **kwargs)

setattr(owner, name, call)
sys.exit(main(arguments))
"""
BLOCK = "time.sleep(1000)"
STEP = ("gptkernels.trainer.model", "BatchLoss.__call__", BLOCK)


@pytest.fixture
def options(tmp_path, device):
    return make_options(tmp_path, device, graph=False)


def arguments_of_child(options, hang, rank=0):
    """Return the arguments of CHILD. ``hang`` has the module, the function and the statement. Only ``rank`` hangs."""
    checkpoint = os.path.join(options["output"], "checkpoint.safetensors")
    return [*hang, checkpoint, str(rank), "train", "--watchdog", "0.05", *run_flags(options)]


# For each name of a part of the run: where the run hangs, the step and the description in the error message.
HANGS = {
    "data": (("gptkernels.data.loader", "DataLoader.next_batch", BLOCK), 4, "reading the training data"),
    "step": (STEP, 4, "in its forward pass, backward pass or update"),
    "validation": (("gptkernels.trainer.train", "mean_loss", BLOCK), 6, "validating"),
    "sample": (("gptkernels.models.gpt2", "GPT2._windows", BLOCK), 4, "sampling"),
    "checkpoint": (("gptkernels.trainer.train", "save_training_state", BLOCK), 8, "saving the checkpoint"),
    "device": (
        ("gptkernels.trainer.step", "Step.__call__", "torch.cuda._sleep(2**60)"),
        6,
        "waiting for cuda:0, which does",
    ),
}


def test_a_hang_ends_the_run(options, device, tmp_path):
    hangs = {name: hang for name, hang in HANGS.items() if name != "device" or device.type == "cuda"}
    programs = [
        (CHILD, arguments_of_child(options | {"output": str(tmp_path / name)}, hang), {})
        for name, (hang, _, _) in hangs.items()
    ]
    # Runs on the same GPU would wait for each other.
    groups = [programs] if device.type == "cpu" else [[program] for program in programs]
    children = [child for group in groups for child in run_programs(*group)]
    whole = train_with(options, output=tmp_path / "whole")
    for (name, (_, step, doing)), child in zip(hangs.items(), children, strict=True):
        assert child.returncode == STALLED, f"{name}: {child.stderr}"
        assert f"error: nothing was finished for 0.05 minutes at step {step} of 8, {doing}" in child.stderr
        assert "(B=2, T=16, on " in child.stderr
        assert "The checkpoint of step 4 is kept" in child.stderr
        assert "in _train" in child.stderr  # a function in the main thread's stack
        assert load_step(tmp_path / name) == 4
        assert_same_run(resume(str(tmp_path / name)).output, whole.output)


def test_a_hang_of_one_process_ends_all_processes(options, device, tmp_path):
    if device.type != "cpu":
        pytest.skip("two processes on one GPU")
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    child = subprocess.run(
        [*TORCHRUN, str(script), *arguments_of_child(options, STEP, rank=1)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert child.returncode == 1
    assert "process 1 of 2, B=2" in child.stderr
    assert f"exitcode  : {STALLED}" in child.stderr


# Sends SIGTERM while the main thread waits for a mutex, so that Python cannot handle the signal.
BLOCK_AND_SIGNAL = """
import ctypes, signal, threading
from gptkernels.trainer import signals

signals.LATE_SECONDS = 0.2
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
lock(mutex)
lock(mutex)
"""


def test_a_blocked_process_answers_a_signal(options):
    hang = (STEP[0], STEP[1], BLOCK_AND_SIGNAL)
    (child,) = run_programs((CHILD, arguments_of_child(options, hang), {}))
    late, stalled = child.stderr.index("the run has not ended"), child.stderr.index("error: nothing was finished")
    assert late < stalled
    assert child.returncode == STALLED


class Script:
    """Replaces the event that ends the watchdog's thread: it calls `act(i)` in each of `count` intervals, and then ends
    the thread.
    """

    def __init__(self, count, act):
        self._count, self._act, self._passed = count, act, 0

    def wait(self, seconds):
        self._act(self._passed)
        self._passed += 1
        return self._passed > self._count


@pytest.mark.parametrize(
    ("every", "doing", "ends"),
    [(INTERVALS - 1, "a unit", False), (10**6, "a unit", True), (10**6, None, False)],
    ids=["slow", "hanging", "unwatched"],
)
def test_only_a_watched_unit_without_progress_is_ended(monkeypatch, every, doing, ends):
    def end(status):
        raise SystemExit(status)

    reported = []
    dog = Watchdog(1.0, reported.append)
    dog._closed = Script(10 * INTERVALS, lambda i: None if i % every else dog.tick())
    monkeypatch.setattr(watchdog.os, "_exit", end)
    dog._what = doing
    if ends:
        with pytest.raises(SystemExit, match=str(STALLED)):
            dog._run()
        assert reported == ["a unit"]
    else:
        dog._run()
        assert not reported


def test_a_blocked_report_does_not_delay_the_exit(monkeypatch):
    """The report blocks if a thread that hangs holds the lock of an output stream."""
    statuses = []
    monkeypatch.setattr(watchdog.os, "_exit", statuses.append)
    monkeypatch.setattr(watchdog, "REPORT_SECONDS", 0.05)
    Watchdog(1.0, lambda doing: threading.Event().wait())._end_process("a unit")
    assert statuses == [STALLED]


def test_zero_minutes_disable_the_watchdog(monkeypatch):
    monkeypatch.setattr(watchdog.threading, "Thread", None)
    with Watchdog(0.0, print) as dog, dog.watch("a unit"):
        dog.tick()
