"""Tests of ``kernel-hub``: the folder for kernel-builder, and the kernel's own tests with this package's libraries."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gptkernels

KERNEL_HUB = Path(__file__).parent.parent / "kernel-hub"
LIBRARIES = Path(gptkernels.__file__).parent / "lib"
# kernel-builder writes this file with an extension module and a namespace of each build.
OPS = f"""import torch

for name in ("libgptkernels.so", "libgptkernels_cuda.so")[: 1 + torch.cuda.is_available()]:
    torch.ops.load_library(f"{LIBRARIES}/{{name}}")
ops = torch.ops.gptkernels


def add_op_namespace_prefix(op_name):
    return f"gptkernels::{{op_name}}"
"""


@pytest.fixture
def folder(tmp_path):
    runpy.run_path(str(KERNEL_HUB / "assemble.py"))["assemble"](tmp_path / "kernel")
    return tmp_path / "kernel"


def test_the_assembled_sources_are_complete(folder):
    tomllib = pytest.importorskip("tomllib")
    build = tomllib.loads((folder / "build.toml").read_text())
    listed = {folder / name for kernel in build["kernel"].values() for name in kernel["src"]}
    for path in listed:
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.M):
            included = {Path(os.path.normpath(parent / name)) for parent in (path.parent, folder / "csrc")}
            assert included & listed, f"{path.name} includes {name}"


def test_python_imports_are_relative_or_torchs():
    for path in (KERNEL_HUB / "torch-ext").rglob("*.py"):
        for name in re.findall(r"^(?:from|import) ([\w.]+)", path.read_text(), re.M):
            assert name.startswith(".") or name.split(".")[0] in ("torch", "typing"), f"{path.name} imports {name}"


def test_the_kernels_own_tests(folder, device):
    """The tests run in a process of their own, because this one has rules for the libraries' operators."""
    pytest.importorskip("kernels")
    for backend in ("cpu", "cuda"):
        variant = folder / "build" / f"torch-{backend}"
        shutil.copytree(folder / "torch-ext" / "gptkernels", variant)
        (variant / "_ops.py").write_text(OPS)
        metadata = {
            "id": "_gptkernels_local",
            "name": "gptkernels",
            "version": 0,
            "license": "MIT",
            "python-depends": [],
        }
        (variant / "metadata.json").write_text(json.dumps(metadata | {"backend": {"type": backend}}))
    variables = {"LOCAL_KERNELS": f"gptkernels/gptkernels={folder}", "OMP_NUM_THREADS": "1"}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device.type == "cpu" else {}
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-o", "markers=kernels_ci", "-m", "kernels_ci", "-q"]
    found = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(folder / "tests")],
        env={**os.environ, **variables, **hidden}, cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert re.search(r"^2\d passed", found.stdout, re.M), found.stdout[-4000:]
