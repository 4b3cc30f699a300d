"""Tests of whole models with torch.compile, torch.export and pipelining. ops/test_standard.py compiles each op."""

import copy
import logging
import subprocess
import sys

import pytest
import torch
from torch.distributed.pipelining import SplitPoint, pipeline

import small_models
from gptkernels.rules import _inductor


def make_model_and_tokens(device, n_layer=2, **changes):
    model = small_models.make_model(device, noise=0, n_layer=n_layer, vocab_size=64, **changes)
    return model, torch.randint(64, (2, 16), device=device)


def test_inductor_compiles_a_deep_model(device, monkeypatch, caplog):
    """If an op is not registered with Inductor, Inductor formats the expressions of the op's arguments, whose length is
    exponential in the number of layers. From torch 2.13 on, it formats them only if its log is on, so the test turns
    the log on. If an expression is formatted, the test fails.
    """
    import torch._inductor.exc

    def fail(*_):
        raise AssertionError("Inductor formats the arguments of an op")

    monkeypatch.setattr(torch._inductor.exc.OperatorIssue, "operator_str", staticmethod(fail))
    torch._dynamo.reset()
    model, tokens = make_model_and_tokens(device, 12)
    with caplog.at_level(logging.INFO, logger="torch._inductor.graph"), torch.no_grad():
        losses = [call(tokens, tokens)[1] for call in (torch.compile(model, fullgraph=True), model)]
    assert "implicit fallback" not in caplog.text
    torch.testing.assert_close(*losses)


def test_inductor_has_a_rule_for_every_op(device):
    from torch._inductor.lowering import lowerings

    _inductor.register_fallbacks()
    ops = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("gptkernels::")]
    assert len(ops) > 20
    for name in ops:
        assert getattr(torch.ops.gptkernels, name.removeprefix("gptkernels::")).default in lowerings, name


def test_inductor_trains_with_dropout(device):
    torch._dynamo.reset()
    model, tokens = make_model_and_tokens(device, dropout=0.5)
    compiled = torch.compile(model, fullgraph=True)
    losses = [compiled(tokens, tokens)[1] for _ in range(2)]
    assert losses[0] != losses[1]
    torch._dynamo.reset()
    results = []
    for call in (torch.compile(model, fullgraph=True, backend="aot_eager"), model):
        torch.manual_seed(5)
        _, loss = call(tokens, tokens)
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(*results)
    model.eval()
    torch.testing.assert_close(compiled(tokens, tokens)[1], model(tokens, tokens)[1])


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_export_supports_any_batch_and_length(strict, device):
    model, tokens = make_model_and_tokens(device)
    model.eval()
    sizes = {0: torch.export.Dim("B", min=2, max=64), 1: torch.export.Dim("T", min=2, max=16)}
    program = torch.export.export(model, (tokens, tokens), dynamic_shapes=(sizes, sizes), strict=strict)
    program = program.run_decompositions()
    called = {str(node.target) for node in program.graph.nodes if "gptkernels" in str(node.target)}
    assert {"gptkernels.linear.default", "gptkernels.mlp.default", "gptkernels.residual_layernorm.default"} <= called
    for shape in [(2, 16), (5, 7), (3, 2)]:
        other = torch.randint(64, shape, device=device)
        torch.testing.assert_close(program.module()(other, other), model(other, other))


def test_importing_adds_no_slow_imports():
    slow = "torch._dynamo torch._inductor torch.distributed.tensor transformers rich matplotlib tokenizers tiktoken"
    code = (
        "import sys, torch; before = {*sys.modules}; import gptkernels; "
        f"print({{*sys.modules}} - before & {{*{slow.split()}}})"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("stages", [2, 3])
def test_pipelining(stages, loss, device):
    """The first and the last stage both have the tied weight."""
    model, _ = make_model_and_tokens(device, 4)
    inputs = torch.randint(64, (2 if loss else 1, 2, 8), device=device).unbind()
    expected = model(*inputs)
    splits = {f"transformer.h.{i}": SplitPoint.BEGINNING for i in range(1, stages)}
    pipe = pipeline(copy.deepcopy(model), inputs, split_spec=splits)
    assert pipe.num_stages == stages
    torch.testing.assert_close(tuple(pipe(*inputs)), expected)
    parts = [dict(pipe.get_stage_module(i).named_parameters()) for i in range(stages)]
    assert all(f"transformer.h.{i}.mlp.c_fc.weight" in part for i, part in enumerate(parts))
    assert torch.equal(parts[0]["lm_head.weight"], parts[-1]["lm_head.weight"])
