"""Tests that GPT2 has the same initial weights in every layout of four processes, to the bit.

A fixture starts the processes. Each of ``LAYOUTS`` makes a model on the meta device, distributes it, allocates each
process's part, and initialises it. The tests read the whole weights in process 0.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import small_models
from gptkernels.models import GPT2, GPT2Config
from helpers import name_of
from processes import run_case, run_processes

# The tests run in one worker of pytest-xdist, so that the fixture starts the processes once.
pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.xdist_group("distributed"),
]

# The four processes have different numbers of the 18 positions, and the second has the vocabulary's last rows.
CONFIG = GPT2Config(**small_models.SIZES | {"block_size": 18})


def shard_fully(model, mesh):
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def distribute(model, mesh, *placements):
    """Distribute the matrices by ``placements``. Vectors are replicated."""
    head = model.lm_head
    del model.lm_head
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            where = placements if parameter.dim() == 2 else [Replicate()] * mesh.ndim
            module.register_parameter(name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, where)))
    head.weight = model.transformer.wte.weight
    model.lm_head = head


def fsdp(model):
    shard_fully(model, init_device_mesh("cpu", (4,)))


def hybrid(model):
    shard_fully(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def rows(model):
    distribute(model, init_device_mesh("cpu", (4,)), Shard(0))


def columns(model):
    distribute(model, init_device_mesh("cpu", (4,)), Shard(1))


def rows_and_columns(model):
    distribute(model, init_device_mesh("cpu", (2, 2)), Shard(0), Shard(1))


def rows_in_fsdp(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    distribute(model, mesh["tp"], Shard(0))
    shard_fully(model, mesh["dp"])


def columns_in_fsdp(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    distribute(model, mesh["tp"], Shard(1))
    shard_fully(model, mesh["dp"])


LAYOUTS = {
    layout.__name__: layout for layout in (fsdp, hybrid, rows, columns, rows_and_columns, rows_in_fsdp, columns_in_fsdp)
}
CASES = [*((name, torch.float32) for name in LAYOUTS), ("rows_and_columns", torch.bfloat16)]


def initialise(layout, dtype):
    model = GPT2(CONFIG, "meta", dtype)
    layout(model)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.reset_parameters()
    parts = [p.to_local() for p in model.parameters()]
    assert sum(t.numel() for t in parts) < 0.6 * sum(p.numel() for p in model.parameters())
    return {name: p.full_tensor() for name, p in model.state_dict().items() if isinstance(p, DTensor)}


def initialise_all():
    return {case: run_case(case, initialise, LAYOUTS[case[0]], case[1]) for case in CASES}


@pytest.fixture(scope="module")
def found():
    return run_processes(initialise_all, 4)[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{name_of(case[1])}")
def test_weights_are_those_of_one_process(case, found):
    torch.manual_seed(3)
    small_models.assert_equal(found[case], GPT2(CONFIG, dtype=case[1]).state_dict())
