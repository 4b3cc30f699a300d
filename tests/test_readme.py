"""Runs the README's examples without changes."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if README.exists() else []


@pytest.mark.parametrize("example", range(len(EXAMPLES)))
def test_examples_run(example):
    exec(compile(EXAMPLES[example], f"README.md, example {example + 1}", "exec"), {"__name__": "example"})
