"""``python -m benchmarks.ledger`` writes docs/ledger.md: the lines of each kernel variant, and the time it saves."""

import json
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.report import markdown

ROOT = Path(__file__).parents[1]
PAGE, CUDA, RESULTS = ROOT / "docs" / "ledger.md", ROOT / "csrc" / "cuda", ROOT / "benchmarks" / "results"
WITHOUT = RESULTS / "without.json"
GPU = "NVIDIA H200"
HEADER = ["variant", "lines", "without it", "measured", "with", "without", "saved"]
INTRODUCTION = f"""# Ledger

This page lists the variants of the CUDA kernels: the number of lines of each variant, and the time that it saves.
`python -m benchmarks.ledger` writes the page from the source tree, the [kept runs](../benchmarks/results) and the list
of variants in `benchmarks/ledger.txt`. A variant is kept in the library if it saves at least 3 % at a shape that a
documented user has, or 1 % of a training step of GPT-2, and if it has about 100 lines or fewer for each per cent.

The column "lines" has the lines of the variant's files in `csrc/cuda`, to the nearest ten; "shared" is the rest of the
folder. The column "without it" has the code that computes the variant's calls if the variant is absent; "-" means that
an operator would not exist. The other columns have a row, its time with and without the variant, how much longer it
takes without the variant, and in brackets the lines for each per cent.

Both times are medians of one run ({GPU}), in which calls with and without the variant alternated. The run used a
build whose dispatch passes over a variant that an environment variable names. Its figures are in
`benchmarks/results/without.json`. Where a row is not in this file, the time with the variant is from the kept runs.
"""


class Variant(NamedTuple):
    family: str
    name: str
    files: list[Path]
    instead: str
    rows: list[str]


def read(text) -> dict[str, list[Variant]]:
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
    found = {pattern: sorted((CUDA / family).glob(pattern)) for pattern in patterns.split()}
    if missing := [pattern for pattern, paths in found.items() if not paths]:
        raise ValueError(f"benchmarks/ledger.txt: no file matches {family}/{missing[0]}")
    return list(dict.fromkeys(path for paths in found.values() for path in paths))


def measured(paths) -> dict[str, float]:
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


def kept_times() -> dict[str, float]:
    return measured(path for path in sorted(RESULTS.glob("*.json")) if path != WITHOUT)


def lines_of(files) -> int:
    """Count to the nearest ten, so that the page does not change with every line."""
    return round(sum(len(path.read_text().splitlines()) for path in files), -1)


def cells(variant, kept, compared) -> list[list[str]]:
    count, needed = lines_of(variant.files), variant.instead == "-"
    head = [variant.name, str(count), variant.instead]
    lines = []
    for key in variant.rows:
        with_it, without = compared.get((variant.family, variant.name, key), (kept.get(key), None))
        gain = without / with_it * 100 - 100 if without else None
        price = f" ({count / gain:.0f} lines)" if gain and gain > 0 else ""
        saved = "" if gain is None else f"{gain:.1f} %{price}"
        lines.append([*head, key, _time(with_it), "" if needed else _time(without), saved])
    return lines or [[*head, "", "", "" if needed else _time(None), ""]]


def _time(seconds):
    if seconds is None:
        return "not measured"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 0.005 else f"{seconds * 1e6:.1f} us"


def page() -> str:
    kept, parts = kept_times(), [INTRODUCTION]
    rows = json.loads(WITHOUT.read_text())["rows"]
    compared = {(row["family"], row["variant"], row["row"]): (row["with"], row["without"]) for row in rows}
    for family, variants in read((ROOT / "benchmarks" / "ledger.txt").read_text()).items():
        table = []
        for variant in variants:
            first, *others = cells(variant, kept, compared)
            table += [first, *([""] * 3 + line[3:] for line in others)]
        named = {path for variant in variants for path in variant.files}
        if rest := [path for path in (CUDA / family).rglob("*.*") if path not in named]:
            table.append(["shared", str(lines_of(rest)), *[""] * 5])
        parts.append(f"\n## {family}\n\n{markdown(HEADER, table, texts=4)}\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
