"""Tests that matmuls and column sums add all terms of a sum, for many numbers of terms.

Some of cuBLASLt's algorithms omit the last terms (examples/cublas_tail), also in torch's matmuls. The tests therefore
choose operands whose sums are exact in every dtype and change if a term is missing.
"""

import pytest
import torch
from test_fp8 import E4M3, E5M2

import gptkernels  # noqa: F401
from helpers import DTYPES, tf32

ops = torch.ops.gptkernels

# Numbers of terms, most of them a multiple of 64 plus fewer terms than the parts into which cuBLASLt may split a sum.
SHORT, LONG = [9, 65, 519, 1027], [2057, 4097, 8200, 16385, 24645, 57123, 65537, 131071]
FLOAT8 = [16, 80, 528], [2064, 16400, 20 * 128 * 3 + 16, 33 * 128 * 7 + 16, 48 * 128 * 5 + 32, 131088]
# (rows, columns) of a result with few tiles. Some are large enough for the algorithms of float8 matmuls to be timed.
# One has an odd number of rows.
SIZES = [(104, 1600), (3072, 64), (64, 64), (17, 40)]
all_sizes = pytest.mark.parametrize(("rows", "columns"), SIZES)


@pytest.fixture(params=[*SHORT, *LONG])
def terms(request, device):
    if device.type == "cpu" and request.param in LONG:
        pytest.skip("long sums are for CUDA")
    return request.param


@pytest.fixture(params=[*DTYPES, "tf32"], ids=lambda d: str(d).removeprefix("torch."))
def dtype(request, device):
    if request.param == "tf32" and device.type == "cpu":
        pytest.skip("TF32 is CUDA's")
    with tf32(request.param == "tf32"):
        yield torch.float32 if request.param == "tf32" else request.param


def windows(rows, terms, dtype, device):
    """Return a matrix (rows, terms) whose rows have the sum 255: 1, 2, 4, ... 128 in 8 neighbouring places, and zeros.

    In half of the rows, these are the first 8 or the last 8 places.
    """
    first = torch.arange(rows, device=device) * 7919 % (terms - 7)
    first[::4] = terms - 8
    first[1::4] = 0
    at = torch.arange(8, device=device)
    return torch.zeros(rows, terms, device=device).scatter_(1, first[:, None] + at, (2.0**at).expand(rows, 8)).to(dtype)


def assert_complete(*sums):
    for found in sums:
        wrong = found != 255
        assert not wrong.any(), f"{wrong.sum()} of {wrong.numel()} sums: {found[wrong][:4].tolist()} instead of 255"


@all_sizes
def test_linear(rows, columns, terms, dtype, product, device):
    """dweight is a sum over the rows of x, out over the columns of x, and dx over the columns of dout."""

    def ones(*shape):
        return torch.ones(shape, dtype=dtype, device=device)

    some = windows(rows, terms, dtype, device)
    x = ones(terms, columns)
    _, dweight, dbias = ops.linear_backward(some.T.contiguous(), x, ones(rows, columns), [False, True, True])
    assert_complete(dweight, dbias)
    assert_complete(ops.linear_backward(x, some.T.contiguous(), ones(columns, rows), [False, True, False])[1])
    assert_complete(ops.linear(some, ones(columns, terms)), ops.linear(some, ones(columns, terms), 0 * ones(columns)))
    assert_complete(ops.linear_backward(some, ones(rows, columns), x, [True, False, False])[0])


def test_second_derivative_of_linear(terms, dtype, device):
    """The gradient of the weight through dx is a sum over the rows of dout."""
    dout = windows(64, terms, dtype, device).T.contiguous()
    x = torch.ones(terms, 40, dtype=dtype, device=device, requires_grad=True)
    weight = torch.ones(64, 40, dtype=dtype, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(ops.linear(x, weight), x, dout, create_graph=True)
    assert_complete(*torch.autograd.grad(dx, weight, torch.ones_like(dx)))


def test_mlp(terms, dtype, product, device):
    """The gradients of both weights and both biases are sums over the rows.

    GELU is the identity for these values, and each half of the projection's weight is an identity matrix.
    """
    width, hidden = 64, 128
    dout = windows(width, terms, dtype, device).T.contiguous()
    x, post = (torch.ones(terms, n, dtype=dtype, device=device) for n in (width, hidden))
    fc_weight = torch.ones(hidden, width, dtype=dtype, device=device)
    proj_weight = torch.eye(width, dtype=dtype, device=device).repeat(1, 2)
    args = dout, x, fc_weight, proj_weight, 64 * post, post
    assert_complete(*ops.mlp_backward(*args, [False, True, True, True, True])[1:])


@pytest.mark.parametrize("width", [64, 200])
def test_linear_cross_entropy(width, terms, dtype, product, device):
    """dweight is a sum over the rows, and dx is a sum over the classes.

    For dweight, each row's softmax is 1 at class 0. All rows have target 0 except one or three groups of 8 rows, so
    that only these rows' logits have gradients other than 0.
    """
    x = torch.ones(terms, width, dtype=dtype, device=device)
    weight = torch.zeros(72, width, dtype=dtype, device=device)
    weight[0] = 100
    targets = torch.zeros(terms, dtype=torch.int64, device=device)
    groups = (
        {1: slice(-8, None)} if terms < 24 else {1: slice(-8, None), 2: slice(8), 3: slice(terms // 2, terms // 2 + 8)}
    )
    for target, of_rows in groups.items():
        targets[of_rows] = target
    options = targets, -1, -100, "sum", terms
    _, _, dweight = ops.linear_cross_entropy_with_gradients(x, weight, *options, [False, True])
    expected = torch.zeros_like(weight)
    expected[0], expected[list(groups)] = 8 * len(groups), -8
    assert torch.equal(dweight, expected)
    classes = torch.zeros(terms, width, dtype=dtype, device=device)
    classes[0], classes[-8:] = 100, torch.arange(1, 9, dtype=dtype, device=device)[:, None]
    targets = terms - 1 - torch.arange(40, device=device) % 8
    _, dx, _ = ops.linear_cross_entropy_with_gradients(
        x[:9].repeat(5, 1)[:40], classes, targets, *options[1:], [True, False]
    )
    assert torch.equal(dx, classes[0] - classes[targets])


def test_attention_probabilities(terms, dtype, device):
    """out is a sum over keys, and dvalue is a sum over queries. All scores are 0, so that a query has the same
    probability for all keys that it sees.
    """
    if terms > 4200:
        pytest.skip("the probabilities would fill the memory")
    qkv = torch.zeros(1, terms, 3, 2, 24, dtype=dtype, device=device)
    some = windows(48, terms, dtype, device).sign().T
    qkv[:, :, 2] = some.view(1, terms, 2, 24)
    qkv = qkv.view(1, terms, 144)
    out, probabilities = ops.attention_probabilities(qkv, 2, 0.0)
    share = probabilities[0, 0].double()
    dqkv = ops.attention_probabilities_backward(some[None].contiguous(), qkv, probabilities, 2, 0.0)
    # TF32 keeps 10 bits of a probability's fraction.
    eps = 2.0**-10 if torch.backends.cuda.matmul.allow_tf32 and dtype == torch.float32 else torch.finfo(dtype).eps
    for found, exact in ((out, share @ some.double()), (dqkv[..., 96:], share.T @ some.double())):
        torch.testing.assert_close(found[0].double(), exact, rtol=4 * eps, atol=1e-30)


@pytest.mark.parametrize("terms", [*FLOAT8[0], 5280, 8496])
@pytest.mark.parametrize("fast", [False, True])
def test_nan_reaches_every_float8_sum(fast, terms, device):
    one = torch.ones((), device=device)
    zeros = torch.zeros(16, terms, device=device)
    for at in (0, terms // 2, terms - 1):
        b = zeros.clone()
        b[3, at] = torch.nan
        found = ops.fp8_matmul(zeros.to(E5M2), b.to(E4M3), one, one, None, torch.float32, fast)
        assert found[:, 3].isnan().all()
        assert found.isnan().sum() == 16


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("a_format", "b_format"), [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@all_sizes
def test_float8(rows, columns, dtype, a_format, b_format, fast, device):
    one = torch.ones((), device=device)
    for terms in FLOAT8[0] + (FLOAT8[1] if device.type == "cuda" else []):
        b = torch.ones(columns + -columns % 16, terms, device=device).to(b_format)
        for bias in (None, torch.zeros(len(b), dtype=dtype, device=device)):
            assert_complete(ops.fp8_matmul(windows(rows, terms, a_format, device), b, one, one, bias, dtype, fast))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float8_weight_gradient(terms, dtype, device):
    """The kernels pad the rows to a multiple of 16."""
    x, weight = (torch.ones(n, 64, dtype=dtype, device=device) for n in (terms, 96))
    _, *saved = ops.fp8_linear(x, weight, None, None, None, [True, True])
    dout = windows(96, terms, dtype, device).T.contiguous()
    assert_complete(*ops.fp8_linear_backward(dout, *saved, None, [False, True, True])[1:])
