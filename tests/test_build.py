"""Tests of the libraries' symbols, of builds and their tools, and of csrc without torch."""

import collections
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import gptkernels
from gptkernels import _library
from processes import run_programs

ROOT = Path(__file__).parent.parent
LIBRARIES = [p for p in (_library.CPU_LIBRARY, _library.CUDA_LIBRARY) if p.exists()]
needs_sources = pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="only in a checkout")


def list_undefined(library):
    listing = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in listing.stdout.splitlines()]


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda p: p.name)
def test_libraries_use_only_the_stable_abi(library):
    """The ABI of the C++ symbols of c10, at and torch changes with each release of torch."""
    symbols = list_undefined(library)
    assert any(s.startswith("aoti_torch_") for s in symbols)
    assert [s for s in symbols if re.match(r"_Z.*(3c10|2at|5torch)", s)] == []
    assert [s for s in symbols if re.match(r"_?Py[A-Z]", s)] == []
    assert [s for s in symbols if "gptkernels" in s] == [], "a launcher is declared and called but nowhere defined"
    assert [s for s in symbols if s.startswith("cu")] == [], "not in csrc/cuda/gemm/cublas.h"


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda p: p.name)
def test_libraries_do_not_depend_on_the_folders_of_the_build(library):
    """Two builds of a commit have the same bytes only if the libraries contain no path and no temporary file's name."""
    assert re.findall(rb"\0(/[^\0]+\.(?:h|cuh|cpp|cu)|tmpxft[^\0]*)\0", library.read_bytes()) == []


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda p: p.name)
def test_libraries_need_only_torch_and_the_systems_libraries(library):
    """A wheel with a manylinux tag may need no other library, so CUDA's runtime must be linked statically."""
    listing = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", listing.stdout))
    system = {"c", "dl", "gcc_s", "m", "pthread", "rt", "stdc++"}
    assert {"libtorch.so", "libtorch_cpu.so"} <= needed
    found = {re.sub(r"lib(.*?)\.so.*", r"\1", name) for name in needed if not name.startswith("ld-linux")}
    assert found - system == {"torch", "torch_cpu"}


def test_info_has_the_versions():
    found = gptkernels.info()
    assert found["gptkernels"] == gptkernels.__version__
    assert re.fullmatch("unknown|[0-9a-f]+(-dirty)?", found["commit"])
    assert found["torch"] == torch.__version__
    assert found["cuda"] == "in use" or found["cuda"].startswith("not in use: ")


def test_a_missing_cuda_library_is_reported():
    code = """
import pathlib, sys, torch
torch.version.cuda = torch.version.cuda or "13.0"
exists, load = pathlib.Path.exists, torch.ops.load_library
redirect = lambda path: sys.argv[1] if "gptkernels_cuda" in str(path) else str(path)
pathlib.Path.exists = lambda self: exists(pathlib.Path(redirect(self)))
torch.ops.load_library = lambda path: load(redirect(path))
import gptkernels
print(gptkernels.info()["cuda"])
x = torch.randn(2, 8)
print(torch.ops.gptkernels.layernorm(x, None, None)[0].shape)
try:
    torch.ops.gptkernels.layernorm.default._op_dk(torch._C.DispatchKey.CUDA, x, None, None)
except RuntimeError as error:
    print(error)
"""
    reasons = {"/nowhere/libgptkernels_cuda.so": "without its CUDA library", __file__: "invalid ELF header"}
    found = run_programs(*((code, [library], {}) for library in reasons), from_server=False)
    for done, reason in zip(found, reasons.values(), strict=True):
        assert done.returncode == 0, done.stderr
        info, shape, error = done.stdout.strip().splitlines()[:3]
        assert info.startswith("not in use: ")
        assert reason in info
        assert shape == "torch.Size([2, 8])"
        assert error.startswith("gptkernels::layernorm: no CUDA kernels are loaded: ")
        assert reason in error


def test_every_cpu_capability_gives_the_same_bits():
    """GPTKERNELS_CPU_CAPABILITY selects the kernels. A value that the processor does not support is an error.

    layernorm, softmax, fused_classifier, gelu, global_norm, dropout and normal_ have the same bits for each CPU
    capability.
    Their sources define the order of additions, and whether a product is rounded before it is added.
    """
    code = """
import hashlib, torch, gptkernels
print(gptkernels.info()["cpu capability"])
torch.manual_seed(0)
ops, numbers = torch.ops.gptkernels, (torch.tensor(5), torch.tensor(7))
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    x, dout = torch.randn(2, 37, 801).to(dtype)
    weight, bias = torch.randn(2, 801).to(dtype)
    out, mean, rstd = ops.layernorm(x, weight, bias)
    losses, dlogits = ops.fused_classifier(x, torch.arange(37))
    found = [out, *ops.layernorm_backward(dout, x, weight, mean, rstd, [True] * 3), ops.softmax(x)]
    found += [losses, dlogits, ops.gelu(x), ops.gelu(x, approximate="none"), ops.gelu_backward(dout, x)]
    found += [ops.gelu_backward(dout, x, approximate="none"), ops.global_norm([x])]
    found += [ops.dropout_mask(10_000, 0.3, *numbers), ops.dropout(x, 0.3, *numbers)]
    found += ops.residual_layernorm(x, dout, None, None, 1e-5, None, 0.3, *numbers)[:2]
    ops.normal_(x, 0.5, 2.0, 5, 7)
    found += [x]
    for t in found:
        print(hashlib.sha256(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest())
"""
    wishes = ("", "default", "avx2", "avx512", "sse9")  # "" selects the best capability of the processor
    programs = [(code, [], {"GPTKERNELS_CPU_CAPABILITY": wish}) for wish in wishes]
    processes = run_programs(*programs, from_server=False)
    unknown = "GPTKERNELS_CPU_CAPABILITY must be default, avx2 or avx512, got sse9"
    assert f"ImportError: gptkernels: {unknown}" in processes.pop().stderr
    found = []
    for wish, done in zip(wishes, processes, strict=False):
        if done.returncode == 0:
            used, bits = done.stdout.split("\n", 1)
            assert used == wish or wish == ""
            found.append(bits)
        else:
            assert wish in ("avx2", "avx512")
            message = f"GPTKERNELS_CPU_CAPABILITY asks for {wish}, but this processor"
            assert f"ImportError: gptkernels: {message}" in done.stderr
    assert found[0].count("\n") == 51
    assert len(found) >= 2
    assert set(found) == {found[0]}


def find_compiler():
    return shutil.which(os.environ.get("CXX", "c++"))


def compile_and_run(folder, *arguments):
    subprocess.run([find_compiler(), "-std=c++20", *arguments, "-o", folder / "program"], check=True)
    return subprocess.run([folder / "program"], capture_output=True, text=True, check=False).stdout


@needs_sources
def test_csrc_has_no_torch(tmp_path):
    sources = sorted((ROOT / "csrc").rglob("*.*"))
    assert [p.name for p in sources if re.search(r"#include.*(torch|ATen|c10)", p.read_text())] == []
    files = [ROOT / "tests/standalone.cpp", ROOT / "csrc/cpu/layernorm.cpp"]
    assert compile_and_run(tmp_path, "-pthread", *files) == "ok\n"


@needs_sources
@pytest.mark.parametrize("major", [12, 13])
def test_cublas_is_the_one_that_torch_has_loaded(major, tmp_path):
    """libtorch_cuda.so and cuBLAS are replaced by libraries whose functions return the major version."""
    gemm = ROOT / "csrc" / "cuda" / "gemm"
    names = re.findall(r"apply\((\w+)\)", (gemm / "cublas.h").read_text())
    declarations = "".join(f'extern "C" int {name}();\n' for name in names)
    definitions = "".join(f'extern "C" int {name}() {{ return {major}; }}\n' for name in names)
    (tmp_path / "cublas_v2.h").touch()
    (tmp_path / "cublasLt.h").write_text(declarations)
    (tmp_path / "cublas.cpp").write_text(definitions)
    (tmp_path / "main.cpp").write_text("""
#include "cublas.h"
#include <cstdio>
namespace gptkernels::cuda {
void print() {
  const char* missing = missing_cublas_function();
  std::printf("%s", missing ? missing : cublasLtGetVersion() == 12 ? "12" : "13");
}
}
int main() { gptkernels::cuda::print(); }
""")
    program = [f"-I{tmp_path}", f"-I{gemm}", gemm / "cublas.cpp", tmp_path / "main.cpp"]
    assert compile_and_run(tmp_path, *program) == names[0]
    shared = [find_compiler(), "-shared", "-fPIC", f"-L{tmp_path}", "-Wl,--no-as-needed", f"-Wl,-rpath,{tmp_path}"]
    cublas = f"libcublas.so.{major}"
    subprocess.run([*shared, tmp_path / "cublas.cpp", "-o", tmp_path / cublas], check=True)
    subprocess.run([*shared, f"-l:{cublas}", "-o", tmp_path / "libtorch_cuda.so"], check=True)
    torch_cuda = ["-Wl,--no-as-needed", f"-L{tmp_path}", f"-Wl,-rpath,{tmp_path}", "-ltorch_cuda"]
    assert compile_and_run(tmp_path, *program, *torch_cuda) == str(major)


def find_types(source):
    code = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', "", source, flags=re.S)
    scopes = []  # for each open brace: a namespace's name, "" for an anonymous namespace, or None
    namespace = r"\bnamespace\s*(?P<namespace>[\w:]*)\s*\{"
    type_ = r"\b(?:struct|class|enum)\s+(?:class\s+)?(?:alignas\([^)]*\)\s*)?(?P<type>\w+)\s*(?::[^:;{}()][^;{}]*)?\{"
    for match in re.finditer(rf"{namespace}|{type_}|[{{}}]", code):
        if match[0] == "}":
            scopes.pop()
            continue
        if match["type"] and all(scopes):
            yield "::".join(scopes), match["type"]
        scopes.append(match["namespace"])


@needs_sources
def test_types_have_one_definition():
    """Two different definitions of a type are undefined behaviour, which neither compiler nor linker reports."""
    found = collections.defaultdict(set)
    for folder in ("csrc", "ops"):
        for source in (p for p in (ROOT / folder).rglob("*") if p.suffix in (".h", ".cuh", ".cpp", ".cu")):
            for namespace, name in find_types(source.read_text()):
                for device in ("cpu", "cuda"):
                    found[namespace.replace("GPTKERNELS_DEVICE", device), name].add(source.name)
    assert {"Matmul", "GemmBackend", "LtAlgorithm"} <= {name for _, name in found}
    assert {key: files for key, files in found.items() if len(files) > 1} == {}


@needs_sources
def test_kernels_of_all_instruction_sets_agree(tmp_path):
    options = ["-O1", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
    assert compile_and_run(tmp_path, *options, ROOT / "tests/instruction_sets.cpp") == "ok\n"


def configure(tmp_path, *options):
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    environment = {k: v for k, v in os.environ.items() if k not in ("CUDACXX", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST")}
    environment["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    command = [cmake, "-S", ROOT, "-B", tmp_path / "build", f"-DTORCH_PATH={Path(torch.__file__).parent}"]
    command += [f"-DGPTKERNELS_OUTPUT={tmp_path}/lib", "-DCMAKE_CUDA_COMPILER=NOTFOUND", *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@needs_sources
@pytest.mark.skipif(os.path.exists("/usr/bin/nvcc"), reason="nvcc cannot be hidden here")
def test_a_build_without_nvcc_has_no_cuda_library(tmp_path):
    demanded = configure(tmp_path, "-DGPTKERNELS_CUDA=1")
    assert demanded.returncode != 0
    assert "demands the CUDA library, but nvcc was not found" in re.sub(r"\s+", " ", demanded.stderr)
    shutil.rmtree(tmp_path / "build")
    found = configure(tmp_path, "-DGPTKERNELS_CUDA=auto")
    assert found.returncode == 0, found.stderr
    assert "no CUDA library, because nvcc was not found" in found.stdout
    assert "nvcc was not found" in (tmp_path / "lib/build.json").read_text()


def load_setup(monkeypatch, setup):
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "setup", setup)
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_sources
def test_a_build_requires_torch_only_if_none_is_installed(tmp_path, monkeypatch):
    found = []
    load_setup(monkeypatch, lambda setup_requires, **_: found.append(setup_requires))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    load_setup(monkeypatch, lambda setup_requires, **_: found.append(setup_requires))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"platlib": tmp_path, "purelib": tmp_path})
    load_setup(monkeypatch, lambda setup_requires, **_: found.append(setup_requires))
    assert found == [[], [], ["torch>=2.10"]]


@needs_sources
def test_a_second_build_uses_the_ninja_of_its_environment(tmp_path, monkeypatch):
    """An isolated build has its own ninja, which pip deletes. CMake's cache must not name it in the next build."""
    setuptools = pytest.importorskip("setuptools")
    setup = load_setup(monkeypatch, lambda **_: None)
    for name in ("CMakeLists.txt", "cmake", "csrc", "ops", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    run, programs = subprocess.run, setup.environment()["PATH"]
    ninja = shutil.which("ninja", path=programs)
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: "--build" in command or run(command, **options))
    monkeypatch.setenv("GPTKERNELS_CUDA", "0")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ninja").symlink_to(ninja)
        path = {**os.environ, "PATH": f"{tmp_path / name}:{programs}"}
        monkeypatch.setattr(setup, "environment", lambda path=path: path)
        build = setup.CMakeBuild(setuptools.Distribution())
        build.build_lib = tmp_path / "lib"
        build.run()
        shutil.rmtree(tmp_path / name)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only in a clone")
def test_a_source_distribution_has_all_files_of_the_repository(tmp_path):
    pytest.importorskip("setuptools")
    files = set(subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).split())
    for name in {name.partition("/")[0] for name in files}:
        (tmp_path / name).symlink_to(ROOT / name)
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", ".", "sdist", "--formats=tar", "-d", "."]
    subprocess.run(command, cwd=tmp_path, check=True)
    with tarfile.open(next(tmp_path.glob("*.tar"))) as packed:
        found = {member.name.partition("/")[2] for member in packed.getmembers() if member.isfile()}
    assert {name for name in found - files if ".egg-info/" not in name} == {"PKG-INFO", "setup.cfg"}
    assert files - found == set()


def run_make(folder, *arguments, **variables):
    for path in ROOT.glob("[!.]*"):
        if path.name not in ("build", "dist"):  # `make wheel` deletes files there
            (folder / path.name).symlink_to(path)
    outer = ("GPTKERNELS_", "MAKE", "MFLAGS", "SOURCE_DATE_EPOCH", "TORCH")  # variables of `make test`
    environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)} | variables
    command = ["make", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=True).stdout


@needs_sources
@pytest.mark.parametrize(("given", "used"), [({}, "auto"), ({"GPTKERNELS_CUDA": "0"}, "0")])
def test_make_wheel_builds_the_cuda_library_if_it_can(given, used, tmp_path):
    """Unlike `make train` and `make test`, `make wheel` builds the CUDA library without a GPU, too."""
    environment = tmp_path / ".venv"
    (environment / "bin").mkdir(parents=True)
    python = environment / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$GPTKERNELS_CUDA, $TORCH_CUDA_ARCH_LIST: $*"\n')
    python.chmod(0o755)
    for name in ("cublas", "tools", "wheel-tools"):
        (environment / name).touch()
    assert run_make(tmp_path, "-s", "wheel", **given).startswith(
        f"{used}, 8.0 8.6 8.9 9.0a 10.0+PTX 12.0: -m pip wheel "
    )


@needs_sources
def test_make_train_names_what_takes_minutes(tmp_path):
    lines = run_make(tmp_path, "-n", "train").splitlines()
    assert any(".venv/bin/pip install --no-compile torch==" in line for line in lines)
    compiling = next(i for i, line in enumerate(lines) if "Compiling: two minutes" in line)
    assert "pip install" in lines[compiling + 1]
    assert not any("--quiet" in line for line in lines)


@needs_sources
def test_the_release_files_have_the_packages_version():
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.M)[0] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


@needs_sources
def test_the_installation_page_names_what_the_build_requires():
    line = re.search(r"^requires = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.M)[1]
    page = (ROOT / "docs/installing.md").read_text()
    assert "pip install " + line.replace('"ninja"', "ninja").replace(",", "") in page
    minimum = re.search(r"cmake_minimum_required\(VERSION (.*)\)", (ROOT / "CMakeLists.txt").read_text())[1]
    assert f"cmake>={minimum}" in line


@needs_sources
def test_the_workflow_compiles_with_the_readmes_cuda_toolkit():
    major = re.search(r"CUDA toolkit\s+(\d+)", (ROOT / "README.md").read_text())[1]
    assert f"container: nvidia/cuda:{major}." in (ROOT / ".github/workflows/ci.yml").read_text()
