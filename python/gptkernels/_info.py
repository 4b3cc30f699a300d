"""``gptkernels.info()``."""

import os
import platform

import torch

from gptkernels import _library


def info() -> dict[str, str]:
    """Return a dict that describes this installation: versions, native libraries, CUDA architectures and the device.

    The entry ``"cuda"`` is "in use", or "not in use: " and the reason.
    """
    build = _library.build()
    found = {
        "gptkernels": build["version"],
        "commit": build["commit"] or "unknown",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "built against torch": build["torch"],
        "compiler": build["compiler"],
        "cpu library": str(_library.CPU_LIBRARY),
        "cpu capability": _library.cpu_capability(),
        "cpu threads": f"{torch.get_num_threads()} of {os.cpu_count()}",
    }
    if _library.CUDA_LIBRARY.exists():
        found["cuda library"] = str(_library.CUDA_LIBRARY)
        found["nvcc"] = build["cuda"]
        found["cuda architectures"] = build["cuda_architectures"].replace(";", ", ")
    found["cuda"] = _cuda()
    if found["cuda"] == "in use":
        major, minor = torch.cuda.get_device_capability()
        found["device"] = f"{torch.cuda.get_device_name()} (sm_{major}{minor})"
    return found


def _cuda() -> str:
    if _library.without_cuda_because:
        return f"not in use: {_library.without_cuda_because}"
    if not torch.cuda.is_available():
        return "not in use: torch sees no CUDA device"
    return "in use"
