"""The table of the operators that are tested.

The fuzzer, ``gptkernels check`` and the tests make their calls from this table. An entry is a function, decorated with
``@operator``, that draws random arguments and returns a :class:`Call`: the operator, torch's counterpart, and the
formula in float64.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gptkernels.testing.draw import Draw, Plain

ops = torch.ops.gptkernels

SMALL, ODD, ORDINARY = range(3)
ROWS = [0, 1, 5]
WIDTHS = [1, 2, 3, 7, 17, 33, 127, 768, 1600, 4097, 50257]
ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOKENS = torch.tensor([[1, 0, 3], [3, 3, 2]])  # the tokens and targets in ``Operator.functions``
Function = tuple[Callable[..., Any], Sequence[tuple[int, ...]]]
# The arguments of torch.library.opcheck.
Invocation = tuple[Any, tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass
class Call:
    """A call of an operator. ``ours``, ``torchs`` and ``exact`` take all of ``args`` and return a tensor or a tuple.

    Attributes:
        text: the text of the call for messages.
        exact: computes the formula; its floating arguments are float64.
        fixed: the names of arguments that never require a gradient.
        any_threads: whether the bits are independent of the number of threads, because torch's BLAS is not called.
        tied: the names of arguments that must have the same dtype and last dimension.
        nan_gradients: whether a NaN in the result's gradient must make the same gradients NaN as in the formula. This
            is False for losses, because an element of dlogits that is exactly 0 stays 0.
        denormal_gradients: whether the results' gradients may be all denormal.
        takes_floating_alone: whether the op must raise an error for an integer tensor in place of a floating one.
        noise: computes from all arguments and douts the error that cancelling sums in the results may have.
        torchs_splits: whether torch's BLAS may have split float32 sums into parts, which have smaller errors.
        products: computes the arguments of ``assert_product`` for each matmul, from all tensors by name.
        invocations: returns the op and its backward ops, each with all arguments.
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
        floating = {name: t for name, t in self.args.items() if t is not None and t.is_floating_point()}
        return {name: t for name, t in floating.items() if name not in self.fixed}

    def function(self) -> Callable[..., Any]:
        wanted = self.differentiable()
        return lambda *tensors: self.ours(*{**self.args, **dict(zip(wanted, tensors, strict=True))}.values())


@dataclasses.dataclass(frozen=True)
class Cost:
    """The least work of a forward or backward: each input is read once, and each output written once.

    ``flops`` is approximate for memory-bound operators.
    """

    bytes: int
    flops: int


@dataclasses.dataclass(frozen=True)
class Operator:
    """An entry of the table.

    Attributes:
        weight: the relative frequency among the fuzzer's calls; 0 for no calls.
        sizes: the choices of a call by ``Plain``, by name: a value, or a list of values for SMALL (finite differences
            and opcheck), ODD (rows whose length is no multiple of a vectorized load) and ORDINARY. None if only the
            fuzzer calls the operator.
        variants: the choices of each variant, by its name.
        costs: computes the costs of forward and backward from the differentiable arguments.
        edges: the choices of more calls in the tests. Most of them have a size near one at which the operator changes
            to another kernel.
        autocast: "none", "lower" (autocast's dtype), "float32 on CUDA", or "torch's steps" (the dtypes of the torch
            functions that the op replaces).
        functions: the backward ops, and the op with all of its outputs, for tests of their derivatives.
        finite_differences: whether the op has a derivative, and float64 results for float64 arguments.
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
    """A variant of an operator, for calls without random choices (``Plain``)."""

    operator: Operator
    variant: str = ""

    @property
    def name(self) -> str:
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
        sizes = self.operator.sizes or {}
        choices = {**sizes, **self.operator.variants[self.variant], **choices}
        of_size = {name: value[size] if isinstance(value, list) else value for name, value in choices.items()}
        return self.operator.draw(Plain(of_size, dtype, device, seed, view))

    def opcheck_dtype(self) -> torch.dtype:
        return torch.float32 if torch.float32 in self.operator.dtypes else self.operator.dtypes[0]

    def has_finite_differences(self) -> bool:
        return self.operator.finite_differences and torch.float64 in self.operator.dtypes


OPERATORS: dict[str, Operator] = {}


def operator(**options: Any) -> Callable[[Callable[[Draw], Call]], Callable[[Draw], Call]]:
    def put(function: Callable[[Draw], Call]) -> Callable[[Draw], Call]:
        OPERATORS[function.__name__] = Operator(function.__name__, function, **options)
        return function

    return put


def grid(choices: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def invoke(op: Any, *args: Any, **kwargs: Any) -> Invocation:
    return op.default, args, kwargs


def nbytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def row_costs(arrays: tuple[int, int], flops: tuple[int, int]) -> Callable[..., tuple[Cost, Cost]]:
    """Both pairs are (forward, backward): how many arrays of x's size are moved, and the flops per element."""

    def costs(x: Tensor, *others: Tensor) -> tuple[Cost, Cost]:
        forward, backward = (Cost(a * nbytes(x), f * x.numel()) for a, f in zip(arrays, flops, strict=True))
        return forward, backward

    return costs


def largest_of(tensors: Sequence[Tensor | None]) -> float:
    floating = [t for t in tensors if t is not None and t.is_floating_point() and t.numel()]
    return max((t.double().nan_to_num(0, 0, 0).abs().amax().item() for t in floating), default=0.0)


def wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def normal(draw: Draw, name: str, *shape: int) -> Tensor:
    return draw.tensor(name, shape, draw.dtype(), special="none", denormal=False)
