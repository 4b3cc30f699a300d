from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.harness.case import Case
from benchmarks.harness.peers import backward, compiled, training
from gptkernels import functional
from gptkernels.testing.cases import OPERATORS

SIZES = {"bfloat16": [(65536, 768), (4096, 768)], "float32": [(65536, 768)]}
CPU_SIZES = [(4096, 768)]
TINY = (4, 8)
P = 0.1


class Mask:
    """Checks a result without its mask: kept elements must be exact, and a share of about P must be dropped."""

    def __init__(self, values):
        self.kept = values / (1 - P)

    def look(self, dropped, added=0.0):
        """Replace dropped elements by the exact ones; also return 1.0 if about a share P was dropped, else 0.0."""
        drops = dropped == added
        deviations = (drops.double().mean() - P) / (P * (1 - P) / drops.numel()) ** 0.5
        return dropped + drops * self.kept, (deviations.abs() < 5).double()

    def exact(self, first=0, added=0.0):
        yield first, ..., self.kept.double() + added
        yield first + 1, ..., torch.ones((), dtype=torch.float64, device=self.kept.device)


def cases(device, dtype, rows, width):
    x, dout = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(2))
    torchs = partial(F.dropout, p=P)
    ours = partial(functional.dropout, p=P)  # includes the kernel that draws the seed, as the baselines do
    forward_cost, backward_cost = OPERATORS["dropout"].costs(x)
    for direction, cost, values, run in [
        ("fwd", forward_cost, x, lambda function: training(function, x)),
        ("bwd", backward_cost, dout, lambda function: backward(function, (x,), dout)),
    ]:
        mask = Mask(values)
        yield Case(
            f"dropout {direction}",
            f"{rows}x{width} p={P}",
            run(ours),
            mask.exact,
            **vars(cost),
            peers={"torch": run(torchs), "compile": run(compiled(torchs))},
            look=lambda result, mask=mask: mask.look(result[0] if isinstance(result, tuple) else result),
        )
