"""Every op can be captured in a CUDA graph.

It allocates nothing by itself, waits for nothing, and takes no number from the host that a replay would have to know.
"""

import copy

import pytest
import torch
from torch.utils._pytree import tree_leaves

from gptkernels import functional, nn
from gptkernels.models import GPT2, GPT2Config
from gptkernels.testing.cases import CASES, ODD, ORDINARY, Draw

ops = torch.ops.gptkernels


def cases(device):
    """Each op by name: what it reads, and a call."""

    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    x, dout = randn(300, 768), randn(300, 768)
    weight, bias = randn(768), randn(768)
    _, mean, rstd = ops.layernorm(x, weight, bias)
    yield "layernorm", x, lambda: ops.layernorm(x, weight, bias)
    yield "layernorm_backward", dout, lambda: ops.layernorm_backward(dout, x, weight, mean, rstd, [True] * 3)
    yield "residual_layernorm", x, lambda: ops.residual_layernorm(x, dout, weight, bias)
    seed = torch.tensor(5, device=device)
    yield (
        "residual_layernorm with dropout",
        x,
        lambda: ops.residual_layernorm(x, dout, weight, bias, 1e-5, None, 0.5, seed, seed),
    )
    yield "dropout", x, lambda: ops.dropout(x, 0.5, seed, seed)
    yield "gelu", x, lambda: ops.gelu(x)
    yield "softmax", x, lambda: ops.softmax(x)
    yield "softmax_backward", dout, lambda: ops.softmax_backward(dout, x)
    wide = randn(5, 120_000)
    yield "softmax of wide rows", wide, lambda: ops.softmax(wide)
    scores = randn(3, 64, 64)
    yield "causal_softmax", scores, lambda: ops.causal_softmax(scores, 0.5)
    logits, targets = randn(64, 50304), torch.randint(50257, (64,), device=device)
    yield "fused_classifier", logits, lambda: ops.fused_classifier(logits, targets, 50257)
    tokens, wte, wpe = torch.randint(100, (4, 50), device=device), randn(100, 768), randn(64, 768)
    rows = randn(4, 50, 768)
    yield "encoder", wte, lambda: ops.encoder(tokens, wte, wpe)
    yield "encoder_backward", rows, lambda: ops.encoder_backward(rows, tokens, 100, 64)


def test_replays_what_was_captured(device):
    if device.type != "cuda":
        pytest.skip("CUDA only")
    for name, read, call in cases(device):
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        for _ in range(2):
            read.mul_(0.5)
            graph.replay()
            expected = call()
            for a, b in zip(*((t if isinstance(t, tuple) else (t,)) for t in (captured, expected)), strict=True):
                assert torch.equal(a, b), name


@pytest.mark.parametrize("size", [ODD, ORDINARY], ids=["odd", "ordinary"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_op_and_its_derivative_is_captured(case, size, device):
    """The calls that ``gptkernels check`` makes: a replay on other values gives the bits of an eager call on them."""
    if device.type != "cuda":
        pytest.skip("CUDA only")
    for op, args, kwargs in case.draw(Draw(size, torch.bfloat16, device, 1)).calls:
        # Integers too: sample_ appends to its sequences, and would come to their end.
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.is_cuda]
        values = [t.clone() for t in given]

        def reset(scale, given=given, values=values):
            for t, value in zip(given, values, strict=True):
                scaled = t.is_floating_point() and t.element_size() > 1  # torch does not multiply float8 numbers
                t.copy_(value * scale if scaled else value)

        op(*args, **kwargs)  # a library that it calls may make a workspace the first time
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
    """The model's loss of tokens."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(tokens, tokens.roll(-1, 1), return_logits=False)[1]


def graphed_modules(device):
    """Each module by name, with an input."""

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
    """Forward and backward of a module as two graphs give eager's results, for other inputs than they were made of."""
    if device.type != "cuda":
        pytest.skip("CUDA only")
    for name, module, x in graphed_modules(device):
        graphed = copy.deepcopy(module)
        graphed(x).sum().backward()  # nothing keeps this run's graph alive, which the capture could not stand
        graphed.zero_grad()
        graphed = torch.cuda.make_graphed_callables(graphed, (x,))
        for _ in range(2):
            x = x.detach().flip(0).contiguous().requires_grad_(x.requires_grad)
            results = []
            for m in (graphed, module):
                out = m(x)
                inputs = [*([x] if x.requires_grad else []), *m.parameters()]
                results.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
            for a, b in zip(*results, strict=True):
                assert torch.equal(a, b), name


def dropout_modules(device):
    config = GPT2Config(n_layer=2, n_embd=128, n_head=2, vocab_size=500, block_size=64, dropout=0.3)
    model = GPT2(config).to(device, torch.bfloat16)
    x = torch.randn(2, 64, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    yield "Dropout", nn.Dropout(0.3), x
    yield "Block", model.transformer.h[0], x
    yield "Transformer", model.transformer, torch.randint(500, (2, 64), device=device)


def test_make_graphed_callables_with_dropout(device):
    """Each replay draws anew, for both directions alike: from a seed it gives what eager gives from that seed."""
    if device.type != "cuda":
        pytest.skip("CUDA only")
    for name, module, x in dropout_modules(device):
        graphed = torch.cuda.make_graphed_callables(copy.deepcopy(module), (x,))
        # The captures have set the generator's numbers on a stream for which torch's replays do not wait.
        torch.cuda.synchronize()

        def run(m, seed, x=x):
            if seed is not None:
                torch.manual_seed(seed)
            out = m(x)
            inputs = [*([x] if x.requires_grad else []), *m.parameters()]
            return [t.clone() for t in (out, *torch.autograd.grad(out, inputs, torch.ones_like(out)))]

        for seed in (1, 2):
            for a, b in zip(run(graphed, seed), run(module, seed), strict=True):
                assert torch.equal(a, b), name
        first, second = (run(graphed, None)[0] for _ in range(2))
        assert not torch.equal(first, second), name


def test_replays_draw_other_masks(device):
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
