"""The pages that tell what there is, against what there is."""

import re
from pathlib import Path

import pytest

from api_reference import operators, reference

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("examples/*.md")]


def test_the_reference_is_of_this_version():
    """Every public name, and nothing else."""
    assert (DOCS / "api.md").read_text() == reference(), "python tests/api_reference.py > docs/api.md"


def test_the_reference_has_every_operator():
    import torch

    registered = {n.removeprefix("gptkernels::") for n in torch._C._dispatch_get_all_op_names() if "gptkernels::" in n}
    assert registered == {schema.split("(")[0] for group in operators() for schema in group}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([\w/.-]+)(?:#[\w-]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_the_index_names_every_page():
    index = (DOCS / "README.md").read_text()
    for page in DOCS.glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


# ---- troubleshooting -------------------------------------------------------------------------------------------------


def said():
    """All that the sources say, with ``...`` for what is put in."""
    kinds = {".py", ".h", ".cpp", ".cu", ".cuh", ".cmake"}
    files = [path for folder in ("python", "csrc", "ops", "cmake") for path in (ROOT / folder).rglob("*")]
    text = "\n".join(path.read_text() for path in files if path.suffix in kinds)
    text = re.sub(r'"\s*\n\s*f?"', "", text)  # one string, written as several
    text = re.sub(r"\$?\{[^{}\n\"]*\}|%l*[sdu]", "...", text)
    return " ".join(text.split())


def test_messages_are_as_they_are_written():
    page = (DOCS / "troubleshooting.md").read_text()
    messages = [line for block in re.findall(r"```text\n(.*?)```", page, re.S) for line in block.splitlines()]
    assert len(messages) > 30
    sources = said()
    for message in messages:
        parts = [part.strip(" :'()/") for part in message.split("...")]
        parts = [part for part in parts if len(part) > 4 and part != "gptkernels"]
        assert parts, message
        for part in parts:  # a sentence, or one that another sentence is put into
            whole = part in sources or all(piece.strip() in sources for piece in re.split(r"(?<=: )|(?<=, but )", part))
            assert whole, f"{part!r} of {message!r}"


# ---- what composes ---------------------------------------------------------------------------------------------------


def test_the_tests_that_are_named_exist():
    page = (DOCS / "compose.md").read_text()
    named = re.findall(r"`(test_\w+)(?:\.py)?::(test_\w+)`", page)
    assert len(named) > 40
    for file, test in named:
        assert f"\ndef {test}(" in next((ROOT / "tests").rglob(f"{file}.py")).read_text(), f"{file}::{test}"
