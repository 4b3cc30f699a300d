import pytest
import torch

import gptkernels  # noqa: F401
from helpers import (
    DTYPES,
    WIDTHS,
    all_dtypes,
    all_rows,
    all_widths,
    assert_same_bits,
    randn,
    refused,
    two_dtypes,
)

ops = torch.ops.gptkernels


def exact(tensors):
    return sum((t.detach().double().square().sum() for t in tensors), torch.zeros((), dtype=torch.float64)).sqrt()


def check(tensors):
    norm = ops.global_norm(tensors)
    assert norm.shape == ()
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double().cpu(), exact(t.cpu() for t in tensors), rtol=2**-24 * 1.001, atol=2**-150)


@all_dtypes
@all_widths
@all_rows
def test_matches_float64(rows, width, dtype, device):
    check([randn(rows, width, dtype=dtype, device=device)])


def test_mixed_dtypes_and_sizes(device):
    check([randn(i % 3, width, dtype=DTYPES[i % 4], device=device) for i, width in enumerate(WIDTHS)])
    check([randn(width, dtype=DTYPES[i % 4], device=device) for i, width in enumerate(WIDTHS * 3)])


@pytest.mark.parametrize("count", [1, 511, 512, 513, 1100])
def test_more_tensors_than_a_launch_supports(count, device):
    check([randn(1 + i % 5, dtype=torch.float32, device=device) for i in range(count)])


@pytest.mark.parametrize("size", [16383, 16384, 16385, 32767, 32768, 32769, 100_003])
@all_dtypes
def test_sizes_around_those_of_chunks(size, dtype, device):
    check([randn(size, dtype=dtype, device=device) for _ in range(2)])


def test_nothing_to_sum(device):
    assert ops.global_norm([]) == 0
    assert ops.global_norm([]).dtype == torch.float32
    for shape in [(0,), (3, 0)]:
        assert ops.global_norm([torch.zeros(shape, device=device)]) == 0
        assert ops.global_norm([torch.zeros(shape, device=device), torch.full((4,), 2.0, device=device)]) == 4


@all_dtypes
def test_denormal_and_large_values(dtype, device):
    """Except for float16, the float32 squares of these elements overflow or underflow."""
    info = torch.finfo(dtype)
    largest = min(info.max, torch.finfo(torch.float32).max)
    check([torch.full((10,), largest / 8, dtype=dtype, device=device)])
    check([torch.full((10,), max(info.smallest_normal, 1e-37) / 4, dtype=dtype, device=device)])
    check([torch.full((1,), largest, dtype=dtype, device=device), torch.ones(7, dtype=dtype, device=device)])
    if dtype in (torch.float32, torch.bfloat16):
        assert (
            ops.global_norm([torch.full((10,), largest, dtype=dtype, device=device)]) == torch.inf
        )  # the norm itself overflows


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@all_dtypes
def test_infinity_and_nan(value, dtype, device):
    tensors = [randn(100, dtype=dtype, device=device) for _ in range(5)]
    tensors[3][40] = value
    norm = ops.global_norm(tensors)
    assert norm.isnan() if value != value else norm == torch.inf


@two_dtypes
def test_gradient_of_a_denormal_norm(dtype, device):
    """For a denormal norm 1 / norm overflows, but x / norm does not."""
    x = torch.full((), torch.finfo(dtype).smallest_normal / 16, dtype=dtype, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(3 * ops.global_norm([x]), x)
    assert dx == 3


def test_deterministic(device):
    tensors = [randn(50_000 + i, dtype=DTYPES[i % 4], device=device) for i in range(20)]
    assert_same_bits(lambda: ops.global_norm(tensors))


def test_kernels_wait_for_the_results_of_the_last(device):
    """A kernel may start before the previous kernel has ended."""
    x = torch.empty(3_000_000, device=device)
    for i in range(1, 50):
        x.fill_(i)
        norm = ops.global_norm([x])
        x.div_(norm)
        torch.testing.assert_close(x[-1].item(), 3_000_000**-0.5)


def test_gradients(device):
    """Finite differences of the float32 norm would be too inexact, so derivatives are compared with torch's."""
    tensors = [randn(3, 5, dtype=torch.float64, device=device), randn(7, dtype=torch.float64, device=device)]
    for leaves in (tensors, [t.float() for t in tensors]):
        leaves = [t.requires_grad_() for t in leaves]
        expected = torch.autograd.grad(torch.cat([t.flatten() for t in leaves]).norm() ** 3, leaves, create_graph=True)
        found = torch.autograd.grad(ops.global_norm(leaves) ** 3, leaves, create_graph=True)
        second = torch.autograd.grad([g.square().sum() for g in found], leaves)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        expected_second = torch.autograd.grad([g.square().sum() for g in expected], leaves)
        torch.testing.assert_close(second, expected_second, rtol=1e-4, atol=1e-4)


def test_gradients_of_some_tensors_and_at_zero(device):
    a, b = torch.zeros(3, device=device, requires_grad=True), torch.zeros(4, device=device)
    ops.global_norm([a, b]).backward()
    assert torch.equal(a.grad, torch.zeros(3, device=device))
    assert b.grad is None


def test_bad_input(device):
    x = torch.ones(3, device=device)
    refused(ops.global_norm, ([x, x.long()],), r"tensors\[1\] must be float64", "int64")


@pytest.mark.large
def test_more_than_2_31_elements(device):
    x = torch.full((2**31 + 5,), 0.5, dtype=torch.bfloat16, device=device)
    x[-1] = 2.0**16
    torch.testing.assert_close(
        ops.global_norm([x]).double().item(), ((2**31 + 4) * 0.25 + 2.0**32) ** 0.5, rtol=2**-23, atol=0
    )
