"""Proof by trial that a replacement computes what a user's own module computes.

A copy of the module with random float64 parameters on the CPU is run beside a replaced copy, in evaluation, in training
without dropout, and with each dropout in turn dropping everything, which shows where it acts. The inputs have several
batch sizes, lengths up to the block size, and small and large values. A trial speaks for the modules that are equal to
the one tried in classes, attributes and buffers; other modules are tried themselves. The model itself is not run.
"""

import copy
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gptkernels._unmodified import _HOOKS

Trial = Callable[[Any], Any]
_MACHINERY = frozenset(torch.nn.Module().__dict__) | {"gptkernels_report"}


def copy_with_random_parameters(module: torch.nn.Module, instead: dict[int, Any] | None = None) -> torch.nn.Module:
    """A copy on the CPU in float64, without hooks.

    Args:
        module: what is copied. Its parameters are not: they may be large, sharded, or without data.
        instead: copies by the ``id`` of what they replace.
    """
    memo: dict[int, Any] = dict(instead or {})
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if id(parameter) not in memo:
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
            memo[id(parameter)] = torch.nn.Parameter(values, requires_grad=False)
    made = copy.deepcopy(module, memo).to("cpu")
    for one in made.modules():
        for hooks in _HOOKS:
            one.__dict__[hooks].clear()
        for name, buffer in one._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                one._buffers[name] = buffer.double()
    return made


def difference(original: torch.nn.Module, replaced: torch.nn.Module, *trials: Trial) -> str | None:
    """Where the two compute something else; None where they agree in every state and trial."""
    if (reason := _called_twice(original, *trials)) is not None:
        return reason
    for state, first, second in zip(_states(original), _states(original), _states(replaced), strict=True):
        for trial in trials:
            first[1]()
            expected = _run(trial, original)
            second[1]()
            found = _run(trial, replaced)
            if (reason := _unequal(expected, found)) is not None:
                return f"its forward is another one: {reason} in {state[0]}"
    return None


def difference_in_evaluation(original: torch.nn.Module, replaced: torch.nn.Module, trial: Trial) -> str | None:
    """`difference` of a trial that would take too long in every state."""
    expected, found = (_run(trial, module.eval()) for module in (original, replaced))
    reason = _unequal(expected, found)
    return None if reason is None else f"its forward is another one: {reason} for other lengths or values"


def _called_twice(module: torch.nn.Module, *trials: Trial) -> str | None:
    """A dropout that works more than once in a call: dropping everything twice would not show that."""
    calls: list[str] = []
    for name, one in module.named_modules():
        if isinstance(one, torch.nn.Dropout):
            one.register_forward_hook(lambda *_, name=name: calls.append(name))
    module.train()
    for trial in trials:
        calls.clear()
        _run(trial, module)
        if (twice := next((name for name in calls if calls.count(name) > 1), None)) is not None:
            return f"its forward is another one: it applies {twice} more than once"
    return None


def _run(trial: Trial, module: torch.nn.Module) -> Any:
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.autocast("cpu", enabled=False):
        torch.manual_seed(0)
        return trial(module)


def _states(module: torch.nn.Module) -> Iterator[tuple[str, Callable[[], None]]]:
    """Names of the states, and what puts the module into each."""
    dropouts = [(name, one) for name, one in module.named_modules() if isinstance(one, torch.nn.Dropout)]
    numbers = [(name, one) for name, one in module.named_modules() if isinstance(one.__dict__.get("dropout"), float)]

    def put(training: bool, p: dict[str, float]) -> None:
        module.train(training)
        for name, one in dropouts:
            one.p = p.get(name, 0.0)
        for name, number in numbers:  # nanoGPT's attention says its probability twice
            number.dropout = p.get(f"{name}.attn_dropout".lstrip("."), p.get(f"{name}.dropout".lstrip("."), 0.0))

    yield "evaluation", lambda: put(False, {})
    yield "training", lambda: put(True, {})
    for name, _ in dropouts:
        yield f"training with the dropout {name}", functools.partial(put, True, {name: 1.0})


def _unequal(expected: Any, found: Any) -> str | None:
    if isinstance(expected, tuple | list):
        if not isinstance(found, tuple | list) or len(found) != len(expected):
            return "it returns something else"
        return next((why for pair in zip(expected, found, strict=True) if (why := _unequal(*pair))), None)
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        return None if expected is found is None else "it returns something else"
    if expected.shape != found.shape:
        return f"the shape is {tuple(expected.shape)}, not {tuple(found.shape)}"
    scale = expected.abs().max().clamp(min=1e-3)
    error = (expected.double() - found.double()).abs().max() / scale
    tolerance = 1e-10 if expected.dtype == torch.float64 else 1e-6
    return None if error <= tolerance else f"the results differ by {error:.1e}"


def signature(module: torch.nn.Module) -> tuple[Any, ...]:
    """Equal for modules that one trial speaks for: the same classes, attributes, parameters' shapes and buffers."""
    parts: list[Any] = []
    for name, one in module.named_modules():
        own = {k: v for k, v in one.__dict__.items() if k not in _MACHINERY and not isinstance(v, Tensor)}
        shapes = [(k, tuple(p.shape)) for k, p in one._parameters.items() if p is not None]
        buffers = [(k, _content(b)) for k, b in one._buffers.items() if b is not None]
        parts.append((name, type(one), *sorted((k, repr(v)) for k, v in own.items()), *shapes, *buffers))
    return tuple(parts)


def _content(buffer: Tensor) -> Any:
    """A buffer's shape, dtype and bytes; without data its identity."""
    if buffer.is_meta:
        return id(buffer)
    data = buffer.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return tuple(buffer.shape), buffer.dtype, hashlib.sha256(data.tobytes()).hexdigest()
