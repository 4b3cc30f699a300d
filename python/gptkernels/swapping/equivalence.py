"""Trial runs that test whether a replacement computes the same as a user's own module.

Two copies of the module, one of them replaced, have equal random float64 parameters on the CPU. Their outputs must
agree in evaluation mode, in training mode without dropout, and with one dropout of probability 1 at a time, which shows
where each dropout is applied. Gradients are compared in training mode without dropout. At the end, two copies of the
whole model are compared.
"""

import contextlib
import copy
import functools
import hashlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gptkernels._unmodified import _HOOKS

_CPU = torch.device("cpu")
Trial = Callable[[Any], Any]
_MACHINERY = frozenset(torch.nn.Module().__dict__) | {"gptkernels_report"}
_SET_BY_TRIALS = _MACHINERY | {"p", "dropout"}
_FLOAT64_TOLERANCE, _FLOAT32_TOLERANCE, _LOW_TOLERANCE = 1e-10, 1e-4, 0.05  # relative to the largest value


@contextlib.contextmanager
def random_generators_kept(device: torch.device) -> Iterator[None]:
    python, numpys = random.getstate(), _numpys_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            if numpys is not None:
                sys.modules["numpy"].random.set_state(numpys)


def _numpys_state() -> Any:
    return sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None


def _seed(device: torch.device) -> None:
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    torch.random.default_generator.manual_seed(0)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(0)


def _has_drawn() -> bool:
    states = []
    for _ in range(2):
        numpys = _numpys_state()
        states.append((torch.random.get_rng_state().tolist(), random.getstate(), numpys and numpys[1].tolist()))
        _seed(_CPU)
    return states[0] != states[1]


class StandIn(torch.nn.Module):
    """A fast sublayer that computes a different function in each layer: (B, T, C) -> (B, T, C)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(torch.randn(width, dtype=torch.float64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, x + x.mean(1, keepdim=True), self.weight)


def copy_with_random_parameters(module: torch.nn.Module, instead: dict[int, Any] | None = None) -> torch.nn.Module:
    """Copy a module to the CPU in float64 without hooks; ``instead`` maps the ``id`` of submodules to replacements.

    Random parameters are drawn, because the module's own may be large, sharded or without data. The copy's matrices are
    overlapping views of one tensor, so that few random numbers are drawn and read.
    """
    memo: dict[int, Any] = dict(instead or {})
    generator = torch.Generator().manual_seed(0)
    parameters = {id(p): p for p in _parameters(module, memo)}
    matrices = [p for p in parameters.values() if p.dim() > 1]
    largest = max(matrices, key=torch.numel, default=torch.empty(0, 1))
    drawn = torch.randn(largest.numel() + 8 * len(matrices), generator=generator, dtype=torch.float64)
    drawn *= max(1, min(largest.shape)) ** -0.5
    for i, p in enumerate(matrices):
        memo[id(p)] = torch.nn.Parameter(drawn[8 * i :][: p.numel()].view(p.shape), requires_grad=False)
    for key, p in parameters.items():
        if p.dim() <= 1:
            values = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3
            memo[key] = torch.nn.Parameter(values, requires_grad=False)
    made = _copy(module, memo).to("cpu")
    for one in made.modules():
        for name, buffer in one._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                one._buffers[name] = buffer.double()
    return made


def _parameters(module: torch.nn.Module, without: dict[int, Any]) -> Iterator[Tensor]:
    if id(module) not in without:
        yield from (p for p in module._parameters.values() if p is not None)
        for child in module._modules.values():
            if child is not None:
                yield from _parameters(child, without)


def _copy(module: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    made = copy.deepcopy(module, memo)
    for one in made.modules():
        for hooks in _HOOKS:
            one.__dict__[hooks].clear()
    return made


def copy_sharing_parameters(module: torch.nn.Module) -> torch.nn.Module:
    return _copy(module, {id(p): torch.nn.Parameter(p.detach(), requires_grad=False) for p in module.parameters()})


def difference(original: torch.nn.Module, replaced: torch.nn.Module, *trials: Trial) -> str | None:
    """Run each trial in each state, and return the first reason why ``replaced`` does not fit, or None."""
    calls = _calls_of_dropouts(original)
    before = _stored(original)
    first, second = _states(original), _states(replaced)
    for state in first:
        for trial in trials:
            first[state]()
            calls.clear()
            expected = _run(trial, original)
            if state == "training" and (twice := next((n for n in calls if calls.count(n) > 1), None)) is not None:
                # A trial in which the dropout's probability is 1 would not show that it is applied twice.
                return f"its forward is another one: it applies {twice} more than once"
            if state in ("evaluation", "training") and _has_drawn():
                return f"its forward draws random numbers in {state}, without dropout"
            second[state]()
            found = _run(trial, replaced)
            if (reason := _unequal(expected, found)) is not None:
                return f"its forward is another one: {reason} in {state}"
    return _stores_something(original, before)


def difference_of_gradients(
    original: torch.nn.Module, replaced: torch.nn.Module, trial: Trial, *inputs: Tensor
) -> str | None:
    """Compare gradients of 1-dim parameters, embeddings' weights and ``inputs``, in training mode without dropout."""
    found = []
    for module in (original, replaced):
        _states(module)["training"]()
        tables = [one.weight for one in module.modules() if isinstance(one, torch.nn.Embedding)]
        wanted = [*(p for p in module.parameters() if p.dim() == 1), *tables, *inputs]
        for t in wanted:
            t.requires_grad_(True)
        found.append(_run(functools.partial(_gradients, trial, wanted), module, grad=True))
        for t in wanted:
            t.requires_grad_(False)
    reason = _unequal(*found)
    return None if reason is None else f"its backward is another one: {reason}"


def _gradients(trial: Trial, wanted: list[Tensor], module: Any) -> list[Tensor]:
    outputs = [t for t in tree_leaves(trial(module)) if isinstance(t, Tensor) and t.requires_grad]
    generator = torch.Generator().manual_seed(2)
    # Directions as an argument of grad() would make torch import SymPy, which takes as long as the trials.
    parts = [(t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum() for t in outputs]
    if not parts:
        return [torch.zeros_like(t) for t in wanted]
    return list(torch.autograd.grad(torch.stack(parts).sum(), wanted, materialize_grads=True))


def difference_in(state: str, original: torch.nn.Module, replaced: torch.nn.Module, trial: Trial) -> str | None:
    for module in (original, replaced):
        _states(module)[state]()
    reason = _unequal(_run(trial, original), _run(trial, replaced))
    return None if reason is None else f"its forward is another one: {reason} for other lengths or values"


# The runs of a whole model: training mode or not, with targets or not, batch size, and length (0 is the longest). The
# first two runs are made for models of all sizes.
_RUNS = (
    (True, True, 1, 9), (False, False, 3, 2), (False, True, 1, 1), (True, False, 3, 1), (False, False, 1, 0),
    (True, True, 3, 0), (False, True, 1, 0), (True, False, 1, 0),
)  # fmt: skip
_MULTIPLICATIONS = 6e9


def difference_of_models(
    original: torch.nn.Module, replaced: torch.nn.Module, vocabulary: int, longest: int
) -> str | None:
    """Compare the outputs of two models for tokens, with the models' own parameters and on their device.

    None means that no difference beyond rounding was found, or that the models cannot be compared.
    """
    parameters = list(original.parameters())
    if not parameters or any(
        type(p) is not torch.nn.Parameter or p.device.type not in ("cpu", "cuda") for p in parameters
    ):
        return None
    device, size = parameters[0].device, sum(p.numel() for p in parameters)
    name = next((n for n in inspect.signature(original.forward).parameters if n in ("targets", "labels")), None)
    budget = _MULTIPLICATIONS
    for i, (training, with_targets, batch, length) in enumerate(_RUNS):
        length = min(length or longest, longest)
        cost = size * (batch * length + 16)  # reading the parameters takes as long as 16 tokens
        if i >= 2 and cost > budget:
            continue
        budget -= cost
        tokens = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(3)).to(device)
        tokens[:, length // 2] = min(vocabulary - 1, 50256)  # GPT-2's separator of documents
        options = {name: tokens.roll(-1, 1)} if name is not None and with_targets else {}

        def trial(module: Any, tokens: Tensor = tokens, options: Any = options) -> Any:
            return [t for t in tree_leaves(module(tokens, **options)) if isinstance(t, Tensor)]

        for module in (original, replaced):
            _states(module)["training" if training else "evaluation"]()
        try:
            expected = _run(trial, original, device)
        except Exception:
            continue
        if not all(bool(t.isfinite().all()) for t in expected):
            continue
        try:
            reason = _unequal(expected, _run(trial, replaced, device))
        except Exception as error:
            reason = f"it raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if reason is not None:
            return f"with it, the whole model computes something else: {reason} for {batch} x {length} tokens"
    return None


def _calls_of_dropouts(module: torch.nn.Module) -> list[str]:
    calls: list[str] = []
    for name, one in module.named_modules():
        if isinstance(one, torch.nn.Dropout):
            one.register_forward_hook(lambda *_, name=name: calls.append(name))
    return calls


def _stored(module: torch.nn.Module) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for name, one in module.named_modules():
        own = {k: v for k, v in one.__dict__.items() if k not in _SET_BY_TRIALS}
        for key, value in (*own.items(), *one._buffers.items(), *one._parameters.items()):
            found[name, key] = (value, value._version) if isinstance(value, Tensor) else repr(value)
    return found


def _stores_something(module: torch.nn.Module, before: dict[tuple[str, str], Any]) -> str | None:
    now = _stored(module)
    for key in before.keys() | now.keys():
        old, new = before.get(key), now.get(key)
        if isinstance(old, tuple) and isinstance(new, tuple):
            changed = old[0] is not new[0] or old[1] != new[1]
        else:
            changed = old != new
        if changed:
            return f"its forward changes {'.'.join(filter(None, key))}"
    return None


def _run(trial: Trial, module: torch.nn.Module, device: torch.device = _CPU, grad: bool = False) -> Any:
    with torch.set_grad_enabled(grad), torch.autocast(device.type, enabled=False):
        _seed(device)
        return trial(module)


def _states(module: torch.nn.Module) -> dict[str, Callable[[], None]]:
    dropouts = [(name, one) for name, one in module.named_modules() if isinstance(one, torch.nn.Dropout)]
    numbers = [(name, one) for name, one in module.named_modules() if isinstance(one.__dict__.get("dropout"), float)]

    def put(training: bool, p: dict[str, float]) -> None:
        module.train(training)
        for name, one in dropouts:
            one.p = p.get(name, 0.0)
        for name, number in numbers:  # nanoGPT's attention stores the probability in a dropout and as a number
            number.dropout = p.get(f"{name}.attn_dropout".lstrip("."), p.get(f"{name}.dropout".lstrip("."), 0.0))

    return {
        "evaluation": functools.partial(put, False, {}),
        "training": functools.partial(put, True, {}),
        **{f"training with the dropout {name}": functools.partial(put, True, {name: 1.0}) for name, _ in dropouts},
    }


def _unequal(expected: Any, found: Any) -> str | None:
    if isinstance(expected, tuple | list):
        if not isinstance(found, tuple | list) or len(found) != len(expected):
            return "it returns something else"
        return next((why for pair in zip(expected, found, strict=True) if (why := _unequal(*pair))), None)
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        return None if expected is found is None else "it returns something else"
    if expected.shape != found.shape:
        return f"the shape is {tuple(expected.shape)}, not {tuple(found.shape)}"
    if expected.dtype != found.dtype:
        return f"the dtype is {expected.dtype}, not {found.dtype}"
    if not expected.is_floating_point():
        return None if torch.equal(expected, found) else "integers differ"
    scale = expected.abs().max().clamp(min=1e-3)
    error = (expected.double() - found.double()).abs().max() / scale
    precise = expected.device.type == "cpu" and expected.dtype == torch.float32  # matmuls on CUDA may use TF32
    low = _FLOAT32_TOLERANCE if precise else _LOW_TOLERANCE
    tolerance = _FLOAT64_TOLERANCE if expected.dtype == torch.float64 else low
    return None if error <= tolerance else f"the results differ by {error:.1e}"


def signature(module: torch.nn.Module) -> tuple[Any, ...]:
    parts: list[Any] = []
    for name, one in module.named_modules():
        own = {k: v for k, v in one.__dict__.items() if k not in _MACHINERY and not isinstance(v, Tensor)}
        shapes = [(k, tuple(p.shape)) for k, p in one._parameters.items() if p is not None]
        buffers = [(k, _content(b)) for k, b in one._buffers.items() if b is not None]
        parts.append((name, type(one), *sorted((k, repr(v)) for k, v in own.items()), *shapes, *buffers))
    return tuple(parts)


def _content(buffer: Tensor) -> Any:
    if buffer.is_meta:
        return id(buffer)
    data = buffer.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return tuple(buffer.shape), buffer.dtype, hashlib.sha256(data.tobytes()).hexdigest()
