"""Tests that the documentation's pages agree with the sources."""

import json
import re
from pathlib import Path

import pytest
import torch
from benchmarks import ledger

from api_reference import operators, reference

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *DOCS.glob("*.md"),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *ROOT.glob("examples/*.md"),
]


def test_the_reference_has_exactly_the_public_names():
    assert (DOCS / "api.md").read_text() == reference(), "python tests/api_reference.py > docs/api.md"


def test_the_reference_has_every_operator():
    registered = {n.removeprefix("gptkernels::") for n in torch._C._dispatch_get_all_op_names() if "gptkernels::" in n}
    assert registered == {schema.split("(")[0] for group in operators() for schema in group}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_are_valid(page):
    for link in re.findall(r"\]\(([\w/.-]+)(?:#[\w-]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_the_index_names_every_page():
    index = (DOCS / "README.md").read_text()
    for page in DOCS.glob("*.md"):
        assert page.name in ("README.md", "index.md") or f"({page.name})" in index, page.name


def read_messages():
    kinds = {".py", ".h", ".cpp", ".cu", ".cuh", ".cmake"}
    files = [path for folder in ("python", "csrc", "ops", "cmake") for path in (ROOT / folder).rglob("*")]
    text = "\n".join(path.read_text() for path in files if path.suffix in kinds)
    text = re.sub(r'"\s*\n\s*f?"', "", text)  # joins the parts of one string
    text = re.sub(r"\$?\{[^{}\n\"]*\}|%l*[sdu]", "...", text)
    return " ".join(text.split())


def test_messages_of_the_troubleshooting_page_are_in_the_sources():
    page = (DOCS / "troubleshooting.md").read_text()
    messages = [line for block in re.findall(r"```text\n(.*?)```", page, re.S) for line in block.splitlines()]
    assert len(messages) > 30
    sources = read_messages()
    for message in messages:
        parts = [part.strip(" :'()/") for part in message.split("...")]
        parts = [part for part in parts if len(part) > 4 and part != "gptkernels"]
        assert parts, message
        for part in parts:  # a message may contain another message
            whole = part in sources or all(piece.strip() in sources for piece in re.split(r"(?<=: )|(?<=, but )", part))
            assert whole, f"{part!r} of {message!r}"


def test_tests_named_in_compose_exist():
    page = (DOCS / "compose.md").read_text()
    named = re.findall(r"`(test_\w+)(?:\.py)?::(test_\w+)`", page)
    assert len(named) > 40
    for file, test in named:
        assert f"\ndef {test}(" in next((ROOT / "tests").rglob(f"{file}.py")).read_text(), f"{file}::{test}"


def test_the_ledger_is_current():
    assert ledger.PAGE.read_text() == ledger.page(), "python -m benchmarks.ledger"


def test_the_ledger_compares_times_with_and_without_a_variant():
    files = [path for path in ledger.CUDA.glob("norm/*.cu") if path.name == "layernorm.cu"]
    ring = ledger.Variant("norm", "ring, of rows", files, "loads", ["a row", "a kept row", "no row"])
    compared = {("norm", "ring, of rows", "a row"): (1e-4, 1.1e-4), ("norm", "another", "a kept row"): (1e-4, 2e-4)}
    first, second, third = ledger.cells(ring, {"a row": 3e-4, "a kept row": 2e-4}, compared)
    assert first[3:] == ["a row", "100.0 us", "110.0 us", f"10.0 % ({ledger.lines_of(files) / 10:.0f} lines)"]
    assert second[3:] == ["a kept row", "200.0 us", "not measured", ""]
    assert third[3:] == ["no row", "not measured", "not measured", ""]


def test_the_ledgers_comparisons_name_its_rows():
    families = ledger.read((ROOT / "benchmarks" / "ledger.txt").read_text())
    listed = {(v.family, v.name, row) for variants in families.values() for v in variants for row in v.rows}
    run = json.loads(ledger.WITHOUT.read_text())
    compared = {(row["family"], row["variant"], row["row"]) for row in run["rows"]}
    assert compared <= listed
    assert {row for *_, row in listed - compared} <= ledger.kept_times().keys()
    assert run["machine"]["gpu"]["name"] == ledger.GPU
