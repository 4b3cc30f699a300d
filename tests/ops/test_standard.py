"""Tests of every operator, from the table of operators; an operator's own file tests what is special to it."""

import dataclasses

import pytest
import torch

from gptkernels.testing import checks
from gptkernels.testing.cases import CASES, ODD, OPERATORS, ORDINARY, SMALL, Case
from helpers import all_views, assert_as_exact_as_torch, assert_same_bits, raises

all_cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def with_dtypes(cases):
    """A parameter for each of the cases in each of its dtypes."""
    pairs = [(case, dtype) for case in cases for dtype in case.operator.dtypes]
    return pytest.mark.parametrize(
        ("case", "dtype"), pairs, ids=[f"{case.name}-{name_of(dtype)}" for case, dtype in pairs]
    )


EDGES = [
    pytest.param(
        operator,
        choices,
        dtype,
        id=f"{operator.name}-{', '.join(f'{name} {value}' for name, value in choices.items())}-{name_of(dtype)}",
    )
    for operator in OPERATORS.values()
    for choices in operator.edges
    for dtype in operator.dtypes
    if not (choices.get("mixed") and dtype.itemsize > 2)  # a wider x has the residual's dtype
]


@pytest.mark.parametrize(("operator", "choices", "dtype"), EDGES)
def test_matches_float64(operator, choices, dtype, device):
    """The result and all gradients at sizes at which kernels change."""
    case = Case(operator, next(iter(operator.variants)))
    checks.hold_to_the_rule(case.call(ORDINARY, dtype, device, **choices))


@all_views
@with_dtypes(CASES)
def test_views(case, dtype, view, device):
    """Arguments and the results' gradients in another layout."""
    checks.hold_to_the_rule(case.call(ODD, dtype, device, view=view), view)


@with_dtypes(CASES)
def test_one_misaligned_argument(case, dtype, device):
    """Whole packs are loaded only where all arguments allow it."""
    for name in case.call(ORDINARY, dtype, device).args:
        checks.hold_to_the_rule(case.call(ORDINARY, dtype, device, **{f"{name}.layout": "misaligned"}))


SEVERAL_OUTPUTS = [case for case in CASES if case.operator.name == "residual_layernorm"]


@pytest.mark.parametrize("unused", [0, 1])
@with_dtypes(SEVERAL_OUTPUTS)
def test_unused_output(case, dtype, unused, device):
    checks.hold_to_the_rule(case.call(ODD, dtype, device), unused=[unused])


@all_cases
def test_gradient_of_one_argument(case, device):
    """An argument alone has the gradient that it has among the others."""
    call = case.call(ODD, case.opcheck_dtype(), device)
    names = list(call.differentiable())
    if len(names) < 2:
        pytest.skip("has fewer than two gradients")
    every = results(call)()[-len(names) :]
    for name, expected in zip(names, every, strict=True):
        alone = dataclasses.replace(call, fixed=[other for other in call.args if other != name])
        torch.testing.assert_close(results(alone)()[-1], expected)


def rows_of(case):
    """The name of the choice of the leading dimensions; None where the operator takes no others."""
    return next((name for name in case.operator.sizes if name.endswith(".rows")), None)


@pytest.mark.parametrize("rows", [(), (2,), (2, 3), (2, 0), (1, 2, 1, 2)], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if rows_of(case)], ids=lambda case: case.name)
def test_leading_shapes(case, rows, device):
    dtype = case.opcheck_dtype()
    checks.hold_to_the_rule(case.call(ODD, dtype, device, **{rows_of(case): rows}))


IN_ROWS = (
    "gelu",
    "layernorm",
    "residual_layernorm",
    "softmax",
    "linear",
    "mlp",
    "fused_classifier",
    "fused_classifier_",
)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@with_dtypes([case for case in CASES if case.operator.name in IN_ROWS])
def test_infinities_and_nan_stay_in_their_row(case, dtype, value, device):
    """What the formula gives in the row of such a value, and the same bits in all others."""
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
    """The outputs and gradients, as a function of nothing."""
    torch.manual_seed(1)
    douts = [torch.randn(out.shape).to(out) for out in checks.outputs(call.ours(*call.args.values()))]
    return lambda: checks.with_gradients(call, call.ours, list(call.args.values()), douts)


@with_dtypes(CASES)
def test_deterministic(case, dtype, device):
    """The same bits again, and with another number of threads where torch's BLAS has no part."""
    rows = rows_of(case)
    many = {rows: 20 if rows == "lead.rows" else 1000} if rows else {}
    call = case.call(ORDINARY, dtype, device, **many)
    assert_same_bits(results(call), vary_threads=call.any_threads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=name_of)
@all_cases
def test_opcheck(case, dtype, device):
    """float32 is ``gptkernels check``'s; a registration can tell apart only whether sums are in float64."""
    if dtype not in case.operator.dtypes:
        pytest.skip("the op does not take the dtype")
    if dtype == torch.float64 and case.variant != next(iter(case.operator.variants)):
        pytest.skip("only the first variant")
    checks.opcheck(case, device, dtype)


@all_cases
def test_output_masks(case, device):
    """An op with a mask of outputs or gradients has the same outputs under a FakeTensorMode, whatever the mask."""
    for op, args, kwargs in case.call(SMALL, case.opcheck_dtype(), device).invocations():
        for i, mask in enumerate(args):
            if not isinstance(mask, list) or not all(isinstance(wanted, bool) for wanted in mask):
                continue
            for parity in (0, 1):
                some = [j % 2 == parity for j in range(len(mask))]
                torch.library.opcheck(op, (*args[:i], some, *args[i + 1 :]), kwargs, test_utils="test_faketensor")


@all_cases
def test_compile(case, device):
    """Without a break of the graph, with the same results and gradients."""
    call = case.call(SMALL, case.opcheck_dtype(), device)
    tensors = [t.detach().requires_grad_() for t in call.differentiable().values()]

    def function(*tensors):
        return call.function()(*tensors)

    def with_gradients(function):
        outs = checks.outputs(function(*tensors))
        gradients = torch.autograd.grad(outs, tensors, [torch.ones_like(out) for out in outs]) if tensors else ()
        return [*outs, *gradients]

    torch._dynamo.reset()  # every case compiles the same function
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for a, b in zip(with_gradients(compiled), with_gradients(function), strict=True):
        torch.testing.assert_close(a, b)


FOLLOWS_TORCH = (
    "gelu",
    "softmax",
    "causal_softmax",
    "linear",
    "mlp",
)  # their counterparts are torch's functions under autocast


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@all_cases
def test_autocast(case, low, device):
    """The bits of a call with arguments in the dtype that autocast's rule gives; gradients in the arguments' dtypes."""
    rule = case.operator.autocast
    if torch.float32 not in case.operator.dtypes or rule == "torch's steps":
        pytest.skip("the op takes no float32, or has a test in test_autocast.py")
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
    for a, b in zip(outs, checks.outputs(call.ours(*cast)), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    if wanted:
        inputs = [t for t in leaves if t is not None and t.requires_grad]
        for gradient in torch.autograd.grad(outs, inputs, [torch.ones_like(out) for out in outs]):
            assert gradient.dtype == dtype


@all_cases
def test_tensors_on_different_devices(case, device):
    """An argument that shares its dtype with the first must share its device, too."""
    if device.type == "cpu":
        pytest.skip("one device only")
    call = case.call(SMALL, case.opcheck_dtype(), device)
    for name in [name for name in call.tied if call.args[name] is not None][1:]:
        with raises(case.operator.name, f"{name} is on cpu", "is on cuda"):
            call.ours(*{**call.args, name: call.args[name].cpu()}.values())
