"""Prints docs/api.md: the public names with their signatures and descriptions, and the operators' schemas.

python tests/api_reference.py > docs/api.md
"""

import dataclasses
import enum
import importlib
import inspect
import re
from functools import cached_property
from pathlib import Path

import torch

import gptkernels

MODULES = {
    "gptkernels": "The package. `functional`, `nn`, `optim`, `models` and `testing` are below.",
    "gptkernels.functional": "torch.nn.functional's names, and the fusions that torch has no name for.",
    "gptkernels.nn": "Layers: torch.nn's constructors, state_dict keys, reprs and initialisation.",
    "gptkernels.optim": "The optimizer, and clipping.",
    "gptkernels.models": "GPT-2.",
    "gptkernels.parallel": "Models divided over processes: [tensor](tensor_parallel.md), "
    "[vocabulary](vocabulary_parallel.md) and [context parallelism](context_parallel.md).",
    "gptkernels.swapping": "What `swap` returns a report of ([swap](swap.md)).",
    "gptkernels.graphs": "Training steps as CUDA graphs ([step](step.md)).",
    "gptkernels.testing": "Ops beside torch: `gptkernels check`.",
    "gptkernels.convert": "`gptkernels convert`: models from and to other forms.",
    "gptkernels.checkpoint": "Models and training states in files.",
    "gptkernels.data": "Text, tokens, token files, batches.",
    "gptkernels.trainer.train": "`gptkernels train` ([training](training.md)).",
    "gptkernels.trainer.evaluate": "`gptkernels train --eval-only`.",
    "gptkernels.trainer.generate": "`gptkernels generate`.",
}

HEAD = """# API

Every public name, with its parameters and the first line of its docstring; `help(name)` says the rest: shapes, dtypes,
errors. `python tests/api_reference.py > docs/api.md` writes this page.
"""

OPERATORS = """
## `torch.ops.gptkernels`

The operators, as [ops/library.cpp](../ops/library.cpp) declares them; the table in the [README](../README.md) says what
each computes and names its page. A `_backward` op is what its op's autograd rule calls, and is differentiable itself
where it does not write into an argument.
"""


def list_public(module):
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if not name.startswith("__")]
    own = (
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and (inspect.isclass(value) or callable(value))
    )
    return sorted(name for name in own if not name.startswith("_"))


def first_line(value):
    """Return the docstring's first paragraph on one line, without Sphinx's roles, cut before ``: (B`` (a shape)."""
    text = (inspect.getdoc(value) or "").strip()
    assert text, value
    text = re.sub(r":\w+:`([^`]+)`", r"`\1`", text.split("\n\n")[0]).replace("``", "`")
    return " ".join(text.split()).split(": (B")[0].rstrip(".") + "."


def signature(name, value):
    """Return ``name(parameter=default)``, ``name(...)`` for a constructor inherited from torch, or ``name.{A, B}`` for
    an enum.
    """
    if inspect.isclass(value) and (base := find_torchs(value)) is not None and inherits_constructor(value, base):
        return f"{name}(...)"
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return f"{name}.{{{', '.join(value.__members__)}}}"
    parameters, seen = [], set()
    for p in inspect.signature(value).parameters.values():
        if p.name in ("self", "cls"):
            continue
        if p.kind is p.KEYWORD_ONLY and not seen & {p.KEYWORD_ONLY, p.VAR_POSITIONAL}:
            parameters.append("*")
        seen.add(p.kind)
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        parameters.append(f"{star}{p.name}" + ("" if p.default is p.empty else f"={format_default(p.default)}"))
    return f"{name}({', '.join(parameters)})"


def format_default(default):
    plain = default is None or isinstance(default, bool | int | float | str | tuple)
    return repr(default) if plain and type(default).__module__ == "builtins" else "..."


def find_torchs(kind):
    base = kind.__mro__[1]
    return base if base.__module__.startswith("torch.") and base is not torch.nn.Module else None


def inherits_constructor(kind, base):
    own = vars(kind).get("__init__")
    return own is None or getattr(own, "__wrapped__", None) is base.__init__


def methods(kind):
    """Yield (name, value, whether it is a method) for a class's public methods and properties, except torch's."""
    ours = [base for base in reversed(kind.__mro__) if base.__module__.startswith("gptkernels")]
    for name, value in {name: value for base in ours for name, value in vars(base).items()}.items():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if name.startswith("_") or name == "extra_repr" or is_field(kind, name):
            continue
        if isinstance(value, property | cached_property):
            yield name, value, False
        elif inspect.isfunction(function):
            yield name, function, True


def public_entries(module):
    """Yield (name, value) for the module's public functions and classes; the package's names only once."""
    for name in list_public(module):
        value = getattr(module, name)
        listed = module.__name__ != "gptkernels" and name in gptkernels.__all__
        if callable(value) and not inspect.ismodule(value) and not listed:
            yield name, value


def entries(module):
    for name, value in public_entries(module):
        yield f"- `{signature(name, value)}`: {first_line(value)}"
        if inspect.isclass(value):
            for method, function, has_arguments in methods(value):
                called = signature(method, function) if has_arguments else method
                yield f"  - `.{called}`: {first_line(function)}"


def is_field(kind, method):
    return dataclasses.is_dataclass(kind) and method in {f.name for f in dataclasses.fields(kind)}


def operators():
    """Return two lists of schemas. The second has the operators for gradients and for dropout masks."""
    text = (Path(__file__).parent.parent / "ops" / "library.cpp").read_text()
    declared = re.findall(r'm\.def\(\s*((?:"[^"]*"\s*)+)\)', text)
    schemas = sorted("".join(re.findall(r'"([^"]*)"', literals)) for literals in declared)
    own = re.compile(r"\w*(_backward|_with_gradients|_mask)_?\(")
    return [s for s in schemas if not own.match(s)], [s for s in schemas if own.match(s)]


def reference():
    parts = [HEAD]
    for name, says in MODULES.items():
        module = importlib.import_module(name)
        parts += [f"\n## `{name}`\n\n{says}\n\n", "\n".join(entries(module)), "\n"]
    forward, others = operators()
    return "".join([*parts, OPERATORS, "\n```\n", "\n".join(forward), "\n\n", "\n".join(others), "\n```\n"])


if __name__ == "__main__":
    print(reference(), end="")
