from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.harness.directions import both

ops = torch.ops.gptkernels
SIZES = {"bfloat16": [(65536, 3072)], "float32": [(65536, 3072)]}
CPU_SIZES = [(4096, 768)]
TINY = (4, 8)


def cases(device, dtype, rows, width):
    x, dout = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(2))
    for approximate in ("tanh", "none"):
        yield from both(
            "gelu",
            f"{rows}x{width} {approximate}",
            partial(F.gelu, approximate=approximate),
            partial(ops.gelu, x, approximate=approximate),
            partial(ops.gelu_backward, dout, x, approximate=approximate),
            dout,
            [x],
        )
