import torch
import torch.nn.functional as F

from benchmarks.harness.case import nbytes
from benchmarks.harness.directions import both

ops = torch.ops.gptkernels
VOCABULARY = 50257
SIZES = {"bfloat16": [(64, 1024, 768)], "float32": [(64, 1024, 768)]}
CPU_SIZES = [(8, 512, 768)]
TINY = (1, 4, 8)


def uniform(shape):
    return torch.randint(VOCABULARY, shape)


def zipf(shape):
    """Zipf's law: the probability of the k-th most frequent token is proportional to 1/k."""
    weights = 1 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)
    return torch.multinomial(weights, shape[0] * shape[1], replacement=True).view(shape)


def exact_backward(dout, tokens):
    dwte = dout.new_zeros(VOCABULARY, dout.shape[-1], dtype=torch.float64)
    yield 0, ..., dwte.index_add_(0, tokens.flatten(), dout.double().flatten(0, 1))
    yield 1, ..., dout.sum(0, dtype=torch.float64)


def formula(tokens, wte, wpe):
    return F.embedding(tokens, wte) + wpe


def cases(device, dtype, batch, length, channels):
    for draw in (uniform, zipf):
        yield from cases_of(device, dtype, batch, length, channels, draw)


def cases_of(device, dtype, batch, length, channels, draw):
    wte = torch.randn(VOCABULARY, channels, device=device, dtype=dtype)
    wpe = torch.randn(length, channels, device=device, dtype=dtype)
    dout = torch.randn(batch, length, channels, device=device, dtype=dtype)
    tokens = draw((batch, length)).to(device)
    rows_read = tokens.unique().numel() * channels * wte.element_size()
    yield from both(
        "encoder",
        f"{batch}x{length}x{channels} {draw.__name__}",
        formula,
        lambda: ops.encoder(tokens, wte, wpe),
        lambda: ops.encoder_backward(dout, tokens, VOCABULARY, length),
        dout,
        [tokens],
        [wte, wpe],
        costs=[
            {"bytes": rows_read + nbytes(dout, wpe, tokens), "flops": dout.numel()},
            {"bytes": nbytes(dout, tokens, wte, wpe), "flops": 2 * dout.numel()},
        ],
        exact_backward=lambda: exact_backward(dout, tokens),
    )
