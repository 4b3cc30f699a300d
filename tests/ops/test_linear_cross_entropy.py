import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import gptkernels.functional as G
from gptkernels.testing.checks import hold_to_the_rule
from helpers import (
    DTYPES,
    CountCalls,
    all_dtypes,
    assert_as_exact_as_torch,
    assert_equal,
    assert_same_bits,
    call_of,
    check,
    count_flops,
    raises,
    randn,
    warmed_up_and_captured,
    wide,
    with_dtypes,
)

ops = torch.ops.gptkernels
all_reductions = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


def problem(*rows, dtype=torch.float32, device="cpu", requires_grad=False):
    x = randn(*rows, 8, dtype=dtype, device=device, requires_grad=requires_grad)
    weight = randn(12, 8, dtype=dtype, device=device, requires_grad=requires_grad)
    return x, weight, torch.randint(12, rows, device=device)


def logits_and_loss(x, weight, targets, vocab_size=None, ignore_index=-100, reduction="mean"):
    logits = F.linear(x, weight)[..., :vocab_size]
    rows = logits.to(wide(x.dtype)).flatten(0, -2)
    loss = F.cross_entropy(rows, targets.flatten().long(), ignore_index=ignore_index, reduction=reduction)
    return loss.view(targets.shape) if reduction == "none" else loss


@all_reductions
@pytest.mark.parametrize("chunk_size", [None, 1, 4, 13, 14, 100])
@all_dtypes
def test_chunk_sizes(chunk_size, reduction, dtype, device):
    sizes = {"rows.rows": (2, 7), "inner": 8, "width": 12, "vocab_size": 10, "ignore_index": 9}
    options = {"functional": True, "reduction": reduction, "chunk_size": chunk_size}
    hold_to_the_rule(call_of("linear_cross_entropy", dtype, device, **sizes, **options))


def test_defaults(device):
    x, weight = randn(5, 8, dtype=torch.float64, device=device), randn(12, 8, dtype=torch.float64, device=device)
    targets = torch.tensor([1, 2, -100, 11, 0], device=device, dtype=torch.int32)
    check(G.linear_cross_entropy, logits_and_loss, x, weight, targets)


def test_keeps_small_float16_gradients(device):
    """probability / count would underflow in float16, so it is multiplied by dloss in float32 before it is rounded."""
    x, weight = randn(512, 8, dtype=torch.float16, device=device), randn(999, 8, dtype=torch.float16, device=device)
    x = (x * 0.01).requires_grad_()
    targets = torch.randint(999, (512,), device=device)
    scale = 2.0**12
    (dx,) = torch.autograd.grad(G.linear_cross_entropy(x, weight, targets) * scale, x)
    exact_x = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(logits_and_loss(exact_x, weight.double(), targets) * scale, exact_x)
    torch.testing.assert_close(dx.double(), expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())


def test_never_holds_all_logits(device, on_cuda):
    rows, columns = 8192, 32000
    x = randn(rows, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = randn(columns, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    targets = torch.randint(columns, (rows,), device=device)
    G.linear_cross_entropy(x, weight, targets, chunk_size=1024).backward()  # allocates cuBLASLt's workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    G.linear_cross_entropy(x, weight, targets, chunk_size=1024).backward()
    assert torch.cuda.max_memory_allocated() - before < rows * columns * 2 / 4


def test_bad_input_of_the_function(device):
    x, weight, targets = problem(2, 5, device=device)
    for args, options, message in [
        (
            (x, weight[:, :7], targets),
            {},
            r"weight must have shape \(Vp, C\) with x \(..., C\), got \(12, 7\) and \(2, 5, 8\)",
        ),
        ((x, weight, targets.flatten()), {}, r"targets must have shape \(2, 5\), got \(10,\)"),
        ((x, weight, targets), {"reduction": "max"}, "reduction must be"),
        ((x, weight, targets), {"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            G.linear_cross_entropy(*args, **options)


# ---- flops, devices and sums -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reduction", "matmuls"), [("mean", 3), ("sum", 3), ("none", 4)])
def test_flops(reduction, matmuls, device):
    args = problem(5, device=device, requires_grad=True)
    flops, _ = count_flops(lambda: G.linear_cross_entropy(*args, reduction=reduction).sum().backward())
    assert flops == matmuls * 2 * 5 * 8 * 12


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
@with_dtypes(torch.float32, torch.bfloat16, torch.float16)
def test_weight_gradient_is_not_rounded_after_each_chunk(dtype, chunk_size, device):
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
    x, weight, targets = problem(2, 20, dtype=dtype, device=device)
    targets %= 10
    targets[0, 2:5] = 9
    factor = None if scale is None else torch.tensor(scale, dtype=wide(dtype), device=device)
    found = ops.linear_cross_entropy_with_logits(x, weight, targets, factor, 10, 9, chunk_size, [True, True])
    assert [t.dtype for t in found] == [dtype, wide(dtype), dtype, wide(dtype)]

    def by_torch(x, weight):
        x, weight = (t.detach().requires_grad_() for t in (x, weight))
        reduction = "mean" if scale is None else "sum"
        loss = logits_and_loss(x, weight, targets, 10, 9, reduction) * (1 if scale is None else scale)
        return F.linear(x, weight).detach(), loss.detach(), *torch.autograd.grad(loss, (x, weight))

    torchs, exact = by_torch(x, weight), by_torch(x.double(), weight.double())
    typical = (torchs[0].double() - exact[0]).abs().mean().item()  # torch's error of the loss may happen to be near 0
    for name, a, b, c in zip(("logits", "loss", "dx", "dweight"), found, torchs, exact, strict=True):
        assert_as_exact_as_torch(a, b.to(a.dtype), c, name, typical if name == "loss" else 0.0)
    for wanted in ([True, False], [False, True], [False, False]):
        some = ops.linear_cross_entropy_with_logits(x, weight, targets, factor, 10, 9, chunk_size, wanted)
        for t, whole, need in zip(some, found, (True, True, *wanted), strict=True):
            assert torch.equal(t, whole) if need else t.numel() == 0


@with_dtypes(torch.float32, torch.float64)
def test_mean_over_many_rows(dtype, device):
    """The mean's two kernels are one thread block each, which needs several iterations for these rows."""
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


def test_ops_without_derivative(device):
    args = problem(5, device=device, requires_grad=True)
    with raises("linear_cross_entropy_with_logits has no derivative"):
        ops.linear_cross_entropy_with_logits(*args, None, -1, -100, -1, [True, True])
    loss, _, _ = ops.linear_cross_entropy_with_gradients(*args, -1, -100, "mean", -1, (True, True))
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
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)
    return lambda x, w, t: G.linear_cross_entropy(x, w, t % 10, **options).sum(), dtype


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_symbolic_trace_supports_other_batches(options, device):
    function, dtype = with_options(options)

    def step(x, w, t):
        loss = function(x, w, t)
        return loss, *torch.autograd.grad(loss, (x, w))

    traced = make_fx(step, tracing_mode="symbolic")(*problem(2, 5, dtype=dtype, device=device, requires_grad=True))
    arguments = problem(3, 11, dtype=dtype, device=device, requires_grad=True)
    for a, b in zip(traced(*arguments), step(*arguments), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_export_supports_any_number_of_rows(options, device):
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


# ---- with and without float8 matmuls ---------------------------------------------------------------------------------

both_functions = pytest.mark.parametrize("function", [G.linear_cross_entropy, G.fp8_linear_cross_entropy])
both_reductions = pytest.mark.parametrize("reduction", ["mean", "sum"])
functions_and_dtypes = pytest.mark.parametrize(
    ("function", "dtype"),
    [(G.linear_cross_entropy, dtype) for dtype in DTYPES]
    + [(G.fp8_linear_cross_entropy, dtype) for dtype in DTYPES if dtype != torch.float64],
    ids=lambda value: getattr(value, "__name__", str(value)),
)


def aligned_problem(rows, dtype=torch.float32, device="cpu"):
    x, weight = (randn(n, 32, dtype=dtype, device=device, requires_grad=True) for n in (rows, 64))
    targets = torch.randint(50, (rows,), device=device)
    targets[2::5] = -100
    return x, weight, targets


@pytest.mark.parametrize("dloss", [1.0, -0.5])
@functions_and_dtypes
def test_backward_twice(function, dtype, dloss, device):
    """The forward has computed the gradients. A backward with retain_graph returns copies of them. The last backward
    may overwrite and return them.
    """
    x, weight, targets = aligned_problem(20, dtype, device)
    loss = function(x, weight, targets, vocab_size=50)
    seed = torch.full_like(loss, dloss)
    kept = torch.autograd.grad(loss, (x, weight), seed, retain_graph=True)
    before = [t.clone() for t in kept]
    again = torch.autograd.grad(loss, (x, weight), seed, retain_graph=True)
    last = torch.autograd.grad(loss, (x, weight), seed)
    for others in (before, again, last):
        assert_equal(kept, others)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@both_reductions
@both_functions
def test_no_gradient_is_computed_without_a_graph(function, reduction, mode, device):
    x, weight, targets = aligned_problem(5, device=device)
    with mode(), CountCalls() as ran:
        flops, loss = count_flops(function, x, weight, targets, reduction=reduction)
    assert ran.count == {f"gptkernels::{function.__name__}": 1}
    assert flops == 2 * 5 * 32 * 64
    torch.testing.assert_close(loss, logits_and_loss(x, weight, targets, reduction=reduction).detach())


@both_reductions
@both_functions
def test_autocast_has_the_bits_of_16_bit_arguments(function, reduction, device):
    x, weight, targets = aligned_problem(40, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        loss = function(x, weight, targets, reduction=reduction, chunk_size=16)
    low = [t.detach().bfloat16().requires_grad_() for t in (x, weight)]
    expected = function(*low, targets, reduction=reduction, chunk_size=16)
    assert torch.equal(loss, expected)
    assert_equal(torch.autograd.grad(loss, (x, weight)), [t.float() for t in torch.autograd.grad(expected, low)])


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
def test_targets_outside_the_vocabulary(function, device, on_cpu):
    """On CUDA a device-side assertion fails, which test_fused_classifier.py tests in another process."""
    x, weight, targets = aligned_problem(40)
    targets[20] = 50
    with raises(rf"{function.__name__}\w*: target 50 at row 20 is outside the vocabulary of 50"):
        function(x, weight, targets, vocab_size=50, chunk_size=16)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        ({"weight": torch.zeros(12, 7)}, [r"weight must have shape \(vocabulary, 8\), got \(12, 7\)"]),
        ({"weight": torch.zeros(0, 8)}, ["weight must have at least 1 row"]),
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


def test_bad_input_of_the_other_ops(device):
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


# ---- exponentials instead of logits (sm_90a) -------------------------------------------------------------------------


@pytest.fixture
def exponentials(sm_90a, monkeypatch):
    """Use our kernel for the LM head's matmul, which stores exponentials, at all sizes that it supports."""
    monkeypatch.setenv("GPTKERNELS_MATMUL", "own")


def head(rows, width, vocabulary, device, scale=0.3):
    """Return bfloat16 x and weight, and targets. The standard deviation of the logits is scale * sqrt(width)."""
    torch.manual_seed(rows + width + vocabulary)
    x = randn(rows, width, dtype=torch.bfloat16, device=device)
    weight = randn(vocabulary, width, dtype=torch.bfloat16, device=device, scale=scale)
    return x, weight, torch.randint(vocabulary, (rows,), device=device)


def check_head(x, weight, targets, chunk_size=None, **options):
    """Check that loss and gradients are as exact as torch's, and that a call without gradients returns the same loss.

    Returns torch's gradients, and the gradients in float64.
    """

    def found(function, *tensors, **more):
        leaves = [t.detach().requires_grad_() for t in tensors]
        loss = function(*leaves, targets, **options, **more)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    ours = found(G.linear_cross_entropy, x, weight, chunk_size=chunk_size)
    torchs, exact = found(logits_and_loss, x, weight), found(logits_and_loss, x.double(), weight.double())
    # Most of the loss's error comes from rounding the logits. torch's error may happen to be near 0, so an estimate of
    # this rounding error is allowed.
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


def test_exponentials_of_rows_with_gaps(exponentials, device):
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
    """The kernel does not compute 1 - p for the target's probability p. The logits, small whole numbers, are exact."""
    torch.manual_seed(0)
    weight = -torch.randint(2, (128, 128), device=device).bfloat16()
    weight.fill_diagonal_(1)
    targets = torch.randint(128, (300,), device=device)
    x = logit * F.one_hot(targets, 128).bfloat16()
    if logit < 64:  # for 64, the formula's 1 - p would be 0 in float64
        check_head(x, weight, targets)
    loss, dx, _ = ops.linear_cross_entropy_with_gradients(x, weight, targets, -1, -100, "mean", -1, [True, True])
    others = (x.double() @ weight.double().T - logit).exp()
    others[torch.arange(300), targets] = 0
    exact = torch.log1p(others.sum(1)).mean()
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0)
    assert (dx != 0).any(1).all()


@pytest.mark.parametrize("redone", [slice(7, 8), slice(250, 270), slice(None)], ids=["one", "some", "all"])
def test_exponentials_that_overflow(redone, exponentials, device):
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


def test_exponentials_of_ignored_rows(exponentials, device):
    x, weight, targets = head(300, 128, 264, device)
    targets[:] = -100
    loss, *found = ops.linear_cross_entropy_with_gradients(x, weight, targets, -1, -100, "sum", -1, [True, True])
    assert all((t == 0).all() for t in (loss, *found))


def test_exponentials_in_a_cuda_graph(exponentials, device):
    """A replay finds the rows that overflow in the replay, and computes them again."""
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
    assert_equal(captured, step())


def test_gpt2s_lm_head_does_not_read_the_logits_again(device, sm_90a):
    x, weight, targets = head(4096, 768, 50304, device, scale=0.02)
    x.requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        G.linear_cross_entropy(x, weight, targets).backward()
    names = [event.key for event in profile.key_averages()]
    assert any("ExpEpilogue" in name for name in names), names
    assert not any("rows_by" in name and "Forward" in name for name in names), names
