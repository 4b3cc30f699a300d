"""Tests that a short campaign of the operator fuzzer finds nothing, and that the fuzzer finds planted faults."""

import dataclasses
import math
import os
import re
import shlex
import time
from functools import partial
from multiprocessing import forkserver

import pytest
import torch

import gptkernels  # noqa: F401
import processes  # noqa: F401
from fuzz import ops as fuzzer
from gptkernels.testing.cases import OPERATORS, Operator
from gptkernels.testing.draw import Draw
from helpers import all_dtypes, double, randn

ops = torch.ops.gptkernels


def run_main(*arguments):
    threads = torch.get_num_threads()
    try:
        return fuzzer.main([*arguments])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("size", "calls"), [("small", 40), ("real", 3)])
@pytest.mark.parametrize("op", sorted(fuzzer.list_operators()))
def test_a_short_campaign_finds_nothing(op, size, calls, device, capfd):
    status = run_main("--calls", str(calls), "--op", op, "--set", f"size={size}", "--device", device.type)
    assert status == 0, capfd.readouterr().out


# Calls with these choices have work for one thread block more than the GPU has SMs.
ONE_MORE = {"size": "real", "broken": "False"} | {
    f"{name}.{choice}": "1" for name in ("x", "a", "rows", "lead", "queries") for choice in ("tiles each", "more tiles")
}
ATTENTIONS = [
    {"head": head, "dtype": f"torch.{dtype}", "mask": mask, "heads of a key head": "1"}
    for head in ("40", "64", "96", "128", "256")
    for dtype in ("bfloat16", "float32")
    for mask in ("none", "bool", "added")
]


@pytest.mark.parametrize(
    ("op", "choices"),
    [(op, {}) for op in sorted(fuzzer.list_operators())]
    + [("scaled_dot_product_attention", choices) for choices in ATTENTIONS],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()) or "drawn",
)
def test_one_more_tile_than_sms(op, choices, device):
    """``make sanitize`` runs this test under compute-sanitizer."""
    for index in range(2):
        fuzzer.run(Draw(17, index, device, ONE_MORE | choices), op)


@pytest.mark.parametrize("op", ["attention", "scaled_dot_product_attention"])
def test_attention_with_the_formula_by_sequence(op, device, monkeypatch):
    monkeypatch.setattr("gptkernels.testing.cases.attention.MOST_SCORES", 1)
    for index in range(20):
        fuzzer.run(Draw(5, index, device, {"broken": "False"}), op)


def test_seed_and_index_determine_a_call():
    for index in range(30):
        first, second = Draw(5, index), Draw(5, index)
        for draw in (first, second):
            fuzzer.run(draw)
        assert first.drawn == second.drawn
        assert first.call == second.call


def test_a_fault_is_found_and_can_be_repeated(monkeypatch, capfd):
    """The softmax of this test returns 0 for the last element of rows that are wider than 20."""

    def faulty(draw):
        call = OPERATORS["softmax"].draw(draw)
        right = call.ours

        def wrong(x):
            out = right(x).clone()
            if out.dim() and out.shape[-1] > 20:
                out[..., -1] = 0
            return out

        return dataclasses.replace(call, ours=wrong)

    monkeypatch.setitem(OPERATORS, "faulty", Operator("faulty", faulty))
    monkeypatch.setattr(fuzzer, "TRIALS", (1, 10))  # An element that should not be 0 needs no more trials.
    assert run_main("--calls", "60", "--op", "faulty", "--seed", "3", "--failures", "1") == 1
    printed = capfd.readouterr().out
    command = re.search(r"python -m fuzz.ops (.*)", printed).group(1)
    assert run_main(*shlex.split(command)) == 1
    repeated = capfd.readouterr().out
    for simple in ("dtype = torch.float32", "x.layout = contiguous"):
        assert simple in repeated
    assert repeated.rstrip().endswith(printed.split("\n\n")[0].rstrip().splitlines()[-1])


# Planted faults of a few ulps. The rule must distinguish such faults from rounding errors that happen to be large.


def make_off_by(units):
    def change(out):
        if isinstance(out, tuple | list):
            return type(out)(change(t) for t in out)
        return out * (1 + units * torch.finfo(out.dtype).eps)

    return change


class DoutOffBy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, units):
        ctx.units = units
        return out.clone()

    @staticmethod
    def backward(ctx, dout):
        return make_off_by(ctx.units)(dout), None


def count_calls_until_found(change, op, device, most=200, **replaced):
    def faulty(draw):
        call = OPERATORS[op].draw(draw)
        return dataclasses.replace(call, ours=lambda *args: change(call.ours(*args)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPERATORS, "faulty", Operator("faulty", faulty))
        for index in range(most):
            try:
                fuzzer.run(Draw(3, index, device, {"size": "small", **replaced}), "faulty")
            except AssertionError:
                return index + 1
    return math.inf


@pytest.mark.parametrize("op", sorted(fuzzer.list_operators()))
def test_a_fault_of_a_few_ulps_is_found(op, device):
    """Only outputs are checked, because the trials for gradients would take most of the time."""
    assert count_calls_until_found(make_off_by(4), op, device, gradients="none") <= 20


@pytest.mark.parametrize("op", ["gelu", "layernorm", "linear", "softmax"])
def test_a_gradient_off_by_a_few_ulps_is_found(op, device):
    assert count_calls_until_found(lambda out: DoutOffBy.apply(out, 6), op, device) <= 20


def test_a_missing_row_is_found_if_torch_misses_it_too(device):
    """In our linear and in torch's, the gradient of the weight omits the last row of the input."""

    def faulty(draw):
        call = OPERATORS["linear"].draw(draw)

        def without_last_row(x, weight, bias):
            rows = x.reshape(-1, x.shape[-1])
            parts = call.torchs(rows[:-1], weight, bias), call.torchs(rows[-1:], weight.detach(), bias)
            return torch.cat(parts).view(*x.shape[:-1], -1)

        return dataclasses.replace(call, ours=without_last_row, torchs=without_last_row)

    replaced = {"size": "real", "dtype": "torch.bfloat16", "x.dims": "1", "gradients": "all", "broken": "False"}
    # If the input had many more rows, a missing row would change the sum by less than bfloat16's rounding.
    replaced |= {"x.rows of a tile": "4"}
    replaced |= {"x.values": "normal", "weight.values": "normal", "dout0.values": "normal", "x.layout": "contiguous"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPERATORS, "faulty", Operator("faulty", faulty))
        for index in range(5):
            draw = Draw(0, index, device, replaced)
            with pytest.raises(AssertionError, match="dweight: Freivalds"):
                fuzzer.run(draw, "faulty")


def test_errors_of_several_trials():
    one = torch.tensor([1.0])
    errors = fuzzer.Errors()
    errors.add(one, one, one.double())
    assert errors.worst_of_torchs() == errors.rounding > 0  # an error of 0 counts as one rounding
    errors.add(one * 4, one * 4, one.double() * 4 + 1e-6)  # four times as large, so that the error counts a quarter
    assert errors.worst_of_torchs() == pytest.approx(0.25e-6, rel=1e-5)
    errors.add(one, one, one.double() - 1e-6)
    assert errors.worst_of_torchs() == pytest.approx(1e-6, rel=1e-5)
    errors.hold_on_the_whole("out")
    for _ in range(3):
        errors.add(one + 3e-6, one, one.double())  # only our result has an error
    with pytest.raises(AssertionError, match="in 6 trials"):
        errors.hold_on_the_whole("out")

    errors = fuzzer.Errors()
    errors.add(one * 0, one * 0, one.double() * 0)
    errors.add(one * 1e-7, one * 1e-7, one.double() * 1e-17)  # the formula's terms cancel, except for rounding errors
    # The first result is 0. A trial with a larger result is scaled down to it, so that its error counts as 0.
    errors.add(one, one * 1.1, one.double())
    assert errors.worst_of_torchs() == pytest.approx(4e-7)  # If terms cancel, torch's error counts four times.

    errors = fuzzer.Errors(noise=1e-6, luck=2.0)
    errors.add(one + 1e-6, one + 3e-7, one.double())
    assert errors.worst_of_torchs() == pytest.approx(2 * (one + 3e-7 - 1).item())
    errors.add(one * 0, one * 0, one.double() * 0)
    assert errors.worst_of_torchs() == 1e-6


def test_trials_keep_what_is_special_about_arguments(device):
    """Equal elements and equal rows stay equal. Zeros, infinities and integers do not change. Absent arguments stay
    absent.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, generator=generator)
    args = {
        "constant": torch.full((3, 5), 2.5),
        "zeros": torch.zeros(4),
        "rows": x.expand(6, 7),
        "special": torch.tensor([[1.0, math.inf], [2.0, 3.0]]),
        "integers": torch.arange(5),
        "absent": None,
    }
    args = {name: t if t is None else t.to(device) for name, t in args.items()}

    def nothing(*args):
        return args[0] * 1

    call = fuzzer.Call("", nothing, nothing, nothing, args)
    first = fuzzer.Trial(call, [], list(args.values()), [None], [], [])
    other = dict(zip(args, fuzzer.make_trial(Draw(1, 0, device), first, 1).args, strict=True))
    assert other["constant"].unique().numel() == 1
    assert 0.875 * 2.5 <= other["constant"][0, 0].item() <= 2.5
    assert not other["zeros"].any()
    assert torch.equal(other["rows"], other["rows"][:1].expand(6, 7))
    assert not torch.equal(other["rows"][0], args["rows"][0])
    assert other["special"].isinf().sum() == 1
    assert torch.equal(other["integers"], args["integers"])
    assert other["absent"] is None


def test_a_lost_device_ends_the_campaign_with_a_report(monkeypatch, capfd):
    def lose(arguments, indices, counts):
        return [(indices[0], Draw(0, indices[0]), torch.AcceleratorError("CUDA error: misaligned address"))]

    monkeypatch.setattr(fuzzer, "find_failures", lose)
    monkeypatch.setattr(Draw, "op", "gelu", raising=False)
    monkeypatch.setattr(Draw, "call", "gelu(x)", raising=False)
    assert run_main("--calls", "1000", "--device", "cuda") == 1
    assert "calls 0 to 31: CUDA error: misaligned address; --jobs 1 finds out which one" in capfd.readouterr().out


def work_with_faults(*args):
    """Run ``fuzz.ops.work`` with a gelu that hangs in call 3 and ends the process in call 40."""
    draw_gelu = OPERATORS["gelu"].draw

    def faulty(draw):
        call = draw_gelu(draw)
        faults = {"0/3": partial(time.sleep, 1000), "0/40": partial(os._exit, 5)}
        return dataclasses.replace(call, ours=lambda x: (faults.get(draw.key, int)(), call.ours(x))[1])

    OPERATORS["gelu"] = Operator("gelu", faulty)
    RIGHT_WORK(*args)


RIGHT_WORK = fuzzer.work


@pytest.mark.xdist_group("distributed")
def test_a_call_that_hangs_or_ends_its_process_is_reported(monkeypatch, capfd):
    # The fork server keeps the list of modules with which it starts. The fuzzer would set a list of torch alone.
    forkserver.ensure_running()
    monkeypatch.setattr(fuzzer, "work", work_with_faults)
    options = "--calls 70 --op gelu --jobs 1 --patience 3 --set broken=False"
    assert fuzzer.main(options.split()) == 1
    printed = capfd.readouterr().out
    command = r"python -m fuzz.ops --seed 0 --index {} --op gelu --set broken=False\n  gelu\(x, .*\n  {}"
    assert re.search(command.format(3, "no progress for 3 s, after it entered the stage 'ours'"), printed)
    assert re.search(command.format(40, "the process ended with status 5"), printed)
    # On a busy machine, other calls may also take longer than the patience.
    assert int(re.search(r"fuzz.ops: \d+ calls, (\d+) failures", printed).group(1)) >= 2


def test_the_campaign_ends_after_its_time(capfd):
    assert run_main("--calls", "1000000", "--seconds", "0.5", "--op", "gelu") == 0
    made = int(re.search(r"fuzz.ops: (\d+) calls", capfd.readouterr().out).group(1))
    assert 1 <= made < 1_000_000


# ---- faults that the fuzzer found ------------------------------------------------------------------------------------


@all_dtypes
def test_attention_of_scale_zero(dtype, device):
    """If a matmul is multiplied by 0, oneDNN does not write the result. NaN in the result's memory must not remain."""
    op = ops.attention_probabilities
    qkv = randn(2, 63, 3 * 120, dtype=dtype, device=device)
    junk = torch.full((2, 5, 63, 63), float("nan"), dtype=dtype, device=device)
    del junk  # The allocator uses this memory for the next tensor of this size.
    out, probabilities = op(qkv, 5, 0.0)
    counts = torch.arange(1, 64, dtype=torch.float64, device=device)
    expected = (torch.ones(63, 63, device=device).tril() / counts[:, None]).expand(2, 5, 63, 63)
    torch.testing.assert_close(probabilities, expected.to(dtype))
    means = double(qkv[..., 240:]).cumsum(1) / counts[:, None]
    torch.testing.assert_close(out.double(), means, rtol=0, atol=4 * torch.finfo(dtype).eps)
