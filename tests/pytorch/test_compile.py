"""Whole models through torch.compile and torch.export. (Each op's own file compiles the op.)"""

import copy
import logging

import pytest
import torch
from torch.distributed.pipelining import SplitPoint, pipeline

from gptkernels.models import GPT2, GPT2Config
from gptkernels.rules import _inductor


def model_of(layers, device):
    config = GPT2Config(n_layer=layers, n_embd=32, n_head=2, vocab_size=64, padded_vocab_size=64, block_size=16)
    return GPT2(config, device=device)


def test_inductor_takes_a_deep_model(device, monkeypatch, caplog):
    """GPT-2's 12 layers. An op that Inductor has no rule for it formats with all that its arguments came from.

    Up to torch 2.12 that is done at once, and takes time exponential in the depth; later only for a log that is on. It
    is on here, and the formatting, were it done, fails the test instead of going on for days.
    """
    import torch._inductor.exc

    def never(*_):
        raise AssertionError("Inductor formats the arguments of an op")

    monkeypatch.setattr(torch._inductor.exc.OperatorIssue, "operator_str", staticmethod(never))
    torch._dynamo.reset()
    model, tokens = model_of(12, device), torch.randint(64, (2, 16), device=device)
    compiled = torch.compile(model, fullgraph=True)
    with caplog.at_level(logging.INFO, logger="torch._inductor.graph"), torch.no_grad():
        _, loss = compiled(tokens, tokens)
    assert "implicit fallback" not in caplog.text
    with torch.no_grad():
        torch.testing.assert_close(loss, model(tokens, tokens)[1])


def test_inductor_knows_every_op(device):
    import torch._inductor.lowering as lowering

    _inductor.register_fallbacks()
    ops = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("gptkernels::")]
    assert len(ops) > 20
    for name in ops:
        assert getattr(torch.ops.gptkernels, name.removeprefix("gptkernels::")).default in lowering.lowerings, name


def test_inductor_trains(device):
    """One layer, forward and backward, against eager."""
    torch._dynamo.reset()
    model, tokens = model_of(1, device), torch.randint(64, (2, 16), device=device)
    compiled = torch.compile(model, fullgraph=True)
    parameters = list(model.parameters())
    found, expected = (torch.autograd.grad(m(tokens, tokens)[1], parameters) for m in (compiled, model))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_inductor_trains_with_dropout(device):
    """No graph break; another mask each step, and in evaluation none. The backward is that of the forward's masks."""
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
def test_export_at_any_batch_and_length(strict, device):
    model, tokens = model_of(2, device).eval(), torch.randint(64, (2, 16), device=device)
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
    """Stages compute what the model does; the first and the last have the tied weight."""
    model = model_of(4, device)
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
