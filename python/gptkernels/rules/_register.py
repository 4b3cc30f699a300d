"""Registers an op's Python rules with torch's dispatcher.

An op's file defines the rules and ends with one call for each:

| call | what it provides |
|---|---|
| ``fake(name, f)`` | shapes and dtypes without data: meta and fake tensors, ``torch.compile``, ``torch.export`` |
| ``autograd(name, Function, jvp=rule)`` | reverse and forward derivatives, also under ``torch.func``'s transforms |
| ``autograd_by_formula(name, f, inputs=n)`` | derivatives of a ``_backward`` op, from its formula in torch ops |
| ``vmap(name, rule)`` | ``torch.vmap``, and with it ``jacrev``, ``jacfwd``, ``hessian`` and per-sample gradients |
| ``autocast(name, cuda=..., cpu=...)`` | casts inside ``torch.autocast`` |
| ``flops(name, f)`` | ``torch.utils.flop_counter`` |
| ``mutates(name)`` | version counters, for an op that writes to an argument |
| ``without_derivative(name)`` | an error, for an op without derivative |

``Function`` is a plain ``torch.autograd.Function``. It needs no ``setup_context``, because the dispatcher calls the
op's autograd kernel once for each transform, as it does for torch's ops. A ``_backward`` op needs a ``jvp`` as well,
because forward over reverse differentiates the backward in forward mode.

The autograd kernels skip the argument handling of ``torch.library.register_autograd`` and ``Function.apply``, which
costs host time in each call.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from gptkernels import _library
from gptkernels.rules import _autocast, _inductor, _jvp, _vmap

ops = torch.ops.gptkernels
_registrations = torch.library.Library("gptkernels", "FRAGMENT")


def fake(name: str, function: Callable[..., Any]) -> None:
    def rule(*args: Any, **kwargs: Any) -> Any:
        _inductor.register_fallbacks()
        return function(*args, **kwargs)

    torch.library.register_fake(f"gptkernels::{name}", rule, lib=_registrations)


def like(position: int) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: args[position].new_empty(args[position].shape)


def empty_gradients(like: Tensor, shapes: Sequence[Sequence[int]], mask: Sequence[bool]) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(shape if wanted else (0,)) for shape, wanted in zip(shapes, mask, strict=True))


def autograd(name: str, function: type[torch.autograd.Function], *, jvp: _jvp.Rule) -> None:
    op = getattr(ops, name).default
    complete = completer(op)
    apply, apply_forward = recorder(function), recorder(_jvp.with_jvp(function, jvp))

    # Global lookups are hoisted out of the kernel, because a call of an op on a small tensor takes only 5 us.
    transforms_active, below = torch._C._are_functorch_transforms_active, torch._C._AutoDispatchBelowAutograd
    grad_enabled, any_requires_grad = torch.is_grad_enabled, torch._C._any_requires_grad

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0 or transforms_active():  # _jvp.active()
            positional = complete(args, kwargs)
            if _jvp.any_tangent(positional):
                return apply_forward(*positional)
        if not (grad_enabled() and any_requires_grad(*args, **kwargs)):
            with below():
                return op(*args, **kwargs)
        return apply(*complete(args, kwargs))

    _registrations.impl(name, kernel, "Autograd")


def save(ctx: Any, *values: Any) -> None:
    ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in values))
    ctx.constants = [None if isinstance(value, Tensor) else value for value in values]


def saved(ctx: Any) -> list[Any]:
    return [constant if t is None else t for t, constant in zip(ctx.saved_tensors, ctx.constants, strict=True)]


def autograd_by_formula(name: str, formula: Callable[..., Any], *, inputs: int) -> None:
    """Register the derivatives of an op, usually a ``_backward`` op, from its formula in torch ops.

    Only the ``inputs`` leading arguments have a derivative. If the forward op computed another argument from them, the
    formula must compute it again instead of reading it.
    """
    op = getattr(ops, name).default
    call = call_by_position(op, op)
    is_masked = op._schema.arguments[-1].name == "output_mask"

    class ByFormula(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            outputs = below_autograd(call, *args)
            ctx.dtypes = [out.dtype for out in (outputs if isinstance(outputs, tuple) else (outputs,))]
            save(ctx, *args)
            ctx.set_materialize_grads(False)
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            args = saved(ctx)

            def outputs(*variables: Any) -> tuple[Any, ...]:
                found = formula(*variables, *args[inputs:])
                found = found if isinstance(found, tuple) else (found,)
                return tuple(t if t is None else t.to(dtype) for t, dtype in zip(found, ctx.dtypes, strict=True))

            needs = ctx.needs_input_grad[:inputs]
            found = differentiate(outputs, args[:inputs], needs, present(grads, args[-1]) if is_masked else grads)
            return *found, *(None,) * (len(args) - inputs)

    autograd(name, ByFormula, jvp=_jvp.by_formula(formula))


def recorder(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a function that runs only the C++ part of ``function.apply``.

    The Python part is not needed: it handles the transforms of torch.func, which the dispatcher has already handled.
    """
    apply = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    apply_in_transform = _single_level(function).apply

    def record(*args: Any) -> Any:
        if not torch._C._are_functorch_transforms_active():
            return apply(*args)
        before = _outer.modes
        _outer.modes = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
        try:
            with enable_single_level_autograd_function():
                return apply_in_transform(*args)
        finally:
            _outer.modes = before

    return record


def _single_level(function: type[torch.autograd.Function]) -> Any:
    """Copy ``function`` as a class whose ``apply`` stays inside the present transform.

    The ``apply`` of a ``Function`` itself enters transforms from torch 2.15 on.
    """
    methods = {name: staticmethod(getattr(function, name)) for name in ("forward", "backward", "jvp")}
    return type(function.__name__, (torch.autograd.function._SingleLevelFunction,), methods)


class _Outer(threading.local):
    """Whether reverse and forward AD were on when an op was called under a transform.

    ``apply`` turns both off inside ``forward``. ``below_autograd`` restores them, so that outer transforms record the
    op.
    """

    modes = True, True


_outer = _Outer()


def call_by_position(function: Callable[..., Any], op: torch._ops.OpOverload) -> Callable[..., Any]:
    keywords = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
    split = len(op._schema.arguments) - len(keywords)
    return lambda *args: function(*args[:split], **dict(zip(keywords, args[split:], strict=True)))


def completer(op: torch._ops.OpOverload) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]:
    defaults = [argument.default_value for argument in op._schema.arguments]
    keywords = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
    positional = len(defaults) - len(keywords)

    def complete(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if len(args) < positional:
            args += tuple(defaults[len(args) : positional])
        for i, keyword in enumerate(keywords, positional):
            args += (kwargs.get(keyword, defaults[i]),)
        return args

    return complete


def below_autograd(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the op without its autograd rule: run the kernel, or the next transform of torch.func."""
    with torch._C._AutoDispatchBelowAutograd():
        if not torch._C._are_functorch_transforms_active():
            return op(*args, **kwargs)
        reverse, forward = _outer.modes
        with torch.set_grad_enabled(reverse), forward_ad._set_fwd_grad_enabled(forward):
            return op(*args, **kwargs)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and statistics: float64 for float64 tensors, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def present(gradients: Sequence[Tensor], mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
    return tuple(g if wanted else None for g, wanted in zip(gradients, mask, strict=True))


def differentiate(
    formula: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    grad_outputs: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Differentiate ``formula(*inputs)`` by torch's autograd, for derivatives that have no kernel."""
    if torch._C._are_functorch_transforms_active():
        return _differentiate_by_func(formula, inputs, needs, grad_outputs)
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
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


def _differentiate_by_func(
    formula: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    grad_outputs: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Compute ``differentiate`` under a transform, where ``requires_grad`` may describe another transform's level."""
    places = [i for i, (t, need) in enumerate(zip(inputs, needs, strict=True)) if t is not None and need]
    found: list[Tensor | None] = [None] * len(inputs)
    if places and any(g is not None for g in grad_outputs):

        def used(*variables: Tensor) -> tuple[Tensor, ...]:
            every = list(inputs)
            for i, variable in zip(places, variables, strict=True):
                every[i] = variable
            return tuple(o for o, g in zip(formula(*every), grad_outputs, strict=True) if g is not None)

        pull = torch.func.vjp(used, *(inputs[i] for i in places))[1]
        gradients: tuple[Tensor, ...] = pull(tuple(g for g in grad_outputs if g is not None))
        for i, gradient in zip(places, gradients, strict=True):
            found[i] = gradient
    return tuple(found)


def vmap(name: str, rule: _vmap.Rule) -> None:
    op = getattr(ops, name).default
    complete, call = completer(op), call_by_position(op, op)

    def kernel(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> Any:
        args = complete(args, kwargs)
        return rule(call, info.batch_size, (*in_dims, *(None,) * (len(args) - len(in_dims))), args)

    torch.library.register_vmap(f"gptkernels::{name}", kernel, lib=_registrations)


def autocast(name: str, *, cuda: str | None = None, cpu: str | None = None) -> None:
    """Cast the op's floating tensors, except float64, as autocast does for torch's counterpart on each device type.

    The policies are ``"float32"``, ``"lower"`` (autocast's dtype), ``"promote"`` (the tensors' dtype, or float32 if
    their dtypes differ), and None for no rule.
    """
    for device_type, policy in (("cuda", cuda), ("cpu", cpu)):
        if policy is not None:
            kernel = _autocast.kernel(getattr(ops, name).default, device_type, policy)
            _registrations.impl(name, kernel, _autocast.KEYS[device_type])


def autocast_by(name: str, device_type: str, rule: Callable[..., Any]) -> None:
    """Register ``rule(op, cast, *arguments)``, for an op whose arguments are cast to different dtypes.

    ``cast(value, dtype)`` changes only tensors that autocast may cast. Autocast is off inside the rule.
    """
    kernel = _autocast.kernel_by(getattr(ops, name).default, device_type, rule)
    _registrations.impl(name, kernel, _autocast.KEYS[device_type])


def mutates(name: str) -> None:
    """Make the op increment the versions of the tensors that it writes to.

    Autograd compares a saved tensor's version in the backward, to detect that the tensor was changed.
    """
    op = getattr(ops, name).default
    count_versions = _version_counter(op)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        out = op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)
        count_versions(args, kwargs)
        return out

    _registrations.impl(name, kernel, "ADInplaceOrView", with_keyset=True)


def without_derivative(name: str) -> None:
    """Make the op raise an error if autograd would have to differentiate it.

    This rule also increments versions, and skips the rule of ``mutates``: passing lists of hundreds of tensors through
    Python a second time would take as long as the op itself.
    """
    op = getattr(ops, name).default
    count_versions = _version_counter(op)

    def refuse(t: Tensor) -> None:
        if t.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"gptkernels::{name} has no derivative: call it under torch.no_grad()")
        if _jvp.any_tangent((t,)):
            raise RuntimeError(f"gptkernels::{name} has no derivative: an argument has a forward-mode tangent")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or _jvp.active():
            for value in (*args, *kwargs.values()):
                for t in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(t, Tensor):
                        refuse(t)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            out = op(*args, **kwargs)
        count_versions(args, kwargs)
        return out

    _registrations.impl(name, kernel, "Autograd")


def _version_counter(op: torch._ops.OpOverload) -> Callable[[Sequence[Any], dict[str, Any]], None]:
    written = [(i, a.name) for i, a in enumerate(op._schema.arguments) if a.alias_info and a.alias_info.is_write]

    def increment(tensors: Sequence[Tensor]) -> None:
        try:
            torch.autograd.graph.increment_version(tensors)
        except RuntimeError:  # inference tensors have no versions; checking each tensor first takes longer
            torch.autograd.graph.increment_version([*filterfalse(Tensor.is_inference, tensors)])

    def count_versions(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        for i, argument in written:
            value = args[i] if i < len(args) else kwargs.get(argument)
            increment([value] if isinstance(value, Tensor) else value or [])

    return count_versions


def _refuse_cuda(name: str, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(f"{name}: no CUDA kernels are loaded: {_library.without_cuda_because}")


if _library.without_cuda_because:
    for _name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        if _name.startswith("gptkernels::"):
            _registrations.impl(_name.removeprefix("gptkernels::"), partial(_refuse_cuda, _name), "CUDA")


def flops(name: str, formula: Callable[..., int]) -> None:
    register_flop_formula(getattr(ops, name))(formula)
