import torch
import torch.nn.functional as F

from benchmarks.case import Case, nbytes

ops = torch.ops.gptkernels
SIZES = {"cuda": [(65536, 768), (16384, 1600), (8192, 8192), (4096, 768)], "cpu": [(4096, 768)]}


def cases(device, dtype, small):
    for rows, width in [(4, 8)] if small else SIZES[device.type]:
        x, dout = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(2))
        weight, bias = (torch.randn(width, device=device, dtype=dtype) for _ in range(2))
        shape = f"{rows}x{width}"
        _, mean, rstd = ops.layernorm(x, weight, bias)
        native = torch.ops.aten.native_layer_norm(x, [width], weight, bias, 1e-5)[1:]
        yield Case(
            "layernorm fwd",
            shape,
            lambda x=x, weight=weight, bias=bias: ops.layernorm(x, weight, bias),
            {"torch": lambda x=x, weight=weight, bias=bias: F.layer_norm(x, x.shape[-1:], weight, bias)},
            bytes=2 * nbytes(x),
        )
        yield Case(
            "layernorm bwd",
            shape,
            lambda a=(dout, x, weight, mean, rstd): ops.layernorm_backward(*a, [True] * 3),
            {
                "torch": lambda a=(dout, x, [width], *native, weight, bias): torch.ops.aten.native_layer_norm_backward(
                    *a, [True] * 3
                )
            },
            bytes=3 * nbytes(x),
        )
