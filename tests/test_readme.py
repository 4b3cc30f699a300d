"""Runs the Python examples of the README and of two pages unchanged."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = {
    f"{page} {number}": example
    for page in ("README.md", "docs/using.md", "docs/from-huggingface.md")
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S), 1)
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name, monkeypatch, tmp_path):
    """A small model takes the place of the downloaded one."""
    monkeypatch.chdir(tmp_path)
    if "from_pretrained" in EXAMPLES[name]:
        transformers = pytest.importorskip("transformers")
        small = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=1, vocab_size=60, n_positions=16)
        for folder in ("gpt2", "path/to/gpt2"):
            transformers.GPT2LMHeadModel(small).save_pretrained(folder)
    exec(compile(EXAMPLES[name], name, "exec"), {"__name__": "example"})
    assert "save_pretrained(" not in EXAMPLES[name] or (tmp_path / "path/to/mine/config.json").exists()
