"""The description of a run's machine and versions."""

import datetime
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

import gptkernels

PACKAGES = ["torch", "triton", "liger-kernel", "quack-kernels", "gptkernels"]


def describe(device) -> dict:
    info = gptkernels.info()
    known = {"torch": torch.__version__, "gptkernels": info["gptkernels"]}
    versions = {name: version for name in PACKAGES if (version := known.get(name) or _version(name))}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": device.type,
        "gpu": _gpu() if device.type == "cuda" else None,
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, **versions},
        "gptkernels": info,
    }


def title(machine) -> str:
    gpu, versions = machine["gpu"], machine["versions"]
    where = f"{gpu['name']}, driver {gpu['driver']}" if gpu else f"{machine['cpu']}, {machine['threads']} threads"
    what = ", ".join(f"{name} {versions[name]}" for name in PACKAGES if name in versions)
    return f"{where}; {what}; {machine['commit']}, {machine['date'][:10]}"


def _gpu():
    found = torch.cuda.get_device_properties()
    return {
        "name": found.name,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0] or "?",
        "multiprocessors": found.multi_processor_count,
        "memory": found.total_memory,
        "l2": found.L2_cache_size,
        "capability": f"{found.major}.{found.minor}",
    }


def _cpu():
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", info.read_text(), re.M) if info.exists() else None
    return found[1].strip() if found else platform.machine()


def _version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit():
    """The environment variable GIT_COMMIT overrides the checkout's commit."""
    if told := os.environ.get("GIT_COMMIT"):
        return told
    commit = _output("git", "rev-parse", "--short=12", "HEAD").strip() or "unknown commit"
    return commit + (" with changes" if _output("git", "status", "--porcelain", "--untracked-files=no") else "")


def _output(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{command[0]}: {error}", file=sys.stderr)
        return ""
