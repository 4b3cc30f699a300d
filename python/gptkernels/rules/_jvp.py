"""Forward-mode AD by rules, which compute the tangents of an op's outputs from the tangents of its arguments.

A rule is called with three sequences: the primal values of the op's arguments, the tangents of the arguments (None for
an argument without one), and the outputs. It returns the outputs' tangents, None for an output without derivative.
Rules are written in differentiable ops, so that forward mode composes with reverse mode and with itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

Rule = Callable[[Sequence[Any], Sequence[Any], Sequence[Tensor]], Tensor | Sequence[Tensor | None] | None]


def with_jvp(function: type[torch.autograd.Function], rule: Rule) -> type[torch.autograd.Function]:
    """Return a subclass of ``function`` with ``rule`` as its ``jvp``.

    If a function has a ``jvp``, torch sets the outputs' tangents before the outputs are saved for the backward, as
    forward over reverse needs. Calls without tangents use ``function`` itself, which keeps fewer tensors.
    """

    class WithJvp(function):  # type: ignore[misc, valid-type]
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            outputs = function.forward(ctx, *args)
            ctx.forward_mode = args, outputs, ctx.non_differentiable or ()
            return outputs

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            args, outputs, constant = ctx.forward_mode
            del ctx.forward_mode  # breaks the reference cycle of the outputs and ctx
            several = isinstance(outputs, tuple)
            outputs = outputs if several else (outputs,)
            # Torch disables forward mode here, but an outer forward-mode transform needs it.
            with forward_ad._set_fwd_grad_enabled(True):
                primals = [a if t is None else unpack(a).primal for a, t in zip(args, tangents, strict=True)]
                found = rule(primals, tangents, outputs)
            found = found if isinstance(found, tuple) else (found,)
            # Torch accepts a tangent of None only for an output that is marked as non-differentiable.
            found = tuple(
                torch.zeros_like(out) if t is None and all(out is not c for c in constant) else t
                for t, out in zip(found, outputs, strict=True)
            )
            return found if several else found[0]

    return WithJvp


def active() -> bool:
    """Return whether an argument may have a tangent.

    Any active transform counts, because compiled transforms do not set ``forward_ad._current_level``.
    """
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def unpack(t: Tensor) -> forward_ad.UnpackedDualTensor:
    return forward_ad.unpack_dual(t, level=0)


def any_tangent(args: Sequence[Any]) -> bool:
    return any(isinstance(a, Tensor) and a.is_floating_point() and unpack(a).tangent is not None for a in args)


def by_formula(formula: Callable[..., Any]) -> Rule:
    """Make a rule that applies torch's forward mode to the op's ``formula`` in torch ops."""

    def rule(inputs: Sequence[Any], tangents: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        duals = (a if t is None else forward_ad.make_dual(a, t, level=0) for a, t in zip(inputs, tangents, strict=True))
        results = formula(*duals)
        results = results if isinstance(results, tuple) else (results,)
        found = [None if r is None else unpack(r).tangent for r in results]
        return tuple(t if t is None else t.to(out.dtype) for t, out in zip(found, outputs, strict=True))

    return rule


def linear_in(*positions: int) -> Callable[[Callable[..., Any]], Rule]:
    """Make a rule for an op that is linear in each of the arguments at ``positions``.

    For each of these arguments that has a tangent, the rule calls the op with the tangent in place of the argument. It
    adds the results.
    """

    def decorate(function: Callable[..., Any]) -> Rule:
        def rule(inputs: Sequence[Any], tangents: Sequence[Any], outputs: Sequence[Tensor]) -> Any:
            total: tuple[Tensor, ...] | None = None
            for i in positions:
                if tangents[i] is None:
                    continue
                part = function(*inputs[:i], tangents[i], *inputs[i + 1 :])
                part = part if isinstance(part, tuple) else (part,)
                total = part if total is None else tuple(a + b for a, b in zip(total, part, strict=True))
            return (None,) * len(outputs) if total is None else total

        return rule

    return decorate
