from functools import partial

import torch

from benchmarks import adamw
from benchmarks.harness.case import Case, nbytes
from benchmarks.harness.peers import compiled

ops = torch.ops.gptkernels
SIZES, CPU_SIZES, TINY = adamw.SIZES, adamw.CPU_SIZES, adamw.TINY


def formula(tensors):
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


def exact_norm(tensors):
    yield 0, ..., sum(t.double().square().sum() for t in tensors).sqrt()


def cases(device, dtype, *model):
    tensors = [torch.randn(shape, device=device, dtype=dtype) for shape in adamw.parameter_shapes(*model)]
    yield Case(
        "global_norm",
        adamw.label(tensors),
        lambda: ops.global_norm(tensors),
        lambda: exact_norm(tensors),
        bytes=nbytes(*tensors),
        flops=2 * sum(t.numel() for t in tensors),
        peers={
            "torch": partial(torch.nn.utils.get_total_norm, tensors),
            "compile": partial(compiled(formula), tensors),
        },
    )
