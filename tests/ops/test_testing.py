"""Tests that ``gptkernels.testing.gradcheck_ops`` and ``gptkernels check`` check every operator and find faults."""

import dataclasses
import json

import pytest
import torch

import gptkernels
from gptkernels.testing import assert_as_exact_as_torch, checks, gradcheck_ops, op_names
from gptkernels.testing.cases import CASES, ODD, SMALL, Case, Operator
from gptkernels.testing.checks import check_case
from gptkernels.testing.report import CHECKS
from gptkernels.trainer.cli import main

ops = torch.ops.gptkernels


def case_dtypes(case):
    return {str(dtype).removeprefix("torch.") for dtype in case.operator.dtypes}


def test_every_op_passes_gptkernels_check(device, monkeypatch):
    """Only the first variant of each operator is traced by opcheck; test_compile traces all variants in less time."""

    whole = checks.opcheck

    def opcheck(case, device):
        whole(case, device, traced=case.variant == next(iter(case.operator.variants)))

    monkeypatch.setattr(checks, "opcheck", opcheck)
    state = torch.random.get_rng_state()
    report = gradcheck_ops(device=device)
    assert report.passed, str(report)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {(result.case, result.check) for result in report.results} == {
        (case.name, check)
        for case in CASES
        for check in CHECKS
        if (check in case_dtypes(case) or not hasattr(torch, check))
        and ("grad" not in check or case.has_finite_differences())
    }
    for result in report.results:
        assert result.error is None or 0 <= result.error <= 1
    text = str(report)
    assert f"{len(report.results)} checks on {device}" in text
    assert text.endswith("all passed")
    for name in op_names():
        assert f"\n{name}" in text


def test_every_op_has_a_case(device):
    drawn = [case.call(SMALL, case.opcheck_dtype(), device) for case in CASES]
    checked = {op.name().removesuffix(".default") for one in drawn for op, _, _ in one.invocations()}
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("gptkernels::")}
    assert checked == registered, "write an entry in gptkernels/testing/cases whose invocations call the op"


def test_progress_and_choice(device):
    shown = []
    report = gradcheck_ops("gelu", device=device, progress=shown.append)
    assert [results[0].case for results in shown] == ["gelu, tanh", "gelu, none"]
    assert report.passed
    assert report.results == [result for results in shown for result in results]


# GELUs with faults that the checks must find.
def slightly_off(x):
    return ops.gelu(x) * (1 + 3e-2)


def nan_in_one_place(x):
    return torch.cat([ops.gelu(x).flatten()[:-1], x.new_tensor([float("nan")])]).view(x.shape)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return ops.gelu(x)

    @staticmethod
    def backward(ctx, dout):
        (x,) = ctx.saved_tensors
        return ops.gelu_backward(dout, x) * 1.01


def other_bits(x):
    return ops.gelu(x) + torch.randn_like(x) * torch.finfo(x.dtype).smallest_normal * 1e30


@pytest.mark.parametrize(
    ("wrong", "failing", "message"),
    [
        (slightly_off, {"float64", "float32", "bfloat16", "float16"}, "result 0: "),
        (nan_in_one_place, {"float64", "float32", "bfloat16", "float16", "gradcheck"}, "1 wrong, ours is nan"),
        (WrongGradient.apply, {"float64", "float32", "gradcheck"}, "result 1"),
        (other_bits, {"float32"}, "the same call gave other bits"),
    ],
)
def test_wrong_operators_are_found(wrong, failing, message, device, monkeypatch):
    monkeypatch.setattr("gptkernels.testing.checks.TRIALS", (1, 3))
    case = next(case for case in CASES if case.name == "gelu, tanh")

    def draw(draw):
        return dataclasses.replace(case.operator.draw(draw), ours=wrong, invocations=list)

    broken = dataclasses.replace(case.operator, name="broken", draw=draw)
    results = list(check_case(Case(broken, "tanh"), device))
    failed = {result.check for result in results if not result.passed}
    assert failing <= failed
    assert any(message in result.message for result in results)


def test_failure_sets_the_exit_status(monkeypatch, capsys):
    def draw(draw):
        raise RuntimeError("broken on purpose")

    wrong = Operator("gelu", draw, variants={"tanh": {}})
    monkeypatch.setattr("gptkernels.testing.CASES", [Case(wrong, "tanh")])
    assert main(["check", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out
    assert "gelu, tanh, bfloat16: RuntimeError: broken on purpose" in out
    assert "7 checks on cpu in 0 s: 7 FAILED" in out


def test_gptkernels_check_prints_a_table_or_json(device, capsys):
    assert main(["check", "--device", str(device), "--op", "softmax", "--op", "global_norm"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("A number is our largest error as a fraction of the allowed error")
    assert out.splitlines()[1].split() == ["op", *CHECKS]
    assert "12 checks" in out
    assert main(["check", "--device", str(device), "--op", "softmax", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert [result["check"] for result in found["results"]] == list(CHECKS)


def test_unknown_operators_and_devices_are_errors(capsys):
    assert main(["check", "--op", "abacus"]) == 2
    assert "there is no op 'abacus'; there are gelu, " in capsys.readouterr().err
    assert main(["check", "--device", "abacus"]) == 2
    assert "device is 'abacus'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="there is no op 'abacus'"):
        gradcheck_ops(["gelu", "abacus"])


def test_cuda_without_kernels_is_an_error(monkeypatch):
    monkeypatch.setattr("gptkernels._library.without_cuda_because", "there is a reason")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ValueError, match="no CUDA kernels are loaded: there is a reason"):
        gradcheck_ops(device="cuda")


def test_exactness_rule_is_public():
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert_as_exact_as_torch(exact.float(), exact.float(), exact)
    with pytest.raises(AssertionError, match=r"out: 1 wrong, ours is 1.5 at \(0,\)"):
        gptkernels.testing.assert_as_exact_as_torch(torch.tensor([1.5, 2.0]), exact.float(), exact)


def test_odd_sizes_are_no_multiples_of_8():
    for case in CASES:
        args = case.call(ODD, torch.bfloat16).args.values()
        dim = 0 if case.name.startswith("fp8") else -1  # feature sizes of float8 layers are multiples of 16
        assert any(t.shape[dim] % 8 for t in args if t is not None and t.dim()), case.name
