"""Runs the examples of the README and of a guide unchanged."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def find_examples(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S) if page.exists() else []


EXAMPLES = find_examples(README)


@pytest.mark.parametrize("example", range(len(EXAMPLES)))
def test_examples_run(example):
    exec(compile(EXAMPLES[example], f"README.md, example {example + 1}", "exec"), {"__name__": "example"})


def test_the_guide_from_hugging_face_runs(monkeypatch, tmp_path):
    """A small model takes the place of the downloaded one."""
    transformers = pytest.importorskip("transformers")
    small = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=1, vocab_size=60, n_positions=16)
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "path/to/gpt2"):
        transformers.GPT2LMHeadModel(small).save_pretrained(name)
    for example in find_examples(README.parent / "docs" / "from-huggingface.md"):
        exec(example, {"__name__": "example"})
    assert (tmp_path / "path/to/mine/config.json").exists()
