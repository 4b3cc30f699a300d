"""One measured case, which all processes of ``torchrun -m benchmarks.scaling.worker CASE`` run; rank 0 writes JSON."""

import argparse
import contextlib
import functools
import itertools
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

import gptkernels
from benchmarks.scaling import torch_parallel
from benchmarks.scaling.training import train
from benchmarks.train_step.measure import batches
from benchmarks.train_step.variants import BETAS, LR, MAX_NORM, groups
from gptkernels.models import GPT2, GPT2Config
from gptkernels.models.nanogpt import parameter_groups
from gptkernels.optim import AdamW
from gptkernels.parallel import context_parallel, linear_cross_entropy, split_sequence, tensor_parallel
from gptkernels.parallel.context import _pack
from gptkernels.rules.attention import unpack

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def torch_step(loss_and_gradients, model) -> Step:
    optimizer = torch.optim.AdamW(groups(model), lr=LR, betas=BETAS, fused=True)

    def step(tokens, targets):
        loss = loss_and_gradients(tokens, targets)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def torch_ddp(config, device) -> Step:
    model = torch_parallel.GPT2(config).to(device, torch.bfloat16)
    call = torch_parallel.ddp(model)
    return torch_step(with_backward(call), model)


def torch_fsdp(config, device) -> Step:
    mesh = init_device_mesh("cuda", (distributed.get_world_size(),))
    model = torch_parallel.fsdp(torch_parallel.GPT2(config).to(device), mesh, torch.bfloat16)
    return torch_step(with_backward(model), model)


def torch_tp(config, device) -> Step:
    mesh = init_device_mesh("cuda", (distributed.get_world_size(),))
    model = torch_parallel.TensorParallelGPT2(config, mesh).to(device, torch.bfloat16).parallelize()
    return torch_step(torch_parallel.tensor_parallel_step(model), model)


def ours_tp(config, device) -> Step:
    mesh = init_device_mesh("cuda", (distributed.get_world_size(),))
    model = tensor_parallel(GPT2(config, device, torch.bfloat16), mesh)
    optimizer = AdamW(parameter_groups(model, 0.1), lr=LR, betas=BETAS, max_grad_norm=MAX_NORM, master_weights=True)

    def loss(tokens, targets):
        return model(tokens, targets, return_logits=False)[1]

    # All exchanges are parts of the loss and its backward.
    step = gptkernels.graphed_step(loss, optimizer, no_sync=contextlib.nullcontext)
    return lambda *batch: step(batch).loss


def ours_cp(config, device, recompute=False) -> Step:
    mesh = init_device_mesh("cuda", (distributed.get_world_size(),))
    model = context_parallel(GPT2(config, device, torch.bfloat16), mesh)
    model.transformer.recompute_blocks = recompute
    optimizer = AdamW(parameter_groups(model, 0.1), lr=LR, betas=BETAS, max_grad_norm=MAX_NORM, master_weights=True)
    call = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step(tokens, targets):
        loss = call(split_sequence(tokens, mesh), split_sequence(targets, mesh), return_logits=False)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def with_backward(model):
    def loss_and_gradients(tokens, targets):
        loss = model(tokens, targets)
        loss.backward()
        return loss

    return loss_and_gradients


STEPS = {
    "torch-ddp": torch_ddp, "torch-fsdp": torch_fsdp, "torch-tp": torch_tp, "ours-tp": ours_tp, "ours-cp": ours_cp,
}  # fmt: skip


LONGEST_WARM_UP = 2**17  # tokens


def measure_steps(make, config, batch, device, warm_up, steps, replicated):
    """Time steps after steps with at most LONGEST_WARM_UP tokens of each sequence."""
    seed_of_rank = 0 if replicated else distributed.get_rank()
    torch.manual_seed(0)
    step = make(config, device)
    torch.manual_seed(seed_of_rank)
    data = batches(config, batch, config.block_size, warm_up + steps, device)
    losses = [step(*(t[:, :LONGEST_WARM_UP] for t in b)) for b in data[:warm_up]]
    times = milliseconds([lambda b=b: losses.append(step(*b)) for b in data[warm_up:]])
    tokens = batch * config.block_size * (1 if replicated else distributed.get_world_size())
    return {
        "ms": statistics.median(times),
        "tokens_per_second": 1e3 * tokens / statistics.median(times),
        "losses": [losses[0].item(), losses[-1].item()],
    }


def milliseconds(calls) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    distributed.barrier()
    marks[0].record()
    for call, mark in zip(calls, marks[1:], strict=True):
        call()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


# ---- the head --------------------------------------------------------------------------------------------------------


def measure_head(case, device, rows=8192, channels=4096, vocabulary=128256, repeats=10):
    """Time the loss and the gradients of a head whose vocabulary is divided among the processes."""
    size, rank = distributed.get_world_size(), distributed.get_rank()
    mesh = init_device_mesh("cuda", (size,))
    torch.manual_seed(0)
    x = torch.randn(rows, channels, device=device, dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(vocabulary, (rows,), device=device)
    whole = 0.02 * torch.randn(vocabulary, channels, device=device, dtype=torch.bfloat16)
    weight = whole.chunk(size)[rank].clone().requires_grad_()
    del whole

    def ours():
        fp8 = case == "ours-fp8-head"
        return linear_cross_entropy(x, weight, targets, mesh.get_group(), padded_vocab_size=vocabulary, fp8=fp8)

    def torchs():
        logits = DTensor.from_local(F.linear(x, weight), mesh, [Shard(1)], run_check=False)
        with loss_parallel():
            return F.cross_entropy(logits.float(), targets)

    def call():
        x.grad = weight.grad = None
        if case != "torch-head":
            loss = ours()
            loss.backward()
        else:
            loss = torchs()
            with loss_parallel():
                loss.backward()
            distributed.all_reduce(x.grad)
        return loss

    for _ in range(3):
        loss = call()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = milliseconds([call] * repeats)
    return {
        "ms": statistics.median(times),
        "extra_gib": (torch.cuda.max_memory_allocated() - before) / 2**30,
        "losses": [loss.item(), x.grad.float().norm().item()],
    }


# ---- the trainer -----------------------------------------------------------------------------------------------------


def measure_training(options, steps=50):
    numbers = train(options | {"steps": steps, "dtype": "bfloat16"})
    ms = statistics.median(step["milliseconds"] for step in numbers[steps // 2 :])
    tokens = numbers[-1]["tokens_per_second"] * numbers[-1]["milliseconds"] / 1e3
    losses = [numbers[0]["loss"], numbers[-1]["loss"]]
    return {"ms": ms, "tokens_per_second": 1e3 * tokens / ms, "losses": losses, "gib": numbers[-1]["memory"] / 2**30}


# ---- rates -----------------------------------------------------------------------------------------------------------


def measure_rates(device, repeats=20):
    """Time collectives, whose larger tensor has some MiB, and torch's kernels that read and write some MiB."""
    size, found = distributed.get_world_size(), []
    for mib in (1, 26, 400):
        whole = torch.zeros(mib * 2**19, device=device, dtype=torch.bfloat16)
        part = whole[: len(whole) // size].clone()
        _, key, value = unpack(torch.zeros(16, mib * 2**19 // 49152, 2304, device=device, dtype=torch.bfloat16), 12)
        sums = torch.zeros(key.shape[2], 2, 16, 12, 64, device=device)[:, 0]
        gradient = torch.zeros_like(sums, dtype=torch.bfloat16)
        copied, added = 4 * 2 * key.numel() / 2**20, 10 * key.numel() / 2**20
        calls = {
            "all_gather": (mib, functools.partial(distributed.all_gather_into_tensor, whole, part)),
            "reduce_scatter": (mib, functools.partial(distributed.reduce_scatter_tensor, part, whole)),
            "all_reduce": (mib, functools.partial(distributed.all_reduce, whole)),
            "copy": (2 * mib, whole.clone),
            "permuting copy": (copied, functools.partial(_pack, key, value)),
            "float32 += bfloat16": (added, functools.partial(sums.add_, gradient)),
        }
        for name, (moved, call) in calls.items():
            us = 1e3 * statistics.median(milliseconds([call] * repeats)[repeats // 2 :])
            found.append({"rate": name, "gpus": size, "mib": round(moved, 1), "us": round(us, 1)})
    return {"rates": found}


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("case", choices=[*STEPS, "ours-head", "ours-fp8-head", "torch-head", "train", "rates"])
    cli.add_argument("--sizes", type=json.loads, default={}, help="fields of GPT2Config")
    cli.add_argument("--options", type=json.loads, default={}, help='of "train": fields of TrainConfig')
    cli.add_argument("--recompute", action="store_true", help='of "ours-cp": recompute the layers in the backward')
    cli.add_argument("--batch", type=int, default=8)
    cli.add_argument("--warm-up", type=int, default=15)
    cli.add_argument("--steps", type=int, default=30)
    cli.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    arguments = cli.parse_args()
    case = arguments.case
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    if case == "train":
        found = measure_training(arguments.options)
    elif case == "rates":
        found = measure_rates(device)
    elif case.endswith("-head"):
        found = measure_head(case, device)
    else:
        make = functools.partial(STEPS[case], **{"recompute": True} if arguments.recompute else {})
        sizes = arguments.batch, device, arguments.warm_up, arguments.steps
        found = measure_steps(make, GPT2Config(**arguments.sizes), *sizes, replicated=case.endswith(("-tp", "-cp")))
    found.setdefault("gib", torch.cuda.max_memory_allocated() / 2**30)
    if distributed.get_rank() == 0:
        text = json.dumps({"case": case, "gpus": distributed.get_world_size(), **found})
        print(text, flush=True)
        if arguments.json:
            arguments.json.write_text(text)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
