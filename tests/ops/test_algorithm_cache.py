"""Tests of the file that stores which of cuBLASLt's algorithms were fastest (csrc/cuda/gemm/algorithm_cache.h)."""

import pytest

from helpers import run_python

# Float8 matmuls that are large enough to be timed: with and without a bias, and for both kinds of accumulation.
PROGRAM = """
import hashlib, torch, gptkernels
ops = torch.ops.gptkernels
torch.manual_seed(0)
a = torch.randn(4096, 768, device="cuda").to(torch.float8_e4m3fn)
b = torch.randn(3072, 768, device="cuda").to(torch.float8_e4m3fn)
bias = torch.randn(3072, device="cuda", dtype=torch.bfloat16)
one = torch.ones((), device="cuda")
exact = a.float() @ b.float().T
digest = hashlib.sha256()
for _ in range(2):
    for some, fast in ((bias, True), (None, True), (None, False)):
        out = ops.fp8_matmul(a, b, one, one, some, torch.bfloat16, fast).float()
        expected = exact if some is None else exact + some.float()
        assert (out - expected).abs().max() <= 2**-8 * expected.abs().max()
        digest.update(out.cpu().numpy().tobytes())
print(digest.hexdigest())
"""


def run(folder):
    done = run_python(PROGRAM, GPTKERNELS_MATMUL_CHOICES=str(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout


pytestmark = pytest.mark.usefixtures("on_cuda")


def test_kept_choices_give_the_same_bits(tmp_path):
    first = run(tmp_path / "new" / "folder")
    (file,) = (tmp_path / "new" / "folder").iterdir()
    lines = file.read_text().splitlines()
    assert len(lines) == 1 + 3  # a header, and a line for each matmul
    assert run(tmp_path / "new" / "folder") == first
    assert file.read_text().splitlines() == lines


def test_damaged_file_is_ignored(tmp_path):
    run(tmp_path)
    (file,) = tmp_path.iterdir()
    first, *lines = file.read_text().splitlines()
    damaged = [" ".join([*line.split()[:21], *["7"] * 8]) for line in lines]  # lines with algorithms that do not exist
    file.write_text("\n".join([first, "x", lines[0][:30], *damaged]))
    run(tmp_path)
    assert not set(damaged) & set(file.read_text().splitlines())
    file.write_bytes(b"\xff\x00" * 1000)
    run(tmp_path)
    assert file.read_text().startswith(first)


def test_off_writes_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run("off") == run("off")
    assert not list(tmp_path.iterdir())


def test_unwritable_folder_is_ignored(tmp_path):
    (tmp_path / "file").write_text("")
    run(tmp_path / "file" / "folder")
