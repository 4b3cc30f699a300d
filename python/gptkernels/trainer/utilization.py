"""How much of the device a run uses: the share of its arithmetic, and its memory."""

from __future__ import annotations

import resource
import sys

import torch

# The tensor cores' peak rate for dense bfloat16 products, in 1e12 operations per second, from NVIDIA's data sheets. The
# first entry that the device's name starts with is used, so a longer name comes before its own prefix.
_PEAKS = {
    "NVIDIA B200": 2250.0,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA H200": 989.4,
    "NVIDIA GH200": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H100": 989.4,
    "NVIDIA A100": 312.0,
    "NVIDIA A800": 312.0,
    "NVIDIA A40": 149.7,
    "NVIDIA A30": 165.0,
    "NVIDIA A10G": 70.0,
    "NVIDIA A10": 125.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA L40": 181.0,
    "NVIDIA L4": 121.0,
    "NVIDIA RTX 6000 Ada": 364.2,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 3090": 71.0,
}


def peak_flops(device: torch.device) -> float | None:
    """The device's bfloat16 operations a second, sparsity aside; None where they are not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peak for beginning, peak in _PEAKS.items() if name.startswith(beginning)), None)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that torch's allocator has handed out on a GPU, or that this process has had on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
