import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import gptkernels.functional as G
from helpers import (
    all_dtypes,
    assert_as_exact_as_torch,
    assert_same_bits,
    check,
    raises,
    randn,
    warmed_up_and_captured,
)

ops = torch.ops.gptkernels
REDUCTIONS = ["mean", "sum", "none"]
all_reductions = pytest.mark.parametrize("reduction", REDUCTIONS)


def problem(*rows, dtype=torch.float32, device="cpu", requires_grad=False):
    """x (*rows, 8), weight (12, 8), targets (*rows)."""
    x = randn(*rows, 8, dtype=dtype, device=device, requires_grad=requires_grad)
    weight = randn(12, 8, dtype=dtype, device=device, requires_grad=requires_grad)
    return x, weight, torch.randint(12, rows, device=device)


def logits_and_loss(x, weight, targets, vocab_size=None, ignore_index=-100, reduction="mean"):
    """What linear_cross_entropy computes, by torch and with all the logits, the loss in float32."""
    logits = F.linear(x, weight)[..., :vocab_size]
    wide = logits.to(torch.promote_types(x.dtype, torch.float32)).flatten(0, -2)
    loss = F.cross_entropy(wide, targets.flatten().long(), ignore_index=ignore_index, reduction=reduction)
    return loss.view(targets.shape) if reduction == "none" else loss


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_size", [None, 1, 4, 13, 14, 100])
@all_dtypes
def test_values_and_gradients(chunk_size, reduction, dtype, device):
    x, weight = randn(2, 7, 8, dtype=dtype, device=device), randn(12, 8, dtype=dtype, device=device)
    targets = torch.randint(10, (2, 7), device=device)
    targets[0, 2:5] = 9
    options = {"vocab_size": 10, "ignore_index": 9, "reduction": reduction}
    check(
        lambda *args: G.linear_cross_entropy(*args, **options, chunk_size=chunk_size),
        lambda *args: logits_and_loss(*args, **options),
        x,
        weight,
        targets,
    )


def test_defaults(device):
    x, weight = randn(5, 8, dtype=torch.float64, device=device), randn(12, 8, dtype=torch.float64, device=device)
    targets = torch.tensor([1, 2, -100, 11, 0], device=device, dtype=torch.int32)
    check(G.linear_cross_entropy, logits_and_loss, x, weight, targets)


def test_keeps_small_float16_gradients(device):
    """1/count times a probability is below float16's smallest number: a loss scale must come in before the rounding."""
    x, weight = randn(512, 8, dtype=torch.float16, device=device), randn(999, 8, dtype=torch.float16, device=device)
    x = (x * 0.01).requires_grad_()
    targets = torch.randint(999, (512,), device=device)
    scale = 2.0**12
    (dx,) = torch.autograd.grad(G.linear_cross_entropy(x, weight, targets) * scale, x)
    wide = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(logits_and_loss(wide, weight.double(), targets) * scale, wide)
    torch.testing.assert_close(dx.double(), expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())


def test_backward_twice(device):
    x = randn(5, 8, dtype=torch.float32, device=device, requires_grad=True)
    weight, targets = randn(12, 8, dtype=torch.float32, device=device), torch.randint(12, (5,), device=device)
    loss = G.linear_cross_entropy(x, weight, targets)
    (once,) = torch.autograd.grad(loss, x, torch.tensor(3.0, device=device), retain_graph=True)
    (again,) = torch.autograd.grad(loss, x, torch.tensor(3.0, device=device))
    assert torch.equal(once, again)


def test_never_holds_all_logits(device):
    if device.type == "cpu":
        pytest.skip("torch counts a CUDA device's memory only")
    rows, columns = 8192, 32000
    x = randn(rows, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = randn(columns, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    targets = torch.randint(columns, (rows,), device=device)
    G.linear_cross_entropy(x, weight, targets, chunk_size=1024).backward()  # cuBLASLt takes its workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    G.linear_cross_entropy(x, weight, targets, chunk_size=1024).backward()
    assert torch.cuda.max_memory_allocated() - before < rows * columns * 2 / 4


def test_bad_input(device):
    x, weight = randn(2, 5, 8, dtype=torch.float32, device=device), randn(12, 8, dtype=torch.float32, device=device)
    targets = torch.randint(12, (2, 5), device=device)
    with pytest.raises(
        ValueError, match=r"weight must have shape \(Vp, C\) with x \(..., C\), got \(12, 7\) and \(2, 5, 8\)"
    ):
        G.linear_cross_entropy(x, weight[:, :7], targets)
    with pytest.raises(ValueError, match=r"targets must have shape \(2, 5\), got \(10,\)"):
        G.linear_cross_entropy(x, weight, targets.flatten())
    with pytest.raises(ValueError, match="reduction must be"):
        G.linear_cross_entropy(x, weight, targets, reduction="max")
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        G.linear_cross_entropy(x, weight, targets, chunk_size=0)


# ---- which work is done ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reduction", "products"), [("mean", 3), ("sum", 3), ("none", 4)])
def test_flops(reduction, products, device):
    x, weight, targets = problem(5, device=device, requires_grad=True)
    with FlopCounterMode(display=False) as flops:
        G.linear_cross_entropy(x, weight, targets, reduction=reduction).sum().backward()
    assert flops.get_total_flops() == products * 2 * 5 * 8 * 12


@all_reductions
def test_on_meta(reduction):
    x, weight, targets = (t.to("meta") for t in problem(2, 3))
    x.requires_grad_()
    loss = G.linear_cross_entropy(x, weight, targets, reduction=reduction)
    assert (loss.dtype, loss.shape) == (torch.float32, (2, 3) if reduction == "none" else ())
    loss.sum().backward()
    assert x.grad.shape == x.shape


@all_reductions
def test_autocast_keeps_float64(reduction, device):
    x, weight, targets = problem(5, dtype=torch.float64, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        check(
            lambda x, w, t: G.linear_cross_entropy(x, w, t, reduction=reduction),
            lambda x, w, t: logits_and_loss(x, w, t, reduction=reduction),
            x,
            weight,
            targets,
        )


@pytest.mark.parametrize("chunk_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weight_gradient_over_many_chunks(dtype, chunk_size, device):
    """However many chunks add to it: what each adds is not rounded to a 16-bit sum."""
    torch.manual_seed(0)
    x, weight = randn(64, 24, dtype=dtype, device=device), randn(40, 24, dtype=dtype, device=device, scale=0.1)
    targets = torch.randint(40, (64,), device=device)

    def gradient(function, x, weight):
        weight = weight.detach().requires_grad_()
        return torch.autograd.grad(function(x, weight, targets), weight)[0]

    ours = gradient(lambda *args: G.linear_cross_entropy(*args, reduction="sum", chunk_size=chunk_size), x, weight)
    torchs = gradient(lambda *args: logits_and_loss(*args, reduction="sum"), x, weight)
    exact = gradient(lambda *args: logits_and_loss(*args, reduction="sum"), x.double(), weight.double())
    assert_as_exact_as_torch(ours, torchs, exact, "dweight")


@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize("chunk_size", [-1, 1, 13, 14, 100])
@all_dtypes
def test_with_logits(dtype, chunk_size, scale, device):
    """The logits, the loss and both gradients, of which the weight's is in the loss's dtype; against float64."""
    torch.manual_seed(0)
    x, weight = randn(2, 20, 8, dtype=dtype, device=device), randn(12, 8, dtype=dtype, device=device)
    targets = torch.randint(10, (2, 20), device=device)
    targets[0, 2:5] = 9
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    factor = None if scale is None else torch.tensor(scale, dtype=wide, device=device)
    found = ops.linear_cross_entropy_with_logits(x, weight, targets, factor, 10, 9, chunk_size, [True, True])
    assert [t.dtype for t in found] == [dtype, wide, dtype, wide]

    def by_torch(x, weight):
        x, weight = (t.detach().requires_grad_() for t in (x, weight))
        reduction = "mean" if scale is None else "sum"
        loss = logits_and_loss(x, weight, targets, 10, 9, reduction) * (1 if scale is None else scale)
        return F.linear(x, weight).detach(), loss.detach(), *torch.autograd.grad(loss, (x, weight))

    torchs, exact = by_torch(x, weight), by_torch(x.double(), weight.double())
    typical = (torchs[0].double() - exact[0]).abs().mean().item()  # a loss is one number, whose error may be near 0
    for name, ours, theirs, formula in zip(("logits", "loss", "dx", "dweight"), found, torchs, exact, strict=True):
        assert_as_exact_as_torch(ours, theirs.to(ours.dtype), formula, name, typical if name == "loss" else 0.0)
    for wanted in ([True, False], [False, True], [False, False]):
        some = ops.linear_cross_entropy_with_logits(x, weight, targets, factor, 10, 9, chunk_size, wanted)
        for t, whole, need in zip(some, found, (True, True, *wanted), strict=True):
            assert torch.equal(t, whole) if need else t.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_mean_over_many_rows(dtype, device):
    """More rows than a block of the reduction's kernel takes in one round."""
    rows = 3 * 8 * 1024 + 77
    x, weight = randn(rows, 2, dtype=dtype, device=device), randn(3, 2, dtype=dtype, device=device)
    targets = torch.randint(3, (rows,), device=device)
    targets[::5] = -100
    check(lambda *args: G.linear_cross_entropy(*args, chunk_size=10000), logits_and_loss, x, weight, targets.int())


# ---- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [(True, False), (False, True)])
def test_backward_is_differentiable(mask, device):
    x, weight, targets = problem(3, dtype=torch.float64, device=device, requires_grad=True)

    def backward(dloss, x, weight):
        found = ops.linear_cross_entropy_backward(dloss, x, weight, targets, -1, -100, "mean", 2, mask)
        return found[mask.index(True)]

    dloss = torch.tensor(1.5, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(backward, (dloss, x, weight))


def test_with_logits_refuses_to_be_differentiated(device):
    x, weight, targets = problem(5, device=device, requires_grad=True)
    with raises("linear_cross_entropy_with_logits has no derivative"):
        ops.linear_cross_entropy_with_logits(x, weight, targets, None, -1, -100, -1, [True, True])


def test_with_gradients_refuses_to_be_differentiated(device):
    x, weight, targets = problem(3, device=device, requires_grad=True)
    loss, _, _ = ops.linear_cross_entropy_with_gradients(x, weight, targets, -1, -100, "mean", -1, (True, True))
    with raises("linear_cross_entropy_with_gradients is not differentiable: call linear_cross_entropy"):
        loss.backward()


# ---- traced ----------------------------------------------------------------------------------------------------------

OPTIONS = [
    {},
    {"chunk_size": 2},
    {"reduction": "none"},
    {"reduction": "sum", "chunk_size": 3, "ignore_index": 4},
    {"vocab_size": 10, "dtype": torch.float16},
]


def with_options(options):
    """The function, and the dtype of its tensors."""
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)
    return lambda x, w, t: G.linear_cross_entropy(x, w, t % 10, **options).sum(), dtype


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_symbolic_trace_at_another_batch(options, device):
    function, dtype = with_options(options)

    def step(x, w, t):
        loss = function(x, w, t)
        return loss, *torch.autograd.grad(loss, (x, w))

    traced = make_fx(step, tracing_mode="symbolic")(*problem(2, 5, dtype=dtype, device=device, requires_grad=True))
    arguments = problem(3, 11, dtype=dtype, device=device, requires_grad=True)
    for a, b in zip(traced(*arguments), step(*arguments), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dynamic_export(options, device):
    function, dtype = with_options(options)

    class Module(torch.nn.Module):
        def forward(self, x, w, t):
            return function(x, w, t)

    rows = torch.export.Dim("rows", min=2, max=4096)
    exported = torch.export.export(
        Module(), problem(5, dtype=dtype, device=device), dynamic_shapes=({0: rows}, None, {0: rows})
    )
    arguments = problem(33, dtype=dtype, device=device)
    torch.testing.assert_close(exported.module()(*arguments), function(*arguments))


# ---- with and without float8 products --------------------------------------------------------------------------------

both_functions = pytest.mark.parametrize("function", [G.linear_cross_entropy, G.fp8_linear_cross_entropy])
both_reductions = pytest.mark.parametrize("reduction", ["mean", "sum"])
DTYPES = {
    G.linear_cross_entropy: [torch.float64, torch.float32, torch.bfloat16, torch.float16],
    G.fp8_linear_cross_entropy: [torch.float32, torch.bfloat16, torch.float16],
}
functions_and_dtypes = pytest.mark.parametrize(
    ("function", "dtype"),
    [(function, dtype) for function, dtypes in DTYPES.items() for dtype in dtypes],
    ids=lambda value: getattr(value, "__name__", str(value)),
)


def aligned_problem(rows, dtype=torch.float32, device="cpu"):
    """x (rows, 32), weight (64, 32), which want gradients, and targets (rows) below 50, some ignored."""
    x, weight = (randn(n, 32, dtype=dtype, device=device, requires_grad=True) for n in (rows, 64))
    targets = torch.randint(50, (rows,), device=device)
    targets[2::5] = -100
    return x, weight, targets


@pytest.mark.parametrize("dloss", [1.0, -0.5])
@functions_and_dtypes
def test_gradients_scaled_in_place_or_not(function, dtype, dloss, device):
    """A backward that keeps the graph copies what the forward has saved; the last one gives it away."""
    x, weight, targets = aligned_problem(20, dtype, device)
    loss = function(x, weight, targets, vocab_size=50)
    seed = torch.full_like(loss, dloss)
    kept = torch.autograd.grad(loss, (x, weight), seed, retain_graph=True)
    before = [t.clone() for t in kept]
    again = torch.autograd.grad(loss, (x, weight), seed, retain_graph=True)
    last = torch.autograd.grad(loss, (x, weight), seed)
    for a, b, c, d in zip(kept, before, again, last, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
        assert torch.equal(a, d)


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@both_reductions
@both_functions
def test_no_gradient_is_computed_where_none_is_recorded(function, reduction, mode, device):
    x, weight, targets = aligned_problem(5, device=device)
    with mode(), Operators() as ran, FlopCounterMode(display=False) as flops:
        loss = function(x, weight, targets, reduction=reduction)
    assert ran.names == [f"gptkernels::{function.__name__}"]
    assert flops.get_total_flops() == 2 * 5 * 32 * 64
    torch.testing.assert_close(loss, logits_and_loss(x, weight, targets, reduction=reduction).detach())


@both_reductions
@both_functions
def test_autocast(function, reduction, device):
    """The bits of a call with arguments of 16 bits; the gradients are float32."""
    x, weight, targets = aligned_problem(40, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        loss = function(x, weight, targets, reduction=reduction, chunk_size=16)
    low = [t.detach().bfloat16().requires_grad_() for t in (x, weight)]
    expected = function(*low, targets, reduction=reduction, chunk_size=16)
    assert torch.equal(loss, expected)
    for a, b in zip(torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(expected, low), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b.float())


@pytest.mark.parametrize(
    ("function", "options"),
    [(G.linear_cross_entropy, options) for options in OPTIONS] + [(G.fp8_linear_cross_entropy, {"chunk_size": 16})],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_compiles_once_for_all_numbers_of_rows(function, options, device):
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)

    def loss(x, weight, targets):
        return function(x, weight, targets % 10, **options).sum()

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter, dynamic=True)
    for rows in (5, 3, 17, 64):
        x, weight, targets = aligned_problem(rows, dtype, device)
        found, wanted = (torch.autograd.grad(f(x, weight, targets), (x, weight)) for f in (compiled, loss))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


@both_functions
def test_targets_outside_the_vocabulary(function, device):
    if device.type != "cpu":
        pytest.skip("on CUDA a device-side assertion ends the process: tests/ops/test_fused_classifier.py")
    x, weight, targets = aligned_problem(40)
    targets[20] = 50
    with raises(rf"{function.__name__}\w*: target 50 at row 20 is outside the vocabulary of 50"):
        function(x, weight, targets, vocab_size=50, chunk_size=16)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        ({"x": torch.zeros(3, 8, dtype=torch.int64)}, ["x must be float64, float32, bfloat16 or float16, got int64"]),
        ({"weight": torch.zeros(12, 8).double()}, ["weight must have the dtype of x", "got float64"]),
        ({"weight": torch.zeros(12, 7)}, [r"weight must have shape \(vocabulary, 8\), got \(12, 7\)"]),
        ({"weight": torch.zeros(0, 8)}, ["weight must have at least 1 row"]),
        ({"targets": torch.zeros(3)}, ["targets must be int64 or int32, got float32"]),
        ({"targets": torch.zeros(4, dtype=torch.int64)}, [r"targets must have shape \(3\), got \(4\)"]),
        ({"vocab_size": 13}, ["vocab_size must be from 1 to 12", "got 13"]),
        ({"vocab_size": 0}, ["vocab_size must be from 1 to 12", "got 0"]),
        ({"reduction": "max"}, ["reduction must be 'mean', 'sum' or 'none', got 'max'"]),
        ({"chunk_size": 0}, ["chunk_size must be at least 1, or -1", "got 0"]),
    ],
    ids=str,
)
def test_bad_input_of_the_op(change, fragments, device):
    x, weight, targets = problem(3)
    arguments = {"x": x, "weight": weight, "targets": targets} | change
    arguments = {n: a.to(device) if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
    with raises("gptkernels::linear_cross_entropy: ", *fragments):
        ops.linear_cross_entropy(**arguments)


def test_bad_input_of_the_backward(device):
    x, weight, targets = problem(3, device=device)
    options = (targets, -1, -100, "mean", -1, (True, True))
    with raises("linear_cross_entropy_backward: dloss must be float32, got float64"):
        ops.linear_cross_entropy_backward(torch.ones((), dtype=torch.float64, device=device), x, weight, *options)
    with raises(r"dloss must have shape \(\), got \(3\)"):
        ops.linear_cross_entropy_backward(torch.ones(3, device=device), x, weight, *options)
    with raises("linear_cross_entropy_with_logits: scale must be float32, got float64"):
        scale = torch.ones((), dtype=torch.float64, device=device)
        ops.linear_cross_entropy_with_logits(x, weight, targets, scale, -1, -100, -1, [True, True])
    with raises("linear_cross_entropy_with_gradients: reduction must be 'mean' or 'sum', got 'none'"):
        ops.linear_cross_entropy_with_gradients(x, weight, targets, -1, -100, "none", -1, (True, True))


# ---- exponentials in place of logits (sm_90a) ------------------------------------------------------------------------


@pytest.fixture
def exponentials(sm_90a, monkeypatch):
    """Our own product of the head, at every size that it can have."""
    monkeypatch.setenv("GPTKERNELS_MATMUL", "own")


def head(rows, width, vocabulary, device, scale=0.3):
    """x, weight, targets of bfloat16: logits of about `scale` sqrt(width)."""
    torch.manual_seed(rows + width + vocabulary)
    x = randn(rows, width, dtype=torch.bfloat16, device=device)
    weight = randn(vocabulary, width, dtype=torch.bfloat16, device=device, scale=scale)
    return x, weight, torch.randint(vocabulary, (rows,), device=device)


def check_head(x, weight, targets, chunk_size=None, **options):
    """The loss and both gradients as exact as torch's; the loss by itself has the same bits."""

    def found(function, *tensors, **more):
        leaves = [t.detach().requires_grad_() for t in tensors]
        loss = function(*leaves, targets, **options, **more)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    ours = found(G.linear_cross_entropy, x, weight, chunk_size=chunk_size)
    torchs, exact = found(logits_and_loss, x, weight), found(logits_and_loss, x.double(), weight.double())
    # The rounded logits are most of the loss's error, and it may be near 0 by chance.
    rounding = 2.0**-9 * F.linear(x.double(), weight.double()).abs().mean().item() / len(x) ** 0.5
    for name, a, b, c in zip(("loss", "dx", "dweight"), ours, torchs, exact, strict=True):
        assert_as_exact_as_torch(a, b.to(a.dtype), c, name, rounding if name == "loss" else 0.0)
    assert torch.equal(ours[0], G.linear_cross_entropy(x, weight, targets, **options, chunk_size=chunk_size))
    return torchs[1:], exact[1:]


@pytest.mark.parametrize(
    ("rows", "width", "vocabulary", "vocab_size"),
    [
        (1, 72, 8, 1),
        (5, 72, 8, 7),
        (300, 128, 264, 257),
        (513, 96, 1000, 993),
        (255, 768, 4096, 4096),
        (130, 1600, 50304, 50257),
    ],
)
def test_exponentials(rows, width, vocabulary, vocab_size, exponentials, device):
    x, weight, targets = head(rows, width, vocabulary, device, scale=0.1)
    targets %= vocab_size
    targets[rows // 2 :: 3] = -100 if rows > 1 else 0
    for reduction in ("mean", "sum"):
        for chunk_size in (None, 200):
            check_head(x, weight, targets, vocab_size=vocab_size, reduction=reduction, chunk_size=chunk_size)
    check_head(x, weight, targets.int(), vocab_size=vocab_size)


@pytest.mark.parametrize("gradients", [[True, False], [False, True]])
def test_exponentials_for_one_gradient(gradients, exponentials, device):
    arguments = (*head(300, 128, 264, device), -1, -100, "mean", -1)
    both = ops.linear_cross_entropy_with_gradients(*arguments, [True, True])
    one = ops.linear_cross_entropy_with_gradients(*arguments, gradients)
    for a, b, wanted in zip(one[1:], both[1:], gradients, strict=True):
        assert torch.equal(a, b) if wanted else a.numel() == 0


def test_exponentials_of_views(exponentials, device):
    """Rows that are apart, and a gradient of the loss other than 1."""
    wide, weight, targets = head(300, 256, 528, device)
    for x, matrix in ((wide[:, 128:], weight[:, 64:192]), (wide[::2, :128], weight[::2, :128])):
        some = targets[: len(x)] % len(matrix)
        torchs, exact = check_head(x, matrix, some, reduction="sum")
        dloss = torch.tensor(-3.5, device=device)
        ours = ops.linear_cross_entropy_backward(dloss, x, matrix, some, -1, -100, "sum", -1, [True, True])
        for name, a, b, c in zip(("dx", "dweight"), ours, torchs, exact, strict=True):
            assert_as_exact_as_torch(a, -3.5 * b, -3.5 * c, name)


@pytest.mark.parametrize("logit", [4, 16, 64])
def test_exponentials_of_confident_rows(logit, exponentials, device):
    """A small loss and its gradient keep their digits: nothing is subtracted from 1. The logits are exact."""
    torch.manual_seed(0)
    weight = -torch.randint(2, (128, 128), device=device).bfloat16()
    weight.fill_diagonal_(1)
    targets = torch.randint(128, (300,), device=device)
    x = logit * F.one_hot(targets, 128).bfloat16()
    if logit < 64:  # beyond, float64 has no digits left of 1 - p
        check_head(x, weight, targets)
    loss, dx, _ = ops.linear_cross_entropy_with_gradients(x, weight, targets, -1, -100, "mean", -1, [True, True])
    others = (x.double() @ weight.double().T - logit).exp()
    others[torch.arange(300), targets] = 0
    exact = torch.log1p(others.sum(1)).mean()
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0)
    assert (dx != 0).any(1).all()


@pytest.mark.parametrize("redone", [slice(7, 8), slice(250, 270), slice(None)], ids=["one", "some", "all"])
def test_exponentials_that_overflow(redone, exponentials, device):
    """Rows with a loss of more than 69 take their logits; rows beside them do not."""
    x, weight, targets = head(600, 768, 1000, device)
    before = ops.linear_cross_entropy(x, weight, targets, -1, -100, "none", -1)
    x[redone] *= 50
    losses = ops.linear_cross_entropy(x, weight, targets, -1, -100, "none", -1)
    assert losses[redone].max() > 200
    others = torch.ones(600, dtype=torch.bool, device=device)
    others[redone] = False
    assert torch.equal(losses[others], before[others])
    check_head(x, weight, targets)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e30])
def test_exponentials_of_special_values(value, exponentials, device):
    """What is not finite stays in its row, or nowhere in a row without a loss."""
    x, weight, targets = head(300, 128, 264, device)
    arguments = (-1, -100, "sum", -1, [True, True])
    _, clean, _ = ops.linear_cross_entropy_with_gradients(x, weight, targets, *arguments)
    x[2, 7] = value
    _, dx, _ = ops.linear_cross_entropy_with_gradients(x, weight, targets, *arguments)
    keep = [i for i in range(300) if i != 2]
    assert torch.equal(dx[keep], clean[keep])
    losses = ops.linear_cross_entropy(x, weight, targets, -1, -100, "none", -1)
    exact = logits_and_loss(x.double(), weight.double(), targets, reduction="none")
    assert losses[2].isnan() == exact[2].isnan()
    targets[2] = -100
    loss, dx, dweight = ops.linear_cross_entropy_with_gradients(x, weight, targets, *arguments)
    assert loss.isfinite()
    assert dx.isfinite().all()
    assert dweight.isfinite().all()
    assert (dx[2] == 0).all()


def test_exponentials_without_a_loss(exponentials, device):
    x, weight, targets = head(300, 128, 264, device)
    targets[:] = -100
    loss, *found = ops.linear_cross_entropy_with_gradients(x, weight, targets, -1, -100, "sum", -1, [True, True])
    assert all((t == 0).all() for t in (loss, *found))


def test_exponentials_in_a_graph(exponentials, device):
    """A replay has rows to redo that the capture had not, and the same bits as a call."""
    x, weight, targets = head(600, 128, 1000, device)
    x.requires_grad_()
    weight.requires_grad_()

    def step():
        loss = G.linear_cross_entropy(x, weight, targets, chunk_size=512)
        return loss, *torch.autograd.grad(loss, (x, weight))

    assert_same_bits(step, vary_threads=False)
    graph, captured = warmed_up_and_captured(step)
    with torch.no_grad():
        x[5] *= 100
        x[520:530] *= 100
        targets[::3] = -100
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


def test_sm_90a_kernels_run(device, sm_90a):
    """GPT-2's head, by default: no kernel reads the logits once more."""
    x, weight, targets = head(4096, 768, 50304, device, scale=0.02)
    x.requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        G.linear_cross_entropy(x, weight, targets).backward()
    names = [event.key for event in profile.key_averages()]
    assert any("ExpEpilogue" in name for name in names), names
    assert not any("rows_by" in name and "Forward" in name for name in names), names
