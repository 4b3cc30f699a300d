"""Builds the two native libraries with CMake, as part of the package.

Environment variables: with GPTKERNELS_CUDA=0 no CUDA library is built, and with 1 the build fails if the CUDA library
cannot be built. CUDACXX is the path of nvcc (default: the one on PATH). TORCH_CUDA_ARCH_LIST names the CUDA
architectures (default: the GPU's architecture; without a GPU: 8.0, 9.0a, 10.0 and PTX of 10.0, or 8.0, 9.0a and PTX of
8.0 if nvcc is older than 12.8). MAX_JOBS is the largest number of compiler processes.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def torch_path() -> Path | None:
    """Return the folder of the installed torch, even in an isolated build, which cannot import it."""
    spec = importlib.util.find_spec("torch")
    if spec and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    for key in ("platlib", "purelib"):
        candidate = Path(sysconfig.get_paths()[key]) / "torch"
        if (candidate / "include").is_dir():
            return candidate
    return None


def environment() -> dict[str, str]:
    """Return the environment variables.

    In PATH, the folder of the running Python's executable comes first, because cmake and ninja may be installed there.
    """
    return {**os.environ, "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))}


class CMakeBuild(build_ext):
    """Runs CMake once for both libraries."""

    def run(self) -> None:
        """Configure and build into the package (editable) or the wheel's build folder."""
        package = ROOT / "python" if self.inplace or self.editable_mode else Path(self.build_lib).resolve()
        build = ROOT / "build" / "cmake"
        cuda = os.environ.get("GPTKERNELS_CUDA", "auto")
        if cuda not in ("0", "1", "auto"):
            raise SystemExit(f"GPTKERNELS_CUDA must be 0 or 1, got {cuda!r}")
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DTORCH_PATH={torch_path() or ''}",
            f"-DGPTKERNELS_CUDA={cuda}",
            f"-DGPTKERNELS_OUTPUT={package / 'gptkernels' / 'lib'}",
        ]  # fmt: skip
        if ninja := shutil.which("ninja", path=environment()["PATH"]):  # CMake's cache may name a deleted environment's
            configure.append(f"-DCMAKE_MAKE_PROGRAM={ninja}")
        jobs = os.environ.get("MAX_JOBS")
        for command in (configure, ["cmake", "--build", str(build), *(["-j", jobs] if jobs else [])]):
            subprocess.run(command, check=True, env=environment())

    def get_outputs(self) -> list[str]:
        """Return no files, because the libraries are package data."""
        return []


class PlatformWheel(bdist_wheel):
    """A wheel for every Python 3, because the libraries do not use Python's C API."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag py3-none-<platform>."""
        return "py3", "none", super().get_tag()[2]


setup(
    # An isolated build uses the headers of the installed torch, and downloads another only if there is none.
    setup_requires=[] if torch_path() else ["torch>=2.10"],
    ext_modules=[Extension("gptkernels.lib", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": PlatformWheel},
)
