"""Tests of vocabulary parallelism: groups of two and four processes on the CPU have the results of one process.

A fixture starts four processes, which run every case in a group of four, and in two groups of two. The tests read the
results of all processes.
"""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_fp8_linear_cross_entropy import IGNORED as FP8_IGNORED
from test_fp8_linear_cross_entropy import assert_gradients, dequantized, problem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from gptkernels import functional as G
from gptkernels.parallel import vocabulary
from helpers import assert_as_exact_as_torch
from processes import run_case, run_processes

# The tests run in one worker of pytest-xdist, so that the fixture starts the processes once.
pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.xdist_group("distributed"),
]

ROWS, C, IGNORED = 24, 8, -7
BASE = {
    "dtype": torch.float64, "padded": 64, "vocab_size": 60, "reduction": "mean", "ignore_index": IGNORED,
    "chunk_size": None, "dloss": 1.0,
}  # fmt: skip
HEADS = {
    "": {},
    "chunks": {"chunk_size": 5},
    "uneven": {"padded": 61, "vocab_size": 59, "chunk_size": 10},
    "padding only": {"vocab_size": 20},  # from the second or third process on
    "empty shard": {"padded": 5, "vocab_size": 5},
    "one shard's targets": {"targets": (2, 14)},
    "all ignored": {"targets": (IGNORED, IGNORED + 1)},
    "sum": {"reduction": "sum", "dloss": 0.25, "chunk_size": 7},
    "none": {"reduction": "none", "chunk_size": 7},
    "infinity": {"special": float("inf")},
    "float32": {"dtype": torch.float32, "chunk_size": 9},
    "bfloat16": {"dtype": torch.bfloat16, "chunk_size": 9},
    "float16": {"dtype": torch.float16, "dloss": 1024.0, "chunk_size": 9},
}
HEADS = {name: BASE | options for name, options in HEADS.items()}
FP8_HEADS = {
    "": {},
    "chunks": {"chunk_size": 10, "reduction": "sum"},
    "padding only": {"vocab_size": 20},  # from the second or third process on
    "all ignored": {"all_ignored": True},
    "bfloat16": {"dtype": torch.bfloat16, "chunk_size": 9},
    "float16": {"dtype": torch.float16, "chunk_size": 9, "dloss": 1024.0},
    "float8 logits": {"fp8_logits": True, "chunk_size": 9},
    "rounded": {"rounded": True, "chunk_size": 9},
}
FP8_HEADS = {
    name: BASE | {"dtype": torch.float32, "ignore_index": FP8_IGNORED, "fp8_logits": False} | options
    for name, options in FP8_HEADS.items()
}
TOKENS = {"": {"positions": False}, "positions": {"positions": True}}


def inputs(options):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, C, generator=generator, dtype=torch.float64)
    if "special" in options:
        x[3, 1] = options["special"]
    weight = torch.randn(options["padded"], C, generator=generator, dtype=torch.float64)
    targets = torch.randint(*options.get("targets", (0, options["vocab_size"])), (ROWS,), generator=generator)
    targets[5::6] = IGNORED
    return x.to(options["dtype"]), weight.to(options["dtype"]), targets


def dloss_of(loss, options):
    return torch.linspace(-1, 2, ROWS, dtype=loss.dtype) if loss.dim() else loss.new_tensor(options["dloss"])


def differentiate(function, leaves, dout):
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout(out))


def chunk_of(t, group, dim=0):
    """Return the process's part, in the division of ``torch.chunk``, as a leaf."""
    each = -(-t.shape[dim] // dist.get_world_size(group))
    first = min(dist.get_rank(group) * each, t.shape[dim])
    return t.narrow(dim, first, min(each, t.shape[dim] - first)).clone().requires_grad_()


def loss_options(options):
    return {
        "vocab_size": options["vocab_size"],
        "padded_vocab_size": options["padded"],
        "ignore_index": options["ignore_index"],
        "reduction": options["reduction"],
    }


def head(options, group, sequence_parallel):
    x, weight, targets = inputs(options)
    x = chunk_of(x, group) if sequence_parallel else x.requires_grad_()

    def function(x, weight):
        return vocabulary.linear_cross_entropy(
            x,
            weight,
            targets,
            group,
            chunk_size=options["chunk_size"],
            sequence_parallel=sequence_parallel,
            **loss_options(options),
        )

    return differentiate(function, (x, chunk_of(weight, group)), lambda loss: dloss_of(loss, options))


def fp8_inputs(options):
    """Not all weights are float8 numbers, except for ``rounded``."""
    torch.manual_seed(3)
    x, weight, targets = problem(ROWS, 32, options["padded"], options["vocab_size"], options["dtype"], "cpu")
    weight *= 5
    if options.get("rounded"):
        weight = dequantized(weight).to(weight.dtype)
    return x, weight, targets.fill_(FP8_IGNORED) if options.get("all_ignored") else targets


def fp8_head(options, group, sequence_parallel):
    """Return the loss, the gradients, and the loss without gradients."""
    x, weight, targets = fp8_inputs(options)
    leaves = chunk_of(x, group) if sequence_parallel else x.requires_grad_(), chunk_of(weight, group)

    def function(x, weight):
        return vocabulary.linear_cross_entropy(
            x, weight, targets, group, chunk_size=options["chunk_size"], sequence_parallel=sequence_parallel, fp8=True,
            fp8_logits=options["fp8_logits"], **loss_options(options),
        )  # fmt: skip

    with torch.no_grad():
        plain = function(*leaves)
    return *differentiate(function, leaves, lambda loss: dloss_of(loss, options)), plain


def loss(options, group, _):
    x, weight, targets = inputs(options)

    def function(logits):
        return vocabulary.cross_entropy(logits, targets, group, **loss_options(options))

    return differentiate(function, (chunk_of(x @ weight.T, group, 1),), lambda loss: dloss_of(loss, options))


def tokens_and_tables(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(59, (3, ROWS // 3), generator=generator)
    return tokens, *(torch.randn(rows, C, generator=generator).to(dtype) for rows in (61, ROWS // 3 + 2))


def douts(shape, dtype):
    """Integers, whose sums are exact in any order."""
    return torch.arange(ROWS * C, dtype=torch.float32).remainder(7).sub(3).to(dtype).view(shape)


def embedding(options, group, sequence_parallel):
    tokens, weight, positions = tokens_and_tables()
    leaves = (chunk_of(weight, group), *([positions.requires_grad_()] if options["positions"] else []))

    def function(weight, positions=None):
        return vocabulary.embedding(
            tokens, weight, group, positions=positions, vocab_size=59, padded_vocab_size=61,
            sequence_parallel=sequence_parallel,
        )  # fmt: skip

    dout = douts((ROWS, C), torch.bfloat16)
    if sequence_parallel:
        dout = chunk_of(dout, group).detach()
    return differentiate(function, leaves, lambda out: dout.view(out.shape))


def torchs_loss_parallel(mesh):
    """Return loss and gradients of torch's functions on DTensors, and of ours on the same DTensors."""
    x, weight, targets = inputs(BASE)
    results = []
    for parallel in (True, False):
        shards = [distribute_tensor(t, mesh, [Shard(dim)]) for t, dim in ((x @ weight.T, 1), (weight, 0))]
        logits, weights = (t.requires_grad_() for t in shards)
        if parallel:
            with loss_parallel():
                found = F.cross_entropy(logits, targets, ignore_index=IGNORED)
                found.backward()
            results += [found.full_tensor().detach(), logits.grad.full_tensor()]
        else:
            found = vocabulary.cross_entropy(logits, targets, ignore_index=IGNORED)
            found.backward()
            by_head = vocabulary.linear_cross_entropy(x, weights, targets, ignore_index=IGNORED)
            by_head.backward()
            results += [found.detach(), logits.grad.full_tensor(), by_head.detach(), weights.grad.full_tensor()]
    return results


def errors():
    x, weight, targets = inputs(BASE)
    weight, whole = chunk_of(weight, None), {"padded_vocab_size": 64}
    head = functools.partial(vocabulary.linear_cross_entropy, **whole)
    calls = [
        lambda: vocabulary.embedding(targets, weight),
        lambda: vocabulary.embedding(targets, weight[1:], **whole),
        lambda: vocabulary.embedding(targets, weight, vocab_size=65, **whole),
        lambda: vocabulary.embedding(targets[1:], weight, sequence_parallel=True, **whole),
        lambda: vocabulary.embedding(targets.clamp(min=0), weight, vocab_size=3, **whole),
        lambda: head(x[:, 1:], weight, targets),
        lambda: head(x, weight, targets[1:]),
        lambda: head(x, weight, targets, sequence_parallel=True),
        lambda: head(x, weight, targets, chunk_size=0),
        lambda: head(x, weight, targets + 62, reduction="sum"),
        lambda: head(x, weight, targets, ignore_index=IGNORED).backward(create_graph=True),
        lambda: head(x, weight, targets, fp8=True),
        lambda: head(x, weight, targets, fp8=True, reduction="none"),
        lambda: vocabulary.cross_entropy(x, targets, reduction="max"),
    ]
    return [message_of(call) for call in calls]


def message_of(call):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


CASES = {
    **{("head", name, sp): (head, options, sp) for name, options in HEADS.items() for sp in (False, True)},
    **{("fp8 head", name, sp): (fp8_head, options, sp) for name, options in FP8_HEADS.items() for sp in (False, True)},
    **{("loss", name, False): (loss, options, False) for name, options in HEADS.items()},
    **{("embedding", name, sp): (embedding, options, sp) for name, options in TOKENS.items() for sp in (False, True)},
}


def run_cases():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    found = {
        (size, *name): run_case(name, function, options, group, sequence_parallel)
        for size, group in ((2, mesh.get_group()), (4, None))
        for name, (function, options, sequence_parallel) in CASES.items()
    }
    return found | {"loss_parallel": torchs_loss_parallel(mesh), "errors": errors()}


@pytest.fixture(scope="module")
def results():
    return run_processes(run_cases, 4)


def of_processes(results, size, *name):
    return [found[(size, *name)] for found in results[:size]]


def assert_all_equal(tensors):
    for t in tensors[1:]:
        torch.testing.assert_close(t, tensors[0], rtol=0, atol=0, equal_nan=True)


def compare(found, options, function, leaves):
    """Compare with one process: in float64 to 1e-12, otherwise in the exactness of torch."""

    def results_of(function, dtype):
        cast = [t.detach().to(dtype).requires_grad_() for t in leaves]
        return differentiate(function, cast, lambda loss: dloss_of(loss, options))

    exact = results_of(function, torch.float64)
    if options["dtype"] == torch.float64:
        for ours, expected in zip(found, exact, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
        return
    for ours, torchs, expected in zip(found, results_of(function, options["dtype"]), exact, strict=True):
        assert_as_exact_as_torch(ours, torchs.to(ours.dtype), expected)


def torchs_loss(options, targets):
    def function(logits):
        used = logits[:, : options["vocab_size"]]
        used = used.to(torch.promote_types(used.dtype, torch.float32))
        return F.cross_entropy(used, targets, ignore_index=IGNORED, reduction=options["reduction"])

    return function


both_sizes = pytest.mark.parametrize("size", [2, 4])


@both_sizes
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize("name", HEADS)
def test_linear_cross_entropy(name, sequence_parallel, size, results):
    options = HEADS[name]
    losses, dx, dweight = zip(*of_processes(results, size, "head", name, sequence_parallel), strict=True)
    assert_all_equal(losses)
    if not sequence_parallel:
        assert_all_equal(dx)
    dx = torch.cat(dx) if sequence_parallel else dx[0]
    x, weight, targets = inputs(options)
    torchs = torchs_loss(options, targets)
    compare((losses[0], dx, torch.cat(dweight)), options, lambda x, weight: torchs(x @ weight.T), (x, weight))


@both_sizes
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize("name", FP8_HEADS)
def test_float8_linear_cross_entropy(name, sequence_parallel, size, results):
    """Without float8 logits and without gradients, the loss is that of the plain head."""
    options = FP8_HEADS[name]
    found = of_processes(results, size, "fp8 head", name, sequence_parallel)
    losses, dx, dweight, without_gradients = zip(*found, strict=True)
    assert_all_equal(losses)
    if not sequence_parallel:
        assert_all_equal(dx)
    dx, dweight = torch.cat(dx) if sequence_parallel else dx[0], torch.cat(dweight)
    x, weight, targets = fp8_inputs(options)
    same = {name: options[name] for name in ("vocab_size", "ignore_index", "reduction")}
    plain = G.linear_cross_entropy(x, weight, targets, **same)
    torch.testing.assert_close(without_gradients[0], plain, rtol=1e-6, atol=0, equal_nan=True)
    if name == "float8 logits":
        rounded = of_processes(results, size, "fp8 head", "rounded", sequence_parallel)
        for ours, expected in zip(found, rounded, strict=True):
            for t, wanted in zip(ours[:3], expected[:3], strict=True):
                assert_all_equal([t, wanted])
        return
    torch.testing.assert_close(losses[0], plain, rtol=1e-6, atol=0, equal_nan=True)
    factor = options["dloss"] / (1 if options["reduction"] == "sum" else max((targets != FP8_IGNORED).sum().item(), 1))
    assert_gradients(dx, dweight, x, weight, targets, options["vocab_size"], factor, size)


@both_sizes
@pytest.mark.parametrize("name", HEADS)
def test_cross_entropy(name, size, results):
    options = HEADS[name]
    losses, dlogits = zip(*of_processes(results, size, "loss", name, False), strict=True)
    assert_all_equal(losses)
    x, weight, targets = inputs(options)
    compare((losses[0], torch.cat(dlogits, 1)), options, torchs_loss(options, targets), (x @ weight.T,))


@both_sizes
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize("name", TOKENS)
def test_embedding(name, sequence_parallel, size, results):
    """The result and the gradients have the bits of one process."""
    out, dweight, *dpositions = zip(*of_processes(results, size, "embedding", name, sequence_parallel), strict=True)
    tokens, *tables = (t.requires_grad_(t.is_floating_point()) for t in tokens_and_tables())
    expected = torch.ops.gptkernels.encoder(tokens, *tables) if dpositions else G.embedding(tokens, tables[0])
    gradients = torch.autograd.grad(expected, tables[: 1 + len(dpositions)], douts(expected.shape, torch.bfloat16))
    out = torch.cat(out) if sequence_parallel else out[0]
    assert_all_equal([out.view(expected.shape), expected.detach()])
    assert_all_equal([torch.cat(dweight), gradients[0]])
    for found in dpositions:
        assert_all_equal([*found, gradients[1]])


def test_torchs_loss_parallel(results):
    torchs, torchs_dlogits, ours, dlogits, by_head, dweight = results[0]["loss_parallel"]
    for found in (ours, by_head):
        torch.testing.assert_close(found, torchs, rtol=1e-12, atol=0)
    torch.testing.assert_close(dlogits, torchs_dlogits, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(dweight, torchs_dlogits.T @ inputs(BASE)[0], rtol=1e-12, atol=1e-15)


def test_errors(results):
    expected = [
        "ValueError: embedding: padded_vocab_size must be given unless weight is a DTensor",
        "ValueError: embedding: weight must have 16 of the 64 entries of the padded vocabulary in process 0 of 4, "
        "got 15",
        "ValueError: embedding: vocab_size must be from 1 to 64, got 65",
        "ValueError: embedding: 4 processes must divide the 23 tokens",
        "RuntimeError: gptkernels::embedding: token 34 at position 0 is outside the vocabulary of 3",
        "ValueError: linear_cross_entropy: weight must have shape (n, C) with x (..., C), got (16, 8) and (24, 7)",
        "ValueError: linear_cross_entropy: targets must have shape (24,), got shape (23,)",
        "ValueError: linear_cross_entropy: targets must have 4 * 24 elements, got shape (24,)",
        "ValueError: linear_cross_entropy: chunk_size must be at least 1, got 0",
        "RuntimeError: gptkernels::fused_classifier_statistics: target 96 at row 0 is outside the vocabulary of 64",
        "RuntimeError: linear_cross_entropy has no second derivative: call it without create_graph=True",
        "ValueError: linear_cross_entropy: with fp8, C and the rows of each process must be multiples of 16, got C = 8 "
        "and 16 of 64 rows",
        "ValueError: linear_cross_entropy: reduction must be 'mean' or 'sum', got 'none'",
        "ValueError: cross_entropy: reduction must be 'mean', 'sum' or 'none', got 'max'",
    ]
    assert results[0]["errors"] == expected
