import torch
import torch.nn.functional as F

from benchmarks.case import Case, nbytes

ops = torch.ops.gptkernels
SIZES = {"cuda": [(8192, 50304), (4096, 32768), (65536, 768)], "cpu": [(4096, 768), (256, 50257)]}


def cases(device, dtype, small):
    for rows, width in [(4, 8)] if small else SIZES[device.type]:
        logits = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
        targets = torch.randint(0, width, (rows,), device=device)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        mean = torch.full((), 1 / rows, device=device, dtype=wide)

        def torchs(logits=logits, targets=targets):
            return torch.autograd.grad(F.cross_entropy(logits, targets), logits)

        def ours(logits=logits, targets=targets):
            return torch.autograd.grad(ops.fused_classifier(logits, targets)[0].mean(), logits)

        shape = f"{rows}x{width}"
        data, overwritten = logits.detach(), logits.detach().clone()
        yield Case(
            "fused_classifier, gradient folded in",
            shape,
            lambda data=data, targets=targets, mean=mean: ops.fused_classifier(data, targets, dlosses=mean),
            {"torch fwd+bwd": torchs},
            bytes=2 * nbytes(data),
        )
        yield Case(
            "fused_classifier_, in place",
            shape,
            lambda data=overwritten, targets=targets, mean=mean: ops.fused_classifier_(data, targets, dlosses=mean),
            {"torch fwd+bwd": torchs},
            bytes=2 * nbytes(data),
        )
        yield Case("fused_classifier through autograd", shape, ours, {"torch fwd+bwd": torchs}, bytes=2 * nbytes(data))
