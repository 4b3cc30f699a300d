"""Token and position embeddings, out[b, t] = wte[tokens[b, t]] + wpe[t], and an embedding without positions."""

import torch

from gptkernels.rules import _register as register
from gptkernels.rules._jvp import linear_in
from gptkernels.rules._register import below_autograd, ops, recorder
from gptkernels.rules._vmap import batches, leading, loop, offset_tokens, rows


def _fake(tokens, weight, *_):
    return weight.new_empty((*tokens.shape, weight.shape[-1]))


def _fake_backward(dout, tokens, vocab_size, max_positions, first_token=-1):
    width = dout.shape[-1]
    return dout.new_empty((vocab_size, width)), dout.new_empty((max_positions, width))


class Encoder(torch.autograd.Function):
    """tokens (B, T), wte (Vp, C), wpe (P, C) with P >= T -> (B, T, C)."""

    @staticmethod
    def forward(ctx, tokens, wte, wpe, vocab_size, first_token):
        refuse_shard(first_token)
        ctx.save_for_backward(tokens)
        ctx.sizes = wte.shape[0], wpe.shape[0]
        return below_autograd(ops.encoder.default, tokens, wte, wpe, vocab_size, first_token)

    @staticmethod
    def backward(ctx, dout):
        (tokens,) = ctx.saved_tensors
        return None, *ops.encoder_backward.default(dout, tokens, *ctx.sizes), None, None


def refuse_shard(first_token):
    if first_token >= 0:
        raise RuntimeError(
            "gptkernels::encoder: a call with first_token has no derivative, since dwpe is that of the sum over all "
            "shards: call gptkernels.parallel.vocabulary.embedding"
        )


class TiedEncoder(torch.autograd.Function):
    """The encoder with wte as a second output, which the tied LM head uses as its weight.

    The backward adds the tokens' gradient in place to the LM head's gradient of wte, so that no second gradient of
    wte's size is written. With ``create_graph=True``, or if the LM head's gradient has another dtype or is not
    contiguous, the addition is not in place.
    """

    @staticmethod
    def forward(ctx, tokens, wte, wpe, vocab_size):
        ctx.save_for_backward(tokens)
        ctx.sizes = wte.shape[0], wpe.shape[0]
        ctx.set_materialize_grads(False)
        return below_autograd(ops.encoder.default, tokens, wte, wpe, vocab_size), wte.view_as(wte)

    @staticmethod
    def backward(ctx, dout, dhead):
        (tokens,) = ctx.saved_tensors
        if dout is None:
            return None, dhead, None, None
        if dhead is None or torch.is_grad_enabled() or dhead.dtype != dout.dtype or not dhead.is_contiguous():
            dwte, dwpe = ops.encoder_backward.default(dout, tokens, *ctx.sizes)
            return None, dwte if dhead is None else dwte + dhead, dwpe, None
        return None, dhead, ops.encoder_backward_.default(dout, tokens, dhead, ctx.sizes[1]), None


tied_encoder = recorder(TiedEncoder)


class EncoderBackward(torch.autograd.Function):
    """dout (B, T, C) -> dwte (V, C), dwpe (P, C), which are linear in dout."""

    @staticmethod
    def forward(ctx, dout, tokens, vocab_size, max_positions, first_token):
        ctx.save_for_backward(tokens)
        ctx.first_token = first_token
        return below_autograd(ops.encoder_backward.default, dout, tokens, vocab_size, max_positions, first_token)

    @staticmethod
    def backward(ctx, ddwte, ddwpe):
        (tokens,) = ctx.saved_tensors
        if ctx.first_token < 0:
            return ops.encoder.default(tokens, ddwte, ddwpe), None, None, None, None
        ddout = ops.embedding.default(tokens, ddwte, -1, ctx.first_token) + ddwpe[: tokens.shape[1]]
        return ddout, None, None, None, None


class Embedding(torch.autograd.Function):
    """tokens (...), weight (Vp, C) -> (..., C)."""

    @staticmethod
    def forward(ctx, tokens, weight, vocab_size, first_token):
        ctx.save_for_backward(tokens)
        ctx.sizes = weight.shape[0], first_token
        return below_autograd(ops.embedding.default, tokens, weight, vocab_size, first_token)

    @staticmethod
    def backward(ctx, dout):
        (tokens,) = ctx.saved_tensors
        return None, ops.embedding_backward.default(dout, tokens, *ctx.sizes), None, None


class EmbeddingBackward(torch.autograd.Function):
    """dout (..., C) -> dweight (V, C), which is linear in dout."""

    @staticmethod
    def forward(ctx, dout, tokens, vocab_size, first_token):
        ctx.save_for_backward(tokens)
        ctx.first_token = first_token
        return below_autograd(ops.embedding_backward.default, dout, tokens, vocab_size, first_token)

    @staticmethod
    def backward(ctx, ddweight):
        (tokens,) = ctx.saved_tensors
        return ops.embedding.default(tokens, ddweight, -1, ctx.first_token), None, None, None


def encoder_tangent(inputs, tangents, outputs):
    tokens, *weights, vocab_size, first_token = inputs
    refuse_shard(first_token)
    filled = (torch.zeros_like(w) if t is None else t for w, t in zip(weights, tangents[1:3], strict=True))
    return ops.encoder.default(tokens, *filled, vocab_size)


def embedding_backward_vmap(op, size, in_dims, args):
    dout, tokens, vocab_size, first_token = args
    dout, tokens = (leading(t, d, size) for t, d in zip((dout, tokens), in_dims[:2], strict=True))
    is_shard = first_token >= 0
    tokens = offset_tokens(tokens - first_token if is_shard else tokens, vocab_size)
    dweights = op(dout, tokens, size * vocab_size, 0 if is_shard else -1)
    return dweights.view(size, vocab_size, -1), 0


register.fake("encoder", _fake)
register.fake("encoder_backward", _fake_backward)
register.fake(
    "encoder_backward_", lambda dout, tokens, dwte, positions, *_: dout.new_empty((positions, dout.shape[-1]))
)
register.mutates("encoder_backward_")
register.without_derivative("encoder_backward_")
register.fake("embedding", _fake)
register.fake("embedding_backward", lambda dout, tokens, vocab_size, *_: dout.new_empty((vocab_size, dout.shape[-1])))
register.autograd("encoder", Encoder, jvp=encoder_tangent)
register.autograd("encoder_backward", EncoderBackward, jvp=linear_in(0)(ops.encoder_backward))
register.autograd("embedding", Embedding, jvp=linear_in(1)(ops.embedding))
register.autograd("embedding_backward", EmbeddingBackward, jvp=linear_in(0)(ops.embedding_backward))
register.vmap("encoder", batches(0))
register.vmap("encoder_backward", loop)
register.vmap("embedding", rows(0, least=0))
register.vmap("embedding_backward", embedding_backward_vmap)
