"""The cases of ``python -m benchmarks.scaling --run``, each of which is a run of ``benchmarks.scaling.worker``."""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy

from benchmarks.scaling.model import GPT2_124M, GPT2_XL, Layout
from gptkernels.data import write_tokens

XL_26 = replace(GPT2_XL, name="GPT-2 1.6B, 26 heads", channels=1664, heads=26, kv_heads=26, hidden=6656)
MODELS = {"gpt2": GPT2_124M, "gpt2-xl": GPT2_XL, "gpt2-xl with 26 heads": XL_26}
LONG = 2**17  # tokens of a sequence, whose steps take so long that few are measured
HEAD = "V=128256, C=4096, 8192 rows"
FP8 = {"fp8": True, "fp8_head": True, "fp8_logits": True}


class Case(NamedTuple):
    """A model, the batch of a data-parallel process, and how processes divide the work.

    ``worker`` is the case of ``benchmarks.scaling.worker``; "train" is ``gptkernels train`` with ``options``. Plain
    torch has no layout, because the model does not describe it.
    """

    name: str
    model: str
    batch: int
    length: int
    gpus: int
    layout: Layout | None = None
    worker: str = "train"
    options: dict | None = None

    @property
    def key(self) -> tuple:
        return self.name, self.model, self.precision, self.gpus, self.batch, self.length

    @property
    def precision(self) -> str:
        return "fp8" if self.layout and self.layout.fp8 else "bf16"


def _trained(name: str, model: str, batch: int, length: int, layout: Layout) -> Case:
    text = ",".join(f"{dim}={getattr(layout, dim)}" for dim in ("dp", "cp", "tp"))
    options = {"parallel": text, "shard": layout.shard, "deterministic_layout": layout.in_order}
    return Case(name, model, batch, length, layout.gpus, layout, "train", options | (FP8 if layout.fp8 else {}))


def _cases(gpus: int) -> list[Case]:
    data, tensors, sequences = Layout(dp=gpus), Layout(tp=gpus), Layout(cp=gpus)
    found = [
        _trained("dp", "gpt2", 64, 1024, data),
        _trained("dp", "gpt2", 64, 1024, replace(data, fp8=True)),
        Case("cp", "gpt2", 1, LONG, gpus, sequences, "ours-cp"),
    ]
    if gpus == 1:
        return [*found, _trained("dp", "gpt2", 16, 1024, data), _trained("dp", "gpt2-xl", 8, 1024, data)]
    found += [
        _trained("dp-deterministic", "gpt2", 64, 1024, replace(data, in_order=True)),
        _trained("fsdp", "gpt2-xl", 8, 1024, replace(data, shard="params")),
        Case("tp", "gpt2-xl", 8, 1024, gpus, tensors, "ours-tp"),
        Case("cp, recomputed", "gpt2", 1, 2**20, gpus, replace(sequences, recompute=True), "ours-cp"),
    ]
    if gpus == 2:
        return [
            *found,
            _trained("dp", "gpt2-xl", 8, 1024, data),
            _trained("tp", "gpt2", 16, 1024, tensors),
            _trained("cp", "gpt2", 16, 1024, sequences),
            Case("tp", "gpt2-xl with 26 heads", 8, 1024, gpus, tensors, "ours-tp"),
            Case("torch-ddp", "gpt2", 64, 1024, gpus, worker="torch-ddp"),
            Case("torch-fsdp", "gpt2-xl", 8, 1024, gpus, worker="torch-fsdp"),
            Case("torch-tp", "gpt2-xl with 26 heads", 8, 1024, gpus, worker="torch-tp"),
            Case("head", HEAD, 0, 0, gpus, worker="ours-head"),
            Case("head, fp8", HEAD, 0, 0, gpus, worker="ours-fp8-head"),
            Case("torch-head", HEAD, 0, 0, gpus, worker="torch-head"),
        ]
    return [*found, _trained("dp=2,tp=2", "gpt2-xl", 24, 1024, Layout(dp=2, tp=2, shard="grads"))]


CASES = [case for gpus in (1, 2, 4) for case in _cases(gpus)]
KEY = "case", "model", "precision", "gpus", "batch", "length"


def key(row: dict) -> tuple:
    return tuple(row[name] for name in KEY)


def run(case: Case) -> dict:
    """Run a case in its processes, and return its row."""
    arguments = [case.worker]
    if case.worker == "train":
        with tempfile.TemporaryDirectory() as folder:
            write_tokens(f"{folder}/data_train.bin", [numpy.random.default_rng(0).integers(50257, size=2**22)])
            sizes = {"model": case.model, "batch_size": case.batch, "sequence_length": case.length}
            options = sizes | (case.options or {}) | {"data": f"{folder}/data"}
            found = _result(case.gpus, "train", "--options", json.dumps(options))
    else:
        if case.model in MODELS:
            shape = MODELS[case.model]
            sizes = {"n_layer": shape.layers, "n_head": shape.heads, "n_embd": shape.channels}
            sizes["block_size"] = case.length
            arguments += ["--sizes", json.dumps(sizes), f"--batch={case.batch}"]
        if case.length >= LONG:
            arguments += ["--warm-up=2", f"--steps={5 if case.length == LONG else 1}"]
        if case.layout and case.layout.recompute:
            arguments.append("--recompute")
        found = _result(case.gpus, *arguments)
    found = {name: round(found[name], 3) for name in ("ms", "tokens_per_second", "gib", "extra_gib") if name in found}
    return dict(zip(KEY, case.key, strict=True)) | found


def rates(gpus: int) -> list[dict]:
    return _result(gpus, "rates")["rates"]


def _result(gpus: int, *arguments: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        command += ["-m", "benchmarks.scaling.worker", *arguments, "--json", f"{folder}/result.json"]
        subprocess.run(command, check=True)
        return json.loads(Path(f"{folder}/result.json").read_text())
