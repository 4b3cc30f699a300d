"""Kills a process in the middle of saving, again and again, and checks that the newest checkpoint is whole.

PYTHONPATH=python:tests python tests/parallel/killed_saves.py 200
"""

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import small_models
from gptkernels.checkpoint import CHECKPOINT, load_training_state
from gptkernels.optim import AdamW
from gptkernels.parallel import CheckpointWriter, load_checkpoint
from processes import forked

RANKS, LONGEST_SAVES, LONGEST_WAIT, PATIENCE = 2, 0.4, 3, 60
"""The processes; the seconds for which they save, in which the other one may end, and in which they must begin."""
MORE_ROUNDS = 20


def fill(model, optimizer, step):
    """Set each weight and moment to the step, so that a mixture of two checkpoints is visible."""
    for parameter in model.parameters():
        parameter.detach().fill_(step)
        names = ("exp_avg", "exp_avg_sq")
        optimizer.state[parameter] = {name: torch.full_like(parameter, step, requires_grad=False) for name in names}
        optimizer.state[parameter]["step"] = torch.tensor(float(step))


def save_forever(rank, folder, number, saving, committed):
    """Resume from the newest checkpoint if there is one, and save new ones without a pause."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous{number}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    model = small_models.make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = AdamW(model.parameters())
    has_checkpoint = (folder / "run" / CHECKPOINT).exists()
    step = load_checkpoint(folder / "run", model, optimizer).trainer["step"] if has_checkpoint else 0
    writer = CheckpointWriter(folder / "run")
    while True:
        fill(model, optimizer, step + 1)
        saving.set()
        writer.save(config=model.config, model=model, optimizer=optimizer, trainer={"step": step + 1})
        fill(model, optimizer, -1)  # the checkpoint must have the values at the time of the call
        writer.wait()
        step += 1
        if rank == 0:
            committed.value = step


def kill_while_saving(folder, number, randomness, longest, committed):
    """Return the number of folders of shards that the killed process has left."""
    saving = forked.Event()
    processes = [
        forked.Process(target=save_forever, args=(rank, folder, number, saving, committed)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    assert saving.wait(PATIENCE), "no process has begun to save"
    time.sleep(randomness.uniform(0, longest))
    killed = randomness.choice(processes)
    assert all(process.is_alive() for process in processes), [process.exitcode for process in processes]
    os.kill(killed.pid, signal.SIGKILL)
    for process in processes:
        process.join(LONGEST_WAIT)
        process.kill()  # as torchrun does: gloo may wait for the killed process
        process.join()
    return len(list((folder / "run").glob("*.shards")))


def check_newest(folder, committed):
    """Return the step of the newest checkpoint, which must be whole and at least as new as the last complete one."""
    state = load_training_state(folder / "run" / CHECKPOINT)
    step = state.trainer["step"]
    assert step in (committed, committed + 1)
    moments = [entry[name] for entry in state.optimizer["state"].values() for name in ("exp_avg", "exp_avg_sq")]
    assert all((tensor == step).all() for tensor in [*state.model.values(), *moments])
    assert len(state.optimizer["state"]) == len(state.model) - 1  # lm_head is tied
    return step


def kill_and_resume(folder, rounds, seed=0):
    """Kill until there was a complete checkpoint and an incomplete one, in `rounds` to `rounds + MORE_ROUNDS` rounds.

    Return the last complete step, and how many rounds have left how many folders of shards.
    """
    folder.mkdir(exist_ok=True)
    randomness = random.Random(seed)
    committed = forked.Value("q", 0, lock=False)
    remains = Counter()
    for number in range(rounds + MORE_ROUNDS):
        longest = LONGEST_SAVES * max(1, number + 1 - rounds)  # a busy machine needs longer for a checkpoint
        remains[kill_while_saving(folder, number, randomness, longest, committed)] += 1
        if (folder / "run" / CHECKPOINT).exists():
            committed.value = check_newest(folder, committed.value)
        else:
            assert committed.value == 0
        if number + 1 >= rounds and committed.value and max(remains) > 1:
            break
    return committed.value, remains


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        step, remains = kill_and_resume(Path(folder), *map(int, sys.argv[1:]))
        print(
            f"{remains.total()} rounds, {step} checkpoints; rounds by the folders of shards after the kill: {remains}"
        )
