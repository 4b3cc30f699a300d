"""How exact a kernel must be: our error is at most twice torch's own, plus one rounding of the output.

Errors are against the formula in float64, on the same inputs. This is the rule that FlashAttention's tests use.
"""

import math

import torch
from torch import Tensor


def assert_as_exact_as_torch(
    ours: Tensor, torchs: Tensor, exact: Tensor, name: str = "out", torch_error: float = 0.0
) -> None:
    """Hold a result to the rule.

    The formula alone says what is special. Where it gives NaN or an infinity, ours is the same. Where its finite value
    overflows the dtype, ours is infinite; within the allowed error of that boundary ours may lie on either side.
    Torch's answer is only the yardstick for the size of errors, and elements where it is not finite do not count.

    Args:
        ours: our kernel's result.
        torchs: torch's result in the same dtype.
        exact: the formula in float64.
        name: what an error message calls the result.
        torch_error: torch's worst error on inputs like these, where more than one was tried.

    Raises:
        AssertionError: a shape, a dtype or a value is wrong.
    """
    _demand(ours.shape == exact.shape, f"{name}: shape {tuple(ours.shape)}, wanted {tuple(exact.shape)}")
    _demand(ours.dtype == torchs.dtype, f"{name}: dtype {ours.dtype}, wanted {torchs.dtype}")
    finite = exact.isfinite()
    same = (ours == exact) | (ours.isnan() & exact.isnan())
    wrong = ~finite & ~same
    if wrong.any():
        raise AssertionError(f"{name}: {_first(wrong, ours, exact)}, where the formula is not finite")
    if not finite.any():
        return

    torch_error = max(torch_error, error_of(torchs, exact))
    allowed = 2 * torch_error + last_rounding(exact, ours.dtype)
    error = (ours.double() - exact).abs()
    # Infinite where the formula, moved outwards by the allowed error, overflows the dtype: the value of an overflow.
    overflow = ours.isinf() & (ours == (exact + allowed * exact.sign()).to(ours.dtype))
    wrong = finite & ~overflow & ~(error <= allowed)
    if wrong.any():
        raise AssertionError(
            f"{name}: {_first(wrong, ours, exact)}; error {error[wrong].max():.3e}, allowed {allowed:.3e} "
            f"(torch's worst is {torch_error:.3e})"
        )


def _demand(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _first(wrong: Tensor, ours: Tensor, exact: Tensor) -> str:
    """How many elements are wrong, and the first of them."""
    index = tuple(wrong.nonzero()[0].tolist())
    return f"{int(wrong.sum())} wrong, ours is {ours[index].item()} at {index}, wanted {exact[index].item():.6e}"


def largest(exact: Tensor) -> float:
    """The largest magnitude among the finite values; 0 if there are none."""
    finite = exact[exact.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def last_rounding(exact: Tensor, dtype: torch.dtype) -> float:
    """What the rounding of a result to its dtype adds to the allowed error."""
    info = torch.finfo(dtype)
    scale = min(largest(exact), info.max)
    # float64 has no exacter reference: both sides may differ from it by the roundings of a sum.
    rounding = 1e-13 * max(scale, 1) if dtype == torch.float64 else info.eps * scale
    return rounding + info.smallest_normal * info.eps


def error_of(result: Tensor, exact: Tensor) -> float:
    """The largest error where both the result and the formula's, rounded to its dtype, are finite; else 0."""
    both = result.isfinite() & exact.to(result.dtype).isfinite()
    return (result[both].double() - exact[both]).abs().max().item() if both.any() else 0.0


class Errors:
    """Our and torch's largest errors of one result in several trials, on the scale of the first.

    On a few numbers torch may be exact by luck, so a call that breaks the rule is made again with other numbers. Of a
    larger result the errors count in proportion. All of them together are compared by their root mean square: the worst
    may be a rare one, as where a softmax is nearly always one-hot, and then it is luck who makes it.

    Attributes:
        ours: our error in each trial.
        torchs: torch's.
    """

    def __init__(self) -> None:
        self.ours: list[float] = []
        self.torchs: list[float] = []

    def add(self, ours: Tensor, torchs: Tensor, exact: Tensor) -> None:
        """Take in one trial."""
        error, scale = error_of(torchs, exact), largest(exact)
        if not self.ours:
            self.scale, self.rounding = scale, last_rounding(exact, ours.dtype)
        # Sums that cancel leave of the formula only float64's roundings, of no meaning as a scale.
        cancelled = error > scale * (2**-5 if ours.dtype == torch.float64 else 2**24)
        factor = 1.0 if cancelled or not scale else min(1.0, self.scale / scale)
        self.ours.append(error_of(ours, exact) * factor)
        self.torchs.append(error * factor)

    def worst_of_torchs(self) -> float:
        """What torch's error is here."""
        return max(self.torchs)

    def share(self) -> float:
        """Our worst error as a share of what the rule allows beside torch's worst."""
        return max(self.ours) / (2 * max(self.torchs) + self.rounding)

    def hold_on_the_whole(self, name: str) -> None:
        """The rule for all trials together.

        Raises:
            AssertionError: it is broken.
        """
        ours, torchs = (math.sqrt(sum(e * e for e in es) / len(es)) for es in (self.ours, self.torchs))
        _demand(
            ours <= 2 * torchs + self.rounding,
            f"{name}: in {len(self.ours)} trials the root mean square of our errors is {ours:.3e}, "
            f"torch's {torchs:.3e}",
        )
