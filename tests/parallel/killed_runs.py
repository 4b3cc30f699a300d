"""Kills processes of a training run again and again, resumes it, and compares it with a run without kills.

PYTHONPATH=python:tests python tests/parallel/killed_runs.py 20
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from small_runs import SMALL, assert_same_run, run_flags, write_text

OPTIONS = SMALL | {"layers": 2, "dropout": 0.1, "device": "cpu", "steps": 200, "val_every": 50, "sample_every": 0}
OPTIONS |= {"shard": "params", "checkpoint_every": 3, "keep_last": 2}
LONGEST_TRAINING, PATIENCE = 1.5, 60
"""The seconds in which a process is killed after training has begun, and in which the others must end."""


def start(options, run):
    flags = [*run_flags(options), "--output", str(run), "--auto-resume", "--nproc", "2"]
    return subprocess.Popen([sys.executable, "-m", "gptkernels", "train", *flags], stdout=subprocess.DEVNULL)


def wait_for_training(launcher, log):
    begun = time.time()
    while not log.exists() or log.stat().st_mtime < begun:
        assert launcher.poll() is None, "the run ended before it trained"
        time.sleep(0.02)


def kill(launcher, randomness):
    """Kill one of the two processes, or both and their launcher. Return the seconds in which the launcher ended."""
    ranks = [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
    assert len(ranks) == 2
    killed = randomness.choice([ranks[:1], ranks[1:], [launcher.pid, *ranks]])
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    begun = time.time()
    status = launcher.wait(PATIENCE)
    assert status == (128 + signal.SIGKILL if len(killed) == 1 else -signal.SIGKILL)
    return time.time() - begun


def kill_and_resume(folder, rounds, seed=0):
    randomness = random.Random(seed)
    options = OPTIONS | {"data": write_text(folder / "text")}
    run, seconds, steps = folder / "run", [], []
    for _ in range(rounds):
        launcher = start(options, run)
        wait_for_training(launcher, run / "log.csv")
        time.sleep(randomness.uniform(0, LONGEST_TRAINING))
        seconds.append(kill(launcher, randomness))
        steps.append((run / "log.csv").read_text().count("train"))
    for name in ("run", "whole"):
        assert start(options, folder / name).wait() == 0
    assert_same_run(run, folder / "whole")
    return steps, seconds


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        steps, seconds = kill_and_resume(Path(name), *map(int, sys.argv[1:]))
        print(f"the runs are equal; steps at each kill: {steps}; the launcher ended after at most {max(seconds):.1f} s")
