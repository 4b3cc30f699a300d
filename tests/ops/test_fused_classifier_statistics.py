import pytest
import torch
from test_fp8_linear_cross_entropy import round_dlogits

import gptkernels  # noqa: F401
from gptkernels.rules.fused_classifier_statistics import FP8_DLOGIT
from gptkernels.testing.cases.fp8 import E5M2
from gptkernels.testing.cases.loss import sharded_classifier
from helpers import all_dtypes, all_views, as_view, assert_equal, randn, refused, run_python, two_dtypes, wide

ops = torch.ops.gptkernels
IGNORED = -100


def inputs(rows, width, dtype, device, vocab_size):
    targets = torch.randint(vocab_size, (rows,))
    targets[6::7] = IGNORED
    return randn(rows, width, dtype=dtype, device=device, scale=3.0), targets.to(device)


@all_dtypes
def test_one_shard_is_fused_classifier(dtype, device):
    """On the CPU the bits are equal. On CUDA the exponentials are added in another order."""
    logits, targets = inputs(20, 3001, dtype, device, 2990)
    dlosses = randn(20, dtype=wide(dtype), device=device)
    expected = ops.fused_classifier(logits, targets, 2990, IGNORED, dlosses)
    found = sharded_classifier(logits, targets, 1, (2990, IGNORED), dlosses)
    if device.type == "cpu":
        assert_equal(found, expected)
    else:
        torch.testing.assert_close(found, expected)


@all_dtypes
def test_statistics(dtype, device):
    logits, targets = inputs(30, 100, dtype, device, 80)
    for first, end in ((0, 37), (37, 64), (64, 90), (90, 100), (64, 64)):
        shard = logits[:, first:end]
        used = shard[:, : max(80 - first, 0)].to(wide(dtype))
        used = torch.where((targets == IGNORED).unsqueeze(-1), -torch.inf, used)
        here = (targets >= first) & (targets < first + used.shape[1])
        index = (targets - first).where(here, 0).unsqueeze(-1)
        lowest = used.new_full((30, 1), torch.finfo(used.dtype).min)
        maximum = torch.cat([used, lowest], 1).amax(1)
        logit = torch.cat([used, lowest], 1).gather(1, index).squeeze(1).where(here, 0)
        exponentials = (used - maximum.unsqueeze(1)).exp().sum(1)
        total = exponentials - torch.where(here, (logit - maximum).exp(), 0)
        found = ops.fused_classifier_statistics(shard, targets, first, 80)
        assert torch.equal(found[0], maximum)
        torch.testing.assert_close(found[1], total, rtol=1e-5, atol=1e-5)
        assert torch.equal(found[2], logit)


@all_views
@all_dtypes
def test_views_in_place(dtype, view, device):
    logits, targets = inputs(9, 50, dtype, device, 50)
    if view == "expanded":
        refused(
            ops.fused_classifier_from_statistics_,
            (as_view(logits, view), targets, torch.zeros(1, 3, 9, dtype=wide(dtype), device=device), 0, 50),
            "logits is written in place",
        )
        return
    expected = sharded_classifier(logits, targets, 1, (50, IGNORED))
    own = as_view(logits, view)
    statistics = ops.fused_classifier_statistics(own, targets, 0, 50)[None]
    version = own._version
    found = ops.fused_classifier_from_statistics_(own, targets, statistics, 0, 50), own
    assert own._version > version
    if view == "misaligned" and device.type == "cuda":  # another order of additions
        torch.testing.assert_close(found, tuple(expected))
    else:
        assert_equal(found, expected)


@pytest.mark.parametrize("width", [25152, 33001])
@two_dtypes
def test_several_tiles(width, dtype, device):
    """Targets are in the edges of a row and in every tile."""
    logits, targets = inputs(9, width, dtype, device, width)
    targets[:] = torch.tensor([0, 1, 8191, 8192, 16384, width // 2, width - 9, width - 2, width - 1])
    statistics = ops.fused_classifier_statistics(logits, targets, 0, width)[None]
    found = logits.clone()
    losses = ops.fused_classifier_from_statistics_(found, targets, statistics, 0, width)
    probabilities = logits.double().softmax(1)
    expected = probabilities - torch.nn.functional.one_hot(targets, width)
    tolerance = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-18
    assert ((found.double() - expected).abs() <= tolerance * expected.abs() + 1e-9).all()
    wanted = -probabilities.log().gather(1, targets.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(losses.double(), wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("width", [16, 100, 25152])
@two_dtypes
def test_float8_gradients(width, dtype, device):
    """The losses have the bits of fused_classifier_from_statistics_, and dlogits is rounded once."""
    vocab_size = 2 * width - 3
    logits, targets = inputs(15, 2 * width, dtype, device, vocab_size)
    shards = [*zip(logits.chunk(2, 1), (0, width), strict=True)]
    statistics = torch.stack([ops.fused_classifier_statistics(x, targets, first, vocab_size) for x, first in shards])
    exact = logits.double()[:, :vocab_size].softmax(1) - torch.nn.functional.one_hot(targets.clamp(0), vocab_size)
    exact = torch.nn.functional.pad(exact * (targets != IGNORED)[:, None], (0, 3))
    for (shard, first), of_shard in zip(shards, exact.chunk(2, 1), strict=True):
        args = targets, statistics, first, vocab_size
        losses, dlogits = ops.fp8_classifier_from_statistics(shard, *args)
        assert dlogits.dtype == E5M2
        rounded, most = round_dlogits(of_shard)
        assert ((dlogits.double() * FP8_DLOGIT - rounded).abs() <= most).all()
        assert torch.equal(losses, ops.fused_classifier_from_statistics_(shard.clone(), *args))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@all_dtypes
def test_special_values_of_one_shard(value, dtype, device):
    """A shard of only -inf takes no part. An infinity or NaN makes the row NaN in all shards."""
    logits, targets = inputs(4, 60, dtype, device, 60)
    logits[1, 20:40] = value
    targets[:] = torch.tensor([3, 5, 59, IGNORED], device=device)
    losses, dlogits = sharded_classifier(logits, targets, 3, (60, IGNORED))
    if value == float("-inf"):
        kept = torch.cat([logits[:, :20], logits[:, 40:]], 1)
        expected = ops.fused_classifier(kept, targets.where(targets < 40, targets - 20).where(targets >= 0, IGNORED))
        torch.testing.assert_close(losses[1], expected[0][1])
        assert not dlogits[1, 20:40].any()
    else:
        assert losses[1].isnan()
        assert dlogits[1].isnan().all()
    assert losses[[0, 2, 3]].isfinite().all()
    assert not losses[3]
    assert not dlogits[3].any()


def test_bad_input(device):
    logits, targets = inputs(5, 8, torch.float32, device, 8)
    for op, more in (
        (ops.fused_classifier_statistics, ()),
        (ops.fused_classifier_from_statistics_, (torch.zeros(2, 3, 5, device=device),)),
    ):
        refused(op, (logits.sum(), targets, *more, 0, 8), "logits must have at least 1 dimension")
        refused(op, (logits, targets[1:], *more, 0, 8), r"targets must have shape \(5\)", r"\(4\)")
        refused(op, (logits, targets, *more, -1, 8), "first_column must not be negative", "got -1")
        refused(op, (logits, targets, *more, 0, 0), "vocab_size must be at least 1", "got 0")
    for wrong in (torch.zeros(2, 3, 4, device=device), torch.zeros(0, 3, 5, device=device)):
        refused(ops.fused_classifier_from_statistics_, (logits, targets, wrong, 0, 8), "statistics must have shape")
    refused(
        ops.fused_classifier_from_statistics_,
        (logits, targets, torch.zeros(2, 3, 5, device=device), 0, 8, IGNORED, torch.zeros(4, device=device)),
        r"dlosses must have shape \(5\)",
    )
    statistics = torch.zeros(2, 3, 5, device=device)
    fp8 = ops.fp8_classifier_from_statistics
    refused(fp8, (logits.double(), targets, statistics, 0, 8), "logits must be float32, bfloat16 or float16")
    refused(fp8, (logits, targets, statistics[:, :, :4], 0, 8), "statistics must have shape")
    shifted = logits.new_zeros(41)[1:].view(5, 8)
    refused(fp8, (shifted, targets, statistics, 0, 8), "logits must begin at a multiple of 16 bytes")
    refused(ops.fused_classifier_statistics, (logits.requires_grad_(), targets, 0, 8), "has no derivative")


@pytest.mark.parametrize("bad", [17, -1, 2**40])
def test_target_outside_the_vocabulary(bad, device, on_cpu):
    """The vocabulary is that of all shards."""
    logits, targets = inputs(50, 8, torch.float32, device, 8)
    targets[[47, 31]] = bad
    message = f"target {bad} at row 31 is outside the vocabulary of 17"
    refused(ops.fused_classifier_statistics, (logits, targets, 8, 17), message)
    targets[[47, 31]] = 16
    ops.fused_classifier_statistics(logits, targets, 0, 17)


def test_target_outside_the_vocabulary_on_cuda(on_cuda):
    done = run_python("""
import torch, gptkernels
targets = torch.tensor([0, 17, 2], device="cuda")
try:
    torch.ops.gptkernels.fused_classifier_statistics(torch.zeros(3, 8, device="cuda"), targets, 8, 17)
    torch.cuda.synchronize()
except RuntimeError as error:
    print("RuntimeError:", error)
""")
    printed = done.stdout + done.stderr
    assert "RuntimeError: CUDA error: device-side assert triggered" in printed
    assert "fused_classifier_statistics" in printed
