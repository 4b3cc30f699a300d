"""The table of operators: how to draw a call of each, what torch answers, and the formula in float64.

To add an operator, write a function that draws its arguments and returns a :class:`Call`, and mark it with
``@operator``. The fuzzer, ``gptkernels check`` and the tests make their calls from this table.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gptkernels.testing.draw import Draw, Plain

SMALL, ODD, ORDINARY = range(3)
ROWS = [0, 1, 5]
WIDTHS = [1, 2, 3, 7, 17, 33, 127, 768, 1600, 4097, 50257]
ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOKENS = torch.tensor([[1, 0, 3], [3, 3, 2]])  # the tokens and targets in ``Operator.functions``
# A differentiable function of floating tensors alone, and the tensors' shapes.
Function = tuple[Callable[..., Any], Sequence[tuple[int, ...]]]
# An op with all of its arguments, as torch.library.opcheck takes them.
Invocation = tuple[Any, tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass
class Call:
    """One call. The three functions take all of ``args`` and return a tensor or several.

    Attributes:
        text: the call for a reader.
        ours: the operator.
        torchs: torch's own kernels in the same dtype.
        exact: the formula, called with float64 in place of each floating argument.
        args: name -> tensor, or None for what is absent.
        fixed: the arguments that never ask for a gradient.
        any_threads: the bits do not depend on the number of threads (torch's BLAS has no part).
        tied: arguments that share their dtype and last dimension; breaking that must be an error.
        nan_gradients: a NaN in the result's gradient shows wherever the formula has one. It does not for the losses,
            where an exact 0 stays 0 whatever it is multiplied by.
        denormal_gradients: the results' gradients may all be denormal.
        takes_floating_alone: an integer in place of a floating argument must be an error.
        noise: the error that terms of the results may have where they cancel, from all arguments and douts.
        torchs_splits: whether torch's BLAS may have split sums of float32, ours not. The parts' errors are smaller.
        products: arguments of ``assert_product`` for each product of the call, from all its tensors by name: the
            arguments, "out", "dout" and the gradients that are wanted.
        invocations: the op and its backward ops, each with all of its arguments.
    """

    text: str
    ours: Callable[..., Any]
    torchs: Callable[..., Any]
    exact: Callable[..., Any]
    args: dict[str, Tensor | None]
    fixed: Sequence[str] = ()
    any_threads: bool = True
    tied: Sequence[str] = ()
    nan_gradients: bool = True
    denormal_gradients: bool = True
    takes_floating_alone: bool = True
    noise: Callable[[Sequence[Tensor | None], Sequence[Tensor | None]], float] = lambda args, douts: 0.0
    torchs_splits: bool = False
    products: Callable[[dict[str, Tensor]], Any] = lambda tensors: []
    invocations: Callable[[], list[Invocation]] = lambda: []

    def differentiable(self) -> dict[str, Tensor]:
        """The arguments that may ask for a gradient."""
        floating = {name: t for name, t in self.args.items() if t is not None and t.is_floating_point()}
        return {name: t for name, t in floating.items() if name not in self.fixed}

    def function(self) -> Callable[..., Any]:
        """The operator as a function of its differentiable arguments alone."""
        wanted = self.differentiable()
        return lambda *tensors: self.ours(*{**self.args, **dict(zip(wanted, tensors, strict=True))}.values())


@dataclasses.dataclass(frozen=True)
class Cost:
    """The work of one direction of a call.

    Attributes:
        bytes: the fewest that must move: each input read once, each output written once.
        flops: floating-point operations, roughly where they are not what bounds the op.
    """

    bytes: int
    flops: int


@dataclasses.dataclass(frozen=True)
class Operator:
    """A line of the table.

    Attributes:
        name: the operator's, or that of a function of ``gptkernels.functional``.
        draw: draws the arguments and returns the call.
        weight: the share of the fuzzer's calls; 0 for none.
        sizes: choice -> its value in a plain call: one for every size, or those of SMALL, ODD and ORDINARY. SMALL is
            for derivatives by finite differences, ODD for rows that no vectorized load fits. None where the fuzzer
            alone calls the operator.
        variants: the cases of the operator: what is special about the call -> the choices that make it so.
        dtypes: the dtypes of the plain calls.
        costs: the forward's and the backward's cost, from the differentiable arguments.
        edges: choices of sizes at which kernels change.
        autocast: what autocast casts the arguments to: "none", "lower" (autocast's dtype), "float32 on CUDA", or
            "torch's steps": the dtypes are those of the torch functions that the op stands for.
        functions: the backward ops, and the op with all of its outputs, for tests of their derivatives.
        finite_differences: whether the op has a derivative, and float64 results of float64 arguments.
    """

    name: str
    draw: Callable[[Draw], Call]
    weight: float = 1.0
    sizes: Mapping[str, Any] | None = None
    variants: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=lambda: {"": {}})
    dtypes: Sequence[torch.dtype] = ALL_DTYPES
    costs: Callable[..., tuple[Cost, Cost]] | None = None
    edges: Sequence[Mapping[str, Any]] = ()
    autocast: str = "none"
    functions: Mapping[str, Function] = dataclasses.field(default_factory=dict)
    finite_differences: bool = True


@dataclasses.dataclass(frozen=True)
class Case:
    """A plain call of an operator.

    Attributes:
        operator: a line of the table.
        variant: one of its variants.
    """

    operator: Operator
    variant: str = ""

    @property
    def name(self) -> str:
        """The operator's name, with what is special about the call."""
        return f"{self.operator.name}, {self.variant}" if self.variant else self.operator.name

    def call(
        self,
        size: int = ORDINARY,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
        view: str = "contiguous",
        **choices: Any,
    ) -> Call:
        """The call with numbers of this seed and, for each tensor, the layout ``view``."""
        sizes = self.operator.sizes or {}
        choices = {**sizes, **self.operator.variants[self.variant], **choices}
        of_size = {name: value[size] if isinstance(value, list) else value for name, value in choices.items()}
        return self.operator.draw(Plain(of_size, dtype, device, seed, view))

    def opcheck_dtype(self) -> torch.dtype:
        """float32, where the op takes it."""
        return torch.float32 if torch.float32 in self.operator.dtypes else self.operator.dtypes[0]

    def has_finite_differences(self) -> bool:
        """Whether derivatives can be compared with finite differences."""
        return self.operator.finite_differences and torch.float64 in self.operator.dtypes


OPERATORS: dict[str, Operator] = {}


def operator(**options: Any) -> Callable[[Callable[[Draw], Call]], Callable[[Draw], Call]]:
    """Put the function that follows into the table, under its name, with the options of :class:`Operator`."""

    def put(function: Callable[[Draw], Call]) -> Callable[[Draw], Call]:
        OPERATORS[function.__name__] = Operator(function.__name__, function, **options)
        return function

    return put


def grid(choices: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations of the choices' values."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def invoke(op: Any, *args: Any, **kwargs: Any) -> Invocation:
    """An element of ``Call.invocations``."""
    return op.default, args, kwargs


def nbytes(*tensors: Tensor | None) -> int:
    """Bytes of all these tensors once."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def row_costs(arrays: tuple[int, int], flops: tuple[int, int]) -> Callable[..., tuple[Cost, Cost]]:
    """Costs in arrays of x's size that move, and in operations for each element, in each direction."""

    def costs(x: Tensor, *others: Tensor) -> tuple[Cost, Cost]:
        forward, backward = (Cost(a * nbytes(x), f * x.numel()) for a, f in zip(arrays, flops, strict=True))
        return forward, backward

    return costs


def largest_of(tensors: Sequence[Tensor | None]) -> float:
    """The largest finite magnitude in some tensors."""
    floating = [t for t in tensors if t is not None and t.is_floating_point() and t.numel()]
    return max((t.double().nan_to_num(0, 0, 0).abs().amax().item() for t in floating), default=0.0)


def wide(t: Tensor) -> Tensor:
    """The tensor in the dtype of losses and statistics."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def normal(draw: Draw, name: str, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal values of the call's dtype, for the arguments of a backward op."""
    return draw.tensor(name, shape, draw.dtype(), scale, special="none", denormal=False)
