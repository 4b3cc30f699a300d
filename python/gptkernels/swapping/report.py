"""The report of ``swap``: which modules were replaced, which were not, and which calls ran the original code."""

import collections
import dataclasses
import re
from collections.abc import Iterable
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Entry:
    """One module in the report of ``swap``.

    Attributes:
        name: the name in ``named_modules``; empty for the model itself.
        kind: the name of the class.
        note: the replacement, or the reason why the module was not replaced.
    """

    name: str
    kind: str
    note: str


@dataclasses.dataclass(repr=False)
class Report:
    """The report of a swapped model, which ``print(model.gptkernels_report)`` shows as a table.

    Attributes:
        replaced: the modules that kernels compute.
        left: the other modules, with reasons. Containers, which compute nothing, are not listed.
        calls: how many calls of a replaced module ran its original code, by class and reason; calls inside
            ``torch.compile`` are not counted.
        return_logits: the argument of ``swap``.
    """

    replaced: list[Entry] = dataclasses.field(default_factory=list)
    left: list[Entry] = dataclasses.field(default_factory=list)
    calls: "collections.Counter[tuple[str, str]]" = dataclasses.field(default_factory=collections.Counter)
    return_logits: bool | Literal["detached"] = True

    def line(self) -> str:
        """Return one line: how many modules of each class were replaced, and how many were not."""
        kinds = collections.Counter(entry.kind for entry in self.replaced)
        counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        return f"gptkernels.swap: {len(self.replaced)} modules replaced ({counted or 'none'}), {len(self.left)} left"

    def __str__(self) -> str:
        rows = [("modules", "class", "", "")]
        rows += [(*_key(group), "->", group[0].note) for group in _groups(self.replaced)]
        rows += [(*_key(group), "left:", group[0].note) for group in _groups(self.left)]
        rows += [("", kind, f"{count} calls to the original:", why) for (kind, why), count in self.calls.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows)
        return "\n".join([self.line(), *(line.rstrip() for line in lines)])

    __repr__ = __str__


def _groups(entries: Iterable[Entry]) -> Iterable[list[Entry]]:
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((re.sub(r"\d+", "*", entry.name), entry.kind, entry.note), []).append(entry)
    return groups.values()


def _key(group: list[Entry]) -> tuple[str, str]:
    name = group[0].name if len(group) == 1 else re.sub(r"\d+", "*", group[0].name) + f" ({len(group)})"
    return name or "(the model)", group[0].kind
