"""Tests that a short campaign of training steps finds nothing, and that a gradient without its last row is found."""

import contextlib
import io

import pytest
import torch

from fuzz import steps
from processes import run_processes

pytestmark = pytest.mark.usefixtures("one_thread")
# These steps run each family in each way, and each way with and without autocast. Inductor would take a minute for each
# family.
SHORT = ["--steps", "14", "--seed", "14", "--backend", "aot_eager"]


def run_campaign(device):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        return steps.main([*SHORT, "--device", device]), output.getvalue()


@pytest.mark.parametrize(
    "kind",
    [pytest.param("cpu", marks=pytest.mark.xdist_group("distributed")), pytest.param("cuda", marks=pytest.mark.large)],
)
def test_a_short_campaign_finds_nothing(kind, device):
    """The campaign runs in a separate process, because a step that hangs ends its process."""
    if kind != device.type:
        pytest.skip(f"--device {kind}")
    [(status, output)] = run_processes(run_campaign, 1, kind)
    assert status == 0, output
    assert "fuzz.steps: 14 steps, 0 failures (seed 14" in output


def test_a_gradient_without_its_last_row_is_found(monkeypatch, capsys):
    def make(sizes):
        ours, torchs = steps.make_nanogpt(sizes)
        weight = ours.transformer.h[1].attn.c_attn.weight
        weight.register_hook(lambda gradient: torch.cat([gradient[:-1], 0 * gradient[-1:]]))
        return ours, torchs

    monkeypatch.setattr(steps, "FAMILIES", {"nanoGPT": steps.FAMILIES["nanoGPT"]._replace(make=make)})
    monkeypatch.setattr(steps, "WAYS", ("eager",))
    assert steps.main(["--steps", "2", "--seed", "3"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("error") == printed.count("gradient of transformer.h.1.attn.c_attn.weight: error") == 2
    assert "python -m fuzz.steps --seed 3 --index 1 --device cpu --backend inductor" in printed
