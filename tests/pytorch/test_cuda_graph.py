"""Tests that every op can be captured in a CUDA graph.

An op must allocate no memory outside torch's allocator and must not synchronise, and the host must not read a tensor's
value, because a replay would use the value read in the capture.
"""

import copy

import pytest
import torch
from torch.utils._pytree import tree_leaves

from gptkernels import functional, nn
from gptkernels.models import GPT2, GPT2Config
from gptkernels.testing.cases import CASES, ODD, ORDINARY

# Rows so wide that a cluster of thread blocks computes one row.
WIDE = {
    "softmax": {"x.rows": 5, "width": 120_000},
    "fused_classifier": {"rows.rows": 64, "width": 50_304, "vocab_size": 50_257},
}


@pytest.mark.parametrize("size", ["odd", "ordinary", "wide"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_op_and_its_derivative_is_captured(case, size, device):
    if device.type != "cuda":
        pytest.skip("CUDA only")
    if size == "wide" and case.name not in WIDE:
        pytest.skip("no row is so wide that a cluster computes it")
    choices = WIDE[case.name] if size == "wide" else {}
    call = case.call(ODD if size == "odd" else ORDINARY, torch.bfloat16, device, 1, **choices)
    for op, args, kwargs in call.invocations():
        # Integers are reset, too. Otherwise sample_, which appends to sequences, would reach the end of a sequence.
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.is_cuda]
        values = [t.clone() for t in given]

        def reset(scale, given=given, values=values):
            for t, value in zip(given, values, strict=True):
                scaled = t.is_floating_point() and t.element_size() > 1  # torch cannot multiply float8 numbers
                t.copy_(value * scale if scaled else value)

        op(*args, **kwargs)  # so that cuBLAS allocates its workspace before the capture
        reset(1.0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = op(*args, **kwargs)
        for scale in (1.0, 0.5):
            reset(scale)
            graph.replay()
            found = [t.clone() for t in [*tree_leaves(captured), *given] if t is not None]
            reset(scale)
            expected = [t for t in [*tree_leaves(op(*args, **kwargs)), *given] if t is not None]
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(*(t.view(torch.uint8) if t.element_size() == 1 else t for t in (a, b))), op.name()


class Loss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(tokens, tokens.roll(-1, 1), return_logits=False)[1]


def make_modules(device):
    def make(module):
        return module.to(device, torch.bfloat16)

    x = torch.randn(2, 64, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.randint(512, (2, 64), device=device)
    config = GPT2Config(n_layer=2, n_embd=128, n_head=2, vocab_size=500, block_size=64)
    yield "LayerNorm", make(nn.LayerNorm(128)), x
    yield "GELU", make(nn.GELU()), x
    yield "Softmax", make(nn.Softmax(-1)), x
    yield "Linear", make(nn.Linear(128, 256)), x
    yield "MLP", make(nn.MLP(128)), x
    yield "CausalSelfAttention", make(nn.CausalSelfAttention(128, 2)), x
    yield "Embedding", make(nn.Embedding(512, 128)), tokens
    yield "Transformer", make(GPT2(config).transformer), tokens.clamp(max=499)
    yield "loss", make(Loss(GPT2(config))), tokens.clamp(max=499)


def test_make_graphed_callables(device):
    if device.type != "cuda":
        pytest.skip("CUDA only")
    for name, module, x in make_modules(device):
        graphed = copy.deepcopy(module)
        graphed(x).sum().backward()  # a warm-up, whose autograd graph is freed before the capture
        graphed.zero_grad()
        graphed = torch.cuda.make_graphed_callables(graphed, (x,))
        for _ in range(2):
            x = x.detach().flip(0).contiguous().requires_grad_(x.requires_grad)
            results = []
            for m in (graphed, module):
                out = m(x)
                inputs = [*([x] if x.requires_grad else []), *m.parameters()]
                results.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
            assert all(map(torch.equal, *results)), name


def make_dropout_modules(device):
    config = GPT2Config(n_layer=2, n_embd=128, n_head=2, vocab_size=500, block_size=64, dropout=0.3)
    model = GPT2(config).to(device, torch.bfloat16)
    x = torch.randn(2, 64, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    yield "Dropout", nn.Dropout(0.3), x
    yield "Block", model.transformer.h[0], x
    yield "Transformer", model.transformer, torch.randint(500, (2, 64), device=device)


def test_make_graphed_callables_with_dropout(device):
    if device.type != "cuda":
        pytest.skip("CUDA only")
    for name, module, x in make_dropout_modules(device):
        graphed = torch.cuda.make_graphed_callables(copy.deepcopy(module), (x,))
        # The captures set the generator's state on a stream that torch's replays do not wait for.
        torch.cuda.synchronize()

        def run(m, seed, x=x):
            if seed is not None:
                torch.manual_seed(seed)
            out = m(x)
            inputs = [*([x] if x.requires_grad else []), *m.parameters()]
            return [t.clone() for t in (out, *torch.autograd.grad(out, inputs, torch.ones_like(out)))]

        for seed in (1, 2):
            assert all(map(torch.equal, run(graphed, seed), run(module, seed))), name
        first, second = (run(graphed, None)[0] for _ in range(2))
        assert not torch.equal(first, second), name


def test_each_replay_draws_another_mask(device):
    if device.type != "cuda":
        pytest.skip("CUDA only")
    x = torch.ones(10_000, device=device)
    functional.dropout(x, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = functional.dropout(x, 0.5)
        total = functional.residual_layer_norm(x[None], x[None], (10_000,), dropout_p=0.5)[1]
    masks = []
    for _ in range(4):
        graph.replay()
        masks += [out != 0, total[0] != 1]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert abs((a == b).float().mean().item() - 0.5) < 0.03
