"""Text generation a token at a time: what ``GPT2.stream`` does, and on CUDA as a graph that the device replays.

Sequences stay on the device: a buffer (B, T + new) of tokens and how many of them each sequence has. Prompts of
different lengths are padded on the right, and each sequence's new tokens take the place of its padding. ``ops.decode``
reads the newest token, ``ops.sample_`` adds the next, so a step needs nothing of the host. The host launches some steps
ahead and reads tokens behind.
"""

import collections
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gptkernels import nn
from gptkernels._modules import is_unmodified
from gptkernels.models.recompute import may_draw
from gptkernels.ops import ops

if TYPE_CHECKING:
    from gptkernels.models.gpt2 import GPT2

MOST_SEQUENCES = 8
"""What ``ops.decode`` takes at most; with more, matrix products are faster than its products with vectors."""


class Draw(NamedTuple):
    """How the next token is drawn; see ``GPT2.stream``."""

    temperature: float
    top_k: int | None
    top_p: float | None
    generator: torch.Generator | None

    def check(self) -> None:
        """Raise a ValueError for a number out of its range."""
        if not self.temperature >= 0:
            raise ValueError(f"GPT2: temperature must be at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"GPT2: top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"GPT2: top_p must be above 0 and at most 1, got {self.top_p}")

    def __call__(self, logits: Tensor, sequences: Tensor, lengths: Tensor) -> None:
        """Add a token to each sequence, from the logits (B, V) of the newest.

        The draws are those of ``torch.multinomial`` with the same generator.
        """
        noise = None
        if self.temperature:
            noise = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
            noise.exponential_(generator=self.generator)
        ops.sample_.default(logits, noise, sequences, lengths, self.temperature or 1.0, self.top_k, self.top_p)


class TokenStream(Iterator[Tensor]):
    """The tokens of each step, (B,) on the device of the prompt; by :meth:`on_host` without a copy to the device.

    Args:
        steps: tensors on the host.
        like: the prompt.
    """

    def __init__(self, steps: Iterator[Tensor], like: Tensor) -> None:
        self.steps = steps
        self._like = like

    def __next__(self) -> Tensor:
        """The next step's."""
        return next(self.steps).to(self._like, non_blocking=True)

    def close(self) -> None:
        """End the generation: the generator of the draws then is where the last step that was taken has left it."""
        self.steps.close()  # type: ignore[attr-defined]

    def on_host(self) -> Iterator[list[int]]:
        """The rest of the steps, without a wait for later ones that the device already works on."""
        return (step.tolist() for step in self.steps)


@torch.no_grad()
def steps(model: "GPT2", prompt: Tensor, lengths: list[int], count: int, draw: Draw) -> Iterator[Tensor]:
    """The tokens of ``count`` steps, int64 (B,) on the host.

    Args:
        model: what predicts them.
        prompt: (B, T) of at most ``block_size`` tokens; padding on the right may be any tokens.
        lengths: how many tokens of each row are no padding; the longest has T.
        count: how many steps.
        draw: how a token is drawn.

    Raises:
        FloatingPointError: at a step, whose logits are NaN or infinite.
    """
    state = _State(model, prompt, lengths, count, draw)
    length = prompt.shape[1]  # of the longest sequence
    last = length + count
    weights = None
    while length < last:
        if length == prompt.shape[1] + 1:
            weights = _Weights.of(model, prompt)
        graphed = min(last, model.config.block_size + 1) - length
        if weights is not None and prompt.is_cuda and graphed >= _Graphs.FEWEST and length > prompt.shape[1] + 1:
            # The steps before have loaded the kernels, which a capture may not do.
            yield from _Graphs(state, weights).run(length, graphed)
            length += graphed
            continue
        state.step(length, weights)
        tokens = state.new_tokens(length - prompt.shape[1], 1)[:, 0].to("cpu", copy=True)
        if bool((tokens < 0).any()):
            raise _not_finite()
        yield tokens
        length += 1


def _not_finite() -> FloatingPointError:
    return FloatingPointError("GPT2: the logits are NaN or infinite: the model has diverged, and can write nothing")


class _State:
    """The sequences of a generation, and the keys and values of their tokens."""

    def __init__(self, model: "GPT2", prompt: Tensor, lengths: list[int], count: int, draw: Draw) -> None:
        config = model.config
        B, T = prompt.shape
        self.model = model
        self.draw = draw
        self.prompt = T
        self.same_length = min(lengths, default=T) == T
        self.sequences = prompt.new_zeros((B, T + count), dtype=torch.int64)
        self.sequences[:, :T] = prompt
        self.lengths = torch.tensor(lengths, dtype=torch.int64).to(prompt.device)
        self._prompts = self.lengths[:, None].clone()
        parameter = model.lm_head.weight
        capacity = min(config.block_size, T + count)
        heads = config.n_head, capacity, config.n_embd // config.n_head
        self.keys_values = torch.empty((config.n_layer, 2, B, *heads), dtype=parameter.dtype, device=prompt.device)
        self.caches = [nn.KeyValueCache(capacity, memory) for memory in self.keys_values]

    def new_tokens(self, begin: int, size: int) -> Tensor:
        """(B, size): what the steps from ``begin`` on have added."""
        return self.sequences.gather(1, self._prompts + torch.arange(begin, begin + size, device=self.lengths.device))

    def step(self, length: int, weights: "_Weights | None") -> None:
        """Add a token to each sequence, by ``weights`` alone or by calling the model's modules.

        Args:
            length: of the longest sequence.
            weights: the model as one operator; None if its modules must be called.
        """
        self.draw(self.logits(length, weights), self.sequences, self.lengths)

    def logits(self, length: int, weights: "_Weights | None") -> Tensor:
        """(B, V) after the newest token of each sequence."""
        if length > self.model.config.block_size:
            # The windows slide: all positions change with each token.
            padded = self._of_windows(length)
        elif weights is not None:
            padded = weights.decode(self.sequences, self.lengths, self.keys_values)
        elif length == self.prompt:
            padded = self._call(self.sequences[:, :length], self.lengths, self.caches)
        elif self.same_length:
            padded = self._call(self.sequences[:, length - 1 : length], torch.ones_like(self.lengths), self.caches)
        else:
            padded = self._of_windows(length)  # a module's cache has one position for all sequences
        return padded[:, : self.model.config.vocab_size]

    def _of_windows(self, length: int) -> Tensor:
        """The logits by running the newest ``block_size`` tokens of each sequence."""
        block_size = self.model.config.block_size
        first = (self.lengths - block_size).clamp(min=0)
        window = first[:, None] + torch.arange(min(length, block_size), device=first.device)
        return self._call(self.sequences.gather(1, window), self.lengths - first, None)

    def _call(self, tokens: Tensor, lengths: Tensor, caches: list[nn.KeyValueCache] | None) -> Tensor:
        """Padded logits after the first ``lengths`` of these tokens (B, T)."""
        hidden = self.model.transformer(tokens) if caches is None else self.model.transformer(tokens, caches)
        newest = hidden[torch.arange(len(lengths), device=lengths.device), lengths - 1]
        padded: Tensor = self.model.lm_head(newest)
        return padded


# ---- the model as one operator ---------------------------------------------------------------------------------------


class _Weights(NamedTuple):
    """The arguments of ``ops.decode`` that are the model's."""

    wte: Tensor
    wpe: Tensor
    layers: list[Tensor]
    norm_weight: Tensor
    norm_bias: Tensor | None
    head: Tensor
    num_heads: int
    vocab_size: int
    eps: float
    approximate: str

    def decode(self, sequences: Tensor, lengths: Tensor, keys_values: Tensor) -> Tensor:
        """Logits (B, Vp) after the newest tokens, whose keys and values are added to the cache."""
        wte, wpe, layers, norm_weight, norm_bias, head, *options = self
        return ops.decode.default(
            sequences, lengths, wte, wpe, layers, norm_weight, norm_bias, head, keys_values, *options
        )

    @classmethod
    def of(cls, model: "GPT2", prompt: Tensor) -> "_Weights | None":
        """Those of a model whose modules would compute just that; None if they must be called."""
        if prompt.shape[0] > MOST_SEQUENCES or torch.is_autocast_enabled(prompt.device.type):
            return None
        config, transformer = model.config, model.transformer
        if not _is_plain(model):
            return None
        bias = transformer.ln_f.bias
        layers = [parameter for block in transformer.h for parameter in _parameters(block)]
        found = cls(
            transformer.wte.weight,
            transformer.wpe.weight,
            layers,
            transformer.ln_f.weight,
            bias,
            model.lm_head.weight,
            config.n_head,
            config.vocab_size,
            transformer.ln_f.eps,
            "tanh" if config.activation == "gelu_tanh" else "none",
        )
        tensors = [t for t in (found.wte, found.wpe, *layers, found.norm_weight, bias, found.head) if t is not None]
        each = 6 if bias is None else 12
        fits = len(layers) == each * config.n_layer and config.n_embd // config.n_head <= 256
        alike = all(
            type(t) is torch.nn.Parameter
            and t.dtype == found.wte.dtype
            and t.device == prompt.device
            and t.is_contiguous()
            for t in tensors
        )
        return found if fits and alike else None


def _parameters(block: Any) -> Iterator[Tensor]:
    """A layer's parameters in the order of ``ops.decode``, biases that are None left out."""
    attention, mlp = block.attn, block.mlp
    for module in (block.ln_1, attention.c_attn, attention.c_proj, block.ln_2, mlp.c_fc, mlp.c_proj):
        yield module.weight
        if module.bias is not None:
            yield module.bias


def _is_plain(model: "GPT2") -> bool:
    """Whether no module has been replaced, hooked or changed, and none drops elements now."""
    from gptkernels.models.gpt2 import Block, Transformer

    transformer, eps = model.transformer, model.transformer.ln_f.eps
    heads, activation = model.config.n_head, model.config.activation

    def all_are(kind: type[torch.nn.Module], *modules: torch.nn.Module) -> bool:
        return all(is_unmodified(module, kind) for module in modules)

    if not (
        all_are(Transformer, transformer)
        and all_are(nn.Embedding, transformer.wte, transformer.wpe)
        and all_are(nn.LayerNorm, transformer.ln_f)
        and all_are(nn.Linear, model.lm_head)
        and all_are(nn.Dropout, transformer.drop)
        and model.lm_head.bias is None
    ):
        return False
    return all(
        not may_draw(block, Block, transformer.drop)
        and all_are(nn.LayerNorm, block.ln_1, block.ln_2)
        and all_are(nn.CausalSelfAttention, block.attn)
        and all_are(nn.MLP, block.mlp)
        and all_are(nn.Linear, block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)
        and all_are(nn.Dropout, block.resid_dropout)
        and block.ln_1.eps == block.ln_2.eps == eps
        and block.attn.n_head == heads
        and block.mlp.activation == activation
        for block in transformer.h
    )


# ---- CUDA graphs -----------------------------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    """Tokens (B, n) on their way to pinned memory."""

    tokens: Tensor
    arrived: torch.cuda.Event


class _Graphs:
    """Steps as CUDA graphs: of one step, and of several."""

    FEWEST = 4
    """Steps that are worth a capture."""
    STEPS = 8
    """Of the longer graph: what the device does between two graphs is done once for so many steps."""

    def __init__(self, state: _State, weights: _Weights) -> None:
        self._state = state
        self._weights = weights
        self._one = self._capture(1)
        self._many: torch.cuda.CUDAGraph | None = None

    def run(self, length: int, count: int) -> Iterator[Tensor]:
        """The tokens of ``count`` steps, (B,) on the host, from sequences the longest of which has ``length`` tokens.

        Two launches are under way while the first one's tokens are read: if no more are wanted then, the generator of
        the draws is set back to the last step that was.
        """
        generator, per_step = self._generator, self._offset_per_step
        start = generator.get_offset() if per_step else 0
        launched = taken = 0
        chunks: collections.deque[_Chunk] = collections.deque()
        try:
            while taken < count:
                while launched < count and len(chunks) < 2:
                    # The first tokens come one by one, the others as many at a time as the longer graph has.
                    size = 1 if launched < self.STEPS or count - launched < self.STEPS else self.STEPS
                    self._launch(size)
                    chunks.append(self._fetch(length - self._state.prompt + launched, size))
                    launched += size
                tokens, arrived = chunks.popleft()
                arrived.synchronize()
                for column in tokens.unbind(1):
                    if bool((column < 0).any()):
                        raise _not_finite()
                    taken += 1
                    yield column
        finally:
            if per_step and taken < launched:
                generator.set_offset(start + taken * per_step)

    def _launch(self, size: int) -> None:
        if size == 1:
            self._one.replay()
            return
        if self._many is None:
            self._many = self._capture(self.STEPS)
        self._many.replay()

    def _fetch(self, begin: int, size: int) -> _Chunk:
        from_device = self._state.new_tokens(begin, size)
        tokens = torch.empty(from_device.shape, dtype=from_device.dtype, pin_memory=True)
        tokens.copy_(from_device, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return _Chunk(tokens, arrived)

    @property
    def _generator(self) -> torch.Generator:
        device = self._state.sequences.device
        return self._state.draw.generator or torch.cuda.default_generators[device.index]

    @property
    def _offset_per_step(self) -> int:
        """How far a step's draws move the generator on CUDA: what ``exponential_`` does for so many numbers."""
        if not self._state.draw.temperature:
            return 0
        generator = self._generator
        copy = generator.clone_state()
        noise = torch.empty(
            (self._state.sequences.shape[0], self._state.model.config.vocab_size), device=self._state.sequences.device
        )
        before = copy.get_offset()
        noise.exponential_(generator=copy)
        return copy.get_offset() - before

    def _capture(self, steps: int) -> torch.cuda.CUDAGraph:
        state = self._state
        graph = torch.cuda.CUDAGraph()
        if state.draw.generator is not None:
            graph.register_generator_state(state.draw.generator)
        stream = torch.cuda.Stream(state.sequences.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Another thread may call what a capture forbids.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for _ in range(steps):
                    logits = self._weights.decode(state.sequences, state.lengths, state.keys_values)
                    state.draw(logits[:, : state.model.config.vocab_size], state.sequences, state.lengths)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph
