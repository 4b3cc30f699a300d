"""What every op's test shares: shapes that break kernels, views, and the rule for how exact a kernel must be."""

import contextlib

import pytest
import torch

from gptkernels.testing.exactness import (  # noqa: F401
    Errors,
    assert_as_exact_as_torch,
    error_of,
    largest,
    last_rounding,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 2, 3, 7, 17, 33, 127, 768, 1600, 4097, 50257]
ROWS = [0, 1, 5]
VIEWS = ["transposed", "sliced", "misaligned", "expanded"]

all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
# All that an op's registration, which opcheck checks, can tell apart: sums are float64 beside float64, else float32.
registered_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
all_widths = pytest.mark.parametrize("width", WIDTHS)
all_rows = pytest.mark.parametrize("rows", ROWS)
all_views = pytest.mark.parametrize("view", VIEWS)


def randn(*shape, dtype, device, scale=1.0, requires_grad=False):
    """Normal values that the dtype represents, made on the CPU so that every device sees the same."""
    return (torch.randn(shape) * scale).to(dtype).to(device).requires_grad_(requires_grad)


def as_view(t, kind):
    """A tensor of the same values (for "expanded": of its first row's values) in another layout."""
    if kind == "transposed":
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "sliced":
        wide = torch.empty(*t.shape[:-1], 2 * t.shape[-1] + 1, dtype=t.dtype, device=t.device)
        view = wide[..., 1::2]
        view.copy_(t)
        return view
    if kind == "misaligned":
        flat = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
        view = flat[1:].view(t.shape)
        view.copy_(t)
        return view
    assert kind == "expanded"
    return t[:1].expand_as(t)


def assert_same_bits(function, times=3, vary_threads=True):
    """Two runs give the same bits; for the CPU also with another number of threads, unless torch's BLAS has a part."""
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
    """The float64 copy of a tensor, for references; None stays None."""
    return None if t is None else t.detach().double()


def gradients(function, inputs, dout):
    """Gradients of ``function(*inputs)`` for the inputs that are tensors (None for None)."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    out = function(*leaves)
    found = iter(torch.autograd.grad(out, [t for t in leaves if t is not None], dout))
    return [None if t is None else next(found) for t in leaves]


def assert_as_exact_with_gradients(ours, torchs, exact, args, dout, names):
    """``assert_as_exact_as_torch`` for what three functions of the same arguments return, and for all gradients.

    Torch's largest error on a few numbers is a matter of luck. Where the rule is broken, the functions are called again
    with the same numbers in other orders. The result at hand must then keep the rule beside torch's worst error, and
    our errors in all these trials must keep it in the root mean square.

    Args:
        ours: our op.
        torchs: torch's.
        exact: the formula, called with float64.
        args: tensors, or None for what is absent.
        dout: the gradient of the result.
        names: of the gradients, one for each of ``args``.

    Returns:
        Our gradients.
    """

    def compared(args, dout):
        """By name the result and the gradients: ours, torch's and the formula's."""
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
    """The same numbers, shuffled; None stays None."""
    return None if t is None else t.flatten()[torch.randperm(t.numel()).to(t.device)].view(t.shape)


def hold_in_trials(trials, name):
    """The rule for the first of several (ours, torch's, exact) beside torch's worst, and for all on the whole."""
    errors = Errors()
    for trial in trials:
        errors.add(*trial)
    assert_as_exact_as_torch(*trials[0], name, torch_error=errors.worst_of_torchs())
    errors.hold_on_the_whole(name)


def raises(*fragments):
    """Expect the op's RuntimeError, with all these fragments in its message."""
    pattern = "".join(f"(?=.*{fragment})" for fragment in fragments)
    return pytest.raises(RuntimeError, match=pattern)


def tolerance(dtype):
    """For tests that look for wrong indices, not for roundings: four times ``torch.testing.assert_close``'s own."""
    rtol, atol = {torch.float64: (1e-7, 1e-7), torch.float32: (1.3e-6, 1e-5)}.get(dtype, (1.6e-2, 1e-2))
    return {"rtol": 4 * rtol, "atol": 4 * atol}


def assert_close_in_scale(a, b, dtype):
    """Like ``assert_close`` with ``tolerance(dtype)``, the errors measured by the largest element of ``b``.

    For chains of products, whose small elements are what is left of large ones.
    """
    scale = b.abs().max().clamp(min=1).double() if b.numel() else 1.0
    torch.testing.assert_close(a.double() / scale, b.double() / scale, **tolerance(dtype))


def check(ours, torchs, *inputs):
    """The same values, dtype, shape and gradients; ours and torchs take the tensors and return one."""
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
    """Philox4x32-7 in whole numbers."""
    c, k = list(counter), [key & 0xFFFFFFFF, key >> 32]
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [k[0] + 0x9E3779B9 & 0xFFFFFFFF, k[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return c


def numbers(device, seed=12345, offset=6789):
    """Seed and offset of a dropout."""
    return [torch.tensor(n, device=device) for n in (seed, offset)]


CHI_SQUARE_15 = 44.3  # of 15 degrees of freedom, exceeded once in 10^4


def chi_square(counts):
    expected = counts.sum() / counts.numel()
    return ((counts - expected) ** 2 / expected).sum().item()


def by_operators(monkeypatch):
    """No block of ``GPT2`` is a node of autograd's graph any more."""
    monkeypatch.setattr("gptkernels.models.fused_block.run", lambda *args: None)


@contextlib.contextmanager
def tf32(allowed):
    """With torch's setting that lets CUDA's float32 products be rounded to TF32."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32 = before


@contextlib.contextmanager
def kept_sizes():
    """The bytes of each tensor that autograd keeps meanwhile, by its address."""
    sizes = {}

    def note(tensor):
        sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield sizes


def node_names(loss):
    """Of the nodes of the loss's graph."""
    found, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [parent for parent, _ in node.next_functions if parent is not None]
    return [node.name() for node in found]


def warmed_up_and_captured(step):
    """A CUDA graph of a call, and what the call returned: tensors that every replay writes again."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured
