import torch

from benchmarks.adamw import gpt2_shapes
from benchmarks.case import Case, nbytes

ops = torch.ops.gptkernels


def cases(device, dtype, small):
    shapes = gpt2_shapes(1, 8, 16, 8) if small else gpt2_shapes(*(() if device.type == "cuda" else (2, 128, 256, 128)))
    tensors = [torch.randn(s, device=device, dtype=dtype) for s in shapes]
    yield Case(
        "global_norm",
        f"{len(shapes)} tensors, {sum(t.numel() for t in tensors) / 1e6:.1f}M",
        lambda: ops.global_norm(tensors),
        {"torch": lambda: torch.nn.utils.get_total_norm(tensors)},
        bytes=nbytes(*tensors),
    )
