"""Whole models run through torch.compile and torch.export; tests/ops/test_standard.py compiles each op."""

import copy
import logging

import pytest
import torch
from torch.distributed.pipelining import SplitPoint, pipeline

from gptkernels.models import GPT2, GPT2Config
from gptkernels.rules import _inductor


def make_model(layers, device):
    config = GPT2Config(n_layer=layers, n_embd=32, n_head=2, vocab_size=64, padded_vocab_size=64, block_size=16)
    return GPT2(config, device=device)


def test_inductor_compiles_a_deep_model(device, monkeypatch, caplog):
    """Inductor has a rule for every op of GPT-2's 12 layers.

    For an op without a rule it formats the expressions of the arguments, which takes time exponential in the depth: up
    to torch 2.12 always, later only if its log is on. The log is on here, and the test fails if anything is formatted.
    """
    import torch._inductor.exc

    def never(*_):
        raise AssertionError("Inductor formats the arguments of an op")

    monkeypatch.setattr(torch._inductor.exc.OperatorIssue, "operator_str", staticmethod(never))
    torch._dynamo.reset()
    model, tokens = make_model(12, device), torch.randint(64, (2, 16), device=device)
    compiled = torch.compile(model, fullgraph=True)
    with caplog.at_level(logging.INFO, logger="torch._inductor.graph"), torch.no_grad():
        _, loss = compiled(tokens, tokens)
    assert "implicit fallback" not in caplog.text
    with torch.no_grad():
        torch.testing.assert_close(loss, model(tokens, tokens)[1])


def test_inductor_has_a_rule_for_every_op(device):
    import torch._inductor.lowering as lowering

    _inductor.register_fallbacks()
    ops = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("gptkernels::")]
    assert len(ops) > 20
    for name in ops:
        assert getattr(torch.ops.gptkernels, name.removeprefix("gptkernels::")).default in lowering.lowerings, name


def test_inductor_trains_with_dropout(device):
    """Each step draws another mask, which its backward uses, without a graph break; evaluation draws none."""
    torch._dynamo.reset()
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, block_size=16, dropout=0.5)
    model, tokens = GPT2(config, device=device), torch.randint(64, (2, 16), device=device)
    compiled = torch.compile(model, fullgraph=True)
    losses = [compiled(tokens, tokens)[1] for _ in range(2)]
    assert losses[0] != losses[1]
    torch._dynamo.reset()
    eager = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for m in (eager, model):
        torch.manual_seed(5)
        _, loss = m(tokens, tokens)
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    model.eval()
    torch.testing.assert_close(compiled(tokens, tokens)[1], model(tokens, tokens)[1])


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_export_supports_any_batch_and_length(strict, device):
    model, tokens = make_model(2, device).eval(), torch.randint(64, (2, 16), device=device)
    sizes = {0: torch.export.Dim("B", min=2, max=64), 1: torch.export.Dim("T", min=2, max=16)}
    program = torch.export.export(model, (tokens, tokens), dynamic_shapes=(sizes, sizes), strict=strict)
    program = program.run_decompositions()
    called = {str(node.target) for node in program.graph.nodes if "gptkernels" in str(node.target)}
    assert {"gptkernels.linear.default", "gptkernels.mlp.default", "gptkernels.residual_layernorm.default"} <= called
    for shape in [(2, 16), (5, 7), (3, 2)]:
        other = torch.randint(64, shape, device=device)
        for a, b in zip(program.module()(other, other), model(other, other), strict=True):
            torch.testing.assert_close(a, b)


def test_importing_does_not_import_inductor():
    import subprocess
    import sys

    code = "import gptkernels, sys; sys.exit('torch._inductor.lowering' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("stages", [2, 3])
def test_pipelining(stages, loss, device):
    """Stages compute what the model computes; the first and the last both hold the tied weight."""
    model = make_model(4, device)
    inputs = torch.randint(64, (2 if loss else 1, 2, 8), device=device).unbind()
    expected = model(*inputs)
    splits = {f"transformer.h.{i}": SplitPoint.BEGINNING for i in range(1, stages)}
    pipe = pipeline(copy.deepcopy(model), inputs, split_spec=splits)
    assert pipe.num_stages == stages
    for found, wanted in zip(pipe(*inputs), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    parts = [dict(pipe.get_stage_module(i).named_parameters()) for i in range(stages)]
    assert all(f"transformer.h.{i}.mlp.c_fc.weight" in part for i, part in enumerate(parts))
    assert torch.equal(parts[0]["lm_head.weight"], parts[-1]["lm_head.weight"])
