"""Helpers of the tests: shapes that break kernels, views, and the rule for how exact a kernel must be."""

import collections
import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gptkernels.testing.cases import OPERATORS, ORDINARY, Case
from gptkernels.testing.cases.table import ROWS, WIDTHS
from gptkernels.testing.draw import VIEWS, as_view  # noqa: F401
from gptkernels.testing.exactness import (  # noqa: F401
    Errors,
    assert_as_exact_as_torch,
    error_of,
    largest,
    last_rounding,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
all_widths = pytest.mark.parametrize("width", WIDTHS)
all_rows = pytest.mark.parametrize("rows", ROWS)
all_views = pytest.mark.parametrize("view", VIEWS)


def randn(*shape, dtype, device, scale=1.0, requires_grad=False):
    """Return normal values that the dtype represents, drawn on the CPU so that every device has the same."""
    return (torch.randn(shape) * scale).to(dtype).to(device).requires_grad_(requires_grad)


def assert_same_bits(function, times=3, vary_threads=True):
    """Assert that runs give the same bits; on the CPU also with other numbers of threads, if the op allows it."""
    first = _flat(function())
    threads = torch.get_num_threads()
    try:
        for i in range(times):
            torch.set_num_threads(1 if vary_threads and i % 2 == 0 else threads)
            for a, b in zip(first, _flat(function()), strict=True):
                assert torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b)
    finally:
        torch.set_num_threads(threads)


def _flat(outputs):
    outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    return [t.detach().contiguous().clone() for t in outputs]


def double(t):
    """Return the float64 copy of a tensor for references, or None."""
    return None if t is None else t.detach().double()


def gradients(function, inputs, dout):
    """Return the gradients of ``function(*inputs)`` for inputs that are tensors, None for None."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    out = function(*leaves)
    found = iter(torch.autograd.grad(out, [t for t in leaves if t is not None], dout))
    return [None if t is None else next(found) for t in leaves]


def assert_as_exact_with_gradients(ours, torchs, exact, args, dout, names):
    """Apply ``assert_as_exact_as_torch`` to the results of three functions of the same arguments and to all gradients.

    torch's largest error on a few numbers is a matter of luck. If the rule is broken, the functions are called again
    with the same numbers in other orders. The first result must then keep the rule against torch's worst error, and the
    root mean square of our errors in all trials must keep it, too.

    Args:
        ours: our op.
        torchs: torch's.
        exact: the formula, called with float64.
        args: tensors, or None for absent ones.
        dout: the gradient of the result.
        names: the gradients' names, one for each of ``args``.

    Returns:
        Our gradients.
    """

    def compared(args, dout):
        """Return by name the results and the gradients: ours, torch's and the formula's."""
        doubles = [double(t) for t in args]
        results = ours(*args), torchs(*args), exact(*doubles)
        found = gradients(ours, args, dout), gradients(torchs, args, dout), gradients(exact, doubles, double(dout))
        named = {name: each for name, *each in zip(names, *found, strict=True) if each[0] is not None}
        return {"out": results, **named}

    first = compared(args, dout)
    broken = [name for name, each in first.items() if not keeps_the_rule(*each, name)]
    if broken:
        others = [compared([in_other_order(t) for t in args], in_other_order(dout)) for _ in range(TRIALS)]
        for name in broken:
            hold_in_trials([trial[name] for trial in (first, *others)], name)
    return [first[name][0] if name in first else None for name in names]


TRIALS = 50


def keeps_the_rule(ours, torchs, exact, name):
    try:
        assert_as_exact_as_torch(ours, torchs, exact, name)
    except AssertionError:
        return False
    return True


def in_other_order(t):
    """Return the same numbers, shuffled; None stays None."""
    return None if t is None else t.flatten()[torch.randperm(t.numel()).to(t.device)].view(t.shape)


def hold_in_trials(trials, name):
    """Hold the first trial to the rule, given torch's worst error, and the root mean square of all."""
    errors = Errors()
    for trial in trials:
        errors.add(*trial)
    assert_as_exact_as_torch(*trials[0], name, torch_error=errors.worst_of_torchs())
    errors.hold_on_the_whole(name)


def call_of(name, dtype, device, **choices):
    """Return a call of the table of operators, with these choices in place of an ordinary call's."""
    operator = OPERATORS[name]
    return Case(operator, next(iter(operator.variants))).call(ORDINARY, dtype, device, **choices)


def raises(*fragments):
    """Expect the op's RuntimeError, with all these fragments in its message."""
    pattern = "".join(f"(?=.*{fragment})" for fragment in fragments)
    return pytest.raises(RuntimeError, match=pattern)


def refused(op, args, *fragments, **options):
    """Expect the error of an op that is called with these arguments: its message names the op and has the fragments."""
    name = op._qualified_op_name.partition("::")[2]
    with raises(rf"\b{name}\b", *fragments):
        op(*args, **options)


def assert_raises(error, match, call, /, *args, **options):
    """Expect that a call raises the error, with a message that matches."""
    with pytest.raises(error, match=match):
        call(*args, **options)


def tolerance(dtype):
    """Return four times ``torch.testing.assert_close``'s tolerances, to find wrong indices rather than roundings."""
    rtol, atol = {torch.float64: (1e-7, 1e-7), torch.float32: (1.3e-6, 1e-5)}.get(dtype, (1.6e-2, 1e-2))
    return {"rtol": 4 * rtol, "atol": 4 * atol}


def assert_close_in_scale(a, b, dtype):
    """Compare with ``tolerance(dtype)``, where errors are relative to the largest element of ``b``.

    Chains of products have small elements that are differences of large ones.
    """
    scale = b.abs().max().clamp(min=1).double() if b.numel() else 1.0
    torch.testing.assert_close(a.double() / scale, b.double() / scale, **tolerance(dtype))


def check(ours, torchs, *inputs):
    """Assert that two functions of tensors return equal values, dtypes, shapes and gradients."""
    out, expected = ours(*inputs), torchs(*inputs)
    torch.testing.assert_close(out, expected, equal_nan=True, **tolerance(expected.dtype))
    inputs = [t.detach() if t.is_floating_point() else None for t in inputs], inputs
    floating = [t for t in inputs[0] if t is not None]

    def with_floating(function):
        def call(*leaves):
            leaves = iter(leaves)
            return function(*(t if f is None else next(leaves) for f, t in zip(*inputs, strict=True)))

        return call

    dout = torch.randn(expected.shape).to(expected)
    found = gradients(with_floating(ours), floating, dout)
    wanted = gradients(with_floating(torchs), floating, dout)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **tolerance(b.dtype))


# ---- random bits -----------------------------------------------------------------------------------------------------


def philox(key, counter):
    """Compute Philox4x32-7 in integers."""
    c, k = list(counter), [key & 0xFFFFFFFF, key >> 32]
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [k[0] + 0x9E3779B9 & 0xFFFFFFFF, k[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return c


def numbers(device, seed=12345, offset=6789):
    """Return seed and offset of a dropout."""
    return [torch.tensor(n, device=device) for n in (seed, offset)]


CHI_SQUARE_15 = 44.3  # with 15 degrees of freedom, exceeded once in 10^4


def chi_square(counts):
    expected = counts.sum() / counts.numel()
    return ((counts - expected) ** 2 / expected).sum().item()


def by_operators(monkeypatch):
    """Run every block of ``GPT2`` by single operators instead of one node of autograd's graph."""
    monkeypatch.setattr("gptkernels.models.fused_block.run", lambda *args: None)


@contextlib.contextmanager
def tf32(allowed):
    """Set torch's option that allows CUDA's float32 products to be rounded to TF32."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32 = before


@contextlib.contextmanager
def kept_sizes():
    """Record the bytes of each tensor that autograd saves inside the context, by its address."""
    sizes = {}

    def note(tensor):
        sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield sizes


class CountCalls(TorchDispatchMode):
    """Counts the operators that run, by name: ``aten::add.Tensor``, ``gptkernels::linear``."""

    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.name()] += 1
        return func(*args, **(kwargs or {}))

    def kernels(self):
        """Return the number of calls of each operator of this package, by its name without the namespace."""
        names = (name for name in self.count if name.startswith("gptkernels::"))
        return collections.Counter({name.removeprefix("gptkernels::"): self.count[name] for name in names})


def node_names(loss):
    """Return the names of the nodes of the loss's graph."""
    found, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [parent for parent, _ in node.next_functions if parent is not None]
    return [node.name() for node in found]


def warmed_up_and_captured(step):
    """Return a CUDA graph of a call, and the call's results: tensors that every replay overwrites."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured
