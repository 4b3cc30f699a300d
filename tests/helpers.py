"""Functions that several test files use."""

import collections
import contextlib
import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from gptkernels.testing.cases import OPERATORS, ORDINARY, Case
from gptkernels.testing.cases.table import ROWS, WIDTHS
from gptkernels.testing.checks import hold_to_the_rule
from gptkernels.testing.draw import VIEWS, as_view  # noqa: F401
from gptkernels.testing.exactness import Errors, assert_as_exact_as_torch, error_of  # noqa: F401

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def with_dtypes(*dtypes):
    return pytest.mark.parametrize("dtype", dtypes, ids=name_of)


all_dtypes = with_dtypes(*DTYPES)
low_dtypes = with_dtypes(torch.bfloat16, torch.float16)
two_dtypes = with_dtypes(torch.float32, torch.bfloat16)
all_widths = pytest.mark.parametrize("width", WIDTHS)
all_rows = pytest.mark.parametrize("rows", ROWS)
all_views = pytest.mark.parametrize("view", VIEWS)


def randn(*shape, dtype, device, scale=1.0, requires_grad=False):
    """Draw on the CPU, so that every device gets the same values."""
    return (torch.randn(shape) * scale).to(dtype).to(device).requires_grad_(requires_grad)


def wide(dtype):
    """Return the dtype of losses and statistics for tensors of ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


def double(t):
    return None if t is None else t.detach().double()


def gradients(function, inputs, dout):
    return out_and_gradients(function, inputs, dout)[1]


def out_and_gradients(function, inputs, dout):
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    out = function(*leaves)
    pairs = list(zip(out, dout, strict=True)) if isinstance(out, tuple) else [(out, dout)]
    used = [(o, d) for o, d in pairs if d is not None]
    wanted, unused = [t for t in leaves if t is not None], len(used) < len(pairs)
    found = iter(torch.autograd.grad([o for o, _ in used], wanted, [d for _, d in used], allow_unused=unused))
    return out, [None if t is None else next(found) for t in leaves]


# ---- comparisons -----------------------------------------------------------------------------------------------------


def assert_equal(found, expected, equal_nan=False):
    if isinstance(found, torch.Tensor):
        found, expected = [found], [expected]
    torch.testing.assert_close(list(found), list(expected), rtol=0, atol=0, equal_nan=equal_nan)


def assert_same_bits(function, times=3, vary_threads=True):
    """If ``vary_threads`` is true, every second call uses another number of CPU threads."""
    first = _copies(function())
    threads = torch.get_num_threads()
    other = 1 if threads > 1 else 3
    try:
        for i in range(times):
            torch.set_num_threads(other if vary_threads and i % 2 == 0 else threads)
            for a, b in zip(first, _copies(function()), strict=True):
                assert torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b)
    finally:
        torch.set_num_threads(threads)


def _copies(outputs):
    outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    return [t.detach().contiguous().clone() for t in outputs]


def tolerance(dtype):
    """Return four times torch's tolerances for float64 and float32, and larger tolerances for 16-bit dtypes."""
    rtol, atol = {torch.float64: (1e-7, 1e-7), torch.float32: (1.3e-6, 1e-5)}.get(dtype, (1.6e-2, 1e-2))
    return {"rtol": 4 * rtol, "atol": 4 * atol}


def assert_close_in_scale(a, b, dtype):
    """Compare after dividing by the largest magnitude in ``b``, or by 1 if that is smaller.

    After several matmuls, a small element is a difference of large numbers, and has their rounding errors.
    """
    scale = b.abs().max().clamp(min=1).double() if b.numel() else 1.0
    torch.testing.assert_close(a.double() / scale, b.double() / scale, **tolerance(dtype))


def check(ours, torchs, *inputs):
    out, expected = ours(*inputs), torchs(*inputs)
    torch.testing.assert_close(out, expected, equal_nan=True, **tolerance(expected.dtype))
    floating = [t.detach() for t in inputs if t.is_floating_point()]

    def with_floating(function):
        def call(*leaves):
            leaves = iter(leaves)
            return function(*(next(leaves) if t.is_floating_point() else t for t in inputs))

        return call

    dout = torch.randn(expected.shape).to(expected)
    found = gradients(with_floating(ours), floating, dout)
    wanted = gradients(with_floating(torchs), floating, dout)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **tolerance(b.dtype))


TRIALS = 50


def assert_as_exact_with_gradients(ours, torchs, exact, args, dout, names):
    """Assert that a result and all its gradients satisfy ``assert_as_exact_as_torch``, and return our gradients.

    torch's largest error over a few numbers may happen to be small. A result that breaks the rule is therefore computed
    again in ``TRIALS`` trials, with the elements of each tensor in other orders. The first result must then satisfy the
    rule with torch's largest error in all trials. The root mean square of our errors in all trials may be at most twice
    torch's, plus one rounding.
    """

    def compute(args, dout):
        doubles = [double(t) for t in args]
        of_torch, of_formula = out_and_gradients(torchs, args, dout), out_and_gradients(exact, doubles, double(dout))
        found = gradients(ours, args, dout), of_torch[1], of_formula[1]
        named = {name: each for name, *each in zip(names, *found, strict=True) if each[0] is not None}
        return {"out": (ours(*args), of_torch[0].detach(), of_formula[0].detach()), **named}

    first = compute(args, dout)
    broken = [name for name, each in first.items() if not satisfies_the_rule(*each, name)]
    if broken:
        others = [compute([shuffled(t) for t in args], shuffled(dout)) for _ in range(TRIALS)]
        for name in broken:
            errors = Errors()
            for trial in (first, *others):
                errors.add(*trial[name])
            assert_as_exact_as_torch(*first[name], name, torch_error=errors.worst_of_torchs())
            errors.hold_on_the_whole(name)
    return [first[name][0] if name in first else None for name in names]


def satisfies_the_rule(ours, torchs, exact, name):
    try:
        assert_as_exact_as_torch(ours, torchs, exact, name)
    except AssertionError:
        return False
    return True


def shuffled(t):
    return None if t is None else t.flatten()[torch.randperm(t.numel()).to(t.device)].view(t.shape)


def call_of(name, dtype, device, **choices):
    """Choices that are not given have ordinary values."""
    operator = OPERATORS[name]
    return Case(operator, next(iter(operator.variants))).call(ORDINARY, dtype, device, **choices)


def check_call(name, dtype, device, choices, **args):
    call = call_of(name, dtype, device, **choices)
    hold_to_the_rule(dataclasses.replace(call, args={**call.args, **args}))


# ---- errors ----------------------------------------------------------------------------------------------------------


def raises(*fragments):
    """Expect a RuntimeError whose message matches all fragments, in any order."""
    pattern = "".join(f"(?=.*{fragment})" for fragment in fragments)
    return pytest.raises(RuntimeError, match=pattern)


def refused(op, args, *fragments, **options):
    name = op._qualified_op_name.partition("::")[2]
    with raises(rf"\b{name}\b", *fragments):
        op(*args, **options)


def assert_raises(error, match, call, /, *args, **options):
    with pytest.raises(error, match=match):
        call(*args, **options)


def run_python(program, *arguments, **environment):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)


# ---- random bits -----------------------------------------------------------------------------------------------------


def philox(key, counter):
    """Return the words of Philox4x32-7 for a 64-bit key and a counter of four 32-bit words, or arrays of words."""
    c, k = list(counter), [key & 0xFFFFFFFF, key >> 32]
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [k[0] + 0x9E3779B9 & 0xFFFFFFFF, k[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return c


def numbers(device, seed=12345, offset=6789):
    return [torch.tensor(n, device=device) for n in (seed, offset)]


CHI_SQUARE_15 = 44.3  # exceeded with probability 1e-4 by chi-square with 15 degrees of freedom


def chi_square(counts):
    expected = counts.sum() / counts.numel()
    return ((counts - expected) ** 2 / expected).sum().item()


def assert_uniform(bins, pairs):
    counts = {"values": bins} | {name: a // 4 * 4 + b // 4 for name, (a, b) in pairs.items()}
    for name, values in counts.items():
        assert chi_square(values.flatten().bincount(minlength=16).double()) < CHI_SQUARE_15, name


# ---- settings and counters of torch ----------------------------------------------------------------------------------


def by_operators(monkeypatch):
    """Make each transformer block of ``GPT2`` call its operators one by one, not as one autograd node."""
    monkeypatch.setattr("gptkernels.models.fused_block.run", lambda *args: None)


@contextlib.contextmanager
def tf32(allowed):
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32 = before


@contextlib.contextmanager
def kept_sizes():
    sizes = {}

    def note(tensor):
        sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield sizes


class CountCalls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.name()] += 1
        return func(*args, **(kwargs or {}))

    def kernels(self):
        names = (name for name in self.count if name.startswith("gptkernels::"))
        return collections.Counter({name.removeprefix("gptkernels::"): self.count[name] for name in names})


def count_flops(function, *args, **options):
    with FlopCounterMode(display=False) as counter:
        result = function(*args, **options)
    return counter.get_total_flops(), result


def node_names(loss):
    found, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [parent for parent, _ in node.next_functions if parent is not None]
    return [node.name() for node in found]


def warmed_up_and_captured(step):
    """Return a CUDA graph of one call of ``step``, and this call's results, which every replay overwrites."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured
