"""Tests that two processes on the CPU have the losses of one process, with DDP or FSDP2 and with our optimizer.

A fixture starts two processes, which train once in each way of ``WAYS``. The tests read the results of process 0.
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import gptkernels
import published
import small_models
from gptkernels import nn
from gptkernels.optim import AdamW, clip_grad_norm_
from processes import run_processes

# The tests run in one worker of pytest-xdist, so that the fixture starts the processes once.
pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.xdist_group("distributed"),
]

STEPS, CLIP, LR = 4, 0.5, 1e-2
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


make_model = functools.partial(small_models.make_model, "cpu", torch.float64)


def make_swapped_model():
    torch.manual_seed(3)
    return gptkernels.swap(published.GPT(published.Config(**small_models.SIZES)).double())


def rows_of_this_process():
    return slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2) if dist.is_initialized() else slice(None)


def make_batch(seed):
    return [t[rows_of_this_process()].contiguous() for t in small_models.make_batch(B=4, seed=seed)]


def train(model, optimizer, steps=STEPS, first=0, clip=None, **options):
    """Return the mean losses over the processes, and the gradient norms if the optimizer or ``clip`` clips."""
    losses, norms = [], []
    for i in range(first, first + steps):
        loss = model(*make_batch(i), **options)[1]
        loss.backward()
        if clip is not None:
            norms.append(clip(model.parameters(), CLIP))
        optimizer.step()
        if getattr(optimizer, "grad_norm", None) is not None:
            norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
        loss = loss.detach().double()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        losses.append(loss.item())
    return losses, [float(norm) for norm in norms]


def make_optimizer(model):
    return AdamW(model.parameters(), lr=LR, max_grad_norm=CLIP)


def shard_model(model, mesh=None, **options):
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


# Each of the following functions is a way of training.


def ddp(folder):
    model = DistributedDataParallel(make_model())
    return train(model, make_optimizer(model))


def fsdp(folder):
    model = shard_model(make_model())
    optimizer = make_optimizer(model)
    found = train(model, optimizer)
    parameter = model.transformer.h[0].attn.c_attn.weight
    assert isinstance(parameter, DTensor)
    for name in ("exp_avg", "exp_avg_sq"):
        state = optimizer.state[parameter][name]
        assert isinstance(state, DTensor)
        assert state.placements == parameter.placements
        assert state.to_local().shape == parameter.to_local().shape != parameter.shape
    return found


def sharded_layers(folder):
    mesh, model = init_device_mesh("cpu", (2,)), make_model()
    for block in model.transformer.h:
        for layer in (block.ln_1, block.ln_2, block.attn, block.mlp.c_fc, block.mlp.c_proj):
            fully_shard(layer, mesh=mesh)
    model = fully_shard(model, mesh=mesh)
    return train(model, make_optimizer(model), return_logits=False)


def clipped_by_ours(folder):
    model = shard_model(make_model())
    return train(model, AdamW(model.parameters(), lr=LR), clip=clip_grad_norm_)


def replicated_and_sharded(folder):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = shard_model(make_model(), mesh)
    return train(model, make_optimizer(model))


def exchange_optimizers(first, second):
    model = shard_model(make_model())
    before = first(model.parameters(), lr=LR)
    losses = train(model, before, 2)[0]
    after = second(model.parameters(), lr=LR)
    after.load_state_dict(before.state_dict())
    return losses + train(model, after, 2, first=2)[0], []


def to_torchs(folder):
    return exchange_optimizers(AdamW, torch.optim.AdamW)


def from_torchs(folder):
    return exchange_optimizers(torch.optim.AdamW, AdamW)


def swapped(folder):
    model = shard_model(make_swapped_model())
    assert model.gptkernels_report.replaced
    return train(model, make_optimizer(model))


def regression(model, optimizer, clip=None):
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8)
    norms = []
    for _ in range(STEPS):
        model(x[rows_of_this_process()]).square().mean().backward()
        norms += [] if clip is None else [clip(model.parameters(), 0.01)]
        optimizer.step()
        norms += [optimizer.grad_norm] if clip is None else []
        optimizer.zero_grad()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).tolist(), [float(norm) for norm in norms]


def make_uneven_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(nn.Linear(8, 3), nn.GELU(), nn.Linear(3, 1)).double()


def uneven(folder):
    """Shard parameters of 3 rows and 1 row. The second process has an empty shard of those with 1 row."""
    model = fully_shard(make_uneven_model(), mesh=init_device_mesh("cpu", (2,)))
    assert min(p.to_local().numel() for p in model.parameters()) == (0 if dist.get_rank() else 1)
    return regression(model, AdamW(model.parameters(), lr=LR, max_grad_norm=0.01))


def masters(folder):
    model = make_uneven_model().bfloat16()
    if dist.is_initialized():
        model = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = AdamW(model.parameters(), lr=1e-4, master_weights=True)
    for i in range(STEPS):
        for j, p in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * i + j)
            grad = torch.randn(p.shape, generator=generator).bfloat16()
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
        optimizer.step()
    copies = [state["master_param"] for state in optimizer.state.values()]
    assert all(isinstance(p, DTensor) == dist.is_initialized() for p in copies)
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in [*copies, *map(torch.detach, model.parameters())]]


def mixed_precision(folder):
    model = make_model().float()
    seen = []
    model.register_forward_hook(lambda module, args, out: seen.append(out[0].dtype))
    model = shard_model(model, mp_policy=BF16)
    optimizer = make_optimizer(model)
    found = train(model, optimizer)
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}
    return found


def mixed_precision_with_torchs(folder):
    model = shard_model(make_model().float(), mp_policy=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def clip(parameters, most):
        return torch.nn.utils.clip_grad_norm_(parameters, most).full_tensor()

    return train(model, optimizer, clip=clip)


def saved(folder):
    model = shard_model(make_model())
    optimizer = make_optimizer(model)
    losses, norms = train(model, optimizer, 2)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/checkpoint")
    again = load_checkpoint(shard_model(make_model()), f"{folder}/checkpoint")
    more = train(*again, 2, first=2)
    return losses + more[0], norms + more[1]


def load_checkpoint(model, folder):
    optimizer = make_optimizer(model)
    for p in model.parameters():
        p.requires_grad_()
    state, optimizer_state = get_state_dict(model, optimizer)
    loaded = {"model": state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    return model, optimizer


WAYS = [
    ddp, fsdp, sharded_layers, clipped_by_ours, replicated_and_sharded, to_torchs, from_torchs, swapped, uneven,
    masters, mixed_precision, mixed_precision_with_torchs, saved,
]  # fmt: skip


def run_ways(folder):
    return {way.__name__: way(folder) for way in WAYS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def results(folder):
    return run_processes(run_ways, 2, folder)[0]


@pytest.fixture(scope="module")
def alone():
    model = make_model()
    return train(model, torch.optim.AdamW(model.parameters(), lr=LR), clip=torch.nn.utils.clip_grad_norm_)


@pytest.fixture(scope="module")
def alone_without_clipping():
    model = make_model()
    return train(model, torch.optim.AdamW(model.parameters(), lr=LR))


@pytest.mark.parametrize(
    "way", [ddp, fsdp, sharded_layers, clipped_by_ours, replicated_and_sharded], ids=lambda way: way.__name__
)
def test_two_processes_have_the_losses_of_one(way, results, alone):
    losses, norms = results[way.__name__]
    assert losses == pytest.approx(alone[0], rel=1e-7)
    assert norms == pytest.approx(alone[1], rel=1e-6)  # norms are float32
    assert min(norms) > CLIP


@pytest.mark.parametrize("way", [to_torchs, from_torchs], ids=lambda way: way.__name__)
def test_sharded_optimizer_state_is_torchs(way, results, alone_without_clipping):
    assert results[way.__name__][0] == pytest.approx(alone_without_clipping[0], rel=1e-10)


def test_a_swapped_model_is_sharded(results):
    model = make_swapped_model()
    gptkernels.unswap(model)
    expected = train(model, torch.optim.AdamW(model.parameters(), lr=LR), clip=torch.nn.utils.clip_grad_norm_)
    assert results[swapped.__name__][0] == pytest.approx(expected[0], rel=1e-5)  # nanoGPT's loss is float32


def test_uneven_and_empty_shards(results):
    model = make_uneven_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    parameters, norms = regression(model, optimizer, torch.nn.utils.clip_grad_norm_)
    found = results[uneven.__name__]
    assert found[0] == pytest.approx(parameters, rel=1e-6, abs=1e-9)
    assert found[1] == pytest.approx(norms, rel=1e-6)


def test_master_weights(results):
    """An element's update depends on no other element, so sharding changes no bit."""
    for a, b in zip(results[masters.__name__], masters(None), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_mixed_precision(results, alone):
    losses, norms = results[mixed_precision.__name__]
    torchs, torchs_norms = results[mixed_precision_with_torchs.__name__]
    assert losses == pytest.approx(torchs, rel=1e-4)
    assert norms == pytest.approx(torchs_norms, rel=1e-3)
    assert losses == pytest.approx(alone[0], rel=2e-2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_is_continued(results, folder, alone):
    losses, _ = results[saved.__name__]
    assert losses == results[fsdp.__name__][0]
    model, optimizer = load_checkpoint(make_model(), str(folder / "checkpoint"))
    assert train(model, optimizer, 2, first=2)[0] == pytest.approx(losses[2:], rel=1e-7)
    assert copy.deepcopy(optimizer).state_dict()["state"][0]["step"] == 4
