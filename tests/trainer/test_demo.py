"""Tests of ``gptkernels demo`` with small sizes."""

import re
import sys

import pytest

from gptkernels.data import prepare
from gptkernels.trainer import demo, runs
from gptkernels.trainer.cli import main
from small_runs import TEXT


@pytest.mark.parametrize("missing", [(), ("transformers", "matplotlib.figure")])
def test_demo(missing, device, tmp_path, monkeypatch, capsys):
    if not missing:
        pytest.importorskip("transformers")
        pytest.importorskip("matplotlib")
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_bytes(TEXT * 4)
    prepare(["text"], runs.STANDARD_LIBRARY)
    monkeypatch.setattr(demo, "SIZES", {device.type: (1, 2, 32, 64, 2, 16)})
    monkeypatch.setattr(demo, "SECONDS", 0.01)
    monkeypatch.setattr(demo, "OPS", ("softmax", "layernorm"))
    assert main(["demo", "--steps", "2", "--device", str(device)]) == 0
    text = capsys.readouterr().out
    assert len(re.findall(r"^(?:softmax|layernorm), \w+ +\d\.\de-\d\d +\d\.\de-\d\d$", text, re.M)) == 4
    assert "step 2/2: loss" in text
    assert (tmp_path / "runs" / "demo" / "demo.png").exists() != bool(missing)
    if missing:
        assert "transformers cannot be imported" in text
        assert "matplotlib cannot be imported" in text
    else:
        losses = [float(loss) for loss in re.findall(r"swapped: .* loss ([\d.]+)", text)]
        assert losses == pytest.approx([losses[0]] * 2, rel=1e-5 if device.type == "cpu" else 1e-2)
