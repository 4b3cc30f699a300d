"""The checks of a case: the rule of exactness in each dtype, finite differences, ``torch.library.opcheck``."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gptkernels.rules import ops
from gptkernels.testing.cases import ODD, ORDINARY, SMALL, Call, Case, Draw
from gptkernels.testing.exactness import Errors, assert_as_exact_as_torch
from gptkernels.testing.report import Result

WITHOUT_DERIVATIVE = (
    ops.linear_cross_entropy_with_gradients.default,
    ops.linear_cross_entropy_with_logits.default,
    ops.fp8_linear_cross_entropy_with_gradients.default,
    ops.layer.default,
    ops.layer_backward.default,
)
# torch.library.opcheck's tests, and those that do not multiply an op's floating arguments: torch has no such product of
# float8 numbers.
ALL_TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
WITHOUT_PRODUCTS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
TRIALS = (1, 10, 40)  # after so many, their worst errors are compared


def check_case(case: Case, device: torch.device) -> Iterator[Result]:
    """The results of all checks of a case, one after the other."""
    for dtype in case.dtypes:
        yield _checked(case, str(dtype).removeprefix("torch."), partial(exactness, case, dtype, device))
    if case.differentiable and case.float64_results:
        yield _checked(case, "gradcheck", partial(differences, case, torch.autograd.gradcheck, device))
        yield _checked(case, "gradgradcheck", partial(differences, case, torch.autograd.gradgradcheck, device))
    yield _checked(case, "opcheck", partial(opcheck, case, device))


def _checked(case: Case, check: str, function: Callable[[], float | None]) -> Result:
    """What came of a check."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Result(case.name, check, True, function())
    except Exception as error:  # whatever it is, the other checks go on
        return Result(case.name, check, False, None, f"{type(error).__name__}: {error}")


# ---- exactness -------------------------------------------------------------------------------------------------------


def exactness(case: Case, dtype: torch.dtype, device: torch.device) -> float:
    """The results and all gradients against the formula in float64, beside torch; two calls give the same bits.

    Returns:
        Our error as a share of what the rule allows, where it is largest.
    """
    return max(_keep_the_rule(case, size, dtype, device) for size in (ORDINARY, ODD))


def _keep_the_rule(case: Case, size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Hold one size to the rule; where it is broken, with more trials, as torch may have been exact by luck."""
    first: list[tuple[Tensor, Tensor, Tensor]] = []
    errors: list[Errors] = []
    tried = 0
    for enough in TRIALS:
        for seed in range(tried, enough):
            found = _results(case, case.draw(Draw(size, dtype, device, seed)), dtype)
            first, errors = first or found, errors or [Errors() for _ in found]
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


def _results(case: Case, call: Call, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each output, then each gradient: ours, torch's, the formula's."""
    doubles = [t.double() for t in call.args]
    outs = _outputs(call.ours(*call.args))
    generator = torch.Generator().manual_seed(1)
    douts = [torch.randn(out.shape, generator=generator).to(out.dtype).to(out.device) for out in outs]
    gradients = case.differentiable and (case.float64_results or dtype != torch.float64)
    ours = _with_gradients(call.ours, call.args, douts, gradients)
    for a, b in zip(ours, _with_gradients(call.ours, call.args, douts, gradients), strict=True):
        if not torch.equal(*(t.flatten().view(torch.uint8) for t in (a, b))):
            raise AssertionError("the same call gave other bits")
    torchs = _with_gradients(call.torchs, call.args, douts, gradients)
    exact = _with_gradients(call.exact, doubles, [dout.double() for dout in douts], gradients)
    return [(a, b.to(a.dtype), c.double()) for a, b, c in zip(ours, torchs, exact, strict=True)]


def _outputs(found: Any) -> list[Tensor]:
    return list(found) if isinstance(found, tuple | list) else [found]


def _with_gradients(
    function: Callable[..., Any], args: Sequence[Tensor], douts: Sequence[Tensor], gradients: bool
) -> list[Tensor]:
    """The outputs, and the gradients of all arguments where they are wanted."""
    leaves = [t.detach().requires_grad_(gradients) for t in args]
    outs = _outputs(function(*leaves))
    found = [out.detach() for out in outs]
    return found + list(torch.autograd.grad(outs, leaves, douts)) if gradients else found


# ---- derivatives and registrations -----------------------------------------------------------------------------------


def differences(case: Case, check: Callable[..., bool], device: torch.device) -> None:
    """``gradcheck`` or ``gradgradcheck``: derivatives against finite differences, in float64."""
    call = case.draw(Draw(SMALL, torch.float64, device, 1))
    check(call.ours, tuple(t.detach().requires_grad_() for t in call.args))


def opcheck(case: Case, device: torch.device) -> None:
    """``torch.library.opcheck`` of the op and of those of its derivative: schema, fake, autograd, tracing."""
    for op, args, kwargs in case.draw(Draw(SMALL, torch.float32, device, 1)).calls:
        written = any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)
        tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)]
        eight_bits = any(t.is_floating_point() and t.element_size() == 1 for t in tensors)
        differentiable = not written and not eight_bits and op not in WITHOUT_DERIVATIVE
        tests = WITHOUT_PRODUCTS if eight_bits else ALL_TESTS
        torch.library.opcheck(op, tuple(_leaf(a, differentiable) for a in args), kwargs, test_utils=tests)


def _leaf(value: Any, requires_grad: bool) -> Any:
    """Floating tensors as leaves."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(requires_grad and value.is_floating_point())
    return value
