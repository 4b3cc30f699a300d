import torch
import torch.nn.functional as F

from benchmarks.case import Case, nbytes

ops = torch.ops.gptkernels
SIZES = {"cuda": [(65536, 768)], "cpu": [(512, 256)]}


def torch_forward(x, fc_weight, fc_bias, proj_weight, proj_bias):
    hidden = F.gelu(F.linear(x, fc_weight, fc_bias), approximate="tanh")
    return F.linear(hidden, proj_weight, proj_bias)


def torch_backward(dout, x, fc_weight, proj_weight, pre_gelu, post_gelu):
    dhidden = torch.ops.aten.gelu_backward(dout @ proj_weight, pre_gelu, approximate="tanh")
    return dhidden @ fc_weight, dhidden.t() @ x, dhidden.sum(0), dout.t() @ post_gelu, dout.sum(0)


def cases(device, dtype, small):
    for rows, channels in [(4, 8)] if small else SIZES[device.type]:
        hidden = 4 * channels
        x, dout = (torch.randn(rows, channels, device=device, dtype=dtype) for _ in range(2))
        fc_weight, fc_bias = (
            torch.randn(*s, device=device, dtype=dtype) * 0.02 for s in ((hidden, channels), (hidden,))
        )
        proj_weight, proj_bias = (
            torch.randn(*s, device=device, dtype=dtype) * 0.02 for s in ((channels, hidden), (channels,))
        )
        _, pre_gelu, post_gelu = ops.mlp(x, fc_weight, fc_bias, proj_weight, proj_bias)
        shape = f"{rows}x{channels}x{hidden}"
        flops = 4 * rows * channels * hidden
        yield Case(
            "mlp fwd",
            shape,
            lambda a=(x, fc_weight, fc_bias, proj_weight, proj_bias): ops.mlp(*a),
            {"torch": lambda a=(x, fc_weight, fc_bias, proj_weight, proj_bias): torch_forward(*a)},
            bytes=nbytes(x, dout, pre_gelu, post_gelu),
            flops=flops,
        )
        yield Case(
            "mlp bwd",
            shape,
            lambda a=(dout, x, fc_weight, proj_weight, pre_gelu, post_gelu): ops.mlp_backward(*a, [True] * 5),
            {"torch": lambda a=(dout, x, fc_weight, proj_weight, pre_gelu, post_gelu): torch_backward(*a)},
            bytes=nbytes(x, dout, pre_gelu, post_gelu, x),
            flops=2 * flops,
        )
