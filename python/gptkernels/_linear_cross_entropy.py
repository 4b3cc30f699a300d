"""The functions ``linear_cross_entropy`` and ``fp8_linear_cross_entropy`` of ``gptkernels.functional``."""

from torch import Tensor

from gptkernels.rules import ops


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """Compute ``cross_entropy(linear(x, weight), targets)`` in chunks of rows, and store only one chunk's logits.

    If autograd records the call, the forward also computes the gradients, and the backward scales them. In three cases
    the backward instead computes each chunk's logits a second time: for ``reduction="none"``; for float16, whose
    gradients must be multiplied by the loss scale before they are rounded; and with ``create_graph=True``. A second
    derivative stores all logits. Inside autocast the matmuls have autocast's dtype.

    Args:
        x: (..., C), the input of the LM head.
        weight: (Vp, C), the output embedding.
        targets: (...), int64 or int32.
        vocab_size: V; the columns V..Vp-1 are padding and are not part of the softmax. None is Vp.
        ignore_index: a row with this target has a loss and a gradient of 0.
        reduction: "mean" (over the rows that are not ignored; nan if all rows are ignored), "sum" or "none".
        chunk_size: the rows in a chunk; None chooses chunks of at most 2^28 logits.

    Returns:
        The loss in float32 (float64 for a float64 x): 0-dim, or (...) for ``reduction="none"``.

    Raises:
        ValueError: if shapes do not match, ``reduction`` is unknown, or ``chunk_size`` is below 1.
    """
    check_reduction("linear_cross_entropy", reduction)
    _check_shapes("linear_cross_entropy", x, weight, targets, chunk_size)
    vocab_size, chunk_size = (-1 if size is None else size for size in (vocab_size, chunk_size))
    return ops.linear_cross_entropy.default(x, weight, targets, vocab_size, ignore_index, reduction, chunk_size)


def fp8_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_size: int | None = None,
    fp8_logits: bool = False,
) -> Tensor:
    """Compute the loss of :func:`linear_cross_entropy`, with float8 matmuls for the gradients.

    The logits' gradient is rounded to e5m2, and x and the weight to e4m3. If autograd does not record the call, nothing
    is rounded to float8. A second derivative or a forward-mode derivative raises a RuntimeError.

    Args:
        x: (..., C), float32, bfloat16 or float16; C is a multiple of 16.
        weight: (Vp, C); Vp is a multiple of 16.
        targets, vocab_size, ignore_index: as in :func:`linear_cross_entropy`.
        reduction: "mean" or "sum".
        chunk_size: as in :func:`linear_cross_entropy`, rounded up to a multiple of 16.
        fp8_logits: if gradients are computed, also compute the logits, and so the loss, from the rounded x and weight.

    Returns:
        The loss, 0-dim float32.

    Raises:
        ValueError: if shapes do not match, ``reduction`` is unknown, or ``chunk_size`` is below 1.
        RuntimeError: if the dtype is not supported, or C or Vp is not a multiple of 16.
    """
    check_reduction("fp8_linear_cross_entropy", reduction, ("mean", "sum"))
    _check_shapes("fp8_linear_cross_entropy", x, weight, targets, chunk_size)
    vocab_size, chunk_size = (-1 if size is None else size for size in (vocab_size, chunk_size))
    options = vocab_size, ignore_index, reduction, chunk_size, fp8_logits
    return ops.fp8_linear_cross_entropy.default(x, weight, targets, *options)


def _check_shapes(function: str, x: Tensor, weight: Tensor, targets: Tensor, chunk_size: int | None) -> None:
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{function}: weight must have shape (Vp, C) with x (..., C), "
            f"got {tuple(weight.shape)} and {tuple(x.shape)}"
        )
    if targets.shape != x.shape[:-1]:
        raise ValueError(f"{function}: targets must have shape {tuple(x.shape[:-1])}, got {tuple(targets.shape)}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"{function}: chunk_size must be at least 1, got {chunk_size}")


def check_reduction(function: str, reduction: str, known: tuple[str, ...] = ("mean", "sum", "none")) -> None:
    if reduction not in known:
        *names, last = map(repr, known)
        raise ValueError(f"{function}: reduction must be {', '.join(names)} or {last}, got {reduction!r}")
