import torch
import torch.nn.functional as F

from benchmarks.case import Case, nbytes

ops = torch.ops.gptkernels
SIZES = {"cuda": [(65536, 768)], "cpu": [(4096, 768)]}


def torch_forward(x, residual, weight, bias):
    total = x + residual
    return F.layer_norm(total, x.shape[-1:], weight, bias), total


def torch_backward(dout, dsum, total, mean, rstd, weight, bias):
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dout, total, list(total.shape[-1:]), mean, rstd, weight, bias, [True] * 3
    )
    return dx + dsum, dweight, dbias


def cases(device, dtype, small):
    for rows, width in [(4, 8)] if small else SIZES[device.type]:
        x, residual, dout, dsum = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(4))
        weight, bias = (torch.randn(width, device=device, dtype=dtype) for _ in range(2))
        shape = f"{rows}x{width}"
        _, total, mean, rstd = ops.residual_layernorm(x, residual, weight, bias)
        native = torch.ops.aten.native_layer_norm(total, [width], weight, bias, 1e-5)[1:]
        yield Case(
            "residual_layernorm fwd",
            shape,
            lambda a=(x, residual, weight, bias): ops.residual_layernorm(*a),
            {"torch": lambda a=(x, residual, weight, bias): torch_forward(*a)},
            bytes=4 * nbytes(x),
        )
        yield Case(
            "residual_layernorm bwd",
            shape,
            lambda a=(dout, dsum, total, weight, mean, rstd): ops.residual_layernorm_backward(*a, [True] * 3),
            {"torch": lambda a=(dout, dsum, total, *native, weight, bias): torch_backward(*a)},
            bytes=4 * nbytes(x),
        )
