"""The machine's limits: the copies with which rows are compared, and one large matmul."""

import torch

from benchmarks.harness.row import Row
from benchmarks.harness.timing import kernel_times


def copy(nbytes, device):
    """Return a copy on the device by torch, which reads half of these bytes and writes the other half.

    A small kernel is compared with a small copy, because neither reaches the rate of a large copy. The bytes are
    random, because zeros can be copied faster.
    """
    source = torch.randint(256, (max(1, nbytes // 2),), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def rows(device, repeats) -> list[Row]:
    """Time the large copy and the large matmul."""
    cuda = device.type == "cuda"
    nbytes, n, dtype = (2 << 30, 8192, torch.bfloat16) if cuda else (2 << 26, 1024, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    copied, multiplied = kernel_times([copy(nbytes, device), lambda: a @ b], device, repeats)
    name = str(dtype).removeprefix("torch.")
    size = f"{nbytes >> 21} MiB"
    return [
        Row("roof", "copy", size, "bytes", nbytes, 0, {"torch": copied}),
        Row("roof", "matmul", f"{n}x{n}x{n}", name, 3 * a.nbytes, 2 * n**3, {"torch": multiplied}),
    ]
