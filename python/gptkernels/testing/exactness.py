"""How exact a kernel must be: our error is at most twice torch's own, plus one rounding of the output.

Errors are against the formula in float64, on the same inputs. This is the rule that FlashAttention's tests use.
Products are also held to a bound that does not depend on torch, whose BLAS may have the same fault.
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
    return exact.abs().where(exact.isfinite(), 0.0).max().item() if exact.numel() else 0.0


def last_rounding(exact: Tensor, dtype: torch.dtype) -> float:
    """The part of the allowed error that comes from rounding a result to its dtype."""
    info = torch.finfo(dtype)
    scale = min(largest(exact), info.max)
    # float64 has no exacter reference: both sides may differ from it by the roundings of a sum.
    rounding = 1e-13 * max(scale, 1) if dtype == torch.float64 else info.eps * scale
    return rounding + info.smallest_normal * info.eps


def error_of(result: Tensor, exact: Tensor) -> float:
    """The largest error where both the result and the formula's, rounded to its dtype, are finite; else 0."""
    return _finite_errors(result, exact).abs().max().item() if exact.numel() else 0.0


def _finite_errors(result: Tensor, exact: Tensor) -> Tensor:
    """result - exact where the result and the rounded formula are finite, else 0."""
    both = result.isfinite() & exact.to(result.dtype).isfinite()
    return (result.double() - exact).where(both, 0.0)


def root_mean_square_error(result: Tensor, exact: Tensor) -> float:
    """Return the root mean square error. Elements that are not finite count as exact."""
    return (_finite_errors(result, exact).norm() / math.sqrt(max(exact.numel(), 1))).item()


def assert_norm_as_exact_as_torch(
    ours: Tensor, torchs: Tensor, exact: Tensor, name: str = "out", torch_error: float = 0.0
) -> None:
    """Require a root mean square error of at most four times torch's, plus the rounding of an average element.

    Roundings average out, except those of equal elements: the mean counts more. So this finds faults that are smaller
    than the largest rounding error, such as a few omitted terms of a long sum. Twice is too strict: where few
    elements have most of the error, its root mean square differs more. Results of fewer than 1000 elements pass: they
    are too few for an average. So do those in float64, whose formula rounds like them.

    Args:
        ours: our kernel's result.
        torchs: torch's result in the same dtype.
        exact: the formula in float64.
        name: what an error message calls the result.
        torch_error: the largest root mean square of torch's errors on inputs like these, if others were tried.

    Raises:
        AssertionError: the error is too large.
    """
    if exact.numel() < 1000 or ours.dtype == torch.float64:
        return
    info = torch.finfo(ours.dtype)
    size = root_mean_square_error(torch.zeros_like(ours), exact)
    mean = abs(exact.where(exact.to(ours.dtype).isfinite(), 0.0).mean().item())
    torch_error = max(torch_error, root_mean_square_error(torchs, exact))
    allowed = 4 * torch_error + info.eps * (size / 2 + mean) + info.smallest_normal * info.eps
    error = root_mean_square_error(ours, exact)
    _demand(
        error <= allowed,
        f"{name}: root mean square error {error:.3e}, allowed {allowed:.3e} (torch's is {torch_error:.3e})",
    )


def assert_product(
    out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, name: str = "out", accumulation: float = 0.0
) -> None:
    """Hold ``out`` (M, N) = ``a`` (M, K) @ ``b`` (K, N) + ``bias`` to a bound derived from its arithmetic.

    This is Freivalds' check: ``out @ r`` and ``a @ (b @ r)`` are compared in float64 for 64 vectors r of random signs,
    at the cost of reading the matrices. The mean square of the difference is an estimate of the squared Frobenius norm
    of the error. Allowed is ``u |out| + c e (|out| + s)``, and a quarter more for the estimate. u is half a unit of the
    output's dtype, e of the sum's; s^2 is the sum over k of |a[:, k]|^2 |b[k, :]|^2, so that s is the norm of a sum
    whose terms have random signs, and s / sqrt(K) that of one term. c is 4 + sqrt(K) (1 + |out| / 4 s) + K / 16: 4 for
    bias and operands, which may be split into parts; sqrt(K) for roundings of partial sums, which are independent but
    for equal terms, whose sum is sqrt(K) s; K / 16 for tensor cores, which truncate after every 16 terms. For float64 K
    is K + N, because the check's own sums round too.

    Args:
        out: the product; it passes if a number in it or in an operand is not finite.
        a: the left operand.
        b: the right operand.
        bias: (N), or None.
        name: what an error message calls the product.
        accumulation: a relative error of sums that have fewer bits than float32.

    Raises:
        AssertionError: the error is too large.
    """
    if not out.numel():
        return
    wide = torch.promote_types(out.dtype, torch.float32)
    info, wide_info = torch.finfo(out.dtype), torch.finfo(wide)
    terms = a.shape[1] + (out.shape[1] if wide == torch.float64 else 0)
    generator = torch.Generator(out.device).manual_seed(terms)
    signs = torch.randint(2, (out.shape[1], 64), generator=generator, device=out.device).double() * 2 - 1
    double_out, a, b = out.double(), a.double(), b.double()
    difference = double_out @ signs - a @ (b @ signs)
    if bias is not None:
        difference -= bias.double() @ signs
    of_a, of_b = a.square().sum(0), b.square().sum(1)
    squares = difference.square().mean(1).sum(), double_out.square().sum(), of_a @ of_b, of_a.sum(), of_b.sum()
    error, size, random_sum, size_a, size_b = torch.stack(squares).sqrt().tolist()
    if not math.isfinite(error + size + random_sum):
        return
    count = 4 + math.sqrt(terms) * (1 + size / 4 / random_sum if random_sum else 1) + terms / 16
    unit = wide_info.eps / 2 * count + accumulation
    # Denormal operands may be taken for 0, and denormal results rounded to it.
    underflow = size_b * math.sqrt(a.numel()) + size_a * math.sqrt(b.numel()) + math.sqrt(out.numel())
    underflow = wide_info.smallest_normal * underflow + info.smallest_normal * info.eps * math.sqrt(out.numel())
    allowed = 1.25 * (info.eps / 2 * size + unit * (size + random_sum) + underflow)
    _demand(
        error <= allowed, f"{name}: Freivalds' check finds an error of {error:.3e} in the norm, allowed {allowed:.3e}"
    )


class Errors:
    """Our and torch's largest errors of one result in several trials, on the scale of the first.

    On a few numbers torch may be exact by luck, so a call that breaks the rule is made again with other numbers. Of a
    larger result the errors count in proportion. All of them together are compared by their root mean square: the worst
    may be a rare one, as where a softmax is nearly always one-hot, and then it is luck who makes it.

    Results that are no larger than torch's error are nothing but roundings of terms that cancel. How large these are
    depends on the order of the sums: there torch is credited with four times its error, and at least with ``noise``.

    Args:
        noise: the error that a sum of these terms may have where they cancel.
        luck: how many times its error torch is credited with elsewhere.

    Attributes:
        ours: our error in each trial.
        torchs: the error that torch is credited with.
    """

    def __init__(self, noise: float = 0.0, luck: float = 1.0) -> None:
        self.noise, self.luck = noise, luck
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
        self.torchs.append(max(4 * error * factor, self.noise) if error >= scale else self.luck * error * factor)

    def worst_of_torchs(self) -> float:
        """The largest error that torch is credited with."""
        return max(self.torchs)

    def share(self) -> float:
        """Our error in the first trial as a share of what torch's worst error allows."""
        return self.ours[0] / (2 * max(self.torchs) + self.rounding)

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
