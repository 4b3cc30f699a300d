import torch
import torch.nn.functional as F

from benchmarks.case import Case, nbytes

ops = torch.ops.gptkernels
SIZES = {"cuda": [(8192, 50304), (4096, 128256)], "cpu": [(4096, 768), (256, 50257)]}


def torch_loss_and_gradient(logits, targets):
    logits = logits.detach().requires_grad_()
    loss = F.cross_entropy(logits, targets)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


def cases(device, dtype, small):
    for rows, width in [(4, 8)] if small else SIZES[device.type]:
        logits = torch.randn(rows, width, device=device, dtype=dtype)
        targets = torch.randint(width, (rows,), device=device)
        yield Case(
            "fused_classifier fwd+bwd",
            f"{rows}x{width}",
            lambda logits=logits, targets=targets: ops.fused_classifier(logits, targets),
            {"torch": lambda logits=logits, targets=targets: torch_loss_and_gradient(logits, targets)},
            bytes=2 * nbytes(logits),
        )
