import torch
import torch.nn.functional as F

from benchmarks.case import Case, nbytes

ops = torch.ops.gptkernels
SIZES = {"cuda": [(65536, 3072)], "cpu": [(4096, 768)]}


def cases(device, dtype, small):
    for rows, width in [(4, 8)] if small else SIZES[device.type]:
        x, dout = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(2))
        for kind in ("tanh", "none"):
            shape = f"{rows}x{width} {kind}"
            yield Case(
                "gelu fwd",
                shape,
                lambda x=x, kind=kind: ops.gelu(x, approximate=kind),
                {"torch": lambda x=x, kind=kind: F.gelu(x, approximate=kind)},
                bytes=2 * nbytes(x),
            )
            yield Case(
                "gelu bwd",
                shape,
                lambda dout=dout, x=x, kind=kind: ops.gelu_backward(dout, x, approximate=kind),
                {"torch": lambda dout=dout, x=x, kind=kind: torch.ops.aten.gelu_backward(dout, x, approximate=kind)},
                bytes=3 * nbytes(x),
            )
