"""Chooses a device by its name, and tells its memory and, for known GPUs, the peak rate."""

import os

import torch

# Dense bfloat16 TFLOP/s, from NVIDIA's data sheets. The first entry that is a prefix of the device's name is used, so a
# name comes before its own prefixes.
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


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"a {device.type}"


def device_memory(device: torch.device) -> int:
    """Return the bytes of a GPU's memory, or of the machine's physical memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_flops(device: torch.device) -> float | None:
    name = device_name(device)
    return next((1e12 * peak for beginning, peak in _PEAKS.items() if name.startswith(beginning)), None)


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device called `name`.

    "cuda" is the GPU with the index `local_rank`. "auto" is "cuda" if torch finds a GPU, and otherwise "cpu".
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}, takes cpu, cuda, cuda:1, ... or auto") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}: there are kernels for cpu and cuda only")
    if device.type == "cpu":
        return device
    index = local_rank if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"device is 'cuda:{index}', this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)
