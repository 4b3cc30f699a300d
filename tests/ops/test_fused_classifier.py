import pytest
import torch
import torch.nn.functional as F

import gptkernels  # noqa: F401
from gptkernels.testing.cases.loss import exact_loss, losses_of
from helpers import (
    all_dtypes,
    all_views,
    all_widths,
    as_view,
    assert_as_exact_as_torch,
    assert_equal,
    assert_same_bits,
    double,
    raises,
    randn,
    refused,
    run_python,
    tolerance,
    two_dtypes,
    wide,
)

ops = torch.ops.gptkernels
IGNORED = -100


def torchs(logits, targets, vocab_size=-1, ignore_index=IGNORED):
    """Compute the losses in float32, because torch's losses of 16-bit logits would be 16-bit numbers."""
    used = logits.to(wide(logits.dtype))[..., : vocab_size if vocab_size != -1 else None].flatten(0, -2)
    losses = F.cross_entropy(used, targets.flatten().long(), reduction="none", ignore_index=ignore_index)
    return losses.view(targets.shape)


def exact(logits, targets, vocab_size=-1, ignore_index=IGNORED):
    vocab_size = logits.shape[-1] if vocab_size == -1 else vocab_size
    return losses_of(logits, targets, vocab_size, ignore_index, exact_loss)


def inputs(rows, width, dtype, device, vocab_size=-1, scale=1.0):
    targets = torch.randint(0, width if vocab_size == -1 else vocab_size, (rows,))
    targets[6::7] = IGNORED
    return (
        randn(rows, width, dtype=dtype, device=device, scale=scale),
        targets.to(device),
        randn(rows, dtype=wide(dtype), device=device),
    )


def gradient(function, logits, targets, dlosses, *options):
    leaf = logits.detach().requires_grad_()
    return torch.autograd.grad(function(leaf, targets, *options), leaf, dlosses)[0]


def ours(logits, targets, *options):
    return ops.fused_classifier(logits, targets, *options)[0]


def in_place(logits, targets, *options):
    storage = torch.empty_like(
        torch.as_strided(logits, (logits.untyped_storage().nbytes() // logits.itemsize,), (1,), 0)
    )
    copy = storage.as_strided(logits.shape, logits.stride(), logits.storage_offset()).copy_(logits)
    losses = ops.fused_classifier_(copy, targets, *options)
    return losses, copy


def check(logits, targets, dlosses, *options):
    losses, dlogits = ops.fused_classifier(logits, targets, *options)
    assert_as_exact_as_torch(
        losses, torchs(logits, targets, *options), exact(double(logits), targets, *options), "losses"
    )
    ones = torch.ones_like(dlosses)

    def assert_gradient(found, dlosses, name):
        assert_as_exact_as_torch(
            found,
            gradient(torchs, logits, targets, dlosses, *options),
            gradient(exact, double(logits), targets, double(dlosses), *options),
            name,
        )

    assert_gradient(dlogits, ones, "dlogits")
    assert_gradient(gradient(ours, logits, targets, dlosses, *options), dlosses, "gradient")
    defaults = (-1, IGNORED)[len(options) :]
    same_losses, scaled = ops.fused_classifier(logits, targets, *options, *defaults, dlosses)
    assert_gradient(scaled, dlosses, "dlogits scaled by dlosses")
    assert torch.equal(same_losses.view(torch.uint8), losses.view(torch.uint8))
    if logits.numel() == 0 or 0 not in logits.stride():
        for gradient_in_place, dloss in ((dlogits, None), (scaled, dlosses)):
            found = in_place(logits, targets, *options, *defaults, dloss)
            assert_equal(found, (losses, gradient_in_place), equal_nan=True)


@pytest.mark.parametrize(
    ("vocab_size", "width"), [(1, 8), (5, 8), (7, 8), (8, 8), (9, 24), (250, 257), (50257, 50304), (131070, 131072)]
)
@all_dtypes
def test_padded_columns_are_not_read(vocab_size, width, dtype, device):
    logits, targets, dlosses = inputs(3, width, dtype, device, vocab_size)
    targets[0] = vocab_size - 1
    check(logits, targets, dlosses, vocab_size)
    expected = ops.fused_classifier(logits, targets, vocab_size)
    for junk in (float("nan"), float("inf"), 1e4):
        logits[:, vocab_size:] = junk
        found = ops.fused_classifier(logits, targets, vocab_size)
        assert_equal(found, expected)
        assert (found[1][:, vocab_size:] == 0).all()
    logits[:, 0] = float("nan")
    assert (ops.fused_classifier(logits, targets, vocab_size)[1][:, vocab_size:] == 0).all()


@pytest.mark.parametrize("width", [1000, 2000, 4096, 12288, 32768, 50304, 65536, 131072, 262144, 600000])
@two_dtypes
def test_rows_in_each_kind_of_memory(width, dtype, device):
    """The CUDA kernels keep a row in the registers or the shared memory of a thread block or a cluster. Wider rows are
    read from global memory in each pass.
    """
    if device.type == "cpu" and width > 131072:
        pytest.skip("the CPU keeps no row")
    check(*inputs(9, width, dtype, device))
    check(*inputs(2, width + 1, dtype, device))


@pytest.mark.parametrize("width", [1001, 50257])
@two_dtypes
def test_more_rows_than_the_device_keeps(width, dtype, device):
    logits, targets, _ = inputs(1200 if device.type == "cuda" else 50, width, dtype, device)
    targets[3::5] = IGNORED
    losses, dlogits = ops.fused_classifier(logits, targets)
    assert_equal(in_place(logits, targets), (losses, dlogits))
    torch.testing.assert_close(losses, torchs(logits, targets), rtol=1e-5, atol=1e-5)
    expected = gradient(torchs, logits, targets, torch.ones_like(losses))
    torch.testing.assert_close(dlogits, expected, **tolerance(dtype))
    assert (dlogits[targets == IGNORED] == 0).all()
    torch.testing.assert_close(dlogits.float().sum(-1), torch.zeros_like(losses), rtol=0, atol=0.02)


@pytest.mark.parametrize("rows", [64, 1000, 5000])
@all_dtypes
def test_many_rows(rows, dtype, device):
    check(*inputs(rows, 96, dtype, device))


@pytest.mark.parametrize("ignore_index", [IGNORED, -1, 3, 1000])
def test_ignored_rows(ignore_index, device):
    logits, targets, dlosses = inputs(40, 33, torch.float32, device)
    targets = targets.where(targets != IGNORED, ignore_index)
    check(logits, targets, dlosses, -1, ignore_index)
    ignored = targets == ignore_index
    logits[ignored] = float("nan")
    dlosses[ignored] = float("nan")
    for dloss in (None, dlosses):
        losses, dlogits = ops.fused_classifier(logits, targets, -1, ignore_index, dloss)
        assert (losses[ignored] == 0).all()
        assert (dlogits[ignored] == 0).all()
    assert (gradient(ours, logits, targets, dlosses, -1, ignore_index)[ignored] == 0).all()


@all_dtypes
def test_all_rows_ignored(dtype, device):
    logits, targets, dlosses = inputs(5, 33, dtype, device)
    targets[:] = IGNORED
    check(logits, targets, dlosses)
    # In a mean over no rows, the gradient of each loss is 1 / 0. The gradient of the logits is still 0, as in torch.
    infinite = torch.full_like(dlosses, float("inf"))
    assert (gradient(ours, logits, targets, infinite) == 0).all()
    assert (ops.fused_classifier(logits, targets, -1, IGNORED, infinite)[1] == 0).all()


@all_dtypes
@all_widths
def test_int32_targets(width, dtype, device):
    logits, targets, dlosses = inputs(5, width, dtype, device)
    check(logits, targets.int(), dlosses)


@all_dtypes
def test_one_dloss_for_all_rows(dtype, device):
    logits, targets, _ = inputs(40, 33, dtype, device)
    one = torch.tensor(1 / 40, dtype=wide(dtype), device=device)
    expected = ops.fused_classifier(logits, targets, -1, IGNORED, one.repeat(40))
    for dlosses in (one, one.expand(40)):
        assert_equal(ops.fused_classifier(logits, targets, dlosses=dlosses), expected)
    dlogits = ops.fused_classifier(logits, targets)[1]
    assert torch.equal(
        ops.fused_classifier_backward(one, dlogits), ops.fused_classifier_backward(one.repeat(40), dlogits)
    )


@all_views
@all_dtypes
def test_views(view, dtype, device):
    logits, targets, dlosses = inputs(6, 40, dtype, device)
    targets = as_view(targets.unsqueeze(-1), view).squeeze(-1)
    check(as_view(logits, view), targets, as_view(dlosses.unsqueeze(-1), view).squeeze(-1))


def test_in_place_writes_to_the_view_alone(device):
    logits, targets, _ = inputs(6, 40, torch.float32, device)
    whole = torch.full((6, 81), 7.0, device=device)
    view = whole[:, 1::2]
    view.copy_(logits)
    losses = ops.fused_classifier_(view, targets)
    assert_equal((losses, view), ops.fused_classifier(logits, targets))
    assert (whole[:, ::2] == 7).all()


def test_leading_shapes_of_dlosses(device):
    for shape in [(8,), (2, 8), (2, 3, 8), (2, 0, 8), (1, 2, 1, 2, 8)]:
        logits, dlosses = (randn(*s, dtype=torch.float32, device=device) for s in (shape, shape[:-1]))
        targets = torch.randint(0, 8, shape[:-1], device=device)
        _, dlogits = ops.fused_classifier(logits, targets)
        scaled = ops.fused_classifier(logits, targets, dlosses=dlosses)[1]
        torch.testing.assert_close(scaled, dlogits * dlosses.unsqueeze(-1))
        torch.testing.assert_close(ops.fused_classifier_backward(dlosses, dlogits), scaled)


@all_dtypes
def test_large_logits(dtype, device):
    logits, targets, dlosses = inputs(5, 768, torch.float64, device, scale=4)
    check((logits + 1000).to(dtype), targets, dlosses.to(wide(dtype)))


@pytest.mark.parametrize("width", [2, 768, 16384, 50304, 131072])
@all_dtypes
def test_confident_rows_keep_their_digits(width, dtype, device):
    for winner in (10, 15, 20, 40):
        logits, targets, _ = inputs(5, width, dtype, device)
        logits.scatter_(-1, targets.unsqueeze(-1), winner)
        losses, dlogits = ops.fused_classifier(logits, targets)
        expected = exact(double(logits), targets)
        torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=0)
        if dtype in (torch.float64, torch.float32):
            at_target = dlogits.gather(-1, targets.unsqueeze(-1)).squeeze(-1).double()
            torch.testing.assert_close(at_target, (-expected).expm1(), rtol=1e-5, atol=0)


@all_dtypes
def test_denormal_and_large_logits(dtype, device):
    biggest = torch.finfo(dtype).max
    for scale in (torch.finfo(dtype).smallest_normal / 4, 300.0, biggest / 8, biggest):
        logits, targets, dlosses = inputs(5, 127, torch.float64, "cpu")
        logits = (logits.clamp(-1, 1) * scale).to(dtype).to(device)
        check(logits, targets.to(device), dlosses.to(wide(dtype)).to(device))


@pytest.mark.parametrize("width", [33, 9000, 131072])
@all_dtypes
def test_masked_logits_have_probability_zero(width, dtype, device):
    logits, targets, dlosses = inputs(5, width, dtype, device)
    logits[:, : width - 10] = float("-inf")
    targets[:] = width - 1
    check(logits, targets, dlosses)
    assert (ops.fused_classifier(logits, targets)[1][:, : width - 10] == 0).all()
    targets[2] = 0  # this target is masked, so that the loss is infinite
    check(logits, targets, dlosses)
    assert ops.fused_classifier(logits, targets)[0][2] == float("inf")


@pytest.mark.parametrize("width", [33, 9000, 131072])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@all_dtypes
def test_infinities_and_nan_stay_in_their_row(value, width, dtype, device):
    logits, targets, _ = inputs(5, width, dtype, device)
    clean = ops.fused_classifier(logits, targets)
    logits[2, 7] = value
    if value == float("-inf"):
        logits[2] = value  # the softmax of a row of -inf is undefined
    losses, dlogits = ops.fused_classifier(logits, targets)
    assert losses[2].isnan()
    assert dlogits[2].isnan().all()
    keep = [0, 1, 3, 4]
    assert_equal((losses[keep], dlogits[keep]), [t[keep] for t in clean])


@all_dtypes
def test_deterministic_with_dlosses(dtype, device):
    logits, targets, dlosses = inputs(500, 257, dtype, device)
    assert_same_bits(lambda: ops.fused_classifier(logits, targets, -1, IGNORED, dlosses))


# ---- autograd --------------------------------------------------------------------------------------------------------


def write_view_in_place(logits, targets, vocab_size):
    made = logits * 1
    losses = ops.fused_classifier_(made.view(-1, made.shape[-1]), targets, vocab_size)
    return losses, made, made.square()


def test_gradcheck_of_a_view_that_is_written(device):
    for rows, width, vocab_size in [(3, 7, -1), (1, 1, -1), (8, 6, 4)]:
        logits, targets, _ = inputs(rows, width, torch.float64, device, vocab_size)
        arguments = lambda x, t=targets, v=vocab_size: write_view_in_place(x, t, v), (logits.requires_grad_(),)
        assert torch.autograd.gradcheck(*arguments)
        assert torch.autograd.gradgradcheck(*arguments)


def test_third_derivative(device):
    logits, targets, _ = inputs(2, 3, torch.float64, device)

    def third(function):
        x = logits.detach().requires_grad_()
        derivative = function(x, targets).sum()
        for _ in range(3):
            (derivative,) = torch.autograd.grad(derivative.square().sum(), x, create_graph=True)
        return derivative

    torch.testing.assert_close(third(ours), third(exact))


def test_with_dlosses_autograd_refuses(device):
    logits, targets, dlosses = inputs(5, 8, torch.float32, device)
    logits.requires_grad_()
    losses, _ = ops.fused_classifier(logits, targets, dlosses=dlosses)
    with raises("fused_classifier", "with dlosses is not differentiable", "torch.no_grad"):
        losses.sum().backward()


def test_in_place_counts_as_a_modification(device):
    logits, targets, _ = inputs(5, 8, torch.float32, device)
    version = logits._version
    ops.fused_classifier_(logits, targets)
    assert logits._version == version + 1
    with torch.no_grad():
        ops.fused_classifier_(logits, targets)
    assert logits._version == version + 2

    leaf = logits.detach().requires_grad_()
    made = leaf * 1
    saves_it = made.square().sum()
    losses = ops.fused_classifier_(made, targets)
    assert made._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saves_it.backward()
    made.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


def test_in_place_on_a_leaf_is_refused(device):
    logits, targets, _ = inputs(5, 8, torch.float32, device)
    before = logits.clone()
    logits.requires_grad_()
    with raises("fused_classifier_", "a leaf Variable that requires grad is being used in an in-place operation"):
        ops.fused_classifier_(logits, targets)
    refused(ops.fused_classifier_, (logits.view(5, 8), targets), "a view of a leaf Variable that requires grad")
    assert torch.equal(logits, before)
    with torch.no_grad():
        ops.fused_classifier_(logits, targets)
    assert not torch.equal(logits, before)


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [ops.fused_classifier, ops.fused_classifier_])
def test_bad_input(op, device):
    logits, targets, dlosses = inputs(5, 8, torch.float32, device)
    refused(op, (logits.sum(), targets), "logits must have at least 1 dimension")
    refused(op, (logits[:, :0], targets), "logits must have at least 1 column", r"\(5, 0\)")
    refused(op, (logits, targets.unsqueeze(-1)), r"targets must have shape \(5\)", r"\(5, 1\)")
    for vocab_size in (0, 9, -2):
        refused(op, (logits, targets, vocab_size), "vocab_size must be from 1 to 8", f"got {vocab_size}")
    refused(op, (logits, targets), "dlosses must be float32", "float64", dlosses=dlosses.double())
    refused(op, (logits, targets), r"dlosses must have shape \(5\)", r"\(1\)", dlosses=dlosses[:1])


def test_bad_input_of_the_backward(device):
    dlogits, _, dlosses = inputs(5, 8, torch.bfloat16, device)
    refused(ops.fused_classifier_backward, (dlosses, dlogits.sum()), "dlogits must have at least 1 dimension")
    refused(ops.fused_classifier_backward, (dlosses.bfloat16(), dlogits), "dlosses must be float32", "bfloat16")


def test_in_place_on_expanded_logits_is_refused(device):
    logits, targets, _ = inputs(5, 8, torch.float32, device)
    with raises("fused_classifier_", "logits is written in place", "share memory", "dimension 0 is expanded"):
        ops.fused_classifier_(logits[:1].expand(5, 8), targets)


def test_in_place_on_no_logits_of_expanded_dimensions(device):
    logits = torch.randn(1, 0, 3, device=device).expand(2, 0, 3)
    targets = torch.zeros(2, 0, dtype=torch.int64, device=device)
    assert ops.fused_classifier_(logits, targets).shape == (2, 0)


@pytest.mark.parametrize("bad", [8, -1, -101, 2**40])
@pytest.mark.parametrize("op", ["fused_classifier", "fused_classifier_"])
def test_target_outside_the_vocabulary(op, bad, device, on_cpu):
    logits, targets, _ = inputs(50, 9, torch.float32, device, 8)
    before = logits.clone()
    targets[[47, 31, 40]] = bad
    with raises(op, f"target {bad} at row 31 is outside the vocabulary of 8"):
        getattr(ops, op)(logits, targets, 8)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("width", [9, 50304, 131072])
def test_target_outside_the_vocabulary_on_cuda(width, on_cuda):
    """The call is made in another process, because the device cannot be used after a device-side assertion."""
    done = run_python(f"""
import torch, gptkernels
targets = torch.tensor([0, {width - 1}, 2], device="cuda")
logits = torch.zeros(3, {width}, device="cuda")
try:
    torch.ops.gptkernels.fused_classifier(logits, targets, {width - 1})
    torch.cuda.synchronize()
except RuntimeError as error:
    print("RuntimeError:", error)
""")
    printed = done.stdout + done.stderr
    assert "RuntimeError: CUDA error: device-side assert triggered" in printed
    assert "fused_classifier_forward" in printed
    assert "a target is outside the vocabulary" in printed


def test_dlosses_on_another_device(device, on_cuda):
    logits, targets, dlosses = inputs(5, 8, torch.float32, device)
    refused(ops.fused_classifier, (logits, targets), "dlosses is on cpu", "logits is on cuda", dlosses=dlosses.cpu())


@pytest.mark.large
def test_more_than_2_31_elements(device):
    rows, width, vocab_size = 50000, 50304, 50257
    logits = torch.randn(rows, width, dtype=torch.bfloat16, device=device)
    targets = torch.randint(0, vocab_size, (rows,), device=device)
    losses, dlogits = ops.fused_classifier(logits, targets, vocab_size)
    scaled = ops.fused_classifier_backward(losses, dlogits)
    for part in (slice(0, 5), slice(rows - 5, rows)):
        check(logits[part].clone(), targets[part], losses[part], vocab_size)
        expected = ops.fused_classifier(logits[part], targets[part], vocab_size)
        assert torch.equal(losses[part], expected[0])
        assert torch.equal(dlogits[part], expected[1])
        assert torch.equal(scaled[part], ops.fused_classifier_backward(*expected))
    assert torch.equal(ops.fused_classifier_(logits, targets, vocab_size), losses)
    assert torch.equal(logits, dlogits)


@pytest.mark.parametrize("dloss", [1.0, 0.25, float("nan"), "rows"])
@all_dtypes
def test_backward_in_place(dloss, dtype, device):
    dlogits = randn(7, 33, dtype=dtype, device=device)
    options = {"dtype": wide(dtype), "device": device}
    dlosses = randn(7, **options) if dloss == "rows" else torch.tensor(dloss, **options)
    expected = ops.fused_classifier_backward(dlosses, dlogits)
    for own in (dlogits.clone(), as_view(dlogits, "transposed"), as_view(dlogits, "sliced")):
        version = own._version
        assert ops.fused_classifier_backward_(dlosses, own) is None
        assert_equal(own, expected, equal_nan=True)
        assert own._version > version
    torch.library.opcheck(ops.fused_classifier_backward_, (dlosses, dlogits.clone()))
    with pytest.raises(RuntimeError, match="has no derivative"):
        ops.fused_classifier_backward_(dlosses, dlogits.clone().requires_grad_() * 1)
