"""Tests of the file that stores which of cuBLASLt's algorithms were fastest (csrc/cuda/gemm/algorithm_cache.h)."""

import pytest

from helpers import run_python

# Matmuls that are large enough to be timed: with a bias in the epilogue, without a bias, and accumulated in float32.
PROGRAM = """
import hashlib, torch, gptkernels
ops = torch.ops.gptkernels
torch.manual_seed(0)
x = torch.randn(4096, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
weight = torch.randn(3072, 768, device="cuda").mul(0.02).bfloat16().requires_grad_()
bias = torch.randn(3072, device="cuda", dtype=torch.bfloat16)
digest = hashlib.sha256()
def add(*tensors):
    for t in tensors:
        digest.update(t.detach().float().cpu().numpy().tobytes())
for _ in range(2):
    out = ops.linear(x, weight, bias)
    exact = x.detach().float() @ weight.detach().float().T + bias.float()
    assert (out.float() - exact).abs().max() <= 2**-8 * exact.abs().max()
    add(out, *torch.autograd.grad(out, (x, weight), torch.ones_like(out)))
    targets = torch.arange(4096, device="cuda") % 3072
    loss = ops.linear_cross_entropy(x, weight, targets, -1, -100, "mean", 1024)
    dx, dweight = torch.autograd.grad(loss, (x, weight))
    exact = torch.nn.functional.cross_entropy(x.float() @ weight.float().T, targets)
    assert abs(loss - exact) <= 1e-2 * exact
    expected = torch.autograd.grad(exact, weight)[0].float()
    assert (dweight.float() - expected).abs().max() <= 2e-2 * expected.abs().max()
    add(loss, dx, dweight)
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
    assert len(lines) >= 1 + 4  # a header, and lines for x @ W^T + b, its two gradients, and a matmul that accumulates
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
