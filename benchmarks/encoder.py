import torch
import torch.nn.functional as F

from benchmarks.case import Case, nbytes

ops = torch.ops.gptkernels
SIZES = {"cuda": [(64, 1024, 768)], "cpu": [(8, 512, 768)]}
VOCABULARY = 50257


def zipf(shape, device):
    """Tokens as frequent as words: the k-th with a probability in proportion to 1/k."""
    weights = 1 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)
    return torch.multinomial(weights, shape[0] * shape[1], replacement=True).view(shape).to(device)


def torch_forward(tokens, wte, wpe):
    return F.embedding(tokens, wte) + wpe[: tokens.shape[1]]


def torch_backward(dout, tokens):
    return torch.ops.aten.embedding_dense_backward(dout, tokens, VOCABULARY, -1, False), dout.sum(0)


def cases(device, dtype, small):
    for batch, length, channels in [(1, 4, 8)] if small else SIZES[device.type]:
        wte = torch.randn(VOCABULARY, channels, device=device, dtype=dtype)
        wpe = torch.randn(length, channels, device=device, dtype=dtype)
        dout = torch.randn(batch, length, channels, device=device, dtype=dtype)
        for kind in ("uniform", "zipf"):
            tokens = zipf((batch, length), device)
            if kind == "uniform":
                tokens = torch.randint(VOCABULARY, (batch, length), device=device)
            touched = tokens.unique().numel() * channels * wte.element_size()
            shape = f"{batch}x{length}x{channels} {kind}"
            yield Case(
                "encoder fwd",
                shape,
                lambda a=(tokens, wte, wpe): ops.encoder(*a),
                {"torch": lambda a=(tokens, wte, wpe): torch_forward(*a)},
                bytes=touched + nbytes(dout, wpe, tokens),
            )
            yield Case(
                "encoder bwd",
                shape,
                lambda a=(dout, tokens, VOCABULARY, length): ops.encoder_backward(*a),
                {"torch": lambda a=(dout, tokens): torch_backward(*a)},
                bytes=nbytes(dout, tokens, wte, wpe),
            )
