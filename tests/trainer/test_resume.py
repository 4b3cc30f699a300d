"""Tests that `--resume` refuses checkpoints that other programs have made or changed, and data that has changed."""

import json
import os
import random
import resource
import time

import pytest
import torch
from safetensors import safe_open

from gptkernels.files import safetensors as _safetensors
from gptkernels.files import writing as _files
from gptkernels.trainer.fingerprint import BLOCK_BYTES, MAX_BLOCKS, fingerprint
from gptkernels.trainer.train import Trainer, resume
from helpers import assert_raises
from small_runs import error_of, make_options, train_with

pytestmark = pytest.mark.usefixtures("one_thread")

FIELDS = ("config", "model", "optimizer", "trainer", "rng")
VALUES = [
    *(None, True, False, 0, 1, -1, 2, 2**31, 3 * 10**7, 2**62, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x", "\0", "\ud800", "x" * 5000, "/etc/passwd", "cuda:7", [], {}, [[]], [None], {"x": 1}),
    *({"$tensor": "rng/cpu"}, {"$tensor": "absent"}, {"$tensor": []}, {"$tuple": 1}, {"$tuple": [1, 2]}),
    *({"$dict": [[1, 2]]}, {"$dict": [[[], 1]]}, {"$dict": 1}),
]


@pytest.fixture
def options(tmp_path, device):
    return make_options(tmp_path, device, steps=3, val_every=0, sample_length=0)


@pytest.fixture
def checkpoint(options, monkeypatch):
    monkeypatch.setattr(_files, "fsync", lambda path: None)
    return train_with(options).output / "checkpoint.safetensors"


def read_checkpoint(path):
    with safe_open(path, "pt") as file:
        names, metadata = list(file.keys()), file.metadata()
        return {name: file.get_tensor(name) for name in names}, {name: json.loads(metadata[name]) for name in FIELDS}


def write_checkpoint(path, tensors, trees):
    fields = {name: json.dumps(tree) for name, tree in trees.items()}
    _safetensors.write_safetensors(path, tensors, "training", fields)


def change(path, field, way, value):
    tensors, trees = read_checkpoint(path)
    *parents, last = way
    node = trees[field]
    for part in parents:
        node = node[part]
    node[last] = value
    write_checkpoint(path, tensors, trees)


def expect_refusal(checkpoint, message):
    with pytest.raises(ValueError, match=message) as info:
        resume(str(checkpoint.parent), steps=4)
    assert str(checkpoint) in str(info.value)


@pytest.mark.parametrize(
    ("field", "way", "value", "message"),
    [
        ("config", ["block_size"], 3 * 10**7, r"transformer.wpe.weight has shape \(16, 16\), must have \(30000000, 16"),
        ("config", ["n_layer"], 10**6, "n_layer is 1000000, but there are"),
        ("config", ["n_head"], 0, "n_head is 0, must be an integer"),
        ("config", ["padded_vocab_size"], 2**30, "has 256 rows, but padded_vocab_size is 1073741824"),
        ("config", ["bias"], 1, "config: bias is 1, must be True or False"),
        ("config", ["activation"], 1, "config: activation is 1, must be a string"),
        ("config", ["dropout"], "0", r"config: dropout is '0', must be an integer .* or a finite float"),
        ("config", ["n_embd"], 2**62, "n_embd is 4611686018427387904, must be an integer with a magnitude below"),
        ("config", ["extra"], 1, "config: 'extra' is unknown"),
        ("model", ["transformer.wte.weight"], 1, "transformer.wte.weight is a int, must be a tensor"),
        ("trainer", ["step"], -1, "step is -1, must be an integer"),
        ("trainer", ["step"], None, "step is None, must be an integer"),
        ("trainer", ["data"], None, "data is None"),
        ("trainer", ["data", "seed"], 5, "data: seed is 5, but the options say 1337"),
        ("trainer", ["options", "layers"], 2, "options: layers is 2, but the model has n_layer 1"),
        ("trainer", ["options", "batch_size"], "2", "batch_size is '2', must be"),
        ("trainer", ["options", "batch_size"], 0, "--batch-size is 0, must be at least 1"),
        ("trainer", ["options", "dtype"], "bfloat16", "is of torch.float32, but the options say bfloat16"),
        ("trainer", ["options", "extra"], 1, "options: not those of this trainer: 'extra' is unknown"),
        ("trainer", ["options", "tokenizer"], "F16", "no tokenizer 'F16'"),
        ("trainer", ["options", "device"], "F16", "device is 'F16'"),
        ("trainer", ["outliers", "window"], 1, "outliers: window must be a float64 tensor"),
        ("optimizer", ["state"], {"$dict": [[0.0, {}]]}, "optimizer in the metadata .*a key is 0.0, must be a string"),
        ("optimizer", ["state"], {"$dict": [[True, {}]]}, "a key is True, must be a string or an integer"),
        ("optimizer", ["state"], {}, "state must have an entry for each of"),
        ("optimizer", ["param_groups"], [], "the groups' parameters are not those of this model"),
        ("rng", ["cpu"], None, "rng: must have the states"),
    ],
)
def test_a_changed_entry_is_refused_by_name(checkpoint, field, way, value, message):
    change(checkpoint, field, way, value)
    expect_refusal(checkpoint, message)


def test_endless_epochs_are_refused(checkpoint):
    change(checkpoint, "trainer", ["options", "steps"], None)
    change(checkpoint, "trainer", ["options", "epochs"], 1e308)
    assert_raises(ValueError, "--epochs is 1e\\+308, which is too many", resume, str(checkpoint.parent))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model/transformer.wpe.weight", torch.full((16, 16), torch.nan), "wpe.weight holds NaN or infinity"),
        ("optimizer/state/0/exp_avg", torch.full((256, 16), torch.inf), "exp_avg holds NaN or infinity"),
        ("optimizer/state/0/exp_avg", torch.zeros(1), r"state 0: exp_avg must be a float32 tensor of shape \(256, 16"),
        ("optimizer/state/0/exp_avg_sq", torch.full((256, 16), -1.0), "exp_avg_sq is negative somewhere"),
        ("optimizer/state/0/step", torch.tensor(0.0), "step is 0.0, must be at least 1"),
        ("rng/cpu", torch.zeros(5056, dtype=torch.uint8), "rng: not the states of torch's random number generators"),
    ],
)
def test_a_changed_tensor_is_refused_by_name(checkpoint, name, value, message):
    tensors, trees = read_checkpoint(checkpoint)
    assert name in tensors
    write_checkpoint(checkpoint, tensors | {name: value}, trees)
    expect_refusal(checkpoint, message)


def mutate(trees, tensors, randomness):
    if randomness.random() < 0.1:
        name = randomness.choice(sorted(tensors))
        wrong = [torch.zeros(1), torch.zeros(2, 3, dtype=torch.int64), torch.full_like(tensors[name], 255)]
        tensors[name] = randomness.choice([*wrong, tensors[name].bool()])
        return name, tensors[name].shape, tensors[name].dtype
    field = randomness.choice([*FIELDS, "config", "trainer", "trainer"])
    node, way = trees, [field]
    while isinstance(node[way[-1]], dict | list) and node[way[-1]] and randomness.random() < 0.9:
        node = node[way[-1]]
        way.append(randomness.choice(list(node) if isinstance(node, dict) else range(len(node))))
    value = randomness.choice(VALUES)
    if randomness.random() < 0.15 and len(way) > 1:
        del node[way[-1]]
    elif randomness.random() < 0.1 and isinstance(node, dict) and len(way) > 1:
        node["another"] = value
    else:
        node[way[-1]] = value
    return way, value


@pytest.mark.parametrize("seed", range(2))
def test_mutants_are_resumed_or_refused(checkpoint, monkeypatch, seed, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Trainer, "run", lambda self: "resumed")
    monkeypatch.setattr("gptkernels.trainer.run_data.standard_library", lambda: "nothing")
    whole = checkpoint.read_bytes()
    randomness = random.Random(seed)
    memory, answers = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(150):
        checkpoint.write_bytes(whole)
        tensors, trees = read_checkpoint(checkpoint)
        done = mutate(trees, tensors, randomness)
        write_checkpoint(checkpoint, tensors, trees)
        start = time.process_time()
        try:
            answers.append(resume(str(checkpoint.parent)))
        except (ValueError, OSError) as error:
            answers.append("refused" if str(error) else "no sentence")
        except Exception as error:
            raise AssertionError(done) from error
        assert time.process_time() - start < 5, done
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100 << 10  # 100 MB, in KiB
    assert set(answers) == {"resumed", "refused"}
    assert answers.count("refused") > 75


def test_the_log_of_a_resumed_run_is_in_its_folder(options, tmp_path, capsys):
    log = tmp_path / "losses.log"
    train_with(options, log_file=log)
    before = log.read_text() + "s:9 trl:4.0000\n"
    log.write_text(before)
    resume(options["output"], steps=4)
    assert log.read_text() == before
    assert (tmp_path / "run" / "main.log").read_text().startswith("s:3 trl:")
    assert f"log in {tmp_path / 'run' / 'main.log'}" in capsys.readouterr().out
    resume(options["output"], steps=5, log_file=str(log))
    assert log.read_text().startswith(f"{before}s:4 trl:")


def test_a_checkpoint_cannot_name_a_file_to_overwrite(checkpoint, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("")
    change(checkpoint, "trainer", ["options", "log_file"], str(precious))
    resume(str(checkpoint.parent), steps=4)
    assert precious.read_text() == ""
    change(checkpoint, "trainer", ["options", "log_file"], str(checkpoint))
    assert resume(str(checkpoint.parent), steps=5).step == 5


def test_a_csv_may_have_invalid_utf8(checkpoint):
    path = checkpoint.with_name("log.csv")
    path.write_bytes(path.read_bytes() + b"\xff\n")
    assert resume(str(checkpoint.parent), steps=4).step == 4
    assert b"\n\xff\n3,train," in path.read_bytes()


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "log.csv", "loss.png"])
def test_a_link_in_the_folder_is_refused(checkpoint, name, tmp_path):
    path, elsewhere = checkpoint.parent / name, tmp_path / "elsewhere"
    os.replace(path, elsewhere)
    path.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    message = f"{name}: a symbolic link, which is not replaced"
    assert_raises(ValueError, message, resume, str(checkpoint.parent), steps=4)
    assert path.is_symlink()
    assert elsewhere.read_bytes() == before


def test_a_checkpoint_that_is_a_fifo_is_refused(tmp_path, capsys):
    os.mkfifo(tmp_path / "checkpoint.safetensors")
    for command in (["train", "--resume"], ["generate"]):
        assert "a regular file" in error_of(capsys, *command, tmp_path)


def test_changed_data_of_the_same_size_is_refused(checkpoint, tmp_path):
    path = tmp_path / "text_train.bin"
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    message = r"text_train.bin has changed: it was \d+ bytes, crc32"
    assert_raises(ValueError, message, resume, str(checkpoint.parent), steps=4)


def test_data_may_have_another_name(checkpoint, tmp_path):
    for name in ("train.bin", "tokenizer.bin"):
        os.link(tmp_path / f"text_{name}", tmp_path / f"moved_{name}")
    assert resume(str(checkpoint.parent), steps=4, data=str(tmp_path / "moved")).step == 4


def test_the_fingerprint_of_a_large_file_reads_every_fourth_block(tmp_path):
    path = tmp_path / "large"
    with open(path, "wb") as file:
        file.truncate(4 * MAX_BLOCKS * BLOCK_BYTES)  # makes a sparse file of 1 GiB
    zeros = fingerprint([path])
    for block, is_read in ((1, False), (4, True)):
        with open(path, "r+b") as file:
            file.seek(block * BLOCK_BYTES)
            file.write(b"x")
        assert (fingerprint([path]) != zeros) == is_read
