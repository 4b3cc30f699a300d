"""The rule of exactness: our error is at most twice torch's own error, plus one rounding of the output.

An error is the difference from the formula in float64, as in FlashAttention's tests. Matmuls must also satisfy a bound
that does not depend on torch, because torch's BLAS may have the same fault.
"""

import math

import torch
from torch import Tensor


def assert_as_exact_as_torch(
    ours: Tensor, torchs: Tensor, exact: Tensor, name: str = "out", torch_error: float = 0.0
) -> None:
    """Check that a result satisfies the rule.

    Where the formula gives NaN or an infinity, our result must be the same. Where the formula's value is finite, our
    result may differ from it by the allowed error, or may be infinite if the value plus the allowed error overflows the
    dtype. Torch's result only determines the allowed error, from its finite elements.

    Args:
        ours, torchs: the results of our kernel and of torch, in the same dtype.
        exact: the formula in float64.
        name: the name of the result in an error message.
        torch_error: torch's largest error on similar inputs, if several inputs were tried.

    Raises:
        AssertionError: if a shape, a dtype or a value is wrong.
    """
    _demand(ours.shape == exact.shape, f"{name}: shape {tuple(ours.shape)}, wanted {tuple(exact.shape)}")
    _demand(ours.dtype == torchs.dtype, f"{name}: dtype {ours.dtype}, wanted {torchs.dtype}")
    torch_error = max(torch_error, error_of(torchs, exact))
    allowed = 2 * torch_error + last_rounding(exact, ours.dtype)
    error = ours.double() - exact
    if _largest_or_nan(error) <= min(allowed, torch.finfo(error.dtype).max):  # then all elements are finite
        return

    finite = exact.isfinite()
    same = (ours == exact) | (ours.isnan() & exact.isnan())
    wrong = ~finite & ~same
    if wrong.any():
        raise AssertionError(f"{name}: {_first(wrong, ours, exact)}, where the formula is not finite")
    # An infinity is right where the formula plus the allowed error, away from 0, overflows the dtype.
    overflow = ours.isinf() & (ours == (exact + allowed * exact.sign()).to(ours.dtype))
    wrong = finite & ~overflow & ~(error.abs() <= allowed)
    if wrong.any():
        raise AssertionError(
            f"{name}: {_first(wrong, ours, exact)}; error {error[wrong].abs().max():.3e}, allowed {allowed:.3e} "
            f"(torch's worst is {torch_error:.3e})"
        )


def _demand(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _first(wrong: Tensor, ours: Tensor, exact: Tensor) -> str:
    index = tuple(wrong.nonzero()[0].tolist())
    return f"{int(wrong.sum())} wrong, ours is {ours[index].item()} at {index}, wanted {exact[index].item():.6e}"


def _largest_or_nan(t: Tensor) -> float:
    """Return the largest magnitude, in one pass over the elements; NaN if an element is NaN."""
    if not t.numel():
        return 0.0
    low, high = t.aminmax()
    return torch.maximum(low.abs(), high.abs()).item()


def largest(exact: Tensor) -> float:
    found = _largest_or_nan(exact)
    return found if math.isfinite(found) else _largest_or_nan(exact.where(exact.isfinite(), 0.0))


def last_rounding(exact: Tensor, dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    scale = min(largest(exact), info.max)
    # The formula in float64 and a float64 result both have the rounding errors of a sum.
    rounding = 1e-13 * max(scale, 1) if dtype == torch.float64 else info.eps * scale
    return rounding + info.smallest_normal * info.eps


def error_of(result: Tensor, exact: Tensor) -> float:
    """Return the largest error of the elements that are finite in the result and in the rounded formula."""
    return _largest_or_nan(_finite_errors(result, exact))


def _finite_errors(result: Tensor, exact: Tensor) -> Tensor:
    errors = result.double() - exact
    if _largest_or_nan(exact) <= torch.finfo(result.dtype).max and math.isfinite(_largest_or_nan(errors)):
        return errors
    both = result.isfinite() & exact.to(result.dtype).isfinite()
    return errors.where(both, 0.0)


def root_mean_square_error(result: Tensor, exact: Tensor) -> float:
    return (_finite_errors(result, exact).norm() / math.sqrt(max(exact.numel(), 1))).item()


def assert_norm_as_exact_as_torch(
    ours: Tensor, torchs: Tensor, exact: Tensor, name: str = "out", torch_error: float = 0.0
) -> None:
    """Check that the root mean square error is at most four times torch's, plus the rounding of an average element.

    The root mean square averages rounding errors, and so detects smaller faults than the largest error does, such as a
    few missing terms of a long sum. The rounding of the mean is added, because equal elements have equal rounding
    errors, which do not average out. The factor is four, because two would be too strict if a few elements have most of
    the error. Results in float64, and results of fewer than 1000 elements, too few for an average, are not checked.
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
    """Check ``out`` (M, N) = ``a`` (M, K) @ ``b`` (K, N) + ``bias`` against a bound on the error of its arithmetic.

    This is Freivalds' check: ``out @ r`` and ``a @ (b @ r)`` are compared in float64 for 64 vectors r of random signs.
    The mean square of the difference estimates the squared Frobenius norm of the error. The allowed norm is
    ``1.25 (u |out| + c e (|out| + s))``, plus an allowance for underflow, where

    - 1.25 allows for the error of the estimate;
    - u and e are half of the machine epsilons of the output's dtype and of the sum's dtype;
    - s^2 is the sum over k of |a[:, k]|^2 |b[k, :]|^2: with random signs of the terms, s would be the norm of the sum;
    - c is 4 + sqrt(K) (1 + |out| / (4 s)) + K / 16: 4 for the bias and for split operands; sqrt(K) for the independent
      roundings of partial sums, and its second term for equal terms, with which |out| is sqrt(K) s; K / 16 for tensor
      cores, which truncate after every 16 terms.

    For float64, K is replaced by K + N, because the check's own sums are rounded, too. If an element of the result or
    of an operand is not finite, nothing is checked. If the sums have fewer bits than float32, ``accumulation`` is the
    relative error of a sum of random terms; that of a sum of equal terms is ``1 + K / 256`` times as large.
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
    equal = math.sqrt(terms) * size / random_sum if random_sum else 0.0  # K if all terms are equal
    unit = wide_info.eps / 2 * count + accumulation * (1 + equal / 256)
    # Denormal operands may be read as 0, and denormal results rounded to 0.
    underflow = size_b * math.sqrt(a.numel()) + size_a * math.sqrt(b.numel()) + math.sqrt(out.numel())
    underflow = wide_info.smallest_normal * underflow + info.smallest_normal * info.eps * math.sqrt(out.numel())
    allowed = 1.25 * (info.eps / 2 * size + unit * (size + random_sum) + underflow)
    _demand(
        error <= allowed, f"{name}: Freivalds' check finds an error of {error:.3e} in the norm, allowed {allowed:.3e}"
    )


class Errors:
    """Our and torch's largest errors of one result in several trials.

    The root mean squares of the two errors over all trials are compared, because the largest error may occur in only a
    few random trials. A trial's errors are scaled down if its result is larger than the first trial's.

    If torch's error is at least as large as the result, the result consists only of the rounding errors of terms that
    cancel, which depend on the order of the sum. Torch's error is then multiplied by four, and is at least ``noise``.
    For a larger result, torch's error is multiplied by ``luck``.

    If torch's error is 0 in all trials, its order of summation suits the numbers, as for 64 equal terms that are added
    in pairs. Torch's error then counts as one rounding of the output.
    """

    def __init__(self, noise: float = 0.0, luck: float = 1.0) -> None:
        self.noise, self.luck = noise, luck
        self.ours: list[float] = []
        self.torchs: list[float] = []
        self.norms: list[float] = []

    def add(self, ours: Tensor, torchs: Tensor, exact: Tensor) -> None:
        error, scale = error_of(torchs, exact), largest(exact)
        if not self.ours:
            self.scale, self.rounding = scale, last_rounding(exact, ours.dtype)
        # If the terms cancel, the formula's result is only float64 rounding errors, and is not used as a scale.
        cancelled = error > scale * (2**-5 if ours.dtype == torch.float64 else 2**24)
        factor = 1.0 if cancelled or not scale else min(1.0, self.scale / scale)
        self.ours.append(error_of(ours, exact) * factor)
        norm = root_mean_square_error(torchs, exact)
        if error >= scale:
            self.torchs.append(max(4 * error * factor, self.noise))
            self.norms.append(max(norm * factor, self.noise))
        else:
            self.torchs.append(self.luck * error * factor)
            self.norms.append(norm * factor)

    def worst_of_torchs(self) -> float:
        return max(self.torchs) or self.rounding

    def worst_norm(self) -> float:
        """Return torch's largest root mean square error, or a quarter of the output's rounding if all of them are 0."""
        return max(self.norms) or self.rounding / 4

    def share(self) -> float:
        return self.ours[0] / (2 * self.worst_of_torchs() + self.rounding)

    def hold_on_the_whole(self, name: str) -> None:
        ours, torchs = (math.sqrt(sum(e * e for e in es) / len(es)) for es in (self.ours, self.torchs))
        torchs = torchs or self.rounding
        _demand(
            ours <= 2 * torchs + self.rounding,
            f"{name}: in {len(self.ours)} trials the root mean square of our errors is {ours:.3e}, "
            f"torch's {torchs:.3e}",
        )
