from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.harness.case import Case, nbytes
from benchmarks.harness.peers import backward, compiled, training
from gptkernels import functional

SIZES = {"bfloat16": [(65536, 768), (4096, 768)], "float32": [(65536, 768)]}
CPU_SIZES = [(4096, 768)]
TINY = (4, 8)
P = 0.1


class Mask:
    """What of a result with dropout is known whatever was drawn: what is kept, and how many are."""

    def __init__(self, values):
        self.kept = values / (1 - P)

    def look(self, dropped, added=0.0):
        """What is kept, as if all were, and whether that is 1 - P of all; ``added`` is what the result has beside."""
        drops = dropped == added
        deviations = (drops.double().mean() - P) / (P * (1 - P) / drops.numel()) ** 0.5
        return dropped + drops * self.kept, (deviations.abs() < 5).double()

    def exact(self, first=0, added=0.0):
        yield first, ..., self.kept.double() + added
        yield first + 1, ..., torch.ones((), dtype=torch.float64, device=self.kept.device)


def cases(device, dtype, rows, width):
    x, dout = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(2))
    shape = f"{rows}x{width} p={P}"
    torchs = partial(F.dropout, p=P)
    ours = partial(functional.dropout, p=P)  # with the kernel that draws the seed, as theirs draw it

    for direction, values, run in [
        ("fwd", x, lambda function: training(function, x)),
        ("bwd", dout, lambda function: backward(function, (x,), dout)),
    ]:
        mask = Mask(values)
        yield Case(
            f"dropout {direction}",
            shape,
            run(ours),
            mask.exact,
            bytes=2 * nbytes(x),
            flops=x.numel(),
            peers={"torch": run(torchs), "compile": run(compiled(torchs))},
            look=lambda result, mask=mask: mask.look(result[0] if isinstance(result, tuple) else result),
        )
