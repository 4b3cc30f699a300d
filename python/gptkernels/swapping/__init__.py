"""Defines ``gptkernels.swap`` and ``gptkernels.unswap``, and decides which modules are replaced, and by what."""

import contextlib
import copy
import functools
import logging
import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from gptkernels._unmodified import CHANGED
from gptkernels.swapping import equivalence, gpt, huggingface, sdpa
from gptkernels.swapping.attention_registration import register_attention
from gptkernels.swapping.classes import derive, options_of, original_of
from gptkernels.swapping.layers import torch_layer
from gptkernels.swapping.report import Entry, Report

__all__ = ["Entry", "Report", "register_attention", "swap", "unswap"]

logger = logging.getLogger("gptkernels")
Model = TypeVar("Model", bound=torch.nn.Module)
Decision = tuple[Any, ...] | str | None  # a replacement's name and options; a reason to leave the module; or neither


def swap(model: Model, *, leave: str | Iterable[str] = (), return_logits: bool | Literal["detached"] = True) -> Model:
    """Replace the modules of a model that this package's kernels support, in place.

    These are Hugging Face's GPT-2, models built like nanoGPT's and llm.c's, torch.nn's layers, and calls of
    ``F.scaled_dot_product_attention``. A replaced module keeps its parameters, buffers, hooks and names; its class
    becomes a subclass of the same name. ``model.gptkernels_report`` lists the modules that were not replaced, with
    reasons.

    Args:
        model: any module.
        leave: names of modules that are not replaced, as in ``named_modules``, with the wildcards ``*`` and ``?``. The
            modules inside them are replaced unless they are named too.
        return_logits: what a language model returns in training when it is given labels or targets: all logits if
            True, None if False (then only one chunk of rows is stored), or logits without a gradient if "detached".

    Returns:
        The same model.

    Raises:
        ValueError: if the model is already swapped, a pattern in ``leave`` names no module, or return_logits is
            invalid.
    """
    if return_logits not in (True, False, "detached"):
        raise ValueError(f"gptkernels.swap: return_logits is True, False or 'detached', not {return_logits!r}")
    if any(original_of(module) is not None for module in model.modules()):
        raise ValueError("gptkernels.swap: the model is swapped already: call gptkernels.unswap first")
    patterns = [leave] if isinstance(leave, str) else list(leave)
    modules = dict(model.named_modules())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in modules):
            raise ValueError(f"gptkernels.swap: leave={pattern!r} names no module of the model")
    report = Report(return_logits=return_logits)
    named = {name: module for name, module in modules.items() if any(fnmatchcase(name, p) for p in patterns)}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    on_cpu: Any = torch.device("cpu") if torch.get_default_device().type != "cpu" else contextlib.nullcontext()
    with equivalence.random_generators_kept(device), on_cpu, torch.inference_mode(False):
        decisions = _decide_all(model, set(named.values()))
        reason = _difference_of_models(model, decisions)
    for module, (name, decision) in decisions.items():
        if reason is not None and isinstance(decision, tuple):
            decision = reason
        kind = type(module).__name__
        if isinstance(decision, tuple):
            _replace(module, decision, report)
            report.replaced.append(Entry(name, kind, _describe(decision)))
        elif decision is not None:
            report.left.append(Entry(name, kind, decision))
    model.gptkernels_report = report  # type: ignore[assignment]
    logger.info(report.line())
    return model


def unswap(model: Model) -> Model:
    """Give every module of the model the class that it had before :func:`swap`, in place.

    Raises:
        ValueError: if a swapped module's class was changed since, for example by FSDP2 or a parametrisation, which must
            be undone first.
    """
    for name, module in model.named_modules():
        if original_of(module) is None and any("_gptkernels_original" in vars(kind) for kind in type(module).__mro__):
            raise ValueError(f"gptkernels.unswap: {name or 'the model'} was given another class since the swap")
    for module in model.modules():
        if (original := original_of(module)) is not None:
            module.__class__ = original
        module.__dict__.pop("gptkernels_report", None)
        module.__dict__.pop(CHANGED, None)
    return model


def _replace(module: Any, decision: tuple[Any, ...], report: Report) -> None:
    name, *options = decision
    original: Any = type(module)
    module.__class__ = derive(original, name, *options)
    module.gptkernels_report = report


def _describe(decision: tuple[Any, ...]) -> str:
    name, *options = decision
    given = ", ".join(f"{option}={value}" for option, value in zip(options_of(name), options, strict=False))
    return name + (f" ({given})" if given else "")


# ---- deciding --------------------------------------------------------------------------------------------------------


def _decide_all(model: torch.nn.Module, leave: set[torch.nn.Module]) -> dict[torch.nn.Module, tuple[str, Decision]]:
    tried: dict[Any, Any] = {}
    longest = min(1024, max(128, min(_tables(model), default=0)))
    decisions: dict[torch.nn.Module, tuple[str, Decision]] = {}
    for name, module in reversed(list(model.named_modules())):
        decision: Decision = "as asked" if module in leave else _decide(module, decisions, tried, longest)
        decisions[module] = name, decision
    return dict(reversed(decisions.items()))


def _decide(module: torch.nn.Module, decisions: Any, tried: dict[Any, Any], longest: int) -> Decision:
    if (reason := _why_not_class(module)) is not None:
        return reason
    for found in (huggingface.decide(module), torch_layer(module)):
        if found is not None:
            return found
    kind = type(module)
    if kind.__module__.startswith(("torch.", "transformers.", "gptkernels.")):
        if isinstance(module, torch.nn.Dropout):
            return "it stays torch's; a swapped parent reads its p"
        return None if module._modules else "there is no kernel for it"
    found = _by_trial(module, decisions, tried, longest)
    if isinstance(found, tuple):
        return found
    if sdpa.methods_that_call_it(kind):
        return ("attention calls",)
    return found


def _why_not_class(module: torch.nn.Module) -> str | None:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing takes seconds
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        return "its class is FSDP's: swap before fully_shard"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "it is parametrised"
    if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
        return "it is lazy: run the model once, then swap"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is scripted"
    if "forward" in module.__dict__:
        return "it has a forward of its own"
    return None


def _by_trial(module: Any, decisions: Any, tried: dict[Any, Any], longest: int) -> Decision:
    """Recognise a user's module by its attributes, and test a replacement. Equal modules are tested once."""
    found = next((maker for looks_like, maker in _TRIALS if looks_like(module)), None)
    if found is None:
        return None
    parts = [decisions[part][1] for part in module.modules() if part in decisions and part is not module]
    key = (found, equivalence.signature(module), repr(parts))
    if key not in tried:
        try:
            tried[key] = found(module, decisions, longest)
        except Exception as error:
            tried[key] = f"a trial failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return tried[key]  # type: ignore[no-any-return]


def _difference_of_models(model: Any, decisions: Any) -> str | None:
    if type(model).__module__.startswith("torch."):
        model = model._modules.get("_orig_mod") or model._modules.get("module") or model
    own = (one for one in model.modules() if not type(one).__module__.startswith(("torch.", "transformers.")))
    tables = _tables(model)
    compiled = any("_orig_mod" in one._modules for one in model.modules())
    if compiled or not tables or not any(isinstance(decisions[one][1], tuple) for one in own):
        return None
    try:
        original, replaced = (equivalence.copy_sharing_parameters(model) for _ in range(2))
    except Exception:
        return None
    _replace_parts(replaced, model, decisions)
    vocabulary = model.transformer.wte.num_embeddings if gpt.looks_like_gpt(model) else min(tables)
    return equivalence.difference_of_models(original, replaced, vocabulary, min(tables))


def _tables(model: torch.nn.Module) -> list[int]:
    return [one.num_embeddings for one in model.modules() if isinstance(one, torch.nn.Embedding)]


def _replace_parts(made: Any, module: Any, decisions: Any, own: tuple[Any, ...] | None = None) -> None:
    report, by_name = Report(), dict(module.named_modules())
    for name, one in list(made.named_modules()):
        decision = own
        if name != "" or own is None:
            decision = decisions.get(by_name.get(name), ("", None))[1]
        if isinstance(decision, tuple) and type(one) is type(by_name[name]):
            _replace(one, decision, report)


def _pair(module: Any, decisions: Any, own: tuple[Any, ...], instead: Any = None) -> tuple[Any, Any]:
    first = equivalence.copy_with_random_parameters(module, instead)
    second = copy.deepcopy(first, {id(p): p for p in first.parameters()})
    _replace_parts(second, module, decisions, own)
    return first, second


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _norm(module: Any, decisions: Any, longest: int) -> Decision:
    width = module.weight.shape[0]
    guesses = [value for value in vars(module).values() if isinstance(value, float)]
    for eps in dict.fromkeys([*guesses, 1e-5, 1e-6, 1e-8, 1e-12]):
        pair = _pair(module, decisions, ("LayerNorm", eps))
        # The result depends on eps only if x is small.
        if equivalence.difference(*pair, lambda m: m(1e-3 * _random(3, width)), lambda m: m(_random(3, width))) is None:
            return "LayerNorm", eps
    return "its forward is not layer_norm"


def _gelu(module: Any, decisions: Any, longest: int) -> Decision:
    for form in ("tanh", "none"):
        if equivalence.difference(*_pair(module, decisions, ("GELU", form)), lambda m: m(3 * _random(5, 7))) is None:
            return "GELU", form
    return "its forward is not gelu"


def _width(linear: Any) -> int:
    return int(linear.weight.shape[1])


# Batch size, length and scale of the inputs. The lengths detect windowed attention; the scales detect branches on large
# values.
_INPUTS = ((1, 1, 1.0), (3, 17, 1e-3), (2, 9, 1e3), (1, 128, 1.0))


def _call(x: Tensor, module: Any) -> Any:
    return module(x)


def _compared(replacement: str, width_of: Any) -> Any:
    def found(module: Any, decisions: Any, longest: int) -> Decision:
        width, pair = width_of(module), _pair(module, decisions, (replacement,))
        longest = min((b.shape[-1] for b in module.buffers() if b.dim() >= 2), default=longest)

        def call(batch: int, length: int, scale: float = 1.0) -> equivalence.Trial:
            return functools.partial(_call, scale * _random(batch, min(length, longest), width))

        x = _random(2, min(3, longest), width)
        reason = equivalence.difference(*pair, functools.partial(_call, x))
        reason = reason or equivalence.difference_of_gradients(*pair, functools.partial(_call, x), x)
        reason = reason or equivalence.difference_in("training", *pair, call(1, 33))
        for one in _INPUTS:
            reason = reason or equivalence.difference_in("evaluation", *pair, call(*one))
        if reason is None and replacement == "gpt block":
            pair = pair[0].float(), pair[1].float()  # takes half the time
            x = _random(1, longest, width).float()
            reason = equivalence.difference_in("training", *pair, functools.partial(_call, x))
        return (replacement,) if reason is None else reason

    return found


_STATES = ("training", True), ("evaluation", False)


def _model(module: Any, decisions: Any, longest: int) -> Decision:
    """Test the replacement of a whole model on copies with all of its layers and positions.

    The copies have a small vocabulary, and stand-ins for attention and MLPs.
    """
    trunk = module.transformer
    if any(type(one) is not torch.nn.Embedding for one in (trunk.wte, trunk.wpe)):
        return "its embeddings are not torch.nn.Embedding"
    vocabulary, (longest, width) = 11, trunk.wpe.weight.shape
    wte, wpe = (torch.nn.Embedding(rows, width, dtype=torch.float64) for rows in (vocabulary, longest))
    head = torch.nn.Linear(width, vocabulary, bias=False, dtype=torch.float64)
    if module.lm_head.weight is trunk.wte.weight:
        head.weight = wte.weight
    instead: dict[int, Any] = {id(trunk.wte): wte, id(trunk.wpe): wpe, id(module.lm_head): head}
    for block in trunk.h:
        instead |= {id(block.attn): equivalence.StandIn(width), id(block.mlp): equivalence.StandIn(width)}

    def call(batch: int, length: int, ignored: int | None, with_targets: bool = True) -> equivalence.Trial:
        drawn = torch.randint(vocabulary, (2, batch, min(length, longest)), generator=torch.Generator().manual_seed(1))
        if ignored is not None and drawn[1].numel() > 1:
            drawn[1, -1, -1] = ignored
        return lambda m: m(*drawn) if with_targets else m(drawn[0])

    first = equivalence.copy_with_random_parameters(module, instead)
    with torch.no_grad():
        last_only = longest > 1 and call(3, 2, None, False)(first)[0].shape[1] == 1
        ignore_index = -1
        try:
            call(3, 2, ignore_index)(first)
        except IndexError:  # the model does not ignore targets of -1
            ignore_index = -100
    own = "gpt model", ignore_index, last_only
    pair = _pair(module, decisions, own, instead)
    trials = [call(*shape, ignored, targets) for shape, ignored, targets in (
        ((3, 2), ignore_index, True), ((3, 2), None, False), ((1, 1), None, True), ((1, 1), None, False),
        ((1, 17), ignore_index, True), ((1, 17), None, False),
    )]  # fmt: skip
    reason = equivalence.difference(*pair, *trials) or equivalence.difference_of_gradients(*pair, trials[0])
    for scale in (1e3, 1e-6) if reason is None else ():
        with torch.no_grad():
            for weight in {wte.weight, head.weight}:
                weight *= scale  # the model may branch on the size of the logits
        for state, targets in _STATES:
            reason = reason or equivalence.difference_in(state, *pair, call(1, 5, None, targets))
    if reason is None:
        pair = pair[0].float(), pair[1].float()  # takes half the time
        for state, targets in _STATES:
            reason = reason or equivalence.difference_in(state, *pair, call(1, longest, None, targets))
    return own if reason is None else reason


def _is_norm(module: Any) -> bool:
    names = {name for name, p in module._parameters.items() if p is not None}
    return (
        "norm" in type(module).__name__.lower()
        and not module._modules
        and not module._buffers
        and {"weight"} <= names <= {"weight", "bias"}
        and module.weight.dim() == 1
    )


def _is_gelu(module: Any) -> bool:
    return "gelu" in type(module).__name__.lower() and not (module._modules or module._parameters or module._buffers)


_TRIALS = (
    (_is_norm, _norm),
    (_is_gelu, _gelu),
    (gpt.looks_like_gpt, _model),
    (gpt.looks_like_block, _compared("gpt block", lambda m: _width(m.attn.c_attn))),
    (gpt.looks_like_attention, _compared("gpt attention", lambda m: _width(m.c_attn))),
    (gpt.looks_like_mlp, _compared("gpt mlp", lambda m: _width(m.c_fc))),
)
