"""Replacements of single modules: torch.nn's modules, Hugging Face's Conv1D and GELUs, and a user's norms and GELUs."""

from typing import Any

import torch
from torch import Tensor

from gptkernels import functional
from gptkernels.rules._autocast import autocast_dtype
from gptkernels.swapping.checks import count, has_librarys_forward, why_not
from gptkernels.swapping.classes import Namespace, replacement


@replacement("LayerNorm")
def layer_norm(original: Any, eps: float | None = None) -> Namespace:
    """``eps`` is a number for a user's class, whose weight has the normalised shape, and None for torch's LayerNorm."""

    def forward(self: Any, input: Tensor) -> Tensor:
        weight, bias, epsilon = norm_of(self)
        if (reason := why_not(input, weight, bias)) is not None:
            count(self, reason)
            return original.forward(self, input)
        shape = self.normalized_shape if eps is None else weight.shape
        return functional.layer_norm(input, shape, weight, bias, epsilon)

    return {"forward": forward, "_gptkernels_eps": eps}


def norm_of(module: Any) -> tuple[Tensor, Tensor | None, float]:
    return module.weight, getattr(module, "bias", None), eps_of(module)


def eps_of(module: Any) -> float:
    eps: float | None = module._gptkernels_eps
    return module.eps if eps is None else eps  # type: ignore[no-any-return]


@replacement("GELU")
def gelu(original: Any, form: str | None = None) -> Namespace:
    def forward(self: Any, input: Tensor) -> Tensor:
        if (reason := why_not(input)) is not None:
            count(self, reason)
            return original.forward(self, input)
        return functional.gelu(input, gelu_form(self))

    return {"forward": forward, "_gptkernels_gelu": form}


def gelu_form(module: Any) -> str:
    form: str | None = module._gptkernels_gelu
    return module.approximate if form is None else form


@replacement("Linear")
def linear(original: Any, transposed: bool = False) -> Namespace:
    def forward(self: Any, input: Tensor) -> Tensor:
        if (reason := why_not(input, self.weight, self.bias)) is not None:
            count(self, reason)
            return original.forward(self, input)
        return functional.linear(input, weight_of(self), self.bias)

    return {"forward": forward, "_gptkernels_transposed": transposed}


def weight_of(module: Any) -> Tensor:
    weight = module.weight
    if not module._gptkernels_transposed:
        return weight  # type: ignore[no-any-return]
    # The cast comes before the view, so that Inductor writes the float32 gradient once, in the parameter's layout.
    return (weight.to(products_dtype(weight)) if torch.compiler.is_compiling() else weight).t()


def products_dtype(t: Tensor) -> torch.dtype:
    return t.dtype if t.dtype == torch.float64 else autocast_dtype(t.device.type) or t.dtype


@replacement("Embedding")
def embedding(original: Any) -> Namespace:

    def forward(self: Any, input: Tensor) -> Tensor:
        reason = why_not(self.weight)
        if reason is None and input.dtype not in (torch.int64, torch.int32):
            reason = f"the indices are {input.dtype}"
        if reason is not None:
            count(self, reason)
            return original.forward(self, input)
        return functional.embedding(input, self.weight)

    return {"forward": forward}


@replacement("Softmax")
def softmax(original: Any) -> Namespace:

    def forward(self: Any, input: Tensor) -> Tensor:
        reason = why_not(input)
        if reason is None and self.dim is None:
            reason = "dim is not given"
        if reason is not None:
            count(self, reason)
            return original.forward(self, input)
        return functional.softmax(input, self.dim)

    return {"forward": forward}


@replacement("CrossEntropyLoss")
def cross_entropy(original: Any) -> Namespace:
    def forward(self: Any, input: Tensor, target: Tensor) -> Tensor:
        reason = why_not(input)
        if reason is None and target.dtype not in (torch.int64, torch.int32):
            reason = f"the targets are {target.dtype}"
        if reason is not None:
            count(self, reason)
            return original.forward(self, input, target)
        return functional.cross_entropy(input, target, ignore_index=self.ignore_index, reduction=self.reduction)

    return {"forward": forward}


def torch_layer(module: torch.nn.Module) -> tuple[Any, ...] | str | None:
    forward = type(module).forward
    for kind, name, unless in _TORCHS:
        if isinstance(module, kind):
            if forward is not kind.forward or not has_librarys_forward(kind):
                return f"its forward is not torch.nn.{kind.__name__}'s"
            reason = unless(module)
            return reason if reason else (name,)
    return None


def _without(**defaults: Any) -> Any:
    def unless(module: Any) -> str | None:
        for name, default in defaults.items():
            value = getattr(module, name)
            if value is not default and value != default:
                return f"no kernel supports its option {name}"
        return None

    return unless


_TORCHS: tuple[tuple[type[torch.nn.Module], str, Any], ...] = (
    (torch.nn.LayerNorm, "LayerNorm", _without()),
    (torch.nn.GELU, "GELU", _without()),
    (torch.nn.Linear, "Linear", _without()),
    (
        torch.nn.Embedding,
        "Embedding",
        _without(padding_idx=None, max_norm=None, scale_grad_by_freq=False, sparse=False),
    ),
    (torch.nn.Softmax, "Softmax", _without()),
    (torch.nn.CrossEntropyLoss, "CrossEntropyLoss", _without(weight=None, label_smoothing=0.0)),
)
