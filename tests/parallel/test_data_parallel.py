"""Tests that two processes train as one process does, for every way to divide the work and the state.

A fixture starts two processes, which train once in each way of ``WAYS``. The tests read the files of the runs, and the
results of process 0.
"""

import contextlib
import functools
import io
import os
import shutil
import subprocess

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from gptkernels.checkpoint import load_training_state
from gptkernels.convert import load
from gptkernels.trainer import train as trainer
from gptkernels.trainer.cli import main
from gptkernels.trainer.config import TrainConfig
from gptkernels.trainer.data_parallel import Replicas
from gptkernels.trainer.evaluate import evaluate_run
from gptkernels.trainer.retention import kept_steps
from gptkernels.trainer.train import Trainer, resume, train
from processes import run_processes
from small_runs import (
    SMALL,
    TEXT,
    TORCHRUN,
    assert_same_run,
    read_log,
    run_flags,
    train_with,
    write_questions,
    write_text,
)

# The tests run in one worker of pytest-xdist, so that the fixture starts the processes once.
pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.xdist_group("distributed"),
    pytest.mark.usefixtures("one_thread"),
]

OPTIONS = SMALL | {"device": "cpu", "layers": 2, "steps": 8, "schedule": "constant", "val_max_batches": 1}
BFLOAT16 = {"dtype": "bfloat16"}
ACCUMULATED = {"batch_size": 1, "grad_accumulation": 2}
WAYS = {
    "none": {},
    "grads": {"shard": "grads"},
    "params": {"shard": "params"},
    "none_accumulated": ACCUMULATED | {"reduce_dtype": "bfloat16", "skip_update_gradz": 1e9},
    "none_total": {"total_batch_tokens": 128, "skip_update_lossz": 1e9},
    "grads_accumulated": ACCUMULATED | {"shard": "grads"},
    "params_accumulated": ACCUMULATED | {"shard": "params", "skip_update_lossz": 1e9, "recompute": "blocks"},
    "none_fp8": BFLOAT16 | {"fp8": True},
    "none_fp8_resumed": BFLOAT16 | {"fp8": True},
    "params_fp8": BFLOAT16 | {"fp8": True, "shard": "params", "reduce_dtype": "float32"},
    "params_rounded": BFLOAT16 | {"master_weights": False, "shard": "params"},
    "params_autocast": {"dtype": "autocast", "shard": "params"},
    "layers": {"parallel": "tp=2", "batch_size": 4, "dropout": 0.2},
    "layers_accumulated": {"parallel": "tp=2", "batch_size": 2, "grad_accumulation": 2},
    "layers_fp8_head": BFLOAT16 | {"parallel": "tp=2", "batch_size": 4, "fp8_head": True, "fp8_logits": True},
    "sequences": {"parallel": "cp=2", "batch_size": 4},
    "sequences_dropped": {"parallel": "cp=2", "batch_size": 4, "sequence_length": 64, "dropout": 0.2},
    "sequences_params": {"parallel": "cp=2", "batch_size": 4, "shard": "params"},
    "resumed": {"shard": "params"},
    "changed": {},
    "none_interrupted": {},
    "params_interrupted": {"shard": "params"},
}
ONE = {"parallel": None, "batch_size": 4, "shard": "none", "reduce_dtype": None, "grad_accumulation": None}
"""The changes of a way's options with which one process has the same batches."""
LAYERS_AND_REST = OPTIONS["layers"] + 1


def run_ways(folder, options):
    rank = dist.get_rank()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    reductions = []
    for owner, name in ((_fsdp_param_group, "foreach_reduce"), (Replicas, "_average")):
        setattr(owner, name, counting(getattr(owner, name), reductions))
    launch = Trainer._launch_step
    Trainer._launch_step = lambda self: launch(assert_sharded(self))
    trainer.plot_losses = lambda *_: None  # Drawing takes most of a small run's time.
    found = {}
    for name, changes in WAYS.items():
        reductions.clear()
        if name == "resumed":
            result = resume(f"{folder}/resumed", steps=8, batch_size=2, **changes)
        elif name == "none_fp8_resumed":
            run = f"{folder}/{name}"
            train(TrainConfig(**options | changes | {"output": run, "steps": 4}))
            result = resume(run, steps=8)
        elif name == "changed":
            run = f"{folder}/changed"
            train(TrainConfig(**options | {"output": run, "steps": 4, "shard": "params"}))
            resume(run, steps=6, shard="none", checkpoint_every=2, keep_last=2)
            result = resume(run, steps=8, shard="grads")
        else:
            with interrupted_backward() if name.endswith("interrupted") else contextlib.nullcontext():
                result = train(TrainConfig(**options | changes | {"output": f"{folder}/{name}"}))
        found[name] = result.val_loss, result.accuracy, result.sample, len(reductions)
    trainer.device_name = lambda _: f"GPU {rank}"
    with contextlib.redirect_stdout(io.StringIO()) as output:
        train(TrainConfig(**options | {"output": f"{folder}/devices", "steps": 0}))
    versions = {"version": f"0.0.{rank}"}
    trainer.build = lambda: versions
    with pytest.raises(ValueError, match="version") as caught:
        train(TrainConfig(**options | {"output": f"{folder}/versions"}))
    return found | {"devices": output.getvalue(), "versions": str(caught.value)}


def assert_sharded(trainer):
    """Assert that FSDP2 has gathered no parameters, as a captured step assumes."""
    modules = [module for module in trainer.model.modules() if isinstance(module, FSDPModule)]
    assert len(modules) == (LAYERS_AND_REST if trainer.config.shard != "none" else 0)
    assert all(module._get_fsdp_state()._fsdp_param_group.is_sharded for module in modules)
    return trainer


@contextlib.contextmanager
def interrupted_backward(step=3):
    """Before a step, run a backward that fails in the last layer, as a failed capture of a CUDA graph does."""
    launch = Trainer._launch_step

    def launch_after_interruption(self):
        if self.step == step:
            last, tokens = self.model.transformer.h[-1], torch.zeros(2, 16, dtype=torch.int64)
            handle = last.register_forward_pre_hook(lambda _, inputs: inputs[0].register_hook(interrupt) and None)
            loss = self._loss(tokens, tokens)
            with pytest.raises(InterruptedError):
                loss.backward()
            handle.remove()
            self.optimizer.zero_grad()
            self._run_model.recover()
        return launch(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_launch_step", launch_after_interruption)
        yield


def interrupt(_):
    raise InterruptedError


def counting(function, calls):
    @functools.wraps(function)
    def count(*args, **kwargs):
        calls.append(None)
        return function(*args, **kwargs)

    return count


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    start = list(TEXT[:8])
    questions = [(start, [list(TEXT[8 : 10 + i]), [0, 1, 2]], 0) for i in range(5)]  # the first process has one more
    files = {"data": write_text(folder / "text"), "eval_file": write_questions(folder / "questions.bin", questions)}
    return OPTIONS | files | {"batch_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def results(folder, options, one_thread):
    train_with(options | ONE, output=folder / "resumed", steps=4)
    return run_processes(run_ways, 2, folder, options)[0]


def numbers(run, column="loss", split="train"):
    return [float(row[column]) for row in read_log(run, split)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, options):
    @functools.cache
    def run(changes):
        return train_with(options | dict(changes), output=tmp_path_factory.mktemp("one") / "run").output

    return lambda way: run(frozenset((WAYS[way] | ONE).items()))


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_have_the_losses_of_one(way, results, folder, alone):
    one = alone("none" if way in ("resumed", "changed") else way)
    is_exact = "dtype" not in WAYS[way] and "reduce_dtype" not in WAYS[way]
    losses, norms = numbers(folder / way), numbers(folder / way, "gradient_norm")
    assert len(losses) == 8
    assert losses == pytest.approx(numbers(one), rel=1e-6 if is_exact else 2e-3)
    assert norms == pytest.approx(numbers(one, "gradient_norm"), rel=1e-5 if is_exact else 2e-2)


def test_shards_of_parameters_change_no_bit(results, folder):
    for column in ("loss", "gradient_norm"):
        assert numbers(folder / "params", column) == numbers(folder / "grads", column)
    assert results["params"][:3] == results["grads"][:3]


@pytest.mark.parametrize("way", ["none", "params"])
def test_an_interrupted_backward_changes_no_bit(way, results, folder):
    assert numbers(folder / f"{way}_interrupted") == numbers(folder / way)


def test_each_process_resumes_with_its_float8_scales(results, folder):
    for column in ("loss", "gradient_norm"):
        assert numbers(folder / "none_fp8_resumed", column) == numbers(folder / "none_fp8", column)


@pytest.mark.parametrize("way", ["none", "params", "params_fp8", "layers", "sequences"])
def test_evaluation_and_samples_are_those_of_the_checkpoint(way, results, folder):
    val_loss, accuracy, sample, _ = results[way]
    found = evaluate_run(str(folder / way), batch_size=4)
    assert val_loss == pytest.approx(found.val_loss, rel=1e-6 if way != "params_fp8" else 2e-3)
    assert accuracy == found.score.accuracy
    assert len(sample) == OPTIONS["sample_length"]


def test_only_the_last_batch_of_a_step_reduces_gradients(results):
    assert results["none_accumulated"][3] == 8
    assert results["grads_accumulated"][3] == results["params_accumulated"][3] == 8 * LAYERS_AND_REST


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--grad-accumulation 3",
        "--skip-update-gradz 1e9",
        "--deterministic-layout",
        "--reduce-dtype float32 --dtype bfloat16 --grad-accumulation 2",
        "--shard grads",
        "--shard params --dtype autocast --recompute blocks",
        "--shard grads --grad-accumulation 3 --reduce-dtype float32 --dtype bfloat16",
        "--shard params --grad-accumulation 3",
        "--shard params --skip-update-lossz 1e9 --dtype bfloat16 --fp8",
        "--parallel tp=2 --grad-accumulation 2",
        "--parallel tp=2 --dtype bfloat16 --fp8-head --skip-update-gradz 1e9",
        "--parallel cp=2",
        "--parallel cp=2 --shard params --grad-accumulation 2",
    ],
)
def test_the_exchange_is_part_of_the_cuda_graph(on_cuda, options, tmp_path, flags):
    given = options | {"device": "cuda", "steps": 20, "val_every": 7}
    runs = [tmp_path / name for name in ("graph", "no-graph")]
    for run in runs:
        command = [*run_flags(given | {"output": str(run)}), f"--{run.name}", *flags.split()]
        assert "runs eagerly" not in run_twice("-m", "gptkernels", "train", *command)
    assert_same_run(*runs)


# Runs `gptkernels`. The capture of a step fails in the middle of the backward, in the processes of FAILING.
FAILING = """
import os, sys, torch
from gptkernels.trainer.cli import main
from gptkernels.trainer.train import Trainer

def interrupt(gradient):
    raise InterruptedError("as planned")

def loss(self, *batch, loss=Trainer._loss):
    handle = self.model.transformer.h[-1].register_forward_pre_hook(watch)
    try:
        return loss(self, *batch)
    finally:
        handle.remove()

def watch(module, inputs):
    if torch.cuda.is_current_stream_capturing() and os.environ["RANK"] in os.environ["FAILING"].split():
        inputs[0].register_hook(interrupt)

Trainer._loss = loss
sys.exit(main())
"""


@pytest.mark.parametrize("failing", ["0 1", "1"])
@pytest.mark.parametrize("flags", ["", "--shard grads", "--shard params --grad-accumulation 2"])
def test_eager_steps_follow_a_capture_that_fails(on_cuda, monkeypatch, options, tmp_path, flags, failing):
    monkeypatch.setenv("FAILING", failing)
    (tmp_path / "failing.py").write_text(FAILING)
    runs = [tmp_path / name for name in ("graph", "no-graph")]
    for run in runs:
        given = options | {"device": "cuda", "steps": 20, "output": str(run)}
        errors = run_twice(str(tmp_path / "failing.py"), "train", f"--{run.name}", *run_flags(given), *flags.split())
        own, other = (errors.count(f"runs eagerly: {why}") for why in ("it cannot be captured: as planned", "another"))
        failures = len(failing.split())
        assert (own, other) == ((failures, 2 - failures) if run.name == "graph" else (0, 0))
    assert_same_run(*runs)


@pytest.mark.parametrize(
    "flags", ["--fp8", "--shard grads", "--shard params --fp8", "--parallel tp=2 --fp8-head", "--parallel cp=2"]
)
def test_a_run_is_resumed_on_gpus(on_cuda, options, tmp_path, flags):
    changes = {"dtype": "bfloat16", "warmup_steps": 1, "dropout": 0.1, "batch_size": 4, "sequence_length": 64}
    given = options | changes | {"device": "cuda", "val_every": 0}
    runs = [tmp_path / name for name in ("whole", "resumed")]
    for steps, run in ((8, runs[0]), (4, runs[1]), (8, runs[1])):
        command = run_flags(given | {"steps": steps, "output": str(run)})
        run_twice("-m", "gptkernels", "train", *command, "--auto-resume", *flags.split())
    assert_same_run(*runs)


def run_twice(*command):
    """Run a Python program in two processes, each with a GPU, and return what they print to standard error."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a GPU for each process")
    return subprocess.run([*TORCHRUN, *command], check=True, capture_output=True, text=True, timeout=300).stderr


def test_processes_of_different_versions_do_not_train(results, folder):
    assert results["versions"] == (
        "the version of gptkernels is 0.0.1 in process 1, but 0.0.0 in process 0; it must be the same in all processes"
    )
    assert not (folder / "versions").exists()


def test_processes_with_different_gpus_train_with_a_warning(results):
    warning = "warning: process 1 has GPU 1, process 0 GPU 0; all processes wait for the slowest one\n"
    assert results["devices"].count(warning) == 1


def test_one_process_continues_a_sharded_run(folder, options, results, tmp_path, alone):
    shutil.copytree(folder / "params", tmp_path / "run")
    continued = resume(str(tmp_path / "run"), steps=12, **ONE)
    whole = train_with(options | ONE, output=tmp_path / "whole", steps=12)
    assert numbers(continued.output) == pytest.approx(numbers(whole.output), rel=1e-6)
    states = [load_training_state(run / "checkpoint.safetensors") for run in (folder / "params", alone("params"))]
    assert states[0].model.keys() == states[1].model.keys()
    torch.testing.assert_close(states[0].model, states[1].model, rtol=1e-3, atol=1e-5)


def test_divided_parameters_are_saved_as_shards(results, folder):
    assert [len(list((folder / way).glob("*.shards"))) for way in ("none", "grads", "params")] == [0, 1, 1]
    assert kept_steps(folder / "changed") == [6, 8]
    assert [path.name.split("-")[1] for path in (folder / "changed").glob("*.shards")] == ["00000008"]


def test_commands_read_shards(results, folder, options, tmp_path, capsys):
    run, model = folder / "params_rounded", tmp_path / "model.safetensors"
    assert main(["generate", str(run), "--max-new-tokens", "3"]) == 0
    assert main(["convert", str(run), str(model)]) == 0
    assert capsys.readouterr().err == ""
    begun = train_with(options | WAYS["params_rounded"] | ONE, output=tmp_path / "run", init_from=run, steps=0).output
    states = [load(path)[1] for path in (run, model, begun)]
    torch.testing.assert_close(states[1:], [states[0]] * 2, rtol=0, atol=0)
