"""Tests of checkpoints that several processes write, and load in other layouts. Bits must be equal.

A fixture starts a group of two processes and a group of four, which save a reference state in each layout of
``LAYOUTS``. Other groups load the checkpoints in other layouts.
"""

import contextlib
import copy
import functools
import json
import os
import pickle
import resource
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor

import killed_saves
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import small_models
import small_runs
from conversions import TARGETS, assert_same_bits
from gptkernels._dtensor import held
from gptkernels.checkpoint import CHECKPOINT, load_training_state, restore_rng_state, save_training_state
from gptkernels.convert import convert, load
from gptkernels.files.safetensors import write_safetensors
from gptkernels.models import GPT2, GPT2Config
from gptkernels.models.nanogpt import parameter_groups
from gptkernels.nn import Linear
from gptkernels.optim import AdamW
from gptkernels.parallel import CheckpointWriter, load_checkpoint, read_checkpoint, shard_placement
from gptkernels.parallel._divided import Shapes, divide
from gptkernels.trainer.retention import kept_steps, retain
from gptkernels.trainer.saved import check_optimizer, saved_options
from gptkernels.trainer.train import resume
from helpers import assert_raises
from processes import run_case, run_processes

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.xdist_group("distributed"),
]

STEP = 2


def make_state(**changes):
    """Return a bfloat16 model with histories of float8 scales, and its optimizer with float32 master weights."""
    model = small_models.make_model(dtype=torch.bfloat16, **{"n_layer": 1, "fp8": True} | changes)
    return model, AdamW(model.parameters(), lr=1e-2, master_weights=True)


@contextlib.contextmanager
def process_group_of_one(folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@functools.cache
def make_reference():
    model, optimizer = make_state()
    for _ in range(STEP):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer


# Each of the following functions is a layout.


def whole(model):
    return model


def sharded(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def split(model, mesh=None):
    """Divide the parameters as ``tensor_parallel`` does, also those of a model with float8 layers."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    rows = model.config.padded_vocab_size
    shapes = Shapes(model.config.n_head, False, rows, rows)
    for name, parameter in [*model.named_parameters()]:
        module, _, attribute = name.rpartition(".")
        part = divide(name, parameter.detach(), shapes, mesh)
        setattr(model.get_submodule(module), attribute, torch.nn.Parameter(part))
    model.lm_head.weight = model.transformer.wte.weight
    return model


def split_and_sharded(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = split(model, mesh["tp"])
    return fully_shard(model, mesh=mesh["dp"], shard_placement_fn=shard_placement)


LAYOUTS = [(whole, 2), (sharded, 2), (split, 2), (sharded, 4), (split_and_sharded, 4)]
SHARDS = [f"{layout.__name__}_{ranks}" for layout, ranks in LAYOUTS]
SOURCES = ["one_file", *SHARDS]
LOADS = [
    *((split, 2, source) for source in ("whole_2", "sharded_4", "split_and_sharded_4")),
    *((split_and_sharded, 4, source) for source in ("sharded_2", "split_2", "split_and_sharded_4")),
    (sharded, 2, "split_and_sharded_4"),
    (sharded, 4, "split_2"),
]
"""Layouts, their numbers of processes, and the checkpoints that they load."""


def make_in(layout):
    model = layout(make_state()[0])
    return model, AdamW(model.parameters(), lr=1e-2, master_weights=True)


def histories(model):
    return [buffer for name, buffer in model.named_buffers() if name.endswith(Linear.HISTORIES)]


def part_of(full, like):
    """Return this process's part of a whole tensor that is distributed like another tensor."""
    full = full.detach().reshape(like.shape)
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


def check_equal(model, optimizer):
    """Compare the parts of a model and its optimizer that this process has with the reference."""
    reference, its_optimizer = make_reference()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        small_models.assert_equal(held(p).detach(), part_of(q, p))
        state, its_state = optimizer.state[p], its_optimizer.state[q]
        assert state.keys() == its_state.keys() == {"step", "exp_avg", "exp_avg_sq", "master_param"}
        for name, tensor in its_state.items():
            small_models.assert_equal(held(state[name]), part_of(tensor, state[name]))


def save_in(layout, folder):
    model, optimizer = make_in(layout)
    load_checkpoint(folder / "one_file", model, optimizer)
    check_equal(model, optimizer)
    for history in histories(model):
        history.fill_(dist.get_rank() + 1)
    torch.manual_seed(dist.get_rank())
    writer = CheckpointWriter(folder / f"{layout.__name__}_{dist.get_world_size()}")
    trainer = {"step": STEP, "window": torch.arange(3.0), "ranks": (dist.get_world_size(),)}
    writer.save(config=model.config, model=model, optimizer=optimizer, trainer=trainer)
    for parameter in model.parameters():  # the checkpoint must have the values at the time of the call
        parameter.detach().zero_()
    writer.wait()


def load_in(layout, folder, source):
    model, optimizer = make_in(layout)
    state = load_checkpoint(folder / source, model, optimizer)
    check_equal(model, optimizer)
    assert state.trainer["step"] == STEP
    assert (state.trainer["window"] == torch.arange(3.0)).all()
    rank = dist.get_rank() % state.trainer["ranks"][0] if dist.is_initialized() else 0
    small_models.assert_equal(state.rng["cpu"], torch.manual_seed(rank).get_state())
    assert all((history == rank + 1).all() for history in histories(model))


def save_to_a_full_disk(folder):
    """The second process cannot write: both raise its error, the previous checkpoint stays, the next save cleans up."""
    run = folder / "full"
    model, optimizer = make_in(sharded)
    writer = CheckpointWriter(run)
    values = {"config": model.config, "model": model, "optimizer": optimizer, "background": False}
    writer.save(trainer={"step": 1}, **values)
    kept = run / "checkpoint-00000001.safetensors"
    if dist.get_rank() == 0:
        kept.hardlink_to(run / CHECKPOINT)
    dist.barrier()
    writer.save(trainer={"step": 2}, **values)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    assert_raises(OSError, r"large in process 1: '.*/__1_0.distcp'", writer.save, trainer={"step": 3}, **values)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert read_checkpoint(run).trainer["step"] == 2
    assert steps_of_shards(run) == [1, 2, 3]
    writer.save(trainer={"step": 4}, **values)
    assert steps_of_shards(run) == [1, 4]
    dist.barrier()
    if dist.get_rank() == 0:
        kept.unlink()
    writer.save(trainer={"step": 4}, **values)
    assert steps_of_shards(run) == [4]


def steps_of_shards(run):
    return sorted(int(path.name.split("-")[1]) for path in run.glob("*.shards"))


def save_infinity(folder):
    model, optimizer = make_in(sharded)
    if dist.get_rank() == 1:
        model.transformer.h[0].mlp.c_fc.weight.to_local().detach()[-1, -1] = torch.inf
    values = {"config": model.config, "model": model, "optimizer": optimizer, "trainer": {}}
    CheckpointWriter(folder / "infinity").save(**values, background=False)
    message = "model/transformer.h.0.mlp.c_fc.weight holds NaN or infinity"
    assert_raises(ValueError, message, load_checkpoint, folder / "infinity", *make_in(sharded))


def save_in_layouts(folder):
    for layout in [layout for layout, ranks in LAYOUTS if ranks == dist.get_world_size()]:
        run_case(layout.__name__, save_in, layout, folder)


def load_in_layouts(folder):
    for layout, source in [(layout, source) for layout, ranks, source in LOADS if ranks == dist.get_world_size()]:
        run_case((layout.__name__, source), load_in, layout, folder, source)


def fail_to_save(folder):
    save_to_a_full_disk(folder)
    save_infinity(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    model, optimizer = make_reference()
    for history in histories(model):
        history.fill_(1)
    trainer = {"step": STEP, "window": torch.arange(3.0), "ranks": (1,)}
    torch.manual_seed(0)
    path, state = folder / "one_file" / CHECKPOINT, optimizer.state_dict()
    save_training_state(path, config=model.config, model=model, optimizer=state, trainer=trainer)
    for ranks in (2, 4):
        run_processes(save_in_layouts, ranks, folder)
    return folder


@pytest.fixture
def run(folder, tmp_path):
    return shutil.copytree(folder / "sharded_2", tmp_path / "run")


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_are_loaded_in_another_layout(folder, ranks):
    run_processes(load_in_layouts, ranks, folder)


@pytest.mark.parametrize("source", SOURCES)
def test_one_process_loads_all(folder, source):
    load_in(whole, folder, source)


@pytest.mark.parametrize("source", ["one_file", "sharded_2"])
def test_float8_may_be_switched_off_and_on(folder, source, tmp_path):
    model, optimizer = make_state(fp8=False)
    trainer = load_checkpoint(folder / source, model, optimizer).trainer
    check_equal(model, optimizer)
    path = tmp_path / CHECKPOINT
    save_training_state(path, config=model.config, model=model, optimizer=optimizer.state_dict(), trainer=trainer)
    model, optimizer = make_state()
    for history in histories(model):
        history.fill_(1)
    load_checkpoint(tmp_path, model, optimizer)
    check_equal(model, optimizer)
    assert not any(history.any() for history in histories(model))


def test_an_error_of_one_process_is_raised_by_both(folder):
    run_processes(fail_to_save, 2, folder)


def test_a_process_that_is_killed_while_saving_loses_nothing(tmp_path):
    step, remains = killed_saves.kill_and_resume(tmp_path / "killed", 4)
    assert step > 0
    assert max(remains) > 1


@pytest.mark.parametrize("source", SHARDS)
def test_shards_have_the_values_of_one_file(folder, source):
    one, other = (load_training_state(folder / name / CHECKPOINT) for name in ("one_file", source))
    assert one.config == other.config
    assert one.trainer | {"ranks": None, "window": None} == other.trainer | {"ranks": None, "window": None}
    assert_same_bits(one.model, other.model)
    assert one.optimizer["param_groups"] == other.optimizer["param_groups"]
    for i, state in one.optimizer["state"].items():
        assert_same_bits(state, other.optimizer["state"][i])
    small_models.assert_equal(one.rng["cpu"], other.rng["cpu"])


def test_each_process_writes_a_share(folder):
    for source, ranks in (("whole_2", 2), ("sharded_4", 4), ("split_and_sharded_4", 4)):
        sizes = [path.stat().st_size for path in (folder / source).glob("*.shards/*.distcp")]
        assert len(sizes) == ranks
        assert max(sizes) < 1.3 * min(sizes)


def test_shards_are_removed_with_their_last_index(run, folder):
    retain(run / CHECKPOINT, 1, 2, 0)
    retain(run / CHECKPOINT, 2, 2, 0)
    shutil.copy(folder / "one_file" / CHECKPOINT, run / "new")
    os.replace(run / "new", run / CHECKPOINT)
    retain(run / CHECKPOINT, 3, 2, 0)
    assert kept_steps(run) == [2, 3]
    assert steps_of_shards(run) == [STEP]
    retain(run / CHECKPOINT, 4, 2, 0)
    assert steps_of_shards(run) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_shards(folder):
    """The folder is one of torch.distributed.checkpoint."""
    (shards,) = (folder / "sharded_4").glob("*.shards")
    expected = load_training_state(folder / "one_file" / CHECKPOINT).model["transformer.wte.weight"]
    found = {"model/transformer.wte.weight": torch.zeros_like(expected)}
    dcp.load(found, checkpoint_id=shards, no_dist=True)
    small_models.assert_equal(found["model/transformer.wte.weight"], expected)


@pytest.mark.parametrize("target", TARGETS)
def test_shards_are_converted(folder, tmp_path, target):
    expected = load(folder / "one_file")
    convert(folder / "split_and_sharded_4", tmp_path / TARGETS[target])
    found = load(tmp_path / TARGETS[target])
    assert found[0] == expected[0]
    assert_same_bits(found[1], expected[1])
    assert (tmp_path / TARGETS[target]).exists()


def test_shards_are_converted_with_their_master_weights(folder, tmp_path):
    for source in ("one_file", "sharded_4"):
        convert(folder / source, tmp_path / f"{source}.pt", dtype="float32")
    one, other = (torch.load(tmp_path / f"{source}.pt") for source in ("one_file", "sharded_4"))
    assert_same_bits(one["model"], other["model"])
    assert one["model"]["lm_head.weight"].dtype == torch.float32
    for i, state in one["optimizer"]["state"].items():
        assert_same_bits(state, other["optimizer"]["state"][i])


def test_copies_are_freed_while_a_graph_is_captured(on_cuda, tmp_path, monkeypatch):
    """The thread that writes a checkpoint frees the copies of CUDA tensors at any time."""
    copies = []

    def free():
        copies.clear()
        torch.empty(1, pin_memory=True)  # queries the events of freed memory

    monkeypatch.setattr(dcp, "async_save", lambda staged, **_: copies.append(staged))
    model = small_models.make_model(n_layer=1, device="cuda")
    values = {"config": model.config, "model": model, "optimizer": AdamW(model.parameters()), "trainer": {"step": 1}}
    stream = torch.cuda.Stream()
    with process_group_of_one(tmp_path), torch.cuda.stream(stream), ThreadPoolExecutor() as other_thread:
        CheckpointWriter(tmp_path).save(**values)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            other_thread.submit(free).result()


def test_a_run_continues_from_shards(tmp_path, monkeypatch):
    """A run that was saved as shards ends with the bits of a run without a stop."""
    options, run = small_runs.make_options(tmp_path, "cpu", dropout=0.1), tmp_path / "run"
    small_runs.train_with(options, output=tmp_path / "whole")
    with monkeypatch.context() as stopping:
        small_runs.at_step(stopping, 4, lambda: pytest.fail("stopped"))
        with pytest.raises(pytest.fail.Exception, match="stopped"):
            small_runs.train_with(options)

    described = read_checkpoint(run)
    config = saved_options(described, run / CHECKPOINT)
    model = GPT2(GPT2Config(**described.config))
    optimizer = AdamW(parameter_groups(model, config.weight_decay))
    check_optimizer(described.optimizer, optimizer, 4, run / CHECKPOINT)
    state = load_checkpoint(run, model, optimizer)
    restore_rng_state(state.rng)
    with process_group_of_one(tmp_path):
        writer = CheckpointWriter(run)
        writer.save(config=model.config, model=model, optimizer=optimizer, trainer=state.trainer, background=False)
    assert steps_of_shards(run) == [4]
    assert resume(str(run)).step == 8
    assert steps_of_shards(run) == []
    small_runs.assert_same_run(tmp_path / "whole", run)


# ---- refusals --------------------------------------------------------------------------------------------------------


def refuse(run, message, **changes):
    for read in (lambda: load_checkpoint(run, *make_state(**changes)), lambda: load(run)):
        with pytest.raises(ValueError, match=message) as error:
            read()
        assert str(run) in str(error.value)
        assert "\n" not in str(error.value)


def rewrite_index(run, **fields):
    with safe_open(run / CHECKPOINT, "pt") as file:
        metadata = file.metadata()
    kept = {name: text for name, text in metadata.items() if name not in ("checksum", "checksums", "format", "kind")}
    write_safetensors(run / CHECKPOINT, load_file(run / CHECKPOINT), "sharded", kept | fields)


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
def test_a_damaged_or_missing_file_is_named(run, name):
    (path,) = run.glob(f"*.shards/{name}")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    refuse(run, rf"{name} is damaged: its checksum is \w{{8}}, was \w{{8}}")
    path.unlink()
    refuse(run, rf"its part .*{name} is missing")


def test_another_version_is_refused(run):
    rewrite_index(run, version="3")
    refuse(run, "version is '3', known: '2'")


@pytest.mark.parametrize("shards", ["{", "[]", '{"folder": "x"}', '{"folder": "x", "ranks": 2, "files": 1}'])
def test_an_index_without_shards_is_refused(run, shards):
    rewrite_index(run, shards=shards)
    refuse(run, "shards in the metadata is missing or damaged")


class Call:
    def __reduce__(self):
        return os.mkdir, ("called",)


def change_file(metadata):
    next(iter(metadata.storage_data.values())).relative_path = "../a"
    return metadata


def change_size(metadata):
    next(iter(metadata.state_dict_metadata.values())).size = torch.Size([2**40])
    return metadata


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda metadata: Call(), "it names posix.mkdir"),
        (lambda metadata: torch.Size([]), "not the metadata of a checkpoint"),
        (change_file, r"it names the file \.\./a"),
        (change_size, r"the tensors take \d+ bytes, the files have \d+"),
    ],
)
def test_metadata_is_read_without_running_code(run, change, message):
    (path,) = run.glob("*.shards/.metadata")
    path.write_bytes(pickle.dumps(change(pickle.loads(path.read_bytes()))))
    with safe_open(run / CHECKPOINT, "pt") as file:
        shards = json.loads(file.metadata()["shards"])
    shards["files"][".metadata"] = f"{zlib.crc32(path.read_bytes()):08x}"
    rewrite_index(run, shards=json.dumps(shards))
    refuse(run, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": False}, r"unknown parameter or buffer transformer\."),
        ({"n_layer": 2}, r"missing parameter or buffer transformer\.h\.1\."),
        ({"n_embd": 16}, r"wte.weight is a bfloat16 tensor of shape \(128, 32\), must be a bfloat16 tensor of shape"),
    ],
)
@pytest.mark.parametrize("source", ["one_file", "sharded_2"])
def test_another_model_is_refused(folder, source, changes, message):
    before = make_state(**changes)
    expected = copy.deepcopy(before[0].state_dict())
    assert_raises(ValueError, message, load_checkpoint, folder / source, *before)
    assert_same_bits(before[0].state_dict(), expected)


def test_another_dtype_or_optimizer_is_refused(folder):
    model = make_state()[0]
    groups = [{"params": [p]} for p in model.parameters()]
    message = "the groups' parameters are not those of this model"
    assert_raises(ValueError, message, load_checkpoint, folder / "sharded_2", model, AdamW(groups))
    model = model.float()
    message = "must be a float32 tensor of shape"
    assert_raises(ValueError, message, load_checkpoint, folder / "sharded_2", model, AdamW(model.parameters()))


def test_a_writer_needs_processes(tmp_path):
    assert_raises(ValueError, "torch.distributed is not initialised", CheckpointWriter, tmp_path)
