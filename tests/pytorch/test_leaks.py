"""What a call has allocated on the heap is freed, but for its results.

A few bytes are enough to matter: small blocks that stay, among the large ones that a training step frees, keep the heap
from using these again, so that a process grows by megabytes a step.
"""

import ctypes
import gc
from functools import partial

import pytest
import torch
from torch.utils import _pytree as pytree

from gptkernels.models import GPT2, GPT2Config
from gptkernels.testing.cases import CASES, SMALL, Draw

CALLS = 300

FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


@pytest.fixture(autouse=True, scope="module")
def frozen_garbage():
    """The collector skips what is there already: hundreds of thousands of objects, which would take it a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def bytes_kept(call):
    """By a call, on an average: what malloc has handed out and not got back."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("glibc's malloc from 2.33 on says it")
    mallinfo2.restype = Mallinfo2
    for _ in range(CALLS // 4):
        call()
    gc.collect()
    before = mallinfo2().uordblks
    for _ in range(CALLS):
        call()
    gc.collect()
    return (mallinfo2().uordblks - before) / CALLS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_of_every_op(case, device, one_thread):
    if device.type != "cpu":
        pytest.skip("of the host's memory, and the same code")
    dtype = torch.float32 if torch.float32 in case.dtypes else case.dtypes[0]
    for op, args, kwargs in case.draw(Draw(SMALL, dtype, device, 0)).calls:
        with torch.no_grad():
            assert bytes_kept(partial(called_on_copies, op, args, kwargs)) < 24, op


def called_on_copies(op, args, kwargs):
    """So that an op that writes to its arguments can be called again."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    op(*args, **kwargs)


def test_of_a_training_step(device, one_thread):
    if device.type != "cpu":
        pytest.skip("of the host's memory, and the same code")
    model = GPT2(GPT2Config(block_size=16, vocab_size=64, n_layer=2, n_head=2, n_embd=16))
    tokens = torch.randint(64, (2, 16))

    def step():
        model(tokens, tokens, return_logits=False)[1].backward()
        model.zero_grad()

    assert bytes_kept(step) < 24
