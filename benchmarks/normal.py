import torch

from benchmarks.harness.case import Case, nbytes

ops = torch.ops.gptkernels
SIZES = {"bfloat16": [(50304, 768)], "float32": [(50304, 768)]}
CPU_SIZES = [(4096, 768)]
TINY = (40, 8)
STD = 0.02


def moments_are_right(x):
    """Return 1.0 if the mean and the mean square are within 5 deviations of N(0, STD^2), else 0.0."""
    x, n = x.double() / STD, x.numel()
    deviations = torch.stack([x.mean() * n**0.5, (x.square().mean() - 1) * (n / 2) ** 0.5])
    return ((deviations.abs() < 5).all().double(),)


def cases(device, dtype, rows, width):
    x = torch.empty(rows, width, device=device, dtype=dtype)

    def ours():
        ops.normal_(x, 0.0, STD, 1, 2)
        return x

    yield Case(
        "normal_",
        f"{rows}x{width}",
        ours,
        lambda: [(0, ..., torch.ones((), dtype=torch.float64, device=device))],
        bytes=nbytes(x),
        flops=150 * x.numel(),
        peers={"torch": lambda: x.normal_(0.0, STD)},
        look=moments_are_right,
        reset=lambda: x.zero_(),
    )
