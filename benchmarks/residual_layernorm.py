import torch
import torch.nn.functional as F

from benchmarks.dropout import Mask, P
from benchmarks.harness import exact
from benchmarks.harness.case import Case, nbytes
from benchmarks.harness.directions import both
from benchmarks.harness.peers import backward, compiled, of_backward, training
from benchmarks.layernorm import CPU_SIZES, SIZES, TINY  # noqa: F401
from gptkernels import functional

ops = torch.ops.gptkernels


def formula(x, residual, weight, bias):
    return norm(x + residual, weight, bias)


def norm(total, weight, bias):
    """The sum is an output as well, and its gradient is added to the gradient of the norm."""
    return F.layer_norm(total, total.shape[-1:], weight, bias), total


def cases(device, dtype, rows, width):
    x, residual, dout, dsum = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(4))
    weight, bias = (torch.randn(width, device=device, dtype=dtype) for _ in range(2))
    _, total, mean, rstd = ops.residual_layernorm(x, residual, weight, bias)
    yield from both(
        "residual_layernorm",
        f"{rows}x{width}",
        formula,
        lambda: ops.residual_layernorm(x, residual, weight, bias)[:2],
        lambda: ops.residual_layernorm_backward(dout, dsum, total, weight, mean, rstd, [True] * 3),
        (dout, dsum),
        [x, residual],
        [weight, bias],
        differentiated=(norm, [total]),
        saves=True,
    )
    yield from dropout_cases(x, residual, weight, bias, dout, dsum)


def dropout_cases(x, residual, weight, bias, dout, dsum):
    """The results are checked by ``Mask``, because every variant draws a different mask."""
    rows, width = x.shape
    shape = f"{rows}x{width} p={P}"
    x = x + x.sign()  # far enough from 0 that the mask can be read from the sums

    def torchs(x, residual, weight, bias):
        return norm(F.dropout(x, P) + residual, weight, bias)

    def ours(x, residual, weight, bias):  # includes the kernel that draws the seed, as the baselines do
        return functional.residual_layer_norm(x, residual, (width,), weight, bias, dropout_p=P)

    mask = Mask(x)

    def look(result):
        out, total = result
        normed = torch.cat([F.layer_norm(part.double(), (width,)) for part in total.split(4096)])
        expected = normed * weight + bias
        return *mask.look(total, residual), (out - expected) / expected.abs().max() + 1

    def sums():
        yield from mask.exact(added=residual)
        yield 2, ..., torch.ones_like(x, dtype=torch.float64)

    inputs = x, residual, weight, bias
    yield Case(
        "residual_layernorm fwd",
        shape,
        training(ours, *inputs),
        sums,
        bytes=4 * nbytes(x),
        flops=11 * x.numel(),
        peers={"torch": training(torchs, *inputs), "compile": training(compiled(torchs), *inputs)},
        look=look,
    )
    # If x is 0, the sum equals the residual for every mask. All gradients but dx are then deterministic.
    inputs = torch.zeros_like(x), residual, weight, bias

    def look_at_gradients(result):
        dx, dresidual, dweight, dbias = result
        return dresidual, dweight, dbias, *Mask(dresidual).look(dx)

    def gradients():
        dresiduals = []
        for i, part, value in exact.gradients(norm, (dout, dsum), [residual], [weight, bias]):
            yield i, part, value
            dresiduals += [value] if i == 0 else []
        yield from Mask(torch.cat(dresiduals)).exact(first=3)

    yield Case(
        "residual_layernorm bwd",
        shape,
        backward(ours, inputs, (dout, dsum)),
        gradients,
        bytes=5 * nbytes(x),
        flops=19 * x.numel(),
        peers=of_backward(torchs, inputs, (dout, dsum)),
        look=look_at_gradients,
    )
