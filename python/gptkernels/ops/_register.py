"""How an op's Python rules reach torch's dispatcher.

The rules are the leanest that ``torch.compile`` still traces: autograd is one ``torch.autograd.Function`` at the
``Autograd`` dispatch key, without the argument handling of ``torch.library.register_autograd``.
"""

from collections.abc import Callable, Sequence
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gptkernels import _library

ops = torch.ops.gptkernels
_registrations = torch.library.Library("gptkernels", "FRAGMENT")


def fake(name: str, function: Callable[..., Any]) -> None:
    """The op's output shapes and dtypes, for tracing without data."""
    torch.library.register_fake(f"gptkernels::{name}", function, lib=_registrations)


def autograd(name: str, function: type[torch.autograd.Function]) -> None:
    """``function`` takes the op's arguments by position, calls it through ``below_autograd``, and differentiates it."""
    op = getattr(ops, name).default
    defaults = [argument.default_value for argument in op._schema.arguments]
    keywords = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
    apply = function.apply

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **kwargs)):
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args, **kwargs)
        if len(args) + len(keywords) < len(defaults):  # the dispatcher drops trailing arguments at their defaults
            args += tuple(defaults[len(args) : len(defaults) - len(keywords)])
        for i, keyword in enumerate(keywords, len(args)):
            args += (kwargs.get(keyword, defaults[i]),)
        return apply(*args)

    _registrations.impl(name, kernel, "Autograd")


def below_autograd(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the op's kernel from its own autograd rule."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args, **kwargs)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and statistics: float32, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def present(gradients: Sequence[Tensor], mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """A backward's outputs with None where the mask asked for none."""
    return tuple(g if wanted else None for g, wanted in zip(gradients, mask, strict=True))


def differentiate(
    formula: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    grad_outputs: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Gradients of ``formula(*inputs)``, written in torch ops, by torch's own autograd.

    This is how a backward is itself differentiable where a kernel of its own is not worth it. The result is
    differentiable again.

    Args:
        formula: the op's outputs as a differentiable function of the inputs.
        inputs: the op's tensors; None where one is absent.
        needs: whether a gradient is wanted, for each input.
        grad_outputs: the incoming gradients; None where an output is not used.

    Returns:
        A gradient or None for each input.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # A view joins this piece of graph to the inputs' own, so that third derivatives pass through.
        variables = [
            (t.view_as(t) if t.requires_grad else t.detach().requires_grad_()) if t is not None and need else t
            for t, need in zip(inputs, needs, strict=True)
        ]
        outputs = formula(*variables)
    pairs = [(o, g) for o, g in zip(outputs, grad_outputs, strict=True) if g is not None and o.requires_grad]
    wanted = [v for v, need in zip(variables, needs, strict=True) if v is not None and need]
    if not pairs or not wanted:
        return (None,) * len(inputs)
    found = iter(
        torch.autograd.grad(
            [o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True, create_graph=create_graph
        )
    )
    return tuple(next(found) if v is not None and need else None for v, need in zip(variables, needs, strict=True))


# ---- autocast --------------------------------------------------------------------------------------------------------


def autocast(name: str, *, cuda: str | None = None, cpu: str | None = None) -> None:
    """Cast the op's floating tensors inside ``torch.autocast``, as its torch counterpart does on that device type.

    Args:
        name: the op.
        cuda: ``"float32"``, ``"lower"`` (autocast's own dtype), ``"promote"`` (the widest among the arguments), or None
            for no rule.
        cpu: likewise.
    """
    for device_type, key, policy in (("cuda", "AutocastCUDA", cuda), ("cpu", "AutocastCPU", cpu)):
        if policy is not None:
            _registrations.impl(name, _autocast_kernel(getattr(ops, name).default, device_type, key, policy), key)


def _autocast_kernel(op: Callable[..., Any], device_type: str, key: str, policy: str) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def eligible(value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.device.type == device_type
            and value.is_floating_point()
            and value.dtype != torch.float64
        )

    def target(values: Sequence[Any]) -> torch.dtype:
        if policy == "lower":
            return torch.get_autocast_dtype(device_type)
        floating = {value.dtype for value in values if eligible(value)}
        return torch.float32 if policy == "float32" or len(floating) != 1 else floating.pop()

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = target((*args, *kwargs.values()))
        args = tuple(value.to(dtype) if eligible(value) else value for value in args)
        kwargs = {name: value.to(dtype) if eligible(value) else value for name, value in kwargs.items()}
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*args, **kwargs)

    return kernel


# ---- ops that write into their arguments -----------------------------------------------------------------------------


def mutates(name: str) -> None:
    """Count up the versions of the tensors that the op writes into, as torch's own in-place ops do.

    By them autograd finds out that a tensor it has saved is no longer what it was. Which arguments are written into is
    the schema's to say.
    """
    op = getattr(ops, name).default
    count_versions = _version_counter(op)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        out = op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)
        count_versions(args, kwargs)
        return out

    _registrations.impl(name, kernel, "ADInplaceOrView", with_keyset=True)


def without_derivative(name: str) -> None:
    """Refuse the op where autograd would have to differentiate it: where gradients are recorded of its arguments.

    Elsewhere this also does what ``mutates`` does: long lists of tensors cost as much to hand through Python once more
    as the op itself.
    """
    op = getattr(ops, name).default
    count_versions = _version_counter(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            for value in (*args, *kwargs.values()):
                for t in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(t, Tensor) and t.requires_grad:
                        raise RuntimeError(f"gptkernels::{name} has no derivative: call it under torch.no_grad()")
        with torch._C._AutoDispatchBelowADInplaceOrView():
            out = op(*args, **kwargs)
        count_versions(args, kwargs)
        return out

    _registrations.impl(name, kernel, "Autograd")


def _version_counter(op: torch._ops.OpOverload) -> Callable[[Sequence[Any], dict[str, Any]], None]:
    """What counts up the versions of the arguments that the op writes into."""
    written = [(i, a.name) for i, a in enumerate(op._schema.arguments) if a.alias_info and a.alias_info.is_write]

    def count_versions(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        for i, argument in written:
            value = args[i] if i < len(args) else kwargs.get(argument)
            tensors = [value] if isinstance(value, Tensor) else value or []
            torch.autograd.graph.increment_version([*filterfalse(Tensor.is_inference, tensors)])

    return count_versions


# ---- no CUDA library -------------------------------------------------------------------------------------------------


def refuse_cuda(name: str, reason: str) -> None:
    """Make the op say, when it is called with CUDA tensors, why it has no kernel for them."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"gptkernels::{name}: no CUDA kernels are loaded: {reason}")

    _registrations.impl(name, kernel, "CUDA")


if _library.without_cuda_because:
    for _name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        if _name.startswith("gptkernels::"):
            refuse_cuda(_name.removeprefix("gptkernels::"), _library.without_cuda_because)


# ---- flops -----------------------------------------------------------------------------------------------------------


def flops(name: str, formula: Callable[..., int]) -> None:
    """Teach ``torch.utils.flop_counter`` the op: ``formula`` takes its arguments with shapes for the tensors."""
    register_flop_formula(getattr(ops, name))(formula)
