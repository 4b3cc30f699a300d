from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.harness import exact
from benchmarks.harness.case import Case, nbytes
from benchmarks.harness.peers import compiled, loss_and_gradients

ops = torch.ops.gptkernels
SIZES = {"bfloat16": [(8192, 50304), (4096, 128256)], "float32": [(8192, 50304)]}
CPU_SIZES = [(4096, 768), (256, 50257)]
TINY = (4, 8)


def formula(logits, targets):
    """Unlike the mean, the sum gives gradients without a factor 1 / rows."""
    return F.cross_entropy(logits, targets, reduction="sum")


def gradient(logits, targets):
    return F.softmax(logits, -1) - F.one_hot(targets, logits.shape[-1])


def exact_loss_and_gradient(logits, targets):
    loss = 0
    for _, rows, dlogits in exact.outputs(gradient, [logits, targets]):
        loss += formula(logits[rows].double(), targets[rows])
        yield 1, rows, dlogits
    yield 0, ..., loss


def liger_(logits, targets):
    """Launch Liger's kernel directly, because its Python function synchronizes with the device three times."""
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel
    from triton import next_power_of_2

    rows, width = logits.shape
    losses = torch.zeros(rows, dtype=logits.dtype, device=logits.device)
    pointers = {"X_ptr": logits, "Y_ptr": targets, "loss_ptr": losses}
    pointers |= dict.fromkeys(["weight_ptr", "z_loss_ptr", "token_accuracy_ptr", "predicted_tokens_ptr"])
    strides = {"X_stride": logits.stride(0), "Y_stride": 1, "loss_stride": 1}
    strides |= dict.fromkeys(["token_accuracy_stride", "predicted_tokens_stride"], 0)
    sizes = {"n_cols": width, "n_non_ignore": rows, "sum_non_ignore_weight": rows, "weight_sum": 0.0}
    options = dict.fromkeys(["lse_square_scale", "label_smoothing"], 0.0)
    options |= {"ignore_index": -100, "reduction": "sum", "softcap": None, "HAS_GRADIENTS": True}
    options |= dict.fromkeys(["RETURN_Z_LOSS", "RETURN_TOKEN_ACCURACY", "RETURN_PREDICTED_TOKENS"], False)
    options |= dict.fromkeys(["HAS_WEIGHT", "HAS_SOFTCAPPING"], False)
    block = min(MAX_FUSED_SIZE, next_power_of_2(width))
    liger_cross_entropy_kernel[(rows,)](**pointers, **strides, **sizes, **options, BLOCK_SIZE=block, num_warps=32)
    return losses.sum(), logits


def quack(logits, targets):
    from quack.cross_entropy import cross_entropy_fwd

    return cross_entropy_fwd(logits, targets, return_dx=True)


def cases(device, dtype, rows, width):
    logits = torch.randn(rows, width, device=device, dtype=dtype)
    targets = torch.randint(width, (rows,), device=device)
    scratch = torch.empty_like(logits)
    common = {
        "shape": f"{rows}x{width}",
        "exact": lambda: exact_loss_and_gradient(logits, targets),
        "bytes": 2 * nbytes(logits),
        "flops": 6 * logits.numel(),
        "look": lambda result: (result[0].double().sum(), result[1]),
        "reset": lambda: scratch.copy_(logits),
    }
    yield Case(
        "fused_classifier",
        ours=lambda: ops.fused_classifier(logits, targets),
        peers={
            "torch": partial(loss_and_gradients, formula, targets, logits),
            "compile": partial(loss_and_gradients, compiled(formula), targets, logits),
            "liger": partial(liger_, scratch, targets),
            "quack": partial(quack, logits, targets),
        },
        **common,
    )
    yield Case(
        "fused_classifier_",
        ours=lambda: (ops.fused_classifier_(scratch, targets), scratch),
        peers={"liger": partial(liger_, scratch, targets)},
        **common,
    )
