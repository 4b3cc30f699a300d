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
    ops.fused_classifier_statistics.default,
    ops.fp8_classifier_from_statistics.default,
    ops.linear_cross_entropy_with_gradients.default,
    ops.linear_cross_entropy_with_logits.default,
    ops.fp8_linear_cross_entropy_with_gradients.default,
    ops.layer.default,
    ops.layer_backward.default,
)
# Torch cannot multiply float8 tensors; WITHOUT_PRODUCTS are the tests of opcheck that do not multiply.
TRACING = "test_aot_dispatch_dynamic"
ALL_TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", TRACING)
WITHOUT_PRODUCTS = ALL_TESTS[1:]
NEAR = 2.0**-13  # the largest relative change of elements in the odd trials of other_numbers
TRIALS = (1, 10, 40)


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
    except Exception as error:
        return Result(case.name, check, False, None, f"{type(error).__name__}: {error}")


def exactness(case: Case, dtype: torch.dtype, device: torch.device) -> float:
    return max(hold_to_the_rule(case.call(size, dtype, device)) for size in (ORDINARY, ODD))


def hold_to_the_rule(call: Call, view: str = "contiguous", unused: Sequence[int] = ()) -> float:
    """Check the rule of exactness, and that a second call gives equal bits.

    Return the largest ratio of our error to the allowed error. A call that violates the rule is repeated with other
    numbers, because torch may happen to be exact for a few numbers.
    """
    args = list(call.args.values())
    generator = torch.Generator().manual_seed(1)
    douts = draw_douts(call, generator)
    if view != "contiguous":
        douts = [as_view(t, view) if t is not None and t.dim() else t for t in douts]
    douts = [None if i in unused else t for i, t in enumerate(douts)]
    first = results(call, args, douts)
    noise, luck = call.noise(args, douts), 2.0 if call.torchs_splits else 1.0
    errors = [Errors(noise, luck) for _ in first]
    tried, source = 0, {"generator": generator}
    for enough in TRIALS:
        for trial in range(tried, enough):
            found = first
            if trial:
                others = ([other_numbers(t, trial, source) for t in some] for some in (args, douts))
                found = results(call, *others)
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
    """Return an argument with other numbers of similar magnitudes.

    Zeros stay zeros, infinities stay infinities, equal elements stay equal, and strides are kept unless the tensor is
    expanded. In even trials every dimension is permuted, and all elements are multiplied by one random factor between
    7/8 and 1. In odd trials each element changes by a relative amount of at most 2^-13 or four epsilons, whichever is
    larger. If the results are ``linear`` in the argument, odd trials also multiply all elements by such a factor.
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


def draw_douts(call: Call, generator: torch.Generator) -> list[Tensor | None]:
    return [torch.randn(out.shape, generator=generator).to(out) for out in outputs(call.ours(*call.args.values()))]


def results(
    call: Call, args: Sequence[Tensor | None], douts: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor, Tensor]]:
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
    call = case.call(SMALL, torch.float64, device, 1)
    check(call.function(), tuple(t.detach().requires_grad_() for t in call.differentiable().values()))


def opcheck(case: Case, device: torch.device, dtype: torch.dtype | None = None, traced: bool = True) -> None:
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
