"""Defines pytest's option ``--device``, the marker ``large``, and fixtures that several test files use."""

import gc

import pytest
import torch


# Before pytest loads this file, it takes the value of an unknown option for a path. So commands without a path must use
# the form --device=cuda.
def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="run the kernels on cpu (default) or cuda")


def pytest_configure(config):
    config.addinivalue_line("markers", "large: needs tens of gigabytes of device memory; runs on CUDA only")


def pytest_collection_modifyitems(config, items):
    """Skip tests marked ``large`` on the CPU. On CUDA, run them in one worker of pytest-xdist, because two at a time
    would exceed the memory.
    """
    skip = pytest.mark.skip(reason="more than 2^31 elements: on CUDA only")
    alone = pytest.mark.xdist_group("large")
    for item in items:
        if "large" in item.keywords:
            item.add_marker(skip if config.getoption("--device") == "cpu" else alone)
        # pytest-xdist 3.8 appends a group's name to an attribute that pytest 9.2 does not read (pytest-xdist #1386).
        group = item.get_closest_marker("xdist_group")
        if group and config.getoption("loadgroup", False) and hasattr(item, "_id"):
            item._id = item._id.parse(f"{item.nodeid}@{group.args[0]}")


@pytest.fixture(scope="session")
def device(request):
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def on_cpu(device):
    if device.type != "cpu":
        pytest.skip("CPU only")


@pytest.fixture
def on_cuda(device):
    if device.type != "cuda":
        pytest.skip("CUDA only")


@pytest.fixture
def sm_90a(on_cuda):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("sm_90a only")


@pytest.fixture(autouse=True, scope="module")
def _frozen_garbage(device):
    """Exclude objects that exist before a file's tests from garbage collections, so that these do not take a second."""
    if device.type == "cuda":
        gc.unfreeze()  # Objects that have become garbage since may hold device memory.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded(device):
    # Without a GPU, torch.manual_seed takes more than a millisecond: for CUDA it stores the call and its stack.
    seed = torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed
    seed(1234)


@pytest.fixture(scope="module")
def one_thread():
    """More threads make small models slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["own", "cublas"])
def product(request, monkeypatch, device):
    """On CUDA, run a test with our matmul kernels for the calls that they support ("own"), and with cuBLAS alone."""
    if device.type == "cpu" and request.param == "cublas":
        pytest.skip("CUDA only")
    monkeypatch.setenv("GPTKERNELS_MATMUL", request.param)
    return request.param
