import torch
import torch.nn.functional as F

from benchmarks.case import Case, nbytes

ops = torch.ops.gptkernels
SIZES = {"cuda": [(65536, 128), (65536, 768), (8192, 4096), (4096, 32768)], "cpu": [(4096, 768)]}


def cases(device, dtype, small):
    for rows, width in [(4, 8)] if small else SIZES[device.type]:
        x, dout = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(2))
        out = ops.softmax(x)
        shape = f"{rows}x{width}"
        yield Case(
            "softmax fwd",
            shape,
            lambda x=x: ops.softmax(x),
            {"torch": lambda x=x: F.softmax(x, -1)},
            bytes=2 * nbytes(x),
        )
        yield Case(
            "softmax bwd",
            shape,
            lambda dout=dout, out=out: ops.softmax_backward(dout, out),
            {"torch": lambda a=(dout, out, -1, dtype): torch.ops.aten._softmax_backward_data(*a)},
            bytes=3 * nbytes(x),
        )
