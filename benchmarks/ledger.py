"""``python -m benchmarks.ledger`` writes docs/ledger.md: the lines of each kernel's variants, and what they win."""

import json
import re
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.report import markdown

ROOT = Path(__file__).parents[1]
PAGE, CUDA, RESULTS = ROOT / "docs" / "ledger.md", ROOT / "csrc" / "cuda", ROOT / "benchmarks" / "results"
GPU = "NVIDIA H200"
HEADER = ["variant", "lines", "without it", "measured", "with", "without", "wins"]
INTRODUCTION = f"""# Ledger

`python -m benchmarks.ledger` writes this page from the source tree, the [kept runs](../benchmarks/results) and the list
in `benchmarks/ledger.txt`. It has each family of CUDA kernels, its variants, the lines of their files in `csrc/cuda` to
the nearest ten, and what a variant wins. A variant stays if it wins at least 3 % at a shape that a documented user has,
or 1 % of a step of GPT-2, and if its lines are worth it: about 100 for each per cent.

"Without it" names what computes a variant's calls if the variant is absent, and the environment variable that disables
it, where one does. "-" marks a variant without which an operator would not exist. A run on the same GPU ({GPU})
without the variant is kept as `benchmarks/results/without/FAMILY_VARIANT.json` (a second one, of the step, as
`FAMILY_VARIANT.step.json`), in lower case with underscores: with that variable, or of a build whose dispatch leaves the
variant out. `GPTKERNELS_MATMUL=cublas` disables three variants at once, so a step without one of them needs a build.
Until there is such a run, the row is "not measured". The lines in brackets are those for each per cent.
"""


class Variant(NamedTuple):
    """One line of ledger.txt, and the keys of the rows below it."""

    family: str
    name: str
    files: list[Path]
    instead: str
    rows: list[str]

    @property
    def runs(self) -> list[Path]:
        """The kept runs without it."""
        stem = re.sub(r"\W+", "_", f"{self.family}_{self.name}".lower())
        return sorted(path for path in (RESULTS / "without").glob("*.json") if path.name.split(".")[0] == stem)


def read(text) -> dict[str, list[Variant]]:
    """ledger.txt by families, in its order."""
    families: dict[str, list[Variant]] = {}
    for line in text.splitlines():
        indent, entry = len(line) - len(line.lstrip()), line.strip()
        if line.startswith("#"):
            continue
        if indent == 0:
            family, families[entry] = entry, []
        elif indent == 2:
            name, patterns, instead = entry.split(" | ")
            families[family].append(Variant(family, name, _matched(family, patterns), instead, []))
        else:
            families[family][-1].rows.append(entry)
    return families


def _matched(family, patterns):
    files = []
    for pattern in patterns.split():
        found = sorted((CUDA / family).glob(pattern))
        if not found:
            raise ValueError(f"benchmarks/ledger.txt: no file matches {family}/{pattern}")
        files += [path for path in found if path not in files]
    return files


def measured(paths) -> dict[str, float]:
    """The seconds of these runs' rows, by their keys."""
    found = {}
    for path in paths:
        run = json.loads(path.read_text())
        steps = run.get("steps", {"rows": []})
        machine = (steps if "steps" in run else run).get("machine", {"gpu": {"name": None}})
        if machine["gpu"]["name"] != GPU:
            continue
        for row in steps["rows"] if steps.get("model") == "gpt2" else []:
            found[f"step {row['variant']} {row['precision']} B={row['batch']}"] = row["milliseconds"] / 1e3
        for row in run.get("rows", []):
            if "swapped" in row:
                key = f"swap {row['model']} {row['mode']} B={row['batch']} dropout={row['dropout']}"
                if row["swapped"] == "yes" and not row["fault"]:
                    found[key] = row["ms"] / 1e3
            elif "ours" in row["times"]:
                found[f"{row['name']} {row['shape']} {row['dtype']}"] = row["times"]["ours"][0]
    return found


def lines_of(files) -> int:
    """To the nearest ten, so that the page does not change with every line."""
    return round(sum(len(path.read_text().splitlines()) for path in files), -1)


def cells(variant, kept) -> list[list[str]]:
    """One line for each row, or one in all."""
    without, count = measured(variant.runs), lines_of(variant.files)
    head = [variant.name, str(count), variant.instead]
    if variant.instead == "-":
        return [[*head, key, _time(kept[key]), "", ""] for key in variant.rows] or [[*head, "", "", "", ""]]
    lines = []
    for key in variant.rows:
        gain = without[key] / kept[key] * 100 - 100 if key in without else None
        price = f" ({count / gain:.0f} lines)" if gain and gain > 0 else ""
        wins = "" if gain is None else f"{gain:.1f} %{price}"
        lines.append([*head, key, _time(kept[key]), _time(without.get(key)), wins])
    return lines or [[*head, "", "", _time(None), ""]]


def _time(seconds):
    if seconds is None:
        return "not measured"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 0.005 else f"{seconds * 1e6:.1f} us"


def page() -> str:
    """docs/ledger.md."""
    kept, parts = measured(sorted(RESULTS.glob("*.json"))), [INTRODUCTION]
    for family, variants in read((ROOT / "benchmarks" / "ledger.txt").read_text()).items():
        table = []
        for variant in variants:
            found = cells(variant, kept)
            table += [found[0], *([""] * 3 + line[3:] for line in found[1:])]  # the variant's name once
        named = {path for variant in variants for path in variant.files}
        rest = [path for path in (CUDA / family).rglob("*.*") if path not in named]
        if rest:
            table.append(["shared", str(lines_of(rest)), "", "", "", "", ""])
        parts.append(f"\n## {family}\n\n{markdown(HEADER, table, texts=4)}\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
