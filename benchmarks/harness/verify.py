"""Verification of a variant's results. A wrong variant is not timed."""

import torch

# Relative to the largest element and to the mean of the exact result. The tolerances are much larger than the error of
# a correct kernel and much smaller than that of a wrong kernel. The tests check how exact our kernels are.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def fault(case, variant, dtype) -> str | None:
    """Describe what is wrong with the variant's outputs. Return None if they are right."""
    case.reset()
    outputs = case.look(variant())
    errors: dict[int, _Error] = {}
    for i, part, exact in case.exact():
        if i < len(outputs):
            got = outputs[i][part]
            if got.shape != exact.shape:
                return f"output {i} has shape {tuple(got.shape)}, not {tuple(exact.shape)}"
            errors.setdefault(i, _Error()).add(got, exact)
    if not errors:
        return "nothing to check"
    for i, error in errors.items():
        worst = error.relative()
        if not worst <= TOLERANCE[case.rounded or dtype]:  # NaN is wrong too
            return f"output {i} is off by {worst:.1e}"
    return None


class _Error:
    """The error of one output, accumulated piece by piece without synchronizing with the device."""

    def __init__(self):
        self.largest, self.sum, self.exact_largest, self.exact_sum = [], [], [], []

    def add(self, got, exact):
        error = (got.detach().double() - exact).abs_()
        exact = exact.abs()
        for values, gathered in ((error, (self.largest, self.sum)), (exact, (self.exact_largest, self.exact_sum))):
            gathered[0].append(values.max())
            gathered[1].append(values.sum())

    def relative(self) -> float:
        """Return the larger of two ratios: the largest error by the largest value, the mean error by the mean value."""
        largest = torch.stack(self.largest).max() / torch.stack(self.exact_largest).max()
        mean = torch.stack(self.sum).sum() / torch.stack(self.exact_sum).sum()
        return torch.maximum(largest, mean).item()
