import torch
import torch.nn.functional as F

from benchmarks.harness.directions import both

ops = torch.ops.gptkernels
SIZES = {"bfloat16": [(65536, 768)], "float32": [(65536, 768)]}
CPU_SIZES = [(512, 256)]
TINY = (4, 8)


def formula(x, fc_weight, fc_bias, proj_weight, proj_bias):
    hidden = F.gelu(F.linear(x, fc_weight, fc_bias), approximate="tanh")
    return F.linear(hidden, proj_weight, proj_bias)


def cases(device, dtype, rows, channels):
    hidden = 4 * channels
    x, dout = (torch.randn(rows, channels, device=device, dtype=dtype) for _ in range(2))
    weights = [
        torch.randn(*size, device=device, dtype=dtype) * channels**-0.5
        for size in ((hidden, channels), (hidden,), (channels, hidden), (channels,))
    ]
    _, pre_gelu, post_gelu = ops.mlp(x, *weights)
    yield from both(
        "mlp",
        f"{rows}x{channels}x{hidden}",
        formula,
        lambda: ops.mlp(x, *weights)[0],
        lambda: ops.mlp_backward(dout, x, weights[0], weights[2], pre_gelu, post_gelu, [True] * 5),
        dout,
        [x],
        weights,
        saves=True,
    )
