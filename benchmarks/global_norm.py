from functools import partial

import torch

from benchmarks.adamw import CPU_SIZES, SIZES, TINY, label, parameter_shapes  # noqa: F401
from benchmarks.harness.case import Case, nbytes
from benchmarks.harness.peers import compiled

ops = torch.ops.gptkernels


def formula(tensors):
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


def cases(device, dtype, *model):
    tensors = [torch.randn(shape, device=device, dtype=dtype) for shape in parameter_shapes(*model)]
    yield Case(
        "global_norm",
        label(tensors),
        lambda: ops.global_norm(tensors),
        lambda: [(0, ..., sum(t.double().square().sum() for t in tensors).sqrt())],
        bytes=nbytes(*tensors),
        flops=2 * sum(t.numel() for t in tensors),
        peers={
            "torch": partial(torch.nn.utils.get_total_norm, tensors),
            "compile": partial(compiled(formula), tensors),
        },
    )
