from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.harness import exact
from benchmarks.harness.case import Case, nbytes
from benchmarks.harness.peers import compiled

ops = torch.ops.gptkernels
SIZES = {"bfloat16": [(8192, 50304), (4096, 128256)], "float32": [(8192, 50304)]}
CPU_SIZES = [(4096, 768), (256, 50257)]
TINY = (4, 8)


def formula(logits, targets):
    """The sum over rows; its gradient needs no scaling."""
    return F.cross_entropy(logits, targets, reduction="sum")


def loss_and_gradient(function, logits, targets):
    logits = logits.detach().requires_grad_()
    loss = function(logits, targets)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


def exact_loss_and_gradient(logits, targets):
    loss = 0
    for i, rows, dlogits in exact.outputs(
        lambda logits, targets: F.softmax(logits, -1) - F.one_hot(targets, logits.shape[-1]), [logits, targets]
    ):
        loss += formula(logits[rows].double(), targets[rows])
        yield i + 1, rows, dlogits
    yield 0, ..., loss


def liger_(logits, targets):
    """Call Liger's kernel directly, on the logits in place: its function synchronises three times before the launch."""
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel
    from triton import next_power_of_2

    rows, width = logits.shape
    losses = torch.zeros(rows, dtype=logits.dtype, device=logits.device)
    liger_cross_entropy_kernel[(rows,)](
        X_ptr=logits,
        X_stride=logits.stride(0),
        Y_ptr=targets,
        Y_stride=1,
        weight_ptr=None,
        loss_ptr=losses,
        z_loss_ptr=None,
        loss_stride=1,
        token_accuracy_ptr=None,
        token_accuracy_stride=0,
        predicted_tokens_ptr=None,
        predicted_tokens_stride=0,
        n_cols=width,
        n_non_ignore=rows,
        sum_non_ignore_weight=rows,
        weight_sum=0.0,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="sum",
        softcap=None,
        RETURN_Z_LOSS=False,
        RETURN_TOKEN_ACCURACY=False,
        RETURN_PREDICTED_TOKENS=False,
        BLOCK_SIZE=min(MAX_FUSED_SIZE, next_power_of_2(width)),
        HAS_WEIGHT=False,
        HAS_SOFTCAPPING=False,
        HAS_GRADIENTS=True,
        num_warps=32,
    )
    return losses.sum(), logits


def quack(logits, targets):
    from quack.cross_entropy import cross_entropy_fwd

    return cross_entropy_fwd(logits, targets, return_dx=True)


def cases(device, dtype, rows, width):
    logits = torch.randn(rows, width, device=device, dtype=dtype)
    targets = torch.randint(width, (rows,), device=device)
    scratch = torch.empty_like(logits)  # for variants that overwrite the logits with the gradient
    common = {
        "shape": f"{rows}x{width}",
        "exact": lambda: exact_loss_and_gradient(logits, targets),
        "bytes": 2 * nbytes(logits),
        "flops": 6 * logits.numel(),
        "look": lambda result: (result[0].double().sum(), result[1]),  # a loss for each row, or already their sum
        "reset": lambda: scratch.copy_(logits),
    }
    yield Case(
        "fused_classifier",
        ours=lambda: ops.fused_classifier(logits, targets),
        peers={
            "torch": partial(loss_and_gradient, formula, logits, targets),
            "compile": partial(loss_and_gradient, compiled(formula), logits, targets),
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
