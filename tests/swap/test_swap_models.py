"""Tests that a swapped model of each family has the results of the unswapped model.

The models run eagerly, compiled, on meta and in pipelines, with autocast, dropout and activation checkpointing.
"""

import contextlib
import copy
import io
from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.utils._python_dispatch import TorchDispatchMode

import gptkernels
from swapped import (
    all_families,
    assert_as_exact,
    make_copies_and_call,
    make_model_and_call,
    needs_transformers,
    our_dropout,
    results,
    tokens,
)

both = pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
backend_of = {"cpu": "aot_eager", "cuda": "inductor"}


def assert_close_gradients(found, expected, tolerance, least=0.0):
    """A gradient's error may be ``tolerance`` times its largest element, plus ``least``. None must match None."""
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance * b.abs().max().item() + least)


def make_swapped_or_not(family, device):
    for is_swapped in (True, False):
        model, call = make_model_and_call(family, device)
        yield (gptkernels.swap(model) if is_swapped else model).double().eval(), call


@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
@all_families
def test_matches_float64(family, precision, device):
    """Under autocast, the models are in training mode."""
    ours, torchs, exact, call = make_copies_and_call(family, device)
    autocast = precision == "autocast"
    for model in (ours, torchs, exact):
        model.train(autocast)
    if precision == "bfloat16":
        ours.bfloat16(), torchs.bfloat16()
        with torch.no_grad():
            for rounded, wide in zip(torchs.parameters(), exact.parameters(), strict=True):
                wide.copy_(rounded)

    def pair(draw):
        return results(torchs, call, device, autocast, draw), results(exact, call, device, draw=draw)

    pairs, found = [pair(draw) for draw in range(4)], results(ours, call, device, autocast)
    try:
        assert_as_exact(found, *pairs[0], pairs[1:])
    except AssertionError:
        if precision == "bfloat16":
            raise
        # torch's results may all happen to be exact, for example if the exact gradient is 0, so more inputs are tried.
        assert_as_exact(found, *pairs[0], [*pairs[1:], *(pair(draw) for draw in range(4, 40))])
    assert not ours.gptkernels_report.calls


@pytest.mark.parametrize("family", ["nanoGPT", pytest.param("GPT2LMHeadModel", marks=needs_transformers)])
def test_meta_tensors(family):
    found = {}
    for device in map(torch.device, ("cpu", "meta")):
        model, call = make_model_and_call(family, "cpu")
        model = gptkernels.swap(model).to(device)
        model.config.pad_token_id = None  # otherwise transformers searches the tokens' values for padding
        found[device.type] = {name: (t.shape, t.dtype) for name, t in results(model, call, device).items()}
    assert found["cpu"].items() <= found["meta"].items()  # on meta, the untied LM head is a further parameter


@pytest.mark.parametrize("family", ["nanoGPT", "llm.c", pytest.param("GPT2LMHeadModel", marks=needs_transformers)])
def test_pipelining(family, device):
    model, _ = make_model_and_call(family, device)
    model.config.use_cache = False
    model = gptkernels.swap(model).eval()
    kwargs = {"labels" if family == "GPT2LMHeadModel" else "targets": tokens(device, 1)}
    expected = model(tokens(device), **kwargs)
    splits = {"transformer.h.1": SplitPoint.BEGINNING}
    found = pipeline(model, (tokens(device),), kwargs, split_spec=splits)(tokens(device), **kwargs)
    torch.testing.assert_close(*map(torch.utils._pytree.tree_leaves, (found, expected)))


@both
@all_families
def test_ten_steps_of_training(family, autocast, device):
    models = make_copies_and_call(family, device)[:3]
    _, call = make_model_and_call(family, device)
    losses = []
    for model, low in zip(models, (autocast, autocast, False), strict=True):
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(10):
            losses[-1].append(results(model, call, device, low)["loss"])
            optimizer.step()
    losses = [torch.stack([loss.double() for loss in run]) for run in losses]
    assert losses[0][-1] < losses[0][0]
    apart = [(run - losses[2]).abs().max().item() for run in losses[:2]]
    assert apart[0] <= 2 * apart[1] + losses[2].abs().max().item() * (2**-8 if autocast else 1e-6), apart


@both
@pytest.mark.parametrize(
    "family", [p for p in all_families.args[1] if p.values[0] not in ("nanoGPT before torch 2", "llm.c")]
)
def test_dropout(family, autocast, device, monkeypatch):
    """llm.c is left out because it has no dropout, nanoGPT before torch 2 because torch draws one of its masks."""
    models = make_copies_and_call(family, device, dropout=0.2)[:3]
    _, call = make_model_and_call(family, device)

    def step(model, low, draw):
        with our_dropout(monkeypatch):
            return results(model.train(), call, device, low, draw)

    found = [
        [step(m, low, draw) for m, low in zip(models, (autocast, autocast, False), strict=True)] for draw in range(4)
    ]
    assert_as_exact(*found[0], [pair[1:] for pair in found[1:]])
    without = results(make_model_and_call(family, device)[0].train(), call, device, autocast)
    assert not torch.allclose(without["output 0"], found[0][0]["output 0"], rtol=1e-3)


@all_families
def test_unswap_restores_the_model(family, device):
    model, call = make_model_and_call(family, device)
    classes, parameters = [type(m) for m in model.modules()], list(model.parameters())
    keys, dicts = list(model.state_dict()), [set(vars(m)) for m in model.modules()]
    model.eval()
    before = results(model, call, device)
    swapped = gptkernels.swap(model)
    assert swapped is model
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    modules = list(zip(model.modules(), classes, strict=True))
    assert all(isinstance(m, kind) and type(m).__name__ == kind.__name__ for m, kind in modules)
    assert any(type(m) is not kind for m, kind in modules)
    assert gptkernels.unswap(model) is model
    assert [type(m) for m in model.modules()] == classes
    assert [set(vars(m)) for m in model.modules()] == dicts
    after = results(model, call, device)
    assert all(torch.equal(before[name], after[name]) for name in before)


@all_families
def test_all_supported_modules_are_replaced(family, device):
    model = gptkernels.swap(make_model_and_call(family, device)[0])
    assert {entry.kind for entry in model.gptkernels_report.left} <= {"Dropout", "Identity", "GPT2SequenceSummary"}


def test_the_report_names_the_options_of_replacements(device):
    report = gptkernels.swap(make_model_and_call("nanoGPT", device)[0]).gptkernels_report
    notes = {entry.kind: entry.note for entry in report.replaced}
    assert notes["GPT"] == "gpt model (ignore_index=-1, last_only=True)"
    assert notes["LayerNorm"] == "LayerNorm (eps=1e-05)"


@all_families
def test_copies_and_pickles_are_swapped_too(family, device):
    model, call = make_model_and_call(family, device)
    gptkernels.swap(model.eval())
    expected = results(model, call, device)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for other in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        assert all(torch.equal(t, expected[name]) for name, t in results(other, call, device).items())
        gptkernels.unswap(other)
        assert "gptkernels_report" in vars(model)


def skip_shared_blocks(family, device):
    if device.type == "cpu" and family not in ("GPT2LMHeadModel", "nanoGPT", "llm.c"):
        pytest.skip("another family has the same blocks")


@both
@all_families
def test_compiles_whole(family, autocast, device):
    if autocast:
        skip_shared_blocks(family, device)
    torch._dynamo.reset()
    model, call = make_model_and_call(family, device)
    gptkernels.swap(model)
    eager = results(model, call, device, autocast)
    expected = results(model, call, device) if autocast else eager
    compiled = torch.compile(lambda x: call(x, device), fullgraph=True, backend=backend_of[device.type])
    found = results(model, lambda m, *_: compiled(m), device, autocast)
    for name, t in expected.items():
        eager_error, scale = (eager[name].float() - t).abs().max().item(), t.abs().max().item()
        allowed = 2 * eager_error + scale * (2.0**-8 if autocast else 1e-4) + 1e-6
        torch.testing.assert_close(found[name].float(), t, rtol=0, atol=allowed)


@all_families
def test_functional_call_compiles_whole(family, device):
    skip_shared_blocks(family, device)
    torch._dynamo.reset()
    model, call = make_model_and_call(family, device)
    gptkernels.swap(model)
    parameters = {name: (1.1 * p.detach()).requires_grad_() for name, p in model.named_parameters()}

    def loss(parameters):
        return call(lambda *args, **kwargs: torch.func.functional_call(model, parameters, args, kwargs), device)[1]

    compiled = torch.compile(loss, fullgraph=True, backend=backend_of[device.type])
    losses = [run(parameters) for run in (loss, compiled)]
    assert not torch.equal(losses[0], call(model, device)[1])
    expected, found = (torch.autograd.grad(one, list(parameters.values()), allow_unused=True) for one in losses)
    torch.testing.assert_close(losses[1], losses[0])
    assert_close_gradients(found, expected, 1e-4, 1e-6)


COMPILED = pytest.mark.parametrize(
    "family", [p for p in all_families.args[1] if p.values[0] in ("GPT2LMHeadModel", "nanoGPT")]
)


def operators(calls, exact_gelu):
    """Count the calls of our operators. For an operator that calls other operators, count these instead."""
    mlp, mlp_backward = ["mlp"], ["mlp_backward"]
    if exact_gelu:
        mlp, mlp_backward = ["linear", "gelu", "linear"], ["linear_backward", "gelu_backward", "linear_backward"]
    norm_backward = "residual_layernorm_dropout_backward"
    attention_backward = ["linear_backward", "attention_backward", "linear_backward"]
    rest = ["linear", "attention", "linear", "residual_layernorm", *mlp]
    rest_backward = [*mlp_backward, norm_backward, *attention_backward]
    calls_of = {
        "layer": ["residual_layernorm", *rest],
        "first layer": ["layernorm", *rest],
        "layer_backward": [*rest_backward, norm_backward],
        "first layer_backward": [*rest_backward, "layernorm_backward"],  # followed by an addition of torch
        "linear_cross_entropy_with_logits": ["linear", "fused_classifier", "linear_backward"],
        "fused_classifier_backward_": [],  # A graph multiplies by the gradient of the loss with an op of torch.
    }
    found = Counter()
    for name, count in calls.items():
        if name.startswith("gptkernels."):
            for one in calls_of.get(name.split(".")[1], [name.split(".")[1]]):
                found[one] += count
    return found


def name_call(node):
    """Return an operator's name. ``layer`` without ``values`` is the first layer, and named "first layer"."""
    has_values = True
    if node.target in (torch.ops.gptkernels.layer.default, torch.ops.gptkernels.layer_backward.default):
        names = [argument.name for argument in node.target._schema.arguments]
        given = dict(zip(names, node.args, strict=False))
        has_values = given.get("values") is not None if "values" in names else given.get("has_values", True)
    return str(node.target) if has_values else str(node.target).replace(".", ".first ", 1)


@COMPILED
def test_compiled_training(family, device):
    torch._dynamo.reset()
    found, called, graphs = [], Counter(), []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            called[str(op)] += 1
            return op(*args, **(kwargs or {}))

    def record(graph, inputs):
        graphs.append(Counter(map(name_call, graph.graph.nodes)))
        return make_boxed_func(graph.forward)

    for compiles in (False, True):
        model, call = make_model_and_call(family, device, dropout=0.1)
        model.config.use_cache = False  # with a cache, compiled blocks are single operators
        gptkernels.swap(model).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of = lambda model=model, call=call: call(model, device)[1]  # noqa: E731
        if compiles:
            loss_of = torch.compile(loss_of, fullgraph=True, backend=aot_autograd(fw_compiler=record))
        torch.manual_seed(0)
        for step in range(3):
            with Calls() if step == 0 and not compiles else contextlib.nullcontext():
                with torch.autocast(device.type, torch.bfloat16):
                    loss = loss_of()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
    torch.testing.assert_close(found[3:], found[:3], rtol=2e-3, atol=0)
    assert len(graphs) == 2
    calls = graphs[0] + graphs[1]
    for layer in ("layer", "first layer"):
        assert calls[f"gptkernels.{layer}.default"] == calls[f"gptkernels.{layer}_backward.default"] == 1
    exact_gelu = family == "nanoGPT"
    assert operators(called, exact_gelu) == operators(calls, exact_gelu)
    assert graphs[0]["aten._foreach_copy.default"] == graphs[1]["aten._foreach_copy.default"] == 2  # one for each block


@both
@COMPILED
def test_compiled_frozen_parameters(family, autocast, device):
    """If some parameters are frozen, the compiled model has the gradients of eager mode, and no others."""
    if device.type == "cpu" and autocast != (family == "nanoGPT"):
        pytest.skip("one family with autocast and one without")
    torch._dynamo.reset()
    model, call = make_model_and_call(family, device)
    gptkernels.swap(model).train()
    for name, p in model.named_parameters():
        if any(part in name for part in ("h.0.ln_1", "h.1.attn", "wte", "h.0.mlp.c_fc.weight", "h.1.ln_2.bias")):
            p.requires_grad_(False)

    def loss():
        return call(model, device)[1]

    def gradients_by(run):
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            result = run()
        result.backward()
        return [p.grad for p in model.parameters()]

    expected = gradients_by(loss)
    found = gradients_by(torch.compile(loss, fullgraph=True, backend="aot_eager"))
    assert_close_gradients(found, expected, 2e-2 if autocast else 1e-4)


@COMPILED
def test_reduce_overhead(family, device):
    if device.type == "cpu":
        pytest.skip("CUDA graphs")
    found = {}
    for dropout in (0.0, 0.5):
        for mode in (None, "reduce-overhead"):
            torch._dynamo.reset()
            model, call = make_model_and_call(family, device, dropout=dropout)
            gptkernels.swap(model).train()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            compiled = torch.compile(model, fullgraph=True, mode=mode) if mode else model
            losses = []
            for _ in range(6):
                with torch.autocast(device.type, torch.bfloat16):
                    loss = call(compiled, device)[1]
                loss.backward()
                optimizer.step() if dropout == 0 else None
                optimizer.zero_grad()
                losses.append(loss.detach().clone())
            found[dropout, mode] = torch.stack(losses)
    torch.testing.assert_close(found[0.0, "reduce-overhead"], found[0.0, None], rtol=2e-3, atol=0)
    dropped = found[0.5, "reduce-overhead"]
    assert len(dropped.unique()) == 6
    torch.testing.assert_close(dropped.mean(), found[0.5, None].mean(), rtol=0.1, atol=0)


@all_families
def test_second_derivative(family, device):
    found = []
    for model, call in make_swapped_or_not(family, device):
        parameters = [p for p in model.parameters() if p.requires_grad]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = call(model, device)[1]
        first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        norm = sum(g.square().sum() for g in first if g is not None)
        found.append([norm, *torch.autograd.grad(norm, parameters, allow_unused=True, materialize_grads=True)])
    assert_close_gradients(*found, 1e-5, 1e-9)  # transformers computes some losses in float32


@all_families
def test_only_trained_parameters_have_gradients(family, device):
    found = []
    for model, call in make_swapped_or_not(family, device):
        for i, p in enumerate(model.parameters()):
            p.requires_grad_(i % 3 == 1)
        call(model, device)[1].backward()
        found.append([p.grad for p in model.parameters()])
    assert_close_gradients(*found, 1e-5, 1e-9)


@all_families
def test_activation_checkpointing(family, device):
    """torch's checkpoint around the whole model changes no bit. The recomputation draws the same dropout masks."""
    model, call = make_model_and_call(family, device, dropout=0.2)
    gptkernels.swap(model).train()

    def checkpointed(model, device, draw=0):
        # checkpoint saves the random state of a GPU only if an argument is a tensor on this GPU.
        def run(_):
            return call(model, device, draw)

        return torch.utils.checkpoint.checkpoint(run, torch.zeros((), device=device), use_reentrant=False)

    found = []
    for way in (call, checkpointed):
        torch.manual_seed(0)
        found.append(results(model, way, device))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
