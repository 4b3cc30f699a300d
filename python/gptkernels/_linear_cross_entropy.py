"""``gptkernels.functional.linear_cross_entropy``."""

from torch import Tensor

from gptkernels.ops._register import ops


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
    """``cross_entropy(linear(x, weight), targets)`` without ever holding all the logits.

    The rows are worked on in chunks. For "mean" and "sum" the forward already computes the gradients of x and weight
    from each chunk's logits, and the backward only scales them; it computes neither where no gradient is recorded. For
    "none", and for float16 (whose loss scale must be in before anything is rounded), the backward computes each chunk's
    logits once more. So it does where the gradients are to be differentiated again; the second derivative holds all the
    logits. Inside autocast the matrix products are done in its dtype.

    Args:
        x: (..., C), the last hidden layer.
        weight: (Vp, C), the output embedding.
        targets: (...), int64 or int32.
        vocab_size: V; the columns from there to Vp are padding and take no part. Vp when None.
        ignore_index: the target of rows that take no part.
        reduction: "mean" (over the rows that take part; nan when there is none), "sum" or "none".
        chunk_size: rows at a time; when None as many as give 2^28 logits.

    Returns:
        float32 (float64 for float64): 0-dim, or of targets' shape for "none".

    Raises:
        ValueError: shapes that do not fit, an unknown ``reduction``, a ``chunk_size`` below 1.
    """
    check_reduction("linear_cross_entropy", reduction)
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            "linear_cross_entropy: weight must have shape (Vp, C) with x (..., C), "
            f"got {tuple(weight.shape)} and {tuple(x.shape)}"
        )
    if targets.shape != x.shape[:-1]:
        raise ValueError(
            f"linear_cross_entropy: targets must have shape {tuple(x.shape[:-1])}, got {tuple(targets.shape)}"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"linear_cross_entropy: chunk_size must be at least 1, got {chunk_size}")
    return ops.linear_cross_entropy.default(
        x,
        weight,
        targets,
        -1 if vocab_size is None else vocab_size,
        ignore_index,
        reduction,
        -1 if chunk_size is None else chunk_size,
    )


def check_reduction(function: str, reduction: str) -> None:
    """Raise a ValueError unless torch knows the reduction."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{function}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
