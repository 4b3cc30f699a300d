"""The checks of a case: the rule of exactness in each dtype, finite differences, and ``torch.library.opcheck``."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gptkernels.rules import ops
from gptkernels.testing.cases import ODD, ORDINARY, SMALL, Call, Case
from gptkernels.testing.draw import as_view
from gptkernels.testing.exactness import Errors, assert_as_exact_as_torch
from gptkernels.testing.report import Result

WITHOUT_DERIVATIVE = (
    ops.linear_cross_entropy_with_gradients.default,
    ops.linear_cross_entropy_with_logits.default,
    ops.fp8_linear_cross_entropy_with_gradients.default,
    ops.layer.default,
    ops.layer_backward.default,
)
# The tests of torch.library.opcheck, and the tests among them that do not multiply floating arguments. Torch cannot
# multiply float8 tensors.
TRACING = "test_aot_dispatch_dynamic"
ALL_TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", TRACING)
WITHOUT_PRODUCTS = ALL_TESTS[1:]
NEAR = 2.0**-13  # the largest relative change of elements in the odd trials of other_numbers
TRIALS = (1, 10, 40)  # the numbers of trials after which the largest errors are compared


def check_case(case: Case, device: torch.device) -> Iterator[Result]:
    for dtype in case.operator.dtypes:
        yield _checked(case, str(dtype).removeprefix("torch."), partial(exactness, case, dtype, device))
    if case.has_finite_differences():
        yield _checked(case, "gradcheck", partial(differences, case, torch.autograd.gradcheck, device))
        yield _checked(case, "gradgradcheck", partial(differences, case, torch.autograd.gradgradcheck, device))
    yield _checked(case, "opcheck", partial(opcheck, case, device))


def _checked(case: Case, check: str, function: Callable[[], float | None]) -> Result:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Result(case.name, check, True, function())
    except Exception as error:  # the other checks continue after any error
        return Result(case.name, check, False, None, f"{type(error).__name__}: {error}")


def exactness(case: Case, dtype: torch.dtype, device: torch.device) -> float:
    """Compare the results and gradients of two calls, of the sizes ORDINARY and ODD, with the formula.

    Returns the largest ratio of error to allowed error.
    """
    return max(hold_to_the_rule(case.call(size, dtype, device)) for size in (ORDINARY, ODD))


def hold_to_the_rule(call: Call, view: str = "contiguous", unused: Sequence[int] = ()) -> float:
    """Check that a call satisfies the rule of exactness, and that a second call with equal arguments gives equal bits.

    If the call violates the rule, it is repeated with other numbers to estimate torch's error again, because torch may
    happen to be exact for a few numbers.

    Args:
        call: the call; further trials replace its numbers by ``other_numbers``.
        view: the layout of the results' gradients.
        unused: the indices of results without a gradient.

    Returns:
        The largest ratio, among all results and gradients, of our error to the allowed error.

    Raises:
        AssertionError: if the rule is violated, or the second call gives other bits.
    """
    args = list(call.args.values())
    generator = torch.Generator().manual_seed(1)
    douts: list[Tensor | None] = [
        torch.randn(out.shape, generator=generator).to(out) for out in outputs(call.ours(*args))
    ]
    if view != "contiguous":
        douts = [as_view(t, view) if t is not None and t.dim() else t for t in douts]
    douts = [None if i in unused else t for i, t in enumerate(douts)]
    first = _results(call, args, douts)
    noise, luck = call.noise(args, douts), 2.0 if call.torchs_splits else 1.0
    errors = [Errors(noise, luck) for _ in first]
    tried, source = 0, {"generator": generator}
    for enough in TRIALS:
        for trial in range(tried, enough):
            found = first
            if trial:
                others = ([other_numbers(t, trial, source) for t in some] for some in (args, douts))
                found = _results(call, *others)
            for kept, triple in zip(errors, found, strict=True):
                kept.add(*triple)
        tried = enough
        try:
            for i, (triple, kept) in enumerate(zip(first, errors, strict=True)):
                assert_as_exact_as_torch(*triple, f"result {i}", kept.worst_of_torchs())
                kept.hold_on_the_whole(f"result {i}")
            return max(kept.share() for kept in errors)
        except AssertionError as error:
            failure = error
    raise failure


def other_numbers(t: Tensor | None, trial: int, source: dict[str, Any], linear: bool = False) -> Tensor | None:
    """Return an argument with other numbers, but the same zeros, equal elements, infinities, magnitudes and strides.

    In even trials a floating argument's rows and columns are permuted, and all elements are multiplied by a random
    factor between 7/8 and 1. In odd trials the elements keep their places, and change by a factor that differs from 1
    by at most 2^-13 or four epsilons of the dtype. Equal elements change by the same factor. Then sums that cancel
    still cancel, and scores that are nearly equal remain nearly equal. Expanded tensors become contiguous.

    Args:
        t: the argument; an integer tensor or None is returned unchanged.
        trial: the trial's index.
        source: arguments of torch's random functions.
        linear: whether the results are proportional to ``t``. Then all elements are multiplied by a random factor in
            odd trials as well.
    """
    if t is None or not t.is_floating_point():
        return t
    random = torch.rand((), dtype=torch.float64, **source).item()
    if trial % 2:
        change = max(NEAR, 4 * torch.finfo(t.dtype).eps) * (t.double() * (1e3 + 1e3 * random)).sin()
        values = t.double() * (1 + change.nan_to_num(0))
        values = (values * (1 - random / 8) if linear else values).to(t.dtype)
    else:
        values = t
        for dim, size in enumerate(t.shape):
            values = values.index_select(dim, torch.randperm(size, **source).to(t.device, non_blocking=True))
        values = (values.double() * (1 - random / 8)).to(t.dtype)
    if any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True)):
        return values
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(values)


def _results(
    call: Call, args: Sequence[Tensor | None], douts: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return, for each output and then for each gradient, this package's tensor, torch's, and the formula's."""
    doubles = [t.double() if t is not None and t.is_floating_point() else t for t in args]
    ours = with_gradients(call, call.ours, args, douts)
    for a, b in zip(ours, with_gradients(call, call.ours, args, douts), strict=True):
        if not torch.equal(*(t.flatten().view(torch.uint8) for t in (a, b))):
            raise AssertionError("the same call gave other bits")
    torchs = with_gradients(call, call.torchs, args, douts)
    exact = with_gradients(call, call.exact, doubles, [None if t is None else t.double() for t in douts])
    return [(a, b.to(a.dtype), c.double()) for a, b, c in zip(ours, torchs, exact, strict=True)]


def outputs(found: Any) -> list[Tensor]:
    return list(found) if isinstance(found, tuple | list) else [found]


def with_gradients(
    call: Call, function: Callable[..., Any], args: Sequence[Tensor | None], douts: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return the outputs, followed by the gradients of all arguments that may require one."""
    wanted = call.differentiable()
    named = zip(call.args, args, strict=True)
    leaves = [t if t is None else t.detach().requires_grad_(name in wanted) for name, t in named]
    outs = outputs(function(*leaves))
    inputs = [t for t in leaves if t is not None and t.requires_grad]
    found = [out.detach() for out in outs]
    if not wanted:
        return found
    used, given = zip(*((out, dout) for out, dout in zip(outs, douts, strict=True) if dout is not None), strict=True)
    return found + list(torch.autograd.grad(used, inputs, given, allow_unused=True, materialize_grads=True))


def differences(case: Case, check: Callable[..., bool], device: torch.device) -> None:
    """Compare derivatives with finite differences in float64, by ``gradcheck`` or ``gradgradcheck``."""
    call = case.call(SMALL, torch.float64, device, 1)
    check(call.function(), tuple(t.detach().requires_grad_() for t in call.differentiable().values()))


def opcheck(case: Case, device: torch.device, dtype: torch.dtype | None = None, traced: bool = True) -> None:
    """Run ``torch.library.opcheck`` for the op and its backward ops.

    It tests the schema (except with float8 arguments), the registration of autograd, the fake kernel, and, if
    ``traced`` is true, tracing by AOTAutograd.
    """
    for op, args, kwargs in case.call(SMALL, dtype or case.opcheck_dtype(), device, 1).invocations():
        written = any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)
        tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)]
        eight_bits = any(t.is_floating_point() and t.element_size() == 1 for t in tensors)
        differentiable = not written and not eight_bits and op not in WITHOUT_DERIVATIVE
        tests = [t for t in (WITHOUT_PRODUCTS if eight_bits else ALL_TESTS) if traced or t != TRACING]
        leaves = tuple(
            a.detach().requires_grad_(differentiable and a.is_floating_point()) if isinstance(a, Tensor) else a
            for a in args
        )
        torch.library.opcheck(op, leaves, kwargs, test_utils=tests)
