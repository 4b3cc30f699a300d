"""Table entries of token embeddings with and without position embeddings."""

import math

import torch.nn.functional as F

from gptkernels import functional as G
from gptkernels.testing.cases.table import ROWS, TOKENS, WIDTHS, Call, grid, invoke, normal, operator, ops


def sum_over_shards(tokens, weight, shards):
    total, first = 0, 0
    for shard in weight.chunk(shards):
        total = total + ops.embedding(tokens, shard, len(weight), first)
        first += len(shard)
    return total


@operator(
    edges=grid({"batch": ROWS, "length": [3], "vocabulary": [13], "width": WIDTHS}),
    sizes={
        "batch": [2, 3, 4],
        "length": [2, 21, 64],
        "vocabulary": [3, 60, 300],
        "width": [2, 33, 96],
        "more positions": 2,
    },
    functions={
        "encoder_backward": (lambda g: ops.encoder_backward(g, TOKENS.to(g.device), 4, 5), [(2, 3, 3)]),
        "encoder_backward of a shard": (
            lambda g: ops.encoder_backward(g, TOKENS.to(g.device), 2, 5, 1),
            [(2, 3, 3)],
        ),
    },
)
def encoder(draw):
    dtype = draw.dtype()
    batch, length = draw.size("batch", 40, real=64), draw.size("length", 40, real=1100)
    vocabulary, more = draw.size("vocabulary", 300, 1, real=60_000), draw.size("more positions", 9)
    width = draw.width("width", (max(batch * length, vocabulary),))
    args = {
        "tokens": draw.indices("tokens", (batch, length), vocabulary),
        "wte": draw.tensor("wte", (vocabulary, width), dtype, huge=1e300),
        "wpe": draw.tensor("wpe", (length + more, width), dtype, huge=1e300),
    }

    def formula(tokens, wte, wpe):
        return F.embedding(tokens, wte) + wpe[: tokens.shape[-1]]

    def invocations():
        tokens, wte, _ = args.values()
        dout = normal(draw, "dout", batch, length, width)
        return [
            invoke(ops.encoder, *args.values()),
            invoke(ops.encoder_backward, dout, tokens, vocabulary, length + more),
            invoke(ops.encoder_backward_, dout, tokens, wte.clone(), length + more),
        ]

    return Call(
        "encoder(tokens, wte, wpe)", ops.encoder, formula, formula, args, tied=("wte", "wpe"), invocations=invocations
    )


@operator(
    edges=grid({"x.rows": ROWS, "vocabulary": [13], "width": WIDTHS}),
    sizes={"x.rows": [3, 50, 300], "vocabulary": [4, 70, 200], "width": [2, 33, 96]},
    variants={"": {}, "shards": {"shards": 3}},
    functions={
        "embedding_backward": (lambda g: ops.embedding_backward(g, TOKENS.to(g.device), 4), [(2, 3, 3)]),
        "embedding_backward of a shard": (
            lambda g: ops.embedding_backward(g, TOKENS.to(g.device), 2, 1),
            [(2, 3, 3)],
        ),
    },
)
def embedding(draw):
    dtype = draw.dtype()
    rows = draw.rows()
    vocabulary = draw.size("vocabulary", 1000, 1, real=60_000)
    width = draw.width("width", (max(math.prod(rows), vocabulary),))
    tokens = draw.indices("tokens", rows, vocabulary)
    weight = draw.tensor("weight", (vocabulary, width), dtype, huge=1e300)
    shards = draw.choose("shards", (None, 1, 2, 3))
    first = -1 if shards is None else vocabulary // 2
    whole = G.embedding if draw.chance("functional", 0.5) else ops.embedding

    def ours(tokens, weight):
        return sum_over_shards(tokens, weight, shards) if shards else whole(tokens, weight)

    return Call(
        f"embedding(tokens, weight), shards: {shards}",
        ours,
        F.embedding,
        F.embedding,
        {"tokens": tokens, "weight": weight},
        invocations=lambda: [
            invoke(ops.embedding, tokens, weight, -1, first),
            invoke(ops.embedding_backward, normal(draw, "dout", *rows, width), tokens, vocabulary, first),
        ],
    )
