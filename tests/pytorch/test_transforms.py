"""Tests of every op with torch's transforms: forward-mode AD, the transforms of torch.func, and nested transforms.

``gradcheck`` and ``gradgradcheck`` compare derivatives with finite differences in float64: ``gradcheck`` compares all
elements, ``gradgradcheck`` a random projection. Other tests compare a transform with a loop, or with another transform
that computes the same values.
"""

import functools

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils._pytree import tree_leaves

from gptkernels import functional, nn
from gptkernels.models import GPT2, GPT2Config
from gptkernels.testing import cases
from gptkernels.testing.cases import SMALL
from helpers import assert_raises

ops = torch.ops.gptkernels


def make_function(case):
    def made(device, dtype):
        call = case.call(SMALL, dtype, device)
        return call.function(), [tuple(t.shape) for t in call.differentiable().values()]

    return made


# Each function (device, dtype) returns a differentiable function of floating-point tensors, and these tensors' shapes.
CASES = {
    case.name: make_function(case)
    for case in cases.CASES
    if case.has_finite_differences()
    and case.name != "attention, dropout"  # vmap would draw another mask for each sample
} | {
    name: lambda device, dtype, function=function: function
    for operator in cases.OPERATORS.values()
    for name, function in operator.functions.items()
}
all_cases = pytest.mark.parametrize("case", CASES)


def draw_case(case, device, dtype=torch.float64):
    function, shapes = CASES[case](device, dtype)
    return function, tuple(torch.randn(shape, dtype=dtype).to(device) for shape in shapes)


def assert_trees_close(a, b, **tolerance):
    a, b = (tree_leaves(t) for t in (a, b))
    assert b
    torch.testing.assert_close(a, b, **tolerance)


def skip_float32_result(case):
    if case == "global_norm":
        pytest.skip("its result is float32; see test_tangent_of_global_norm")


@all_cases
def test_forward_mode_is_the_derivative(case, device):
    skip_float32_result(case)
    function, inputs = draw_case(case, device)
    for t in inputs:
        t.requires_grad_()
    # t * 1 is not a leaf. An earlier version lost the tangents of tensors that are not leaves.
    assert gradcheck(
        lambda *args: function(*(t * 1 for t in args)),
        inputs,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )


@all_cases
def test_forward_over_reverse(case, device):
    skip_float32_result(case)
    function, inputs = draw_case(case, device)
    for t in inputs:
        t.requires_grad_()
    options = {"check_fwd_over_rev": True, "check_rev_over_rev": True, "check_batched_grad": True}
    assert gradgradcheck(function, inputs, **options, fast_mode=True)


@all_cases
def test_forward_mode_without_gradients(case, device):
    function, inputs = draw_case(case, device)
    directions = [torch.randn_like(t) for t in inputs]
    _, whole = jvp(function, inputs, tuple(directions))
    parts = []
    for i, direction in enumerate(directions):
        with torch.no_grad(), forward_ad.dual_level():
            args = [forward_ad.make_dual(t, direction) * 1 if i == k else t for k, t in enumerate(inputs)]
            results = function(*args)
            results = results if isinstance(results, tuple) else (results,)
            tangents = [forward_ad.unpack_dual(r).tangent for r in results]
            parts.append([torch.zeros_like(r) if t is None else t for r, t in zip(results, tangents, strict=True)])
    assert any(t.abs().max() > 0 for part in parts for t in part)
    total = [sum(column) for column in zip(*parts, strict=True)]
    assert_trees_close(whole, total if isinstance(whole, tuple) else total[0])


def test_tangent_of_global_norm(device):
    tensors = [torch.randn(5, dtype=torch.float64, device=device), torch.randn(2, 3, device=device)]
    directions = [torch.randn_like(t) for t in tensors]
    norm, tangent = jvp(lambda *ts: ops.global_norm(ts), tuple(tensors), tuple(directions))
    flat, direction = (torch.cat([t.double().flatten() for t in ts]) for ts in (tensors, directions))
    torch.testing.assert_close(norm.double(), flat.norm(), rtol=1e-6, atol=0)
    torch.testing.assert_close(tangent.double(), flat @ direction / flat.norm(), rtol=1e-6, atol=1e-7)
    zeros = (torch.zeros(3, device=device),)
    assert jvp(lambda *ts: ops.global_norm(ts), zeros, (torch.ones(3, device=device),))[1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@all_cases
def test_forward_mode_in_every_dtype(case, dtype, device):
    function, inputs = draw_case(case, device, dtype)
    directions = tuple(torch.randn_like(t) for t in inputs)
    if case.startswith("fused_classifier_backward"):  # dlosses are float32
        inputs, directions = ((t[0].float(), t[1]) for t in (inputs, directions))
    outputs, found = jvp(function, tuple(inputs), tuple(directions))
    _, exact = jvp(function, tuple(t.double() for t in inputs), tuple(t.double() for t in directions))
    for out, tangent, wanted in zip(*map(tree_leaves, (outputs, found, exact)), strict=True):
        assert tangent.dtype == out.dtype
        scale = wanted.abs().max().clamp(min=1)
        # A case chains up to five matmuls of rounded factors.
        error = (tangent.double() - wanted.double()).abs().max() / scale
        assert error <= 64 * torch.finfo(dtype).eps, (error, torch.finfo(dtype).eps)


def test_an_op_without_derivative_refuses_tangents(device):
    logits, targets = torch.randn(2, 5, device=device), torch.tensor([1, 2], device=device)
    ones = torch.ones(2, device=device)

    def classify(x):
        return ops.fused_classifier(x, targets, -1, -100, ones)

    message = "fused_classifier: a call with dlosses is not differentiable"
    assert_raises(RuntimeError, message, jvp, classify, (logits,), (logits,))
    p, g, m, v, t = (torch.zeros(3, device=device) for _ in range(5))
    options = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0}

    def step(g):
        with torch.no_grad():
            ops.adamw_([p], [g], [m], [v], [t.sum()], lr=torch.tensor(0.1), **options)
        return p

    assert_raises(RuntimeError, "adamw_ has no derivative", jvp, step, (g,), (g,))


@all_cases
def test_jacobians_agree(case, device):
    skip_float32_result(case)
    function, inputs = draw_case(case, device)
    positions = tuple(range(len(inputs)))
    reverse = jacrev(function, positions)(*inputs)
    assert_trees_close(jacfwd(function, positions)(*inputs), reverse)
    assert_trees_close(jacfwd(function, positions, randomness="same")(*inputs), reverse)
    assert_trees_close(reverse, torch.autograd.functional.jacobian(function, inputs))
    outputs, _ = vjp(function, *inputs)
    assert_trees_close(outputs, function(*inputs))
    outputs, push = linearize(function, *inputs)
    directions = tuple(torch.randn_like(t) for t in inputs)
    assert_trees_close(push(*directions), jvp(function, inputs, directions)[1])


@all_cases
def test_hessians_agree(case, device):
    skip_float32_result(case)
    if case in ("linear_cross_entropy", "linear_cross_entropy, sum", "linear_cross_entropy, functional"):
        pytest.skip("the op refuses a tangent outside of its forward if the forward computes the gradients")
    function, inputs = draw_case(case, device)
    weights = [torch.randn_like(t) for t in tree_leaves(function(*inputs))]

    def scalar(*args):
        outputs = tree_leaves(function(*args))
        return sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True))

    positions = tuple(range(len(inputs)))
    expected = torch.autograd.functional.hessian(scalar, inputs)
    found = hessian(scalar, positions)(*inputs)
    assert_trees_close(found, expected)
    assert_trees_close(jacrev(jacfwd(scalar, positions), positions)(*inputs), expected)
    if case.partition(",")[0] != "fused_classifier_":  # The op writes in place, and copy_ refuses a ZeroTensor.
        assert_trees_close(jacfwd(jacfwd(scalar, positions), positions)(*inputs), expected)
    assert_trees_close(jacrev(jacrev(scalar, positions), positions)(*inputs), expected)


@all_cases
def test_vmap_equals_the_loop(case, device):
    """All inputs or a single input are mapped, over the first or the last dimension, also inside another vmap."""
    function, shapes = CASES[case](device, torch.float64)
    size = 3
    plain = [torch.randn(shape, dtype=torch.float64).to(device) for shape in shapes]
    stacked = [torch.randn(size, *shape, dtype=torch.float64).to(device) for shape in shapes]
    for mapped in [tuple(range(len(shapes))), *((i,) for i in range(len(shapes)))]:
        inputs = [stacked[i] if i in mapped else plain[i] for i in range(len(shapes))]
        dims = tuple(0 if i in mapped else None for i in range(len(shapes)))

        def one(i, mapped=mapped, inputs=inputs):
            return function(*(t[i] if k in mapped else t for k, t in enumerate(inputs)))

        looped = [tree_leaves(one(i)) for i in range(size)]
        expected = [torch.stack(column) for column in zip(*looped, strict=True)]
        assert_trees_close(vmap(function, dims)(*inputs), expected)
        last = [t.movedim(0, -1) if d == 0 else t for t, d in zip(inputs, dims, strict=True)]
        assert_trees_close(vmap(function, tuple(-1 if d == 0 else None for d in dims))(*last), expected)
    twice = [torch.stack([t, 2 * t]) for t in stacked]
    looped = [tree_leaves(vmap(function)(*(t[i] for t in twice))) for i in range(2)]
    assert_trees_close(vmap(vmap(function))(*twice), [torch.stack(pair) for pair in zip(*looped, strict=True)])


@all_cases
def test_per_sample_gradients(case, device):
    function, shapes = CASES[case](device, torch.float64)

    def scalar(*args):
        return sum((out * out).sum() for out in tree_leaves(function(*args)))

    stacked = [torch.randn(3, *shape, dtype=torch.float64).to(device) for shape in shapes]
    for dims in [(0,) * len(shapes), (0, *(None,) * (len(shapes) - 1))]:
        inputs = [t if d == 0 else t[0] for t, d in zip(stacked, dims, strict=True)]
        gradient = grad(scalar, tuple(range(len(shapes))))
        found = vmap(gradient, dims)(*inputs)
        looped = [gradient(*(t[i] if d == 0 else t for t, d in zip(inputs, dims, strict=True))) for i in range(3)]
        assert_trees_close(found, [torch.stack(column) for column in zip(*looped, strict=True)])


def test_vmap_over_integers(device):
    tokens = torch.randint(4, (3, 2, 5), device=device)
    wte, wpe = (torch.randn(3, 4, 6, device=device), torch.randn(5, 6, device=device))

    def check(function, dims, *args):
        def sample(i):
            return tree_leaves(function(*(a if d is None else a[i] for a, d in zip(args, dims, strict=True))))

        expected = [torch.stack(column) for column in zip(*map(sample, range(3)), strict=True)]
        assert_trees_close(vmap(function, dims)(*args), expected)  # vmap may add terms in another order

    check(ops.encoder, (0, None, None), tokens, wte[0], wpe)
    check(ops.encoder, (0, 0, None), tokens, wte, wpe)
    check(ops.encoder, (None, 0, None), tokens[0], wte, wpe)
    check(ops.embedding, (0, None), tokens, wte[0])
    check(ops.embedding, (0, 0), tokens, wte)
    rows = torch.randn(3, 2, 5, 6, device=device)
    for dims, args in [((0, 0), (rows, tokens)), ((0, None), (rows, tokens[0])), ((None, 0), (rows[0], tokens))]:
        check(lambda g, t: ops.embedding_backward(g, t, 4), dims, *args)
        check(lambda g, t: ops.encoder_backward(g, t, 4, 7), dims, *args)
    logits, targets = torch.randn(3, 5, 8, device=device), torch.randint(6, (3, 5), device=device)
    for dlosses, dim in [
        (None, None),
        (torch.rand(3, 5, device=device), 0),
        (torch.rand(3, device=device), 0),
        (torch.rand((), device=device), None),
        (torch.rand(5, device=device), None),
    ]:
        for d, t in [(0, targets), (None, targets[0])]:
            check(lambda x, t, g: ops.fused_classifier(x, t, 6, 2, g), (0, d, dim), logits, t, dlosses)
    check(lambda x, t: ops.fused_classifier(x, t), (None, 0), logits[0], targets)


def test_vmap_keeps_the_ops_errors(device):
    def refuse(message, function, *args):
        assert_raises(RuntimeError, message, vmap(function), *args)

    # vmap concatenates the samples' gradients of the weight. There, row 4 of the first sample is row 0 of the second.
    tokens = torch.tensor([[0, 1, 4], [0, 0, 0]])
    refuse(r"token|range|index", lambda g, t: ops.embedding_backward(g, t, 4), torch.ones(2, 3, 8), tokens)
    refuse("at least 1 dimension", ops.softmax, torch.randn(3, device=device))
    empty = torch.randn(0, 2, 3, device=device), torch.randn(0, 4, 3, device=device)
    refuse("size 0", lambda x, w: ops.linear(x, w), *empty)
    # An unmapped tensor cannot hold a different result for each sample.
    logits = torch.randn(4, 5, device=device)
    refuse("inplace", lambda t: ops.fused_classifier_(logits, t), torch.zeros(3, 4, dtype=torch.long, device=device))


def make_model(device, **changes):
    config = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11, "block_size": 6, "padded_vocab_size": 16}
    return GPT2(GPT2Config(**{**config, **changes}), device=device, dtype=torch.float64)


def make_loss(model, tokens):
    def loss(parameters, tokens=tokens):
        return functional_call(model, parameters, (tokens, tokens))[1]

    return loss


def test_model_tangents_agree_with_gradients(device):
    model, tokens = make_model(device), torch.randint(11, (3, 6), device=device)
    parameters = dict(model.named_parameters())
    direction = {name: torch.randn_like(p) for name, p in parameters.items()}
    loss = make_loss(model, tokens)
    value, tangent = jvp(loss, (parameters,), (direction,))
    gradient = grad(loss)(parameters)
    torch.testing.assert_close(value, model(tokens, tokens)[1])
    torch.testing.assert_close(tangent, sum((gradient[n] * direction[n]).sum() for n in parameters))
    # Forward over reverse mode and reverse over forward mode compute the same Hessian-vector product.
    _, over_reverse = jvp(grad(loss), (parameters,), (direction,))
    over_forward = grad(lambda p: jvp(loss, (p,), (direction,))[1])(parameters)
    assert_trees_close(over_reverse, over_forward)
    assert all(t.abs().max() > 0 for t in over_reverse.values())


def test_model_per_sample_gradients(device):
    model, tokens = make_model(device), torch.randint(11, (3, 6), device=device)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = vmap(grad(lambda p, t: make_loss(model, t[None])(p)), (None, 0))(parameters, tokens)
    for i in range(3):
        expected = grad(make_loss(model, tokens[i : i + 1]))(parameters)
        assert_trees_close({name: t[i] for name, t in found.items()}, expected)


def test_ensemble_of_models(device):
    models, tokens = [make_model(device) for _ in range(2)], torch.randint(11, (3, 6), device=device)
    parameters, _ = torch.func.stack_module_state(models)
    found = vmap(lambda p: functional_call(models[0], p, (tokens,))[0])(parameters)
    assert_trees_close(found, torch.stack([model(tokens)[0] for model in models]))


@pytest.mark.parametrize("module", ["LayerNorm", "Linear", "GELU", "Softmax", "MLP", "CausalSelfAttention"])
def test_modules_have_per_sample_gradients_and_tangents(module, device):
    made = {
        "LayerNorm": lambda: nn.LayerNorm(8),
        "Linear": lambda: nn.Linear(8, 4),
        "GELU": lambda: nn.GELU(),
        "Softmax": lambda: nn.Softmax(-1),
        "MLP": lambda: nn.MLP(8),
        "CausalSelfAttention": lambda: nn.CausalSelfAttention(8, 2),
    }[module]().to(device, torch.float64)
    x = torch.randn(3, 2, 5, 8, dtype=torch.float64, device=device)
    parameters = {name: p.detach() for name, p in made.named_parameters()}

    def scalar(p, x):
        return functional_call(made, p, (x,)).square().sum()

    found = vmap(grad(scalar, (0, 1)), (None, 0))(parameters, x)
    for i in range(3):
        expected = grad(scalar, (0, 1))(parameters, x[i])
        assert_trees_close([t[i] for t in tree_leaves(found)], expected)
    _, tangent = jvp(functools.partial(scalar, parameters), (x[0],), (x[1],))
    torch.testing.assert_close(tangent, (grad(scalar, 1)(parameters, x[0]) * x[1]).sum())


def test_transforms_of_cross_entropy_and_embedding_match_torch(device):
    x = torch.randn(3, 4, 5, dtype=torch.float64, device=device)
    targets = torch.randint(5, (3, 4), device=device)
    losses = functional.cross_entropy, torch.nn.functional.cross_entropy
    for transform in (grad, hessian):
        assert_trees_close(*(vmap(transform(f))(x, targets) for f in losses))
    weight = torch.randn(5, 2, dtype=torch.float64, device=device)
    found, expected = (
        vmap(grad(lambda w, t, f=f: f(t, w).square().sum()), (None, 0))(weight, targets)
        for f in (functional.embedding, torch.nn.functional.embedding)
    )
    assert_trees_close(found, expected)


def test_transforms_compile(device):
    x, w, b = (torch.randn(s, device=device) for s in [(3, 8), (8,), (8,)])

    def function(x, w, b):
        return (ops.gelu(ops.layernorm(x, w, b)[0]) * ops.softmax(x)).sum()

    for transformed in [
        lambda *args: grad(function, (0, 1, 2))(*args),
        lambda *args: vmap(grad(function), (0, None, None))(*args),
        lambda *args: jvp(function, args, args),
        lambda *args: jacrev(lambda x: ops.gelu(ops.linear(x, w[None])))(args[0]),
    ]:
        compiled = torch.compile(transformed, fullgraph=True, backend="aot_eager")
        assert_trees_close(compiled(x, w, b), transformed(x, w, b))
