"""Tests of ``gptkernels.swap`` on torch.nn's layers and on users' modules, and of its report and errors."""

import contextlib
import copy
import itertools
import logging
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import scaled_dot_product_attention as imported

import gptkernels
import published
from gptkernels import functional
from gptkernels.swapping import Report, head
from gptkernels.swapping.dropout import Draws
from gptkernels.swapping.head import head_and_loss
from helpers import CountCalls, assert_as_exact_as_torch, assert_raises, gradients, raises


class Sub(nn.Linear):
    """A subclass of nn.Linear that changes nothing."""


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def list_left(model):
    return {entry.name: entry.note for entry in model.gptkernels_report.left}


def list_replaced(model):
    return {entry.name for entry in model.gptkernels_report.replaced}


LAYERS = {
    "LayerNorm": (nn.LayerNorm(16), (4, 16)),
    "LayerNorm of two dimensions": (nn.LayerNorm((4, 16), bias=False), (3, 4, 16)),
    "LayerNorm without weights": (nn.LayerNorm(16, elementwise_affine=False), (4, 16)),
    "GELU": (nn.GELU(), (4, 16)),
    "GELU tanh": (nn.GELU("tanh"), (4, 16)),
    "Linear": (nn.Linear(16, 8), (2, 3, 16)),
    "Linear without bias": (nn.Linear(16, 8, bias=False), (16,)),
    "Softmax": (nn.Softmax(1), (2, 5, 3)),
    "a subclass": (Sub(16, 8), (4, 16)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_a_swapped_layer_is_as_exact_as_torch(name, dtype, device):
    layer, shape = LAYERS[name]
    torchs = copy.deepcopy(layer).to(device, dtype)
    ours, exact = gptkernels.swap(copy.deepcopy(torchs)), copy.deepcopy(torchs).double()
    assert list_replaced(ours) == {""}
    x = torch.randn(shape, device=device).to(dtype)
    with profile_cpu() as profile:
        out = ours(x)
    assert any(event.key.startswith("gptkernels::") for event in profile.key_averages())
    assert_as_exact_as_torch(out, torchs(x), exact(x.double()))
    dout = torch.randn_like(out)
    calls = ((ours, dtype), (torchs, dtype), (exact, torch.float64))
    assert_as_exact_as_torch(*(gradients(m, [x.to(d)], dout.to(d))[0] for m, d in calls))


def test_a_swapped_embedding_and_cross_entropy_match_torch(device):
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)).to(device)
    loss = nn.CrossEntropyLoss(ignore_index=3)
    x = torch.randint(11, (4, 5), device=device)
    expected = loss(model(x).flatten(0, 1), x.flatten())
    gptkernels.swap(model), gptkernels.swap(loss)
    found = loss(model(x).flatten(0, 1), x.flatten())
    torch.testing.assert_close(found, expected)
    soft, loss = torch.rand(20, 11, device=device).softmax(1), gptkernels.swap(nn.CrossEntropyLoss())
    torch.testing.assert_close(loss(model(x).flatten(0, 1), soft), F.cross_entropy(model(x).flatten(0, 1), soft))
    assert loss.gptkernels_report.calls == {("CrossEntropyLoss", "the targets are torch.float32"): 1}


def test_modules_that_are_left_have_a_reason():
    model = nn.ModuleDict(
        dict(
            padded=nn.Embedding(5, 4, padding_idx=0), sparse=nn.Embedding(5, 4, sparse=True), scaled=Scaled(4, 4),
            weighted=nn.CrossEntropyLoss(weight=torch.ones(4)), smooth=nn.CrossEntropyLoss(label_smoothing=0.1),
            drop=nn.Dropout(), conv=nn.Conv1d(1, 1, 1), lazy=nn.LazyLinear(3), own=nn.Linear(4, 4),
            parametrised=nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), asked=nn.Linear(4, 4),
        )
    )  # fmt: skip
    model["own"].forward = lambda x: x
    gptkernels.swap(model, leave="ask*")
    reasons = list_left(model)
    assert {name: reasons[name] for name in model} == {
        "padded": "no kernel supports its option padding_idx",
        "sparse": "no kernel supports its option sparse",
        "scaled": "its forward is not torch.nn.Linear's",
        "weighted": "no kernel supports its option weight",
        "smooth": "no kernel supports its option label_smoothing",
        "drop": "it stays torch's; a swapped parent reads its p",
        "conv": "there is no kernel for it",
        "lazy": "it is lazy: run the model once, then swap",
        "own": "it has a forward of its own",
        "parametrised": "it is parametrised",
        "asked": "as asked",
    }
    assert not list_replaced(model)


def test_the_report_lists_modules_and_calls(caplog):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout())
    with caplog.at_level(logging.INFO, "gptkernels"):
        gptkernels.swap(model)
    line = "gptkernels.swap: 2 modules replaced (2 Linear), 1 left"
    assert [record.getMessage() for record in caplog.records] == [line]
    model(torch.randn(3, 4))
    assert repr(model.gptkernels_report).splitlines() == [
        line,
        "modules  class",
        "* (2)    Linear   ->     Linear",
        "2        Dropout  left:  it stays torch's; a swapped parent reads its p",
    ]
    model[0](torch.randn(3, 4, dtype=torch.float32)), model[1].bfloat16()
    with raises("dtype|BFloat16"):
        model(torch.randn(3, 4))
    assert "1 calls to the original:  dtypes differ" in str(model.gptkernels_report)
    assert pickle.loads(pickle.dumps(model.gptkernels_report)) == model.gptkernels_report
    assert isinstance(model.gptkernels_report, Report)


def test_swap_and_unswap_refuse_what_they_cannot_do():
    model = nn.Sequential(nn.Linear(4, 4))
    assert_raises(ValueError, r"leave='1\*' names no module", gptkernels.swap, model, leave="1*")
    gptkernels.swap(model)
    assert_raises(ValueError, "swapped already", gptkernels.swap, model)
    nn.utils.parametrizations.weight_norm(model[0])
    assert_raises(ValueError, "0 was given another class since the swap", gptkernels.unswap, model)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    gptkernels.unswap(model)
    assert type(model[0]) is nn.Linear
    gptkernels.unswap(model)  # a model that is not swapped stays as it is


def test_unsupported_tensors_go_to_the_original():
    class Mine(torch.Tensor):
        pass

    model = gptkernels.swap(nn.Sequential(nn.Linear(4, 4)))
    out = model(torch.randn(2, 4).as_subclass(Mine))
    assert type(out) is Mine
    assert dict(model.gptkernels_report.calls) == {("Linear", "a tensor is a Mine"): 1}


def make_small(kind=published.GPT, **changes):
    return kind(published.Config(**{**dict(block_size=16, vocab_size=23, n_layer=2, n_head=2, n_embd=8), **changes}))


class RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight)


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


def rotate(q, k):
    t = torch.arange(q.shape[2], dtype=q.dtype, device=q.device)[:, None].cos()
    return q * t, k * t


class RotatedAttention(published.CausalSelfAttention):
    """Has the attributes of nanoGPT's attention, but computes another function."""

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(self.n_embd, dim=2))
        q, k = rotate(q, k)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


def test_modules_with_another_function_are_not_replaced():
    model = make_small()
    model.transformer.h[1].attn = RotatedAttention(model.config)
    model.transformer.h[0].mlp.gelu = QuickGELU()
    model.transformer.ln_f = RmsNorm(8)
    model.eval()
    x = torch.randint(23, (2, 9))
    expected = model(x, x)
    gptkernels.swap(model)
    reasons = list_left(model)
    assert reasons["transformer.ln_f"] == "its forward is not layer_norm"
    assert reasons["transformer.h.0.mlp.gelu"] == "its forward is not gelu"
    notes = {entry.name: entry.note for entry in model.gptkernels_report.replaced}
    assert notes["transformer.h.1"] == "gpt block"  # the block calls its attention
    assert notes["transformer.h.1.attn"] == "attention calls"
    assert notes["transformer.h.0.attn"] == "gpt attention"
    torch.testing.assert_close(model(x, x), expected)


@pytest.mark.parametrize("name", ["attn_dropout", "resid_dropout"])
def test_attention_with_other_dropouts_is_not_replaced(name):
    class Elsewhere(published.CausalSelfAttention):
        """Applies attn_dropout where nanoGPT has no dropout, or resid_dropout a second time."""

        def forward(self, x):
            return self._modules[name](super().forward(x))

    class Model(published.GPT):
        class block(published.Block):
            attention = Elsewhere

    reason = list_left(gptkernels.swap(make_small(Model)))["transformer.h.0.attn"]
    expected = {"attn_dropout": "in training with the dropout attn_dropout", "resid_dropout": "more than once"}
    assert expected[name] in reason


class Calls(nn.Module):
    """Calls scaled_dot_product_attention under three names, in two methods. One method also calls super()."""

    def forward(self, q, k, v):
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        b = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return a + b + self.third(q, k, v)

    def third(self, q, k, v, *, causal=True):
        # From Python 3.12 on, Dynamo cannot trace super() in an assert that pytest has rewritten.
        inherited = super().extra_repr()
        assert inherited == ""
        return imported(q, k, v, is_causal=causal)


class CallsItsMethod(nn.Module):
    def forward(self, q, k, v):
        return self.scaled_dot_product_attention(q, k, v) + F.scaled_dot_product_attention(q, k, v)

    def scaled_dot_product_attention(self, q, k, v):
        return q + k + v


def profile_cpu():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def count_calls(function):
    with profile_cpu() as profile:
        function()
    return sum(e.count for e in profile.key_averages() if e.key == "gptkernels::scaled_dot_product_attention")


def test_calls_of_scaled_dot_product_attention_are_replaced(device):
    q, k, v = (torch.randn(2, 3, 9, 8, device=device) for _ in range(3))
    module, untouched = Calls(), Calls()
    expected = module(q, k, v)
    gptkernels.swap(module)
    torch.testing.assert_close(module(q, k, v), expected)
    assert count_calls(lambda: module(q, k, v)) == 3
    assert count_calls(lambda: untouched(q, k, v)) == 0
    assert count_calls(lambda: F.scaled_dot_product_attention(q, k, v)) == 0
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), expected)
    assert count_calls(lambda: compiled(q, k, v)) == 3
    other = pickle.loads(pickle.dumps(module))
    assert count_calls(lambda: other(q, k, v)) == 3
    gptkernels.unswap(module)
    assert type(module) is Calls
    assert count_calls(lambda: module(q, k, v)) == 0


def test_a_module_with_a_method_of_the_functions_name_is_left():
    assert not list_replaced(gptkernels.swap(CallsItsMethod()))


class Adapter(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 1


PARTS = [
    "transformer.wte", "transformer.drop", "transformer.h.0", "transformer.h.0.ln_1", "transformer.h.0.attn",
    "transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj", "transformer.h.0.attn.resid_dropout",
    "transformer.h.0.attn.attn_dropout", "transformer.h.0.ln_2", "transformer.h.0.mlp", "transformer.h.0.mlp.c_fc",
    "transformer.h.0.mlp.gelu", "transformer.h.0.mlp.c_proj", "transformer.ln_f", "lm_head",
]  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_later_hooks_and_adapters_are_called(part):
    x = torch.randint(23, (2, 9))
    torchs = make_small(published.SlowGPT).eval()
    ours = gptkernels.swap(copy.deepcopy(torchs))
    plain = torchs(x, x)[1]
    for model in (torchs, ours):
        model.get_submodule(part).register_forward_hook(lambda module, args, out: out * 1.5)
    torch.testing.assert_close(ours(x, x), torchs(x, x))
    if part != "transformer.h.0.attn.attn_dropout":
        assert not torch.allclose(torchs(x, x)[1], plain, rtol=1e-6)
    for model in (torchs, ours):
        parent, _, name = part.rpartition(".")
        module = model.get_submodule(part)
        module._forward_hooks.clear()
        setattr(model.get_submodule(parent), name, Adapter(module))
    torch.testing.assert_close(ours(x, x), torchs(x, x))


def test_global_hooks_are_called():
    x, model = torch.randint(23, (2, 9)), gptkernels.swap(make_small())
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(type(m).__name__))
    try:
        model(x, x)
    finally:
        handle.remove()
    assert seen.count("Linear") == 9


def test_optimizers_and_tied_weights_stay_valid(device):
    x = torch.randint(23, (2, 9), device=device)
    model = make_small().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gptkernels.swap(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    before = [p.detach().clone() for p in model.parameters()]
    model(x, x)[1].backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model.load_state_dict(make_small().state_dict())


@pytest.mark.parametrize("kind", [published.GPT, published.LlmcGPT])
def test_logits_can_be_omitted(kind, device):
    x = torch.randint(23, (2, 9), device=device)
    model = make_small(kind).to(device).train()
    expected = model(x, x)[1]
    gptkernels.swap(model, return_logits=False)
    logits, loss = model(x, x)
    assert logits is None
    torch.testing.assert_close(loss, expected)
    assert model.eval()(x, x)[0] is not None
    if kind is published.LlmcGPT:
        assert gptkernels.unswap(model)(x, x, return_logits=False)[0] is None
        assert gptkernels.swap(model)(x, x, return_logits=False)[0] is None
    else:
        with pytest.raises(TypeError):
            model(x, x, return_logits=False)


def test_logits_can_be_detached(device):
    x = torch.randint(23, (2, 9), device=device)
    model = make_small(published.GPT).to(device).train()
    expected, loss = model(x, x)
    expected_gradients = torch.autograd.grad(loss, [*model.parameters()])
    gptkernels.swap(model, return_logits="detached")
    logits, loss = model(x, x)
    assert not logits.requires_grad
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, [*model.parameters()]), expected_gradients)
    assert model.eval()(x, x)[0].requires_grad
    with pytest.raises(ValueError, match="return_logits is True, False or 'detached', not 'no'"):
        gptkernels.swap(make_small(published.GPT), return_logits="no")


def test_a_swapped_model_keeps_its_errors():
    model = gptkernels.swap(make_small())
    assert_raises(AssertionError, "17 tokens are more than 16", model, torch.zeros(1, 17, dtype=torch.long))


def test_generate_gives_the_same_tokens():
    model, x = make_small(vocab_size=50).eval(), torch.randint(50, (2, 3))

    def run():
        torch.manual_seed(0)
        return model.generate(x, 20, temperature=0.8, top_k=5)

    expected = run()
    gptkernels.swap(model)
    assert torch.equal(run(), expected)


def test_swapping_has_no_side_effects():
    model = make_small(dropout=0.1)
    state, training = torch.get_rng_state(), [m.training for m in model.modules()]
    model.register_forward_pre_hook(lambda *_: pytest.fail("called"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gptkernels.swap(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == training


@pytest.mark.parametrize(
    ("change", "context"),
    [
        (lambda model: model, torch.inference_mode()),
        (lambda model: model, torch.no_grad()),
        (lambda model: model.bfloat16(), contextlib.nullcontext()),
        (lambda model: model.to("meta"), torch.device("meta")),
        (lambda model: nn.utils.vector_to_parameters(torch.full((3000,), torch.nan), model.parameters()) or model,
         contextlib.nullcontext()),
    ],
    ids=["inference", "no_grad", "bfloat16", "meta", "nan"],
)  # fmt: skip
def test_models_in_any_state_are_replaced(change, context):
    with context:
        for sizes in ({}, dict(block_size=1, n_layer=1), dict(vocab_size=2)):
            assert "" not in list_left(gptkernels.swap(change(make_small(**sizes))))


def test_additional_arguments_of_a_block_are_supported():
    class Scaled(published.Block):
        def forward(self, x, scale=1.0):
            return super().forward(x) * scale

    block, x = Scaled(published.Config(16, 23, 1, 2, 8)), torch.randn(2, 5, 8)

    def call():
        return [block(x), block(x, 0.5), block(x, scale=2.0), block(x=x)]

    expected = call()
    assert gptkernels.swap(block).gptkernels_report.replaced[0].note == "gpt block"
    torch.testing.assert_close(call(), expected)


def test_a_forward_draws_once(device, monkeypatch):
    config = published.Config(16, 64, 3, 2, 16, 0.5)
    model = gptkernels.swap(published.GPT(config).to(device))
    tokens = torch.arange(32, device=device).view(2, 16)
    counts, draw = [], functional._draw_numbers
    monkeypatch.setattr(functional, "_draw_numbers", lambda n, like: counts.append(n) or draw(n, like))
    model(tokens, tokens)
    assert counts == [1 + 3 * 3 + 1]
    model.eval()(tokens, tokens)
    assert len(counts) == 1


def test_dropouts_have_different_offsets_that_a_seed_fixes(device):
    def draw():
        torch.manual_seed(0)
        draws = Draws(3, torch.empty(0, device=device))
        assert draws(0.0) == (0.0, None, None)
        return [draws(0.5) for _ in range(5)]

    first = draw()
    assert all(one.p == 0.5 and one.seed.shape == one.offset.shape == () for one in first)
    assert len({one.offset.item() for one in first}) == 5
    assert [(one.seed.item(), one.offset.item()) for one in first] == [
        (one.seed.item(), one.offset.item()) for one in draw()
    ]


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_saves_no_mask(compiled, device):
    saved = []
    for p in (0.0, 0.5):
        model = gptkernels.swap(published.GPT(published.Config(16, 64, 2, 2, 16, p)).to(device))
        tokens = torch.arange(32, device=device).view(2, 16)
        call = torch.compile(model, backend="aot_eager") if compiled else model
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.numel()) or t, lambda t: t):
            call(tokens, tokens)
        saved.append(sum(size for size in sizes if size > 1))
    assert saved[1] <= saved[0]


@pytest.mark.parametrize("used", ["loss", "a part of the loss", "logits", "both"])
@pytest.mark.parametrize(
    ("how", "divisor"),
    [*itertools.product(["whole", "chunks"], [None, 7, torch.tensor(7)]), ("compiled", None), ("compiled", 7)],
)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_the_head_and_its_loss_are_as_exact_as_torch(autocast, how, divisor, used, device, monkeypatch):
    hidden, weight = (torch.randn(shape, device=device) for shape in [(3, 100, 16), (77, 16)])
    targets = torch.randint(77, (3, 100), device=device)
    targets[1, 2] = -1
    outside = 1e-2 * torch.randn(3, 100, 77, device=device)
    if how == "chunks":  # The 300 rows are two chunks of 128 rows and a last one of 44.
        monkeypatch.setattr(head, "CHUNK", 128)

    def ours(hidden, weight):
        count = divisor.to(device) if isinstance(divisor, torch.Tensor) else divisor
        return head_and_loss(hidden, weight, targets, -1, count)

    if how == "compiled":
        torch._dynamo.reset()
        ours = torch.compile(ours, fullgraph=True, backend="aot_eager")

    def torchs(hidden, weight):
        logits = F.linear(hidden, weight)
        reduction = "mean" if divisor is None else "sum"
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=reduction)
        return logits, loss if divisor is None else loss / int(divisor)

    def run(function, dtype, low):
        leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight)]
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            logits, loss = function(*leaves)
        total = {
            "loss": loss,
            "a part of the loss": loss / 3,
            "logits": (logits.to(outside.dtype) * outside).sum(),
            "both": loss / 3 + (logits.to(outside.dtype) * outside).sum(),
        }[used]
        return [logits.detach(), loss.detach(), *torch.autograd.grad(total, leaves)]

    results = (
        run(ours, torch.float32, autocast),
        run(torchs, torch.float32, autocast),
        run(torchs, torch.float64, False),
    )
    for name, a, b, c in zip(("logits", "loss", "dhidden", "dweight"), *results, strict=True):
        torchs, exact = (results[1][0], results[2][0]) if name == "loss" else (b, c)
        assert_as_exact_as_torch(a, b, c, name, (torchs.double() - exact).abs().mean().item())


def test_the_gradient_of_the_logits_is_never_whole(device, monkeypatch):
    monkeypatch.setattr(head, "CHUNK", 128)
    hidden, weight = (torch.randn(shape, device=device, requires_grad=True) for shape in [(1000, 16), (256, 16)])
    targets = torch.randint(256, (1000,), device=device)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t)
    with hooks, CountCalls() as calls:
        head_and_loss(hidden, weight, targets, -1)
    assert calls.kernels() == {"linear_cross_entropy_with_logits": 1}
    assert max(saved) < 1000 * 256
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        head_and_loss(hidden, weight, targets, -1)
        assert torch.cuda.max_memory_allocated() - before < 1.5 * 4 * 1000 * 256


@pytest.mark.parametrize("returned", ["loss", "detached logits"])
def test_compiled_head_and_loss_are_one_pass(returned, device):
    """If only the loss has a gradient, one operator of the compiled forward computes the loss and the logits' gradient,
    and the compiled backward contains no tensor of the logits' size.
    """
    torch._dynamo.reset()
    graphs = []

    def record(graph, inputs):
        graphs.append([(str(n.target), n.meta["val"]) for n in graph.graph.nodes if n.op == "call_function"])
        return make_boxed_func(graph.forward)

    @torch.compile(fullgraph=True, backend=aot_autograd(fw_compiler=record))
    def call(hidden, weight, targets):
        logits, loss = head_and_loss(hidden, weight, targets, -1, return_logits="detached")
        return loss if returned == "loss" else (loss, logits)

    hidden, weight = (torch.randn(shape, device=device, requires_grad=True) for shape in [(300, 16), (77, 16)])
    found = call(hidden, weight, torch.randint(77, (300,), device=device))
    (found if returned == "loss" else found[0]).backward()
    forward, backward = ([name for name, _ in graph if "gptkernels" in name] for graph in graphs)
    assert forward == ["gptkernels.linear.default", "gptkernels.fused_classifier.default"]
    assert backward == ["gptkernels.linear_backward.default"]
    assert not any(isinstance(made, torch.Tensor) and made.numel() >= 300 * 77 for _, made in graphs[1])


def test_the_head_and_its_loss_compile_inside_of_a_transform(device):
    torch._dynamo.reset()
    hidden, weight = (torch.randn(shape, device=device) for shape in [(300, 16), (77, 16)])
    targets = torch.randint(77, (300,), device=device)
    gradient = torch.func.grad(lambda hidden, weight: head_and_loss(hidden, weight, targets, -1)[1])
    found = torch.compile(gradient, fullgraph=True, backend="aot_eager")(hidden, weight)
    torch.testing.assert_close(found, gradient(hidden, weight))


def test_the_second_derivative_of_the_head_matches_torch(device):
    hidden, weight = (torch.randn(shape, device=device, requires_grad=True) for shape in [(3, 5, 16), (77, 16)])
    targets = torch.randint(77, (3, 5), device=device)
    torchs = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), targets.flatten())
    found = []
    for loss in (head_and_loss(hidden, weight, targets, -100)[1], torchs):
        first = torch.autograd.grad(loss, (hidden, weight), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), (hidden, weight)))
    torch.testing.assert_close(*found)
