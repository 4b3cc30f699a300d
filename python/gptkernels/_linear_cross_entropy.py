"""``gptkernels.functional.linear_cross_entropy`` and ``fp8_linear_cross_entropy``."""

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
    """Compute ``cross_entropy(linear(x, weight), targets)`` without ever holding all the logits.

    The rows are processed in chunks. For "mean" and "sum" the forward also computes the gradients of x and weight, from
    the same logits, and the backward only scales them. If autograd records nothing, no gradient is computed. For
    "none", and for float16 (whose gradients must be multiplied by the loss scale before they are rounded), the backward
    computes each chunk's logits a second time. It also does so if the gradients are differentiated again
    (``create_graph=True``); that second derivative holds all the logits. Inside autocast the matrix products have its
    dtype.

    Args:
        x: (..., C), the last hidden layer.
        weight: (Vp, C), the output embedding.
        targets: (...), int64 or int32.
        vocab_size: V. The columns V..Vp-1 are padding: they are left out of the softmax. Vp when None.
        ignore_index: a row with this target is ignored: its loss and its gradient are 0.
        reduction: "mean" (over the rows that are not ignored; nan if all are), "sum" or "none".
        chunk_size: the number of rows in a chunk; when None as many as have 2^28 logits.

    Returns:
        float32 (float64 for float64): 0-dim, or of targets' shape for "none".

    Raises:
        ValueError: shapes do not match, ``reduction`` is unknown, or ``chunk_size`` is below 1.
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
    """Compute the same loss as :func:`linear_cross_entropy`, with float8 products in its gradients.

    The gradients of the logits are rounded to e5m2, x and the weight to e4m3. The gradients are computed in the
    forward. If autograd records nothing, this is :func:`linear_cross_entropy`, without float8. Second derivatives and
    forward-mode derivatives are not supported: both raise a RuntimeError.

    Args:
        x: (..., C), the last hidden layer, float32, bfloat16 or float16; C is a multiple of 16.
        weight: (Vp, C), the output embedding; Vp is a multiple of 16.
        targets: (...), int64 or int32.
        vocab_size: V. The columns V..Vp-1 are padding: they are left out of the softmax. Vp when None.
        ignore_index: a row with this target is ignored: its loss and its gradient are 0.
        reduction: "mean" (over the rows that are not ignored; nan if all are) or "sum".
        chunk_size: the number of rows in a chunk, rounded up to a multiple of 16; when None as many as have 2^28
            logits.
        fp8_logits: if gradients are computed, compute the logits, and with them the loss, from the rounded x and weight
            too.

    Returns:
        0-dim float32.

    Raises:
        ValueError: shapes do not match, ``reduction`` is unknown, or ``chunk_size`` is below 1.
        RuntimeError: the dtype is not supported, or the number of features is not a multiple of 16.
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
    """Raise a ValueError for an unknown reduction."""
    if reduction not in known:
        *names, last = map(repr, known)
        raise ValueError(f"{function}: reduction must be {', '.join(names)} or {last}, got {reduction!r}")
