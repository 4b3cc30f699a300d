"""Tests of the package with the features of torch that training programs use, as docs/compose.md lists them."""

import collections
import copy
import functools
import io
import multiprocessing
import os
import pickle
import threading

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import benchmark
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import small_models
from gptkernels import functional, nn
from gptkernels.optim import AdamW
from helpers import CountCalls, assert_raises, randn
from processes import run_processes

ops = torch.ops.gptkernels
T, C = small_models.SIZES["block_size"], small_models.SIZES["n_embd"]
make_model = functools.partial(small_models.make_model, noise=0)
make_batch = functools.partial(small_models.make_batch, B=3)


def gradients_of(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()))


def loss_and_gradients(model, *args, **kwargs):
    loss = model(*args, **kwargs)[1]
    return [loss.detach(), *gradients_of(loss, model)]


def step_on(model, optimizer, *batch):
    model(*batch)[1].backward()
    optimizer.step()
    optimizer.zero_grad()


def detached_parameters(model):
    return [p.detach() for p in model.parameters()]


@pytest.fixture
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("return_logits", [True, False])
def test_one_graph_supports_every_batch_and_length(return_logits, device):
    model = make_model(device)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    frames = []
    for B, length in [(3, 12), (5, 11), (9, 8), (4, 13)]:
        batch = make_batch(device, B=B, length=length)
        loss = compiled(*batch, return_logits=return_logits)[1]
        found = [loss.detach(), *gradients_of(loss, model)]
        torch.testing.assert_close(found, loss_and_gradients(model, *batch, return_logits=return_logits))
        frames.append(counter.frame_count)
    assert frames == frames[:1] * 4


@pytest.mark.usefixtures("_fresh_dynamo")
def test_inductor_with_a_dynamic_batch(device):
    model = make_model(device, n_layer=1)
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for B in (2, 5, 3):
        batch = make_batch(device, B=B)
        for t in batch:
            torch._dynamo.mark_dynamic(t, 0)
        loss = compiled(*batch)[1]
        torch.testing.assert_close([loss.detach(), *gradients_of(loss, model)], loss_and_gradients(model, *batch))
    assert counter.frame_count == 1


@pytest.mark.usefixtures("_fresh_dynamo")
def test_reduce_overhead(device, on_cuda):
    """The test needs CUDA, because on the CPU this mode is Inductor's default."""
    found = []
    for compiles in (False, True):
        model = make_model(device, n_layer=1)
        call = torch.compile(model, fullgraph=True, mode="reduce-overhead") if compiles else model
        optimizer = AdamW(model.parameters(), lr=1e-2)
        losses = []
        for i in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            loss = call(*make_batch(device, seed=i))[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        found.append(losses)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def autocast_cases(device):
    def make(*shape):
        return randn(*shape, dtype=torch.float32, device=device)

    x, weight, bias, square = make(6, 8), make(8), make(8), make(8, 8)
    heads = make(2, 2, 6, 8)
    targets = torch.arange(6, device=device)
    yield "layer_norm", lambda f: f.layer_norm(x, (8,), weight, bias)
    yield "gelu", lambda f: f.gelu(x)
    yield "softmax", lambda f: f.softmax(x, -1)
    yield "linear", lambda f: f.linear(x, square, bias)
    yield "embedding", lambda f: f.embedding(targets, square)
    yield "cross_entropy", lambda f: f.cross_entropy(x, targets)
    yield "cross_entropy of products", lambda f: f.cross_entropy(f.linear(x, square), targets)
    yield "scaled_dot_product_attention", lambda f: f.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    yield "dropout", lambda f: f.dropout(x, 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_gives_torchs_dtypes(dtype, device):
    for name, call in autocast_cases(device):
        with torch.autocast(device.type, dtype):
            ours, torchs = call(functional), call(F)
        assert ours.dtype == torchs.dtype, name
        torch.testing.assert_close(ours.float(), torchs.float(), rtol=2e-2, atol=2e-2, msg=name)


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_float16_with_a_grad_scaler(max_grad_norm, device):
    overflows = 5

    def train(model, optimizer, clips):
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=4)
        losses, scales = [], []
        for i in range(15):
            tokens, targets = make_batch(device, seed=i % 3)
            with torch.autocast(device.type, torch.float16):
                loss = model(tokens, targets)[1]
            scaler.scale(loss * (1e30 if i == overflows else 1.0)).backward()
            if clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
            scales.append(scaler.get_scale())
        return losses, scales

    ours, reference = small_models.make_pair(device, torch.float32, noise=0)
    losses, scales = train(ours, AdamW(ours.parameters(), lr=3e-3, max_grad_norm=max_grad_norm), False)
    theirs = train(reference, torch.optim.AdamW(reference.parameters(), lr=3e-3), max_grad_norm is not None)
    assert scales == theirs[1]
    assert scales[overflows] == scales[overflows - 1] / 2
    assert losses == pytest.approx(theirs[0], rel=5e-3)
    assert losses[-1] < losses[0] - 0.3


def save_attention():
    return create_selective_checkpoint_contexts([ops.attention.default])


def save_matmuls():
    def policy(context, op, *args, **kwargs):
        is_matmul = op in (ops.linear.default, ops.mlp.default, torch.ops.aten.mm.default)
        return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize(
    ("contexts", "saved"),
    [(None, set()), (save_attention, {"attention"}), (save_matmuls, {"linear", "mlp"})],
    ids=["all", "attention is saved", "matmuls are saved"],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_selective_checkpointing_by_our_ops(contexts, saved, autocast, device):
    block, x = make_model(device).transformer.h[0], randn(2, T, C, dtype=torch.float32, device=device)
    options = {} if contexts is None else {"context_fn": contexts}

    def recomputed(x):
        return checkpoint(block, x, use_reentrant=False, **options)

    found, counts = [], []
    for call in (block, recomputed):
        leaf = x.clone().requires_grad_()
        with CountCalls() as calls, torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            out = call(leaf)
            gradients = torch.autograd.grad(out, [leaf, *block.parameters()], torch.ones_like(out))
        found.append([out.detach(), *gradients])
        counts.append(calls.kernels())
    small_models.assert_equal(*found)
    plain, recomputing = counts
    for op in ("linear", "attention", "layernorm", "residual_layernorm", "mlp"):
        assert recomputing[op] == plain[op] * (1 if op in saved else 2), op
    for op in ("attention_backward", "mlp_backward"):
        assert recomputing[op] == plain[op] == 1


@pytest.mark.usefixtures("_fresh_dynamo")
def test_selective_checkpointing_compiled(device):
    """The policy saves attention's result. The compiled backward recomputes the first norm, but not attention."""
    graphs = []

    def remember(graph, _):
        graphs.append(collections.Counter(getattr(node.target, "_opname", "") for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    block = make_model(device).transformer.h[0]
    x = randn(2, T, C, dtype=torch.float32, device=device, requires_grad=True)

    def recomputed(x):
        return checkpoint(block, x, use_reentrant=False, context_fn=save_attention)

    backend = aot_autograd(fw_compiler=remember, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(recomputed, fullgraph=True, backend=backend)
    inputs = [x, *block.parameters()]
    found = torch.autograd.grad(compiled(x).sum(), inputs)
    torch.testing.assert_close(found, torch.autograd.grad(block(x).sum(), inputs))
    forward, backward = graphs
    assert forward["attention"] == 1
    assert backward["attention"] == 0
    assert forward["layernorm"] == backward["layernorm"] == 1


def test_optimizer_hooks(device):
    seen, found = [], []

    def halve(optimizer, args, kwargs):
        seen.append("pre")
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    for cls in (AdamW, torch.optim.AdamW):
        model = make_model(device, dtype=torch.float64)
        optimizer = cls(model.parameters(), lr=1e-2)
        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(lambda *_: seen.append("post"))
        optimizer.register_state_dict_pre_hook(lambda *_: seen.append("state"))
        optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
        for i in range(3):
            step_on(model, optimizer, *make_batch(device, seed=i))
        optimizer.load_state_dict(optimizer.state_dict())
        found.append(detached_parameters(model))
    assert seen == [*["pre", "post"] * 3, "state", "loaded"] * 2
    torch.testing.assert_close(*found)


def test_step_in_the_backward(device):
    """Each parameter has an optimizer that a hook calls in the backward pass, as in torch's tutorial."""
    found = []
    for cls in (AdamW, torch.optim.AdamW):
        model = make_model(device, dtype=torch.float64)
        optimizers = {p: cls([p], lr=1e-2) for p in model.parameters()}

        def step(p, optimizers=optimizers):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for i in range(3):
            model(*make_batch(device, seed=i))[1].backward()
            assert all(p.grad is None for p in model.parameters())
        found.append(detached_parameters(model))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("how", ["multi", "foreach over buffers"])
def test_averaged_model(how, device):
    found = []
    options = {"use_buffers": True} if how != "multi" else {}
    for cls in (AdamW, torch.optim.AdamW):
        model = make_model(device, dtype=torch.float64)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), **options)
        optimizer = cls(model.parameters(), lr=1e-2)
        for i in range(4):
            step_on(model, optimizer, *make_batch(device, seed=i))
            average.update_parameters(model)
        assert average.module.lm_head.weight is average.module.transformer.wte.weight
        with torch.no_grad():
            loss = average(*make_batch(device))[1]
        found.append([loss, *detached_parameters(average)])
    torch.testing.assert_close(*found)


def test_gradient_penalty_and_functional_call(device):
    ours, reference = small_models.make_pair(device, noise=0, n_layer=1)
    args, found = make_batch(device), []
    for model in (ours, reference):
        parameters = list(model.parameters())
        # This is the only one of torch's attention backends that has a second derivative.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            first = torch.autograd.grad(model(*args)[1], parameters, create_graph=True)
            found.append(torch.autograd.grad(sum(g.square().sum() for g in first), parameters))
    torch.testing.assert_close(*found)

    def penalty(parameters):
        gradients = torch.func.grad(lambda p: functional_call(ours, p, args)[1])(parameters)
        return sum(g.square().sum() for g in gradients.values())

    by_func = torch.func.grad(penalty)({name: p.detach() for name, p in ours.named_parameters()})
    torch.testing.assert_close(list(by_func.values()), found[0])


def test_profiler_shows_our_ops_with_shapes(device):
    model, args = make_model(device), make_batch(device)
    with torch.profiler.profile(record_shapes=True) as profile:
        model(*args, return_logits=False)[1].backward()
    shapes = collections.defaultdict(set)
    for event in profile.events():
        if event.name.startswith("gptkernels::"):
            shapes[event.name.removeprefix("gptkernels::")].add(tuple(map(tuple, event.input_shapes[:3])))
    padded = model.config.padded_vocab_size
    assert ((3, T), (padded, C), (T, C)) in shapes["encoder"]
    assert ((3, T, C), (C,), (C,)) in shapes["layernorm"]
    assert ((3, T, C), (3 * C, C), (3 * C,)) in shapes["linear"]
    assert ((3, T, 3 * C), (), ()) in shapes["attention"]
    assert ((3, T, C), (4 * C, C), (4 * C,)) in shapes["mlp"]
    assert ((3, T, C), (3, T, 3 * C), (3, T, C)) in shapes["attention_backward"]
    assert ((3, T, C), (padded, C), (3, T)) in shapes["linear_cross_entropy_with_gradients"]
    if device.type == "cuda":
        kernels = {event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA}
        assert any("layernorm_forward" in name for name in kernels)


@pytest.mark.parametrize("return_logits", [True, False])
def test_flop_counter(return_logits, device):
    model, (tokens, targets) = make_model(device), make_batch(device)
    with FlopCounterMode(display=False) as counted:
        model(tokens, targets, return_logits=return_logits)[1].backward()
    rows, padded = tokens.numel(), model.config.padded_vocab_size
    products = 2 * rows * (12 * C * C * 2 + C * padded)
    attention = 2 * (2 * 2 * 3 * T * T * C)  # torch also counts the scores that the causal mask hides
    assert counted.get_total_flops() == 3 * products + 7 * attention // 2
    by_module = counted.get_flop_counts()
    assert sum(by_module["GPT2.transformer.h.0.mlp"].values()) == 3 * 2 * rows * 8 * C * C
    # The counter's hooks keep modules from calling fused ops. Outside of modules, it uses the fused op's formula.
    x = randn(5, 8, dtype=torch.float32, device=device)
    fc, proj = (randn(*shape, dtype=torch.float32, device=device) for shape in ((32, 8), (8, 32)))
    with FlopCounterMode(display=False) as counted:
        functional.mlp(x, fc, None, proj, None)
    assert counted.get_flop_counts()["Global"] == {ops.mlp: 2 * 2 * 5 * 8 * 32}


def test_every_matrix_product_has_a_flop_formula():

    names = {name.removeprefix("gptkernels::") for name in torch._C._dispatch_get_all_op_names() if "gptkern" in name}
    multiply = {
        n
        for n in names - {"attention_dropout_mask", "fp8_quantize", "fp8_layernorm", "fp8_classifier_from_statistics"}
        if n.startswith(("linear", "mlp", "attention", "scaled", "fp8", "layer_backward")) or n == "layer"
    }
    assert len(multiply) == 27
    for name in multiply:
        assert getattr(ops, name) in flop_registry, name


def test_benchmark_timer(device):
    x = randn(64, 96, dtype=torch.float32, device=device)
    timer = benchmark.Timer("f(x)", globals={"f": functional.gelu, "x": x}, num_threads=1, label="gelu")
    measured = timer.timeit(5)
    assert measured.median > 0
    assert "gelu" in str(measured)
    assert benchmark.Compare([measured, timer.blocked_autorange(min_run_time=0.01)]) is not None


def test_memory_snapshot(device, tmp_path):
    """Our kernel launchers allocate no memory, so torch's allocator records all memory of an op."""
    if device.type != "cuda":
        pytest.skip("CUDA only")
    x = randn(1024, 768, dtype=torch.float32, device=device)
    torch.cuda.memory._record_memory_history(max_entries=10_000)
    try:
        out = functional.gelu(x)
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    allocations = [e for trace in snapshot["device_traces"] for e in trace if e["action"] == "alloc"]
    ours = [e for e in allocations if e["addr"] == out.data_ptr()]
    assert ours
    assert ours[-1]["size"] == out.nbytes
    assert any("test_memory_snapshot" in frame["name"] for frame in ours[-1]["frames"])
    assert (tmp_path / "snapshot.pickle").stat().st_size > 0


def train_briefly(device, seed, steps=3):
    model = make_model(device, n_layer=1)
    generator = torch.Generator().manual_seed(seed)  # threads share torch's default generator
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.05 + (p.dim() == 1))
    optimizer = AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    for i in range(steps):
        with torch.autocast(device.type, torch.bfloat16, enabled=i % 2 == 1):
            loss = model(*make_batch(device, seed=seed + i), return_logits=i % 2 == 0)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def run_in_threads(functions):
    found = [None] * len(functions)
    barrier = threading.Barrier(len(functions))

    def run(i):
        barrier.wait()
        found[i] = functions[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_threads(device):
    alone = [train_briefly(device, seed) for seed in range(4)]
    for _ in range(3):
        together = run_in_threads([functools.partial(train_briefly, device, seed) for seed in range(4)])
        small_models.assert_equal(together, alone)


def test_streams(device):
    if device.type != "cuda":
        pytest.skip("CUDA only")
    expected = train_briefly(device, 1)
    side, other = torch.cuda.Stream(device), torch.cuda.Stream(device)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(2_000_000_000)  # takes about a second
        busy = torch.cuda.Event()
        busy.record()
    with torch.cuda.stream(side):
        found = train_briefly(device, 1)
        done = torch.cuda.Event()
        done.record()
    done.synchronize()
    assert not busy.query()  # The other stream's work has not ended: training did not wait for it.
    small_models.assert_equal(found, expected)
    # After a stream has waited for a delayed stream, an op reads what the delayed stream wrote.
    x = torch.zeros(4096, 768, device=device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(2.0)
    torch.cuda.current_stream().wait_stream(side)
    torch.testing.assert_close(functional.gelu(x), F.gelu(torch.full_like(x, 2.0)))


def test_several_devices(device):
    if torch.cuda.device_count() < 2 or device.type != "cuda":
        pytest.skip("needs two CUDA devices")

    def train_and_copy(on, seed):
        return [t.cpu() for t in train_briefly(on, seed)]

    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    with torch.cuda.device(first):
        small_models.assert_equal(train_and_copy(second, 1), train_and_copy(first, 1))
    small_models.assert_equal(*run_in_threads([functools.partial(train_and_copy, d, 2) for d in (first, second)]))
    args = torch.ones(2, 8, device=first), (8,), torch.ones(8, device=second)
    assert_raises(RuntimeError, "weight is on cuda:1", functional.layer_norm, *args)


def test_inference_mode(device):
    """Autograd refuses to save a tensor that was made in inference mode, as it does for torch's ops."""
    model, (tokens, targets) = make_model(device), make_batch(device)
    with torch.inference_mode():
        logits, _ = model(tokens, targets)
        generated = model.generate(tokens[:, :4], 5, temperature=0)
        x = torch.randn(2, 8, device=device)
    assert logits.is_inference()
    expected = model(tokens, targets)
    small_models.assert_equal(logits, expected[0].detach())
    assert torch.equal(generated, model.generate(tokens[:, :4], 5, temperature=0))
    expected[1].backward()
    AdamW(model.parameters()).step()
    weight = torch.ones(8, device=device, requires_grad=True)
    message = "Inference tensors cannot be saved for backward"
    assert_raises(RuntimeError, message, functional.layer_norm, x, (8,), weight)


def fork_and_compare():
    torch.set_num_threads(1)
    ours, theirs = multiprocessing.get_context("fork").Pipe()

    def child():
        torch.set_num_threads(1)  # makes torch's thread pool, which several threads of autograd cannot do at once
        theirs.send([t.numpy() for t in train_briefly(torch.device("cpu"), 1)])

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    expected = train_briefly(torch.device("cpu"), 1)
    assert ours.poll(60), "the child hangs"
    small_models.assert_equal([torch.from_numpy(t) for t in ours.recv()], expected)
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.xdist_group("distributed")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_after_import():
    """A process that has used CUDA or OpenMP's threads cannot be forked, so the parent is forked from the server."""
    run_processes(fork_and_compare, 1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_loader_workers(context):
    """The parent calls ops with several OpenMP threads before it starts the worker, which has one thread."""
    data = small_models.Batches()  # not defined here, so that a spawned process need not import this file
    expected = [data[i] for i in range(4)]
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context=context)
    small_models.assert_equal(list(loader), expected)


def test_copies(device):
    model = make_model(device, dtype=torch.float64)
    optimizer = AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    step_on(model, optimizer, *make_batch(device, seed=0))
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    copies = [
        copy.deepcopy((model, optimizer)),
        pickle.loads(pickle.dumps((model, optimizer))),
        torch.load(file, weights_only=False),
    ]
    step_on(model, optimizer, *make_batch(device, seed=1))
    for other, its_optimizer in copies:
        assert other.lm_head.weight is other.transformer.wte.weight
        assert its_optimizer.param_groups[0]["params"][0] is next(other.parameters())
        step_on(other, its_optimizer, *make_batch(device, seed=1))
        small_models.assert_equal(detached_parameters(other), detached_parameters(model))


def test_functions_can_be_pickled():
    for name in functional.__all__:
        assert pickle.loads(pickle.dumps(getattr(functional, name))) is getattr(functional, name)


@pytest.mark.parametrize("parametrization", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrizations(parametrization, device):
    found = []
    for layer, activation in ((nn.Linear, nn.GELU), (torch.nn.Linear, torch.nn.GELU)):
        torch.manual_seed(2)
        model = torch.nn.Sequential(layer(8, 8), activation(), layer(8, 8)).to(device, torch.float64)
        parametrization(model[0])
        optimizer = (AdamW if layer is nn.Linear else torch.optim.AdamW)(model.parameters(), lr=1e-2)
        x = torch.linspace(-1, 1, 24, dtype=torch.float64, device=device).view(3, 8)
        for _ in range(3):
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([loss.detach(), *detached_parameters(model)])
    torch.testing.assert_close(*found)
    mlp = nn.MLP(8, device=device, dtype=torch.float64)
    parametrization(mlp.c_fc)
    x = torch.randn(3, 8, dtype=torch.float64, device=device)
    expected = F.linear(F.gelu(F.linear(x, mlp.c_fc.weight, mlp.c_fc.bias), approximate="tanh"), mlp.c_proj.weight)
    torch.testing.assert_close(mlp(x), expected + mlp.c_proj.bias)
