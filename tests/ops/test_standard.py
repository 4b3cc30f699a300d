"""Tests of every operator, generated from the table of operators. Tests of one operator are in a file with its name."""

import dataclasses
import itertools

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gptkernels.testing import checks
from gptkernels.testing.cases import CASES, ODD, OPERATORS, ORDINARY, SMALL, Case
from helpers import all_views, assert_as_exact_as_torch, assert_equal, assert_same_bits, count_flops, name_of, raises

all_cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def cases_with_dtypes(cases):
    pairs = [(case, dtype) for case in cases for dtype in case.operator.dtypes]
    return pytest.mark.parametrize(
        ("case", "dtype"), pairs, ids=[f"{case.name}-{name_of(dtype)}" for case, dtype in pairs]
    )


EDGES = [
    pytest.param(
        operator, choices, id=f"{operator.name}-{', '.join(f'{name} {value}' for name, value in choices.items())}"
    )
    for operator in OPERATORS.values()
    for choices in operator.edges
]


def test_the_docstring_is_the_schema():
    assert torch.ops.gptkernels.gelu.__doc__ == 'gptkernels::gelu(Tensor x, *, str approximate="tanh") -> Tensor'


@pytest.mark.parametrize(("operator", "choices"), EDGES)
def test_matches_float64_at_edge_sizes(operator, choices, device):
    case = Case(operator, next(iter(operator.variants)))
    if device.type == "cpu":  # A CPU has one kernel.
        if max(choices.get("width", 0) / 2**16, choices.get("tokens", 0) / 2**10) > 1:
            pytest.skip("a size at which CUDA's kernels change")
        if choices.get("x.rows", 0) > 48 and choices.get("width", 0) > 96:
            choices = {**choices, "x.rows": 48}  # More rows give each SM of a GPU several.
    for dtype in operator.dtypes:
        if not (choices.get("mixed") and dtype.itemsize > 2):  # in mixed calls, x has 16 bits and the residual 32
            checks.hold_to_the_rule(case.call(ORDINARY, dtype, device, **choices))


@all_views
@cases_with_dtypes(CASES)
def test_views(case, dtype, view, device):
    checks.hold_to_the_rule(case.call(ODD, dtype, device, view=view), view)


@cases_with_dtypes(CASES)
def test_one_misaligned_argument(case, dtype, device, on_cuda):
    """Kernels must not load the misaligned argument in packs.

    The CPU's kernels do not look at alignment; ``test_views`` misaligns all of their arguments.
    """
    for name in case.call(ORDINARY, dtype, device).args:
        checks.hold_to_the_rule(case.call(ORDINARY, dtype, device, **{f"{name}.layout": "misaligned"}))


SEVERAL_OUTPUTS = [case for case in CASES if case.operator.name == "residual_layernorm"]


@pytest.mark.parametrize("unused", [0, 1])
@cases_with_dtypes(SEVERAL_OUTPUTS)
def test_unused_output(case, dtype, unused, device):
    checks.hold_to_the_rule(case.call(ODD, dtype, device), unused=[unused])


@all_cases
def test_gradient_of_one_argument(case, device):
    call = case.call(ODD, case.opcheck_dtype(), device)
    names = list(call.differentiable())
    if len(names) < 2:
        pytest.skip("has fewer than two gradients")
    every = results(call)()[-len(names) :]
    for name, expected in zip(names, every, strict=True):
        alone = dataclasses.replace(call, fixed=[other for other in call.args if other != name])
        torch.testing.assert_close(results(alone)()[-1], expected)


def rows_of(case):
    return next((name for name in case.operator.sizes if name.endswith(".rows")), None)


@pytest.mark.parametrize("rows", [(), (2,), (2, 3), (2, 0), (1, 2, 1, 2)], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if rows_of(case)], ids=lambda case: case.name)
def test_leading_shapes(case, rows, device):
    dtype = case.opcheck_dtype()
    checks.hold_to_the_rule(case.call(ODD, dtype, device, **{rows_of(case): rows}))


IN_ROWS = (
    *("gelu", "layernorm", "residual_layernorm", "softmax"),
    *("linear", "mlp", "fused_classifier", "fused_classifier_", "fused_classifier_statistics"),
)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@cases_with_dtypes([case for case in CASES if case.operator.name in IN_ROWS])
def test_infinities_and_nan_stay_in_their_row(case, dtype, value, device):
    call = case.call(ODD, dtype, device, **{rows_of(case): 5})
    first, *others = call.args.values()
    clean, first = checks.outputs(call.ours(first, *others)), first.clone()
    first[2, 7] = value
    doubles = [t.double() if t is not None and t.is_floating_point() else t for t in (first, *others)]
    triples = (call.ours(first, *others), call.torchs(first, *others), call.exact(*doubles))
    for expected, ours, torchs, exact in zip(clean, *map(checks.outputs, triples), strict=True):
        assert_as_exact_as_torch(ours, torchs.to(ours.dtype), exact)
        for row in (0, 1, 3, 4):
            assert torch.equal(ours[row], expected[row])


def results(call):
    torch.manual_seed(1)
    douts = [torch.randn(out.shape).to(out) for out in checks.outputs(call.ours(*call.args.values()))]
    return lambda: checks.with_gradients(call, call.ours, list(call.args.values()), douts)


@cases_with_dtypes(CASES)
def test_deterministic(case, dtype, device):
    """The number of threads changes no bit unless torch's BLAS is called."""
    rows = rows_of(case)
    enough = 1000 if device.type == "cuda" else 300  # to occupy all SMs, or several threads
    many = {rows: 20 if rows == "lead.rows" else enough} if rows else {}
    call = case.call(ORDINARY, dtype, device, **many)
    assert_same_bits(results(call), vary_threads=call.any_threads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=name_of)
@all_cases
def test_opcheck(case, dtype, device):
    """This test calls opcheck in float64 and bfloat16, and ``gptkernels check`` calls opcheck in float32.

    Compared with float32, only the dtypes of outputs, sums and statistics differ, which opcheck compares with those of
    the fake kernels. Therefore calls are not traced, which would take most of the time, and in float64 only the first
    variant of each operator is tested.
    """
    if dtype not in case.operator.dtypes:
        pytest.skip("the op does not support the dtype")
    if dtype == torch.float64 and case.variant != next(iter(case.operator.variants)):
        pytest.skip("only the first variant")
    checks.opcheck(case, device, dtype, traced=False)


@all_cases
def test_output_masks(case, device):
    for op, args, kwargs in case.call(SMALL, case.opcheck_dtype(), device).invocations():
        for i, mask in enumerate(args):
            if not isinstance(mask, list) or not all(isinstance(wanted, bool) for wanted in mask):
                continue
            for parity in (0, 1):
                some = [j % 2 == parity for j in range(len(mask))]
                torch.library.opcheck(op, (*args[:i], some, *args[i + 1 :]), kwargs, test_utils="test_faketensor")


@all_cases
def test_compile(case, device):
    call = case.call(SMALL, case.opcheck_dtype(), device)
    tensors = [t.detach().requires_grad_() for t in call.differentiable().values()]

    def function(*tensors):
        return call.function()(*tensors)

    def with_gradients(function):
        outs = checks.outputs(function(*tensors))
        gradients = torch.autograd.grad(outs, tensors, [torch.ones_like(out) for out in outs]) if tensors else ()
        return [*outs, *gradients]

    torch._dynamo.reset()  # Dynamo limits recompilations, and would count the cases as recompilations of one function
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for a, b in zip(with_gradients(compiled), with_gradients(function), strict=True):
        torch.testing.assert_close(a, b)


# Under autocast, these operators return the dtypes that torch's functions return.
FOLLOWS_TORCH = ("gelu", "softmax", "causal_softmax", "linear", "mlp")


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@all_cases
def test_autocast(case, low, device):
    """A call under autocast equals a call whose arguments are cast as the operator's autocast rule says."""
    rule = case.operator.autocast
    if torch.float32 not in case.operator.dtypes or rule == "torch's steps":
        pytest.skip("the op does not support float32, or has a test in test_autocast.py")
    dtype = torch.bfloat16 if low else torch.float32
    call = case.call(ODD, dtype, device)
    wide_on_cuda = torch.float32 if device.type == "cuda" else dtype
    target = {"lower": torch.bfloat16, "none": dtype, "float32 on CUDA": wide_on_cuda}[rule]
    wanted = list(call.differentiable())
    leaves = [t if t is None else t.detach().requires_grad_(name in wanted) for name, t in call.args.items()]
    with torch.autocast(device.type, torch.bfloat16):
        outs = checks.outputs(call.ours(*leaves))
        if case.operator.name in FOLLOWS_TORCH:
            assert outs[0].dtype == checks.outputs(call.torchs(*call.args.values()))[0].dtype
    cast = [t.to(target) if t is not None and t.dtype == dtype else t for t in call.args.values()]
    assert_equal(outs, checks.outputs(call.ours(*cast)))
    if wanted:
        inputs = [t for t in leaves if t is not None and t.requires_grad]
        for gradient in torch.autograd.grad(outs, inputs, [torch.ones_like(out) for out in outs]):
            assert gradient.dtype == dtype


# Arguments that may have any number of rows, any number of columns, or any shape.
ANY_ROWS = [
    *("attn_mask", "weight", "proj_weight", "mlp_proj_weight", "head", "wpe"),
    *("saved", "x_t", "weight_t", "fc_weight_t"),
]
ANY_COLUMNS, ANY_SHAPE = ("dlogits",), ("tensors", "steps")
# Tensors of indices, or indexed ones: with another shape, a kernel might access memory beyond a tensor.
INDICES = ("tokens", "targets", "sequences", "lengths", "wte", "dwte")
# These ops call other ops, whose errors name their own arguments.
OF_PARTS = ("layer", "layer_backward", "fp8_layer", "fp8_layer_backward")


def wrong_tensors(t, name):
    refused = "must .*got"
    if name != "attn_mask":
        yield t.to(torch.int64 if t.is_floating_point() else torch.float32), (refused, name)
    if t.is_floating_point() and name != "tensors":
        yield t.to(torch.float64 if t.dtype == torch.float32 else torch.float32), (refused,)
    if t.is_cuda and name != "steps":
        yield t.cpu(), ("is on cpu",)
    if name in (*INDICES, *ANY_SHAPE):
        return
    yield t[None], (refused,)
    if t.dim() and name not in ANY_ROWS:
        yield t[:-1], (refused,)
    if t.dim() and name not in ANY_COLUMNS:
        yield t[..., :-1], (refused,)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.operator.name != "embedding"], ids=lambda case: case.name
)
def test_wrong_dtypes_shapes_and_devices_are_refused(case, device):
    """The first tensor determines the expected shapes and the device. Only its dtype is made wrong."""
    for op, args, kwargs in case.call(SMALL, case.opcheck_dtype(), device).invocations():
        leaves, structure = tree_flatten(args)
        names = [op._schema.arguments[i].name for i, arg in enumerate(args) for _ in tree_leaves(arg)]
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for i in places:
            for wrong, fragments in itertools.islice(wrong_tensors(leaves[i], names[i]), 1 if i == places[0] else None):
                changed = tree_unflatten([*leaves[:i], wrong, *leaves[i + 1 :]], structure)
                with torch.no_grad(), raises(r"gptkernels::\w+: ", *fragments[: 1 if op._opname in OF_PARTS else 2]):
                    op(*changed, **kwargs)


MATMULS = ("linear", "mlp", "attention_probabilities")


@pytest.mark.parametrize("case", [case for case in CASES if case.operator.name in MATMULS], ids=lambda case: case.name)
def test_flops_are_torchs(case, device):
    call = case.call(ODD, case.opcheck_dtype(), device)
    ours, torchs = (count_flops(results(each))[0] for each in (call, dataclasses.replace(call, ours=call.torchs)))
    assert ours == torchs > 0
