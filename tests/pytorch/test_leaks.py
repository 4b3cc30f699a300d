"""Tests that a call of an op frees all heap memory that it allocates, except its results.

A leak of a few bytes matters: small allocations between the large ones that a training step frees keep the heap from
merging the free memory, and the process may grow by megabytes with each step.
"""

import ctypes
import gc
from functools import partial

import pytest
import torch
from torch.utils import _pytree as pytree

from gptkernels.models import GPT2, GPT2Config
from gptkernels.testing.cases import CASES, SMALL

CALLS = 300

FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def leaked_bytes(call):
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("mallinfo2 needs glibc 2.33")
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
def test_every_op_leaks_nothing(case, device, one_thread):
    if device.type != "cpu":
        pytest.skip("the host code is the same on every device")
    for op, args, kwargs in case.call(SMALL, case.opcheck_dtype(), device).invocations():
        with torch.no_grad():
            assert leaked_bytes(partial(call_on_copies, op, args, kwargs)) < 24, op


def call_on_copies(op, args, kwargs):
    """An op may write to its arguments."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    op(*args, **kwargs)


def test_a_training_step_leaks_nothing(device, one_thread):
    if device.type != "cpu":
        pytest.skip("the host code is the same on every device")
    model = GPT2(GPT2Config(block_size=16, vocab_size=64, n_layer=2, n_head=2, n_embd=16))
    tokens = torch.randint(64, (2, 16))

    def step():
        model(tokens, tokens, return_logits=False)[1].backward()
        model.zero_grad()

    assert leaked_bytes(step) < 24
