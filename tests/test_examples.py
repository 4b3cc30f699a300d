"""Runs the programs in ``examples``, with the arguments of their pages or fewer steps."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch._inductor.config

import gptkernels
from gptkernels.checkpoint import save_model
from gptkernels.data import write_tokens
from gptkernels.models import GPT2, GPT2Config
from gptkernels.trainer.config import TrainConfig
from processes import run_processes
from small_runs import make_options, read_log, run_flags

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
LIBRARIES = Path(gptkernels.__file__).parent / "lib"
PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # with pip's cmake
needs_cmake = pytest.mark.skipif(shutil.which("cmake", path=PROGRAMS) is None, reason="needs cmake")


def make_environment():
    path = os.pathsep.join([str(Path(gptkernels.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PATH": PROGRAMS, "PYTHONPATH": path}


def run(*command, **options):
    options = {"env": make_environment(), "capture_output": True, "timeout": 400, **options}
    found = subprocess.run(list(map(str, command)), **options)
    assert found.returncode == 0, found.stderr[-4000:]
    return found.stdout


def run_here(monkeypatch, script, *arguments):
    """Run a Python program in this process, which saves the imports."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    monkeypatch.syspath_prepend((EXAMPLES / script).parent)
    monkeypatch.delitem(sys.modules, "model", raising=False)  # nanoGPT's
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")


def build(source, folder, *options):
    torch_path = Path(torch.__file__).parent
    cmake = shutil.which("cmake", path=PROGRAMS)
    generator = ("-G", "Ninja") if shutil.which("ninja", path=PROGRAMS) else ()
    run(cmake, "-S", EXAMPLES / source, "-B", folder, f"-DTORCH_PATH={torch_path}", *generator, *options)
    run(cmake, "--build", folder)


def read_losses(text):
    return [float(found) for found in re.findall(r"loss'?:? '?([\d.]+)", text)]


def test_nanogpt(device, monkeypatch, capsys, one_thread):
    """The losses with and without the swap differ only by dropout masks and rounding errors."""
    texts = []
    for more in ([], ["--no-swap"]):
        run_here(monkeypatch, "nanogpt/train.py", "--steps", 21, "--device", device, *more)
        texts.append(capsys.readouterr().out)
    ours, theirs = texts
    assert "gpt block" in ours
    assert "gpt block" not in theirs
    ours, theirs = read_losses(ours), read_losses(theirs)
    assert len(ours) == 3
    assert ours[-1] < ours[0] - 1
    assert ours == pytest.approx(theirs, rel=2e-2)


def test_huggingface(device, tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device.type == "cuda")
    run_here(monkeypatch, "huggingface/train.py", "--steps", 20, "--output", tmp_path)
    text = capsys.readouterr().out
    losses = read_losses(text)
    assert losses[-1] < losses[0] - 1
    assert "Hugging Face GPT2Block" in text
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)) is transformers.GPT2LMHeadModel


@pytest.mark.parametrize("name", ["pytorch", "accelerate", "lightning", "peft"])
def test_losses_fall(name, device, tmp_path, monkeypatch, capsys):
    if name != "pytorch":
        pytest.importorskip("transformers")
        package = pytest.importorskip(name)
    if name == "accelerate":
        package.state.AcceleratorState._reset_state(reset_partial_state=True)  # other tests' precision and device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device.type == "cuda")
    run_here(monkeypatch, f"{name}/train.py", "--steps", 21, *(["--output", tmp_path] if name == "peft" else []))
    losses = read_losses(capsys.readouterr().out)
    assert len(losses) == 3
    assert losses[-1] < losses[0] - (0.1 if name == "peft" else 1)  # adapters of random weights learn little
    assert name != "peft" or (tmp_path / "adapter_config.json").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_llmc(dtype, device, tmp_path, monkeypatch, capsys):
    model, tokens, output = (tmp_path / name for name in ("model.bin", "tokens.bin", "tuned.bin"))
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, block_size=16)
    GPT2(config, dtype=dtype).save_checkpoint(model)
    write_tokens(tokens, [list(range(64)) * 4])
    options = "--steps", 21, "--learning-rate", 1e-2, "--device", device
    run_here(monkeypatch, "llmc/finetune.py", model, tokens, output, *options)
    losses = read_losses(capsys.readouterr().out)
    assert losses[-1] < losses[0] - 1
    assert output.read_bytes()[: 8 * 4] == model.read_bytes()[: 8 * 4]  # the header: version, sizes
    assert not torch.equal(*(GPT2.from_checkpoint(path).lm_head.weight for path in (model, output)))


def test_slurm(tmp_path):
    """Stand-ins of SLURM's programs start the tasks of two nodes on this machine."""
    programs = {
        "scontrol": "echo localhost",
        "srun": 'while [[ $1 == --* ]]; do shift; done; "$@" & "$@"; status=$?; wait $! && exit $status',
    }
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "1"}
    environment = make_environment() | variables | {"SLURM_JOB_ID": str(os.getpid()), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = os.pathsep.join([str(tmp_path), environment["PATH"]])
    options = make_options(tmp_path, "cpu", shard="params", steps=4, val_every=0, sample_every=0)
    script = EXAMPLES / "slurm" / "train.sbatch"
    text = run("bash", script, *run_flags(options), env=environment, text=True, timeout=150)
    assert "x 2 processes" in text
    assert len(read_log(tmp_path / "run", "train")) == 4


def torchtitans_losses():
    """Return the loss and its gradient with and without the override, with divided and whole logits."""
    from torchtitan.config import OverrideConfig, apply_overrides
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    sys.path.insert(0, str(EXAMPLES / "torchtitan"))
    set_spmd_backend("spmd_types")
    theirs, ours = llama3_debugmodel(), llama3_debugmodel()
    apply_overrides(OverrideConfig(imports=["overrides.cross_entropy"]), ours)
    assert type(ours.loss.loss_fn).__qualname__ == "KernelCrossEntropyLoss.Config"
    vocabulary = ours.loss.loss_fn.global_vocab_size
    logits = torch.randn(2, 8, vocabulary, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(vocabulary, (2, 8), generator=torch.Generator().manual_seed(2))
    labels[0, :3] = -100
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = []
    for part, where in ((logits.chunk(2, -1)[mesh.get_local_rank()], mesh), (logits, None)):
        for config in (ours, theirs):
            given = part.clone().requires_grad_()
            with set_current_spmd_mesh(where):
                loss = config.loss.loss_fn.build()(given, labels, torch.tensor(13))[0]
                loss.backward()
            found.append((loss.detach(), given.grad))
    return found


def test_torchtitan():
    pytest.importorskip("torchtitan.models.llama3")
    for ours, theirs, whole, expected in run_processes(torchtitans_losses, 2):
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(whole, expected)
        torch.testing.assert_close(ours[0], whole[0])


@needs_cmake
def test_cpp(device, tmp_path, monkeypatch):
    """A C++ program without Python generates the tokens that the model generates in Python.

    The prompt and the number of tokens are those of examples/README.md.
    """
    line = re.search("^build/cpp/generate .*", (EXAMPLES / "README.md").read_text(), re.M)[0]
    text, count = shlex.split(line)[2:4]
    torch.manual_seed(0)
    model = GPT2(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=256, block_size=TrainConfig().sequence_length))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5 if p.dim() == 2 else 1)  # with small weights, the text repeats one byte
    save_model(tmp_path / "model.safetensors", model.state_dict(), model.config)
    fast = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
    arguments = tmp_path / "model.safetensors", tmp_path / "model.pt2", "--device", device
    with ThreadPoolExecutor() as pool, torch._inductor.config.patch(fast):  # both are compiled at the same time
        built = pool.submit(build, "cpp", tmp_path / "build")
        run_here(monkeypatch, "cpp/export.py", *arguments)
        built.result()
    program, libraries = tmp_path / "build" / "generate", [LIBRARIES / "libgptkernels.so"]
    linked = run("ldd", program, text=True)
    assert "libtorch" in linked
    assert "libpython" not in linked
    assert "libtorch_python" not in linked
    if device.type == "cuda":
        libraries.append(LIBRARIES / "libgptkernels_cuda.so")
    found = run(program, tmp_path / "model.pt2", text, count, *libraries)
    prompt = torch.tensor([list(text.encode())], device=device)
    expected = bytes(model.to(device).generate(prompt, int(count), temperature=0)[0].tolist())
    assert found == expected
    assert len(set(found)) > 5
    failed = subprocess.run([program, tmp_path / "model.pt2", "def ", "1", tmp_path / "none.so"], capture_output=True)
    assert failed.returncode == 1
    assert b"none.so" in failed.stderr


@needs_cmake
def test_adding_an_op(device, tmp_path):
    cuda = device.type == "cuda"
    build("adding_an_op", tmp_path, f"-DWITH_CUDA={'ON' if cuda else 'OFF'}", "-DCMAKE_BUILD_TYPE=Debug")
    libraries = [str(tmp_path / "libsquared_relu.so")] + [str(tmp_path / "libsquared_relu_cuda.so")] * cuda
    paths = [EXAMPLES / "adding_an_op" / "python", ROOT / "tests", Path(gptkernels.__file__).parent.parent]
    variables = {"LIBRARY": os.pathsep.join(libraries), "PYTHONPATH": os.pathsep.join(map(str, paths))}
    text = run(
        *(sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "conftest", "-p", "no:cacheprovider"),
        *("--device", device, EXAMPLES / "adding_an_op" / "tests"),
        text=True,
        env={**os.environ, **variables},
    )
    assert re.search(r"17\d passed", text)


def test_the_index_names_every_example():
    index = (EXAMPLES / "README.md").read_text()
    for folder in EXAMPLES.iterdir():
        assert folder.name == "README.md" or f"[{folder.name}](" in index
