"""Tests that context parallelism in groups of 2 and 4 processes on the CPU has the results of one process.

A fixture starts four processes, which call each function of ``WAYS`` in a group of all of them and in a group of the
first two. The tests read the results of process 0.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel as torchs_context_parallel
from torch.nn.parallel import DistributedDataParallel

import gptkernels
import small_models
from gptkernels.optim import AdamW
from gptkernels.parallel import context_parallel, context_parallel_attention, gather_sequence, split_sequence
from gptkernels.swapping import attention_registration
from gptkernels.testing import assert_as_exact_as_torch
from processes import run_case, run_processes
from small_models import assert_equal

# The tests run in one worker of pytest-xdist, so that the fixture starts the processes once.
pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.xdist_group("distributed"),
]

T, STEPS = 32, 20
DROPPED = {"block_size": 128, "dropout": 0.3}
SIZES = [2, 4]
both_sizes = pytest.mark.parametrize("size", SIZES)

# dtype, B, NH, KH, tokens, HS, options
ATTENTIONS = {
    "float64": (torch.float64, 2, 2, 2, 256, 16, {}),
    "grouped heads": (torch.float32, 1, 4, 2, 256, 24, {"scale": 0.3}),
    "all keys": (torch.float64, 2, 2, 1, 24, 8, {"is_causal": False}),
    "short chunks": (torch.float64, 1, 3, 3, 24, 40, {}),
    "bfloat16": (torch.bfloat16, 2, 4, 2, 256, 64, {}),
}


def make_inputs(name):
    dtype, B, NH, KH, tokens, HS, _ = ATTENTIONS[name]
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(B, heads, tokens, HS, generator=generator).to(dtype) for heads in (NH, KH, KH, NH)]


def out_and_gradients(function, *inputs):
    *inputs, dout = inputs
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    out.backward(dout)
    return [out.detach(), *(t.grad for t in leaves)]


def make_model(**changes):
    return small_models.make_model("cpu", torch.float64, **{"block_size": T, **changes})


def make_batch(seed, B=2, length=T):
    """Make a batch with unequal numbers of ignored targets; in every fourth batch, the first rank has no target."""
    tokens, targets = small_models.make_batch(B=B, length=length, seed=seed)
    targets[0, : 3 + seed] = -100
    if seed % 4 == 3:
        targets[:, : length // 4] = targets[:, -(length // 4) :] = -100
    return tokens, targets


def train(model, group=None, steps=STEPS, B=2, length=T, **options):
    """Return the loss and the gradients of every step. Gradients are averaged by ``model``, losses here."""
    torch.manual_seed(7)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], []
    for i in range(steps):
        batch = make_batch(i, B, length)
        if group is not None:
            batch = [split_sequence(t, group) for t in batch]
        loss = model(*batch, **options)[1]
        loss.backward()
        losses.append(loss.detach() if group is None else mean_over_ranks(loss.detach(), group))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), torch.stack(gradients)


def mean_over_ranks(t, group):
    dist.all_reduce(t, group=group)
    return t / group.size()


# Each of the following functions is called in the groups of 2 and 4 processes.


def attention(group):
    found = {}
    for name, (*_, options) in ATTENTIONS.items():
        local = [split_sequence(t, group, 2) for t in make_inputs(name)]
        results = out_and_gradients(lambda *x, o=options: context_parallel_attention(*x, group, **o), *local)
        found[name] = [gather_sequence(t, group, 2) for t in results]
    return found


def exact_attention(rows, query, key, value, dout):
    """Compute causal attention and its gradients in float64, for a ``dout`` that is 0 outside of the queries ``rows``.

    Return the rows of the output and of the query's gradient, and the whole gradients of key and value.
    """
    query, dout, key, value = query[:, :, rows].double(), dout[:, :, rows].double(), key.double(), value.double()
    scale = query.shape[3] ** -0.5
    scores = query @ key.mT * scale
    scores.masked_fill_(torch.arange(key.shape[2], device=rows.device) > rows[:, None], -torch.inf)
    p = scores.softmax(-1)
    out = p @ value
    dscores = p * (dout @ value.mT - (dout * out).sum(-1, keepdim=True)) * scale
    return out, dscores @ key, dscores.mT @ query, p.mT @ dout


def long_attention(group, device="cpu", tokens=2048, samples=32):
    """Check the output for some queries, their gradients, and what they contribute to all keys' and values' gradients.

    A tensor of all scores would have tokens^2 elements.
    """
    generator = torch.Generator(device).manual_seed(1)
    inputs = [torch.randn(1, 2, tokens, 64, generator=generator, device=device).bfloat16() for _ in range(4)]
    rows = torch.randperm(tokens, generator=generator, device=device)[:samples].sort().values
    kept = torch.zeros(tokens, 1, dtype=torch.bool, device=device)
    kept[rows] = True
    inputs[3] *= kept
    local = [split_sequence(t, group, 2) for t in inputs]
    found = out_and_gradients(lambda *x: context_parallel_attention(*x, group), *local)
    found = [gather_sequence(t, group, 2) for t in found]
    if group.rank() == 0:
        torchs = out_and_gradients(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), *inputs)
        for i, expected in enumerate(exact_attention(rows, *inputs)):
            ours, theirs = (t[:, :, rows] if i < 2 else t for t in (found[i], torchs[i]))
            for parts in zip(*(t.chunk(8, 2) for t in (ours, theirs, expected)), strict=True):  # of unequal magnitudes
                assert_as_exact_as_torch(*parts)


def long_attention_on_gpus(tokens):
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    long_attention(dist.new_group(backend="nccl"), device, tokens, 64)


def autocast(group):
    *inputs, dout = [split_sequence(t, group, 2) for t in make_inputs("bfloat16")]
    with torch.autocast("cpu", torch.bfloat16):
        found = out_and_gradients(
            lambda *x: context_parallel_attention(*x, group), *map(torch.Tensor.float, inputs), dout
        )
    return [gather_sequence(t, group, 2) for t in found]


def sequences(group):
    tokens = torch.arange(2 * T).view(2, T)
    return split_sequence(tokens, group), gather_sequence(split_sequence(tokens, group), group)


def ddp(group):
    return train(DistributedDataParallel(context_parallel(make_model(), group), process_group=group), group)


def recomputed_and_chunked(group):
    model = context_parallel(make_model(bias=False), group)
    model.transformer.recompute_blocks = True
    return train(DistributedDataParallel(model, process_group=group), group, 4, return_logits=False)


def dropped(group):
    model = DistributedDataParallel(context_parallel(make_model(**DROPPED), group), process_group=group)
    return train(model, group, 2, 3, DROPPED["block_size"])


def dropped_and_recomputed(group):
    model = context_parallel(make_model(**DROPPED), group)
    model.transformer.recompute_blocks = True
    return train(DistributedDataParallel(model, process_group=group), group, 2, 3, DROPPED["block_size"])


def logits(group):
    """The embeddings are computed by their modules, because one of them has a hook."""
    model = context_parallel(make_model(), group)
    model.transformer.wpe.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        return gather_sequence(model(split_sequence(make_batch(0)[0], group))[0], group)


def mixed_precision(group):
    model = context_parallel(make_model().float(), group)
    with torch.autocast("cpu", torch.bfloat16):
        return train(DistributedDataParallel(model, process_group=group), group, 4)[0]


def errors(group):
    def message(call, *args, **options):
        with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
            call(*args, **options)
        return f"{caught.type.__name__}: {caught.value}"

    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    out = context_parallel_attention(q, q, q, group)
    model = context_parallel(make_model(), group)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    foreign = make_model()
    foreign.transformer.drop = torch.nn.Dropout(0.1)
    return {
        "second derivative": message(torch.autograd.grad, out.sum(), q, create_graph=True),
        "odd": message(context_parallel_attention, q[:, :, 1:], q[:, :, 1:], q[:, :, 1:], group),
        "keys": message(context_parallel_attention, q, q[:, :, :2], q[:, :, :2], group),
        "split": message(split_sequence, torch.zeros(2, 4 * group.size() + 2), group),
        "gather": message(gather_sequence, torch.zeros(2, 3), group),
        "generate": message(model.generate, tokens, 3),
        "cache": message(model.transformer, tokens, [gptkernels.nn.KeyValueCache(8)] * 2),
        "length": message(model, torch.zeros(1, T, dtype=torch.int64)),
        "dropout": message(context_parallel, foreign, group),
        "dropout of 4 tokens": message(context_parallel_attention, q, q, q, group, dropout_p=0.5),
        "probability": message(context_parallel_attention, q, q, q, group, dropout_p=1.5),
        "type": message(context_parallel, torch.nn.Linear(2, 2), group),
    }


WAYS = [
    attention, long_attention, autocast, sequences, ddp, recomputed_and_chunked, dropped, dropped_and_recomputed,
    logits, mixed_precision, errors,
]  # fmt: skip

# The following functions are called in one group.


def with_fsdp(mesh):
    """Each of two data-parallel groups trains on one of the two sequences, which its two ranks divide."""
    model = context_parallel(make_model(), mesh["cp"])
    both = mesh["dp", "cp"]._flatten("dp_cp")
    for block in model.transformer.h:
        fully_shard(block, mesh=both)
    fully_shard(model, mesh=both)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses = []
    for i in range(4):
        row = slice(mesh["dp"].get_local_rank(), mesh["dp"].get_local_rank() + 1)
        loss = model(*(split_sequence(t[row], mesh["cp"]) for t in small_models.make_batch(length=T, seed=i)))[1]
        loss.backward()
        losses.append(mean_over_ranks(loss.detach(), dist.group.WORLD))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def compiled(group):
    model = context_parallel(make_model(n_layer=1, **DROPPED), group)
    tokens, targets = [split_sequence(t, group) for t in make_batch(3, length=DROPPED["block_size"])]
    torch.manual_seed(7)
    loss = torch.compile(model, backend="aot_eager", fullgraph=True)(tokens, targets)[1]
    loss.backward()
    gradients = [mean_over_ranks(p.grad, group) for p in model.parameters()]
    return mean_over_ranks(loss.detach(), group), torch.cat([g.flatten() for g in gradients])


def torchs_ring(mesh):
    """Run torch's own ring of ``aten::_scaled_dot_product_flash_attention`` with the functions that we register.

    On the CPU torch's ring has no operator to call. So the functions for CUDA, which do not depend on the device, are
    registered for the CPU.
    """
    calls, library = [], torch.library.Library("aten", "IMPL")
    for name, ours in (("", attention_registration._cuda), ("_backward", attention_registration._cuda_backward)):

        def counted(*args, ours=ours, **options):
            calls.append(ours.__name__)
            return ours(*args, **options)

        library.impl(f"_scaled_dot_product_flash_attention{name}", counted, "CPU")

    def ring(*local):
        sharded = [DTensor.from_local(t, mesh, [Shard(2)]) for t in local]
        return torch.ops.aten._scaled_dot_product_flash_attention(*sharded, 0.0, True)[0].to_local()

    with torchs_context_parallel(mesh, buffers=[torch.empty(16)], buffer_seq_dims=[0]):
        found = out_and_gradients(ring, *(split_sequence(t, mesh, 2) for t in make_inputs("float64")))
    return calls, [gather_sequence(t, mesh, 2) for t in found]


def run_ways():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    groups = {2: dist.new_group([0, 1]), 4: dist.group.WORLD}
    calls = [(way, size, groups[size]) for size in SIZES for way in WAYS]
    calls += [(with_fsdp, 4, mesh), (compiled, 2, groups[2]), (torchs_ring, 2, mesh["cp"])]
    return {(way.__name__, size): run_case(size, way, group) for way, size, group in calls if dist.get_rank() < size}


@pytest.fixture(scope="module")
def results():
    return run_processes(run_ways, 4)[0]


def attention_alone(name, inputs=None):
    options = {"is_causal": True, **ATTENTIONS[name][-1]}
    return out_and_gradients(
        lambda *x: F.scaled_dot_product_attention(*x, **options, enable_gqa=True), *(inputs or make_inputs(name))
    )


@both_sizes
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name, size, results):
    found = results[attention.__name__, size][name]
    exact = attention_alone(name, [t.double() for t in make_inputs(name)])
    for ours, torchs, expected in zip(found, attention_alone(name), exact, strict=True):
        assert_as_exact_as_torch(ours, torchs, expected)


def test_a_million_tokens(on_cuda):
    count = torch.cuda.device_count() // 2 * 2
    if not count:
        pytest.skip("needs 2 GPUs")
    run_processes(long_attention_on_gpus, min(count, 4), 2**20)


@both_sizes
@pytest.mark.parametrize("name", ["float64", "grouped heads", "bfloat16"])
def test_attention_has_the_bits_of_one_process(name, size, results):
    """The chunks are multiples of the CPU kernel's tiles, which therefore have the same queries and keys."""
    options = {"is_causal": True, "enable_gqa": True, **ATTENTIONS[name][-1]}
    ours = gptkernels.functional.scaled_dot_product_attention
    expected = out_and_gradients(lambda *x: ours(*x, **options), *make_inputs(name))
    for a, b in zip(results[attention.__name__, size][name][:2], expected[:2], strict=True):  # the output and dquery
        assert_equal(a, b)


@both_sizes
def test_autocast(size, results):
    out, *gradients = results[autocast.__name__, size]
    expected, *expected_gradients = results[attention.__name__, size]["bfloat16"]
    assert_equal(out, expected)
    for a, b in zip(gradients, expected_gradients, strict=True):
        assert_equal(a, b.float())


@both_sizes
def test_sequences_are_split_and_gathered(size, results):
    local, whole = results[sequences.__name__, size]
    length = T // (2 * size)
    assert local.tolist() == [[*range(i, i + length), *range(i + T - length, i + T)] for i in (0, T)]
    assert whole.tolist() == torch.arange(2 * T).view(2, T).tolist()


def assert_same_training(found, expected, tolerance=1e-12):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * b.abs().max().item())


@both_sizes
def test_training_is_that_of_one_process(size, results):
    assert_same_training(results[ddp.__name__, size], train(make_model()))


@both_sizes
def test_recomputed_blocks_and_chunks_of_logits(size, results):
    expected = train(make_model(bias=False), steps=4, return_logits=False)
    assert_same_training(results[recomputed_and_chunked.__name__, size], expected)


@both_sizes
@pytest.mark.parametrize("way", [dropped, dropped_and_recomputed])
def test_masks_of_dropout_are_those_of_one_process(way, size, results):
    expected = train(make_model(**DROPPED), steps=2, B=3, length=DROPPED["block_size"])
    assert_same_training(results[way.__name__, size], expected)


@both_sizes
def test_gathered_logits(size, results):
    assert_same_training([results[logits.__name__, size]], [make_model()(make_batch(0)[0])[0]])


@both_sizes
def test_training_in_autocast(size, results):
    with torch.autocast("cpu", torch.bfloat16):
        expected = train(make_model().float(), steps=4)[0]
    torch.testing.assert_close(results[mixed_precision.__name__, size], expected, rtol=1e-2, atol=0)


def test_fsdp_over_data_and_context_parallel_ranks(results):
    model, losses = make_model(), []
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for i in range(4):
        losses.append(model(*small_models.make_batch(length=T, seed=i))[1])
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_training([results[with_fsdp.__name__, 4]], [torch.stack(losses)])


def test_compiled_without_graph_breaks(results):
    model = make_model(n_layer=1, **DROPPED)
    torch.manual_seed(7)
    loss = model(*make_batch(3, length=DROPPED["block_size"]))[1]
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert_same_training(results[compiled.__name__, 2], (loss, gradients))


def test_torchs_ring_calls_ours(results):
    calls, found = results[torchs_ring.__name__, 2]
    assert calls == ["_cuda"] * 2 + ["_cuda_backward"] * 2
    exact = attention_alone("float64")
    for ours, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)  # torch merges the outputs in float32


@both_sizes
def test_errors(size, results):
    attention, layer = "ValueError: context_parallel_attention", "ValueError: CausalSelfAttention: context parallelism"
    assert results[errors.__name__, size] == {
        "second derivative": "RuntimeError: context_parallel_attention has no second derivative: call it without "
        "create_graph=True",
        "odd": f"{attention}: query must have an even number of tokens, a head and a tail, got 3",
        "keys": f"{attention}: key and value must have one shape and the 4 tokens of query, got (1, 2, 2, 8) and "
        "(1, 2, 2, 8)",
        "split": f"ValueError: split_sequence: dimension 1 must be a multiple of {2 * size}, twice the number of "
        f"ranks, got {4 * size + 2}",
        "gather": "ValueError: gather_sequence: t must have an even number of tokens, a head and a tail, got 3",
        "generate": "RuntimeError: GPT2: a model with context parallelism cannot generate",
        "cache": f"{layer} does not support a cache of keys and values",
        "length": f"ValueError: GPT2: {size * T} tokens are more than block_size {T}",
        "dropout": "ValueError: context_parallel: a dropout must be a gptkernels.nn.Dropout, got torch.nn.Dropout",
        "dropout of 4 tokens": f"{attention}: with dropout, query must have a multiple of 32 tokens, got 4",
        "probability": f"{attention}: dropout_p must be from 0 to 1, got 1.5",
        "type": "TypeError: context_parallel: the model must be or contain a GPT2, got Linear",
    }
