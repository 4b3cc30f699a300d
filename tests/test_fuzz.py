"""The fuzzer of operators finds what is wrong, says how to repeat it, and finds nothing in a short campaign."""

import dataclasses
import re
import shlex

import pytest
import torch

import gptkernels  # noqa: F401
from fuzz import ops as fuzzer
from fuzz.draw import Draw
from fuzz.entries import ENTRIES
from helpers import all_dtypes, double, randn

ops = torch.ops.gptkernels


@pytest.mark.parametrize("op", sorted(ENTRIES))
def test_a_short_campaign(op, device, capfd):
    threads = torch.get_num_threads()
    try:
        status = fuzzer.main(["--calls", "40", "--op", op, "--device", device.type])
    finally:
        torch.set_num_threads(threads)
    assert status == 0, capfd.readouterr().out


def test_a_call_is_known_by_its_seed_and_index():
    for index in range(30):
        first, second = Draw(5, index), Draw(5, index)
        for draw in (first, second):
            fuzzer.run(draw)
        assert first.drawn == second.drawn
        assert first.call == second.call


def test_a_fault_is_found_and_can_be_repeated(monkeypatch, capfd):
    """A softmax that forgets a row's last element, where rows are wider than 20."""

    def faulty(draw):
        call = ENTRIES["softmax"][0](draw)
        right = call.ours

        def wrong(x):
            out = right(x).clone()
            if out.dim() and out.shape[-1] > 20:
                out[..., -1] = 0
            return out

        return dataclasses.replace(call, ours=wrong)

    monkeypatch.setattr(fuzzer, "MOST_FAILURES", 1)
    monkeypatch.setitem(fuzzer.ENTRIES, "faulty", (faulty, 1))
    threads = torch.get_num_threads()
    try:
        assert fuzzer.main(["--calls", "60", "--op", "faulty", "--seed", "3"]) == 1
        printed = capfd.readouterr().out
        command = re.search(r"python -m fuzz.ops (.*)", printed).group(1)
        assert fuzzer.main(shlex.split(command)) == 1
        repeated = capfd.readouterr().out
    finally:
        torch.set_num_threads(threads)
    for simple in ("dtype = torch.float32", "x.layout = contiguous", "x.dims = 0"):
        assert simple in repeated
    assert repeated.rstrip().endswith(printed.split("\n\n")[0].rstrip().splitlines()[-1])


# ---- what it found --------------------------------------------------------------------------------------------------


@all_dtypes
def test_attention_of_scale_zero(dtype, device):
    """Every key is weighted alike. oneDNN leaves a product with a factor of 0 unwritten."""
    op = getattr(ops, "attention_probabilities", ops.attention)
    qkv = randn(2, 63, 3 * 120, dtype=dtype, device=device)
    junk = torch.full((2, 5, 63, 63), float("nan"), dtype=dtype, device=device)
    del junk  # what the allocator hands out next
    out, probabilities = op(qkv, 5, 0.0)
    counts = torch.arange(1, 64, dtype=torch.float64, device=device)
    expected = (torch.ones(63, 63, device=device).tril() / counts[:, None]).expand(2, 5, 63, 63)
    torch.testing.assert_close(probabilities, expected.to(dtype))
    means = double(qkv[..., 240:]).cumsum(1) / counts[:, None]
    torch.testing.assert_close(out.double(), means, rtol=0, atol=4 * torch.finfo(dtype).eps)
