import torch
import torch.nn.functional as F

from benchmarks.case import Case, nbytes

ops = torch.ops.gptkernels
SIZES = {"cuda": [(65536, 768, 3072), (65536, 3072, 768), (4096, 768, 2304)], "cpu": [(1024, 768, 768)]}


def torch_backward(dout, x, weight):
    return dout @ weight, dout.t() @ x, dout.sum(0)


def cases(device, dtype, small):
    for rows, inner, outer in [(4, 8, 8)] if small else SIZES[device.type]:
        x = torch.randn(rows, inner, device=device, dtype=dtype)
        weight, bias = (
            torch.randn(outer, inner, device=device, dtype=dtype),
            torch.randn(outer, device=device, dtype=dtype),
        )
        dout = torch.randn(rows, outer, device=device, dtype=dtype)
        shape = f"{rows}x{inner}x{outer}"
        yield Case(
            "linear fwd",
            shape,
            lambda a=(x, weight, bias): ops.linear(*a),
            {"torch": lambda a=(x, weight, bias): F.linear(*a)},
            bytes=nbytes(x, weight, dout),
            flops=2 * rows * inner * outer,
        )
        yield Case(
            "linear bwd",
            shape,
            lambda a=(dout, x, weight): ops.linear_backward(*a, [True] * 3),
            {"torch": lambda a=(dout, x, weight): torch_backward(*a)},
            bytes=2 * nbytes(x, weight) + nbytes(dout),
            flops=4 * rows * inner * outer,
        )
