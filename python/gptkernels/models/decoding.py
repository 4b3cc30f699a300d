"""Text generation, one token at a time: the implementation of ``GPT2.stream``, with CUDA graphs on CUDA.

A buffer (B, columns) on the device contains the tokens, padded on the right; new tokens overwrite a sequence's padding.
``ops.decode`` reads tokens on the device and ``ops.sample_`` appends them there, so that the host can launch several
steps before it reads their tokens.
"""

import collections
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gptkernels import nn
from gptkernels._unmodified import is_unmodified
from gptkernels.block.fused import parameters_of
from gptkernels.models.recompute import uses_dropout
from gptkernels.models.transformer import Block, Transformer
from gptkernels.rules import ops
from gptkernels.rules._autocast import autocast_dtype

if TYPE_CHECKING:
    from gptkernels.models.gpt2 import GPT2

MOST_SEQUENCES = 8
"""The most sequences that ``ops.decode`` supports; with more, matmuls are faster."""


class Draw(NamedTuple):
    """The options with which the next token is drawn; see ``GPT2.stream``."""

    temperature: float
    top_k: int | None
    top_p: float | None
    generator: torch.Generator | None

    def check(self) -> None:
        """Raise a ValueError if an option is out of its range."""
        if not self.temperature >= 0:
            raise ValueError(f"GPT2: temperature must be at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"GPT2: top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"GPT2: top_p must be above 0 and at most 1, got {self.top_p}")

    def noise(self, rows: int, vocabulary: int, device: torch.device) -> Tensor | None:
        """Draw a step's random numbers as ``torch.multinomial`` does; return None at temperature 0."""
        if not self.temperature:
            return None
        noise = torch.empty((rows, vocabulary), dtype=torch.float32, device=device)
        return noise.exponential_(generator=self.generator)

    def __call__(self, logits: Tensor, noise: Tensor | None, sequences: Tensor, lengths: Tensor) -> None:
        """Append a token to each sequence, drawn from the logits (B, V)."""
        ops.sample_.default(logits, noise, sequences, lengths, self.temperature or 1.0, self.top_k, self.top_p)


class TokenStream(Iterator[Tensor]):
    """An iterator over the tokens of each step, (B,) on the prompt's device; :meth:`on_host` gives them on the host."""

    def __init__(self, steps: Iterator[Tensor], like: Tensor) -> None:
        self.steps = steps
        self._like = like

    def __next__(self) -> Tensor:
        return next(self.steps).to(self._like, non_blocking=True)

    def close(self) -> None:
        """Set the random generator to its state after the last step that was read."""
        self.steps.close()  # type: ignore[attr-defined]

    def on_host(self) -> Iterator[list[int]]:
        """Iterate over the tokens of the remaining steps, without waiting for steps that the device computes ahead."""
        return (step.tolist() for step in self.steps)


@torch.no_grad()
def steps(model: "GPT2", prompt: Tensor, lengths: list[int], count: int, draw: Draw) -> Iterator[Tensor]:
    """Yield the tokens of each of ``count`` steps, int64 (B,) on the host.

    The rows of ``prompt`` (B, T) are padded on the right with any tokens; ``lengths`` has the lengths of the rows
    without padding. A FloatingPointError says that a step's logits are NaN or infinite.
    """
    kept = _Kept.take(model, prompt, count)
    state = _State(model, prompt, lengths, kept.buffers, draw)
    length = prompt.shape[1]
    last = length + count
    weights = None
    try:
        while length < last:
            if length == prompt.shape[1] + 1:
                weights = _Weights.of(model, prompt)
            graphed = min(last, model.config.block_size + 1) - length
            if weights is not None and prompt.is_cuda and graphed >= _Graphs.FEWEST:
                found = kept.graphs_of(weights, draw)
                if found is None and length > prompt.shape[1] + 1:
                    # The previous steps loaded the kernels. Loading is not allowed in a capture.
                    found = kept.graphs = _Graphs(kept.buffers, weights, draw)
                if found is not None:
                    yield from found.run(state, weights, length, graphed)
                    length += graphed
                    continue
            state.step(length, weights)
            tokens = state.new_tokens(length - prompt.shape[1], 1)[:, 0].to("cpu", copy=True)
            if bool((tokens < 0).any()):
                raise _not_finite()
            yield tokens
            length += 1
    finally:
        kept.put_back(model)


def _not_finite() -> FloatingPointError:
    return FloatingPointError("GPT2: the logits are NaN or infinite: the model has diverged, and can write nothing")


class _Buffers(NamedTuple):
    sequences: Tensor  # (B, columns), int64
    lengths: Tensor  # (B,), int64
    keys_values: Tensor  # (L, 2, B, NH, capacity, HS)

    @classmethod
    def new(cls, model: "GPT2", prompt: Tensor, columns: int) -> "_Buffers":
        config, parameter = model.config, model.lm_head.weight
        B, C, capacity = prompt.shape[0], config.n_embd, min(config.block_size, columns)
        return cls(
            prompt.new_zeros((B, columns), dtype=torch.int64),
            prompt.new_zeros(B, dtype=torch.int64),
            torch.empty(
                (config.n_layer, 2, B, config.n_head, capacity, C // config.n_head),
                dtype=parameter.dtype,
                device=prompt.device,
            ),
        )


class _State:
    def __init__(self, model: "GPT2", prompt: Tensor, lengths: list[int], buffers: _Buffers, draw: Draw) -> None:
        T = prompt.shape[1]
        self.model = model
        self.draw = draw
        self.prompt = T
        self.same_length = min(lengths, default=T) == T
        self.sequences, self.lengths, self.keys_values = buffers
        self.sequences[:, :T] = prompt
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int64, device="cpu"))
        self._prompts = self.lengths[:, None].clone()
        capacity = self.keys_values.shape[4]
        self.caches = [nn.KeyValueCache(capacity, memory) for memory in self.keys_values]

    def new_tokens(self, begin: int, size: int) -> Tensor:
        if self.same_length:
            return self.sequences[:, self.prompt + begin : self.prompt + begin + size]
        return self.sequences.gather(1, self._prompts + torch.arange(begin, begin + size, device=self.lengths.device))

    def step(self, length: int, weights: "_Weights | None") -> None:
        logits = self.logits(length, weights)
        noise = self.draw.noise(logits.shape[0], logits.shape[1], logits.device)
        self.draw(logits, noise, self.sequences, self.lengths)

    def logits(self, length: int, weights: "_Weights | None") -> Tensor:
        if length > self.model.config.block_size:
            # Dropping the oldest token changes the position of every other token.
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
        """Compute the logits from the newest ``block_size`` tokens of each sequence, without a cache."""
        block_size = self.model.config.block_size
        first = (self.lengths - block_size).clamp(min=0)
        window = first[:, None] + torch.arange(min(length, block_size), device=first.device)
        return self._call(self.sequences.gather(1, window), self.lengths - first, None)

    def _call(self, tokens: Tensor, lengths: Tensor, caches: list[nn.KeyValueCache] | None) -> Tensor:
        hidden = self.model.transformer(tokens) if caches is None else self.model.transformer(tokens, caches)
        newest = hidden[torch.arange(len(lengths), device=lengths.device), lengths - 1]
        padded: Tensor = self.model.lm_head(newest)
        return padded


# ---- the model as one operator ---------------------------------------------------------------------------------------


class _Weights(NamedTuple):
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
        """Compute logits (B, Vp) after the newest tokens, and add their keys and values to the cache."""
        wte, wpe, layers, norm_weight, norm_bias, head, *options = self
        return ops.decode.default(
            sequences, lengths, wte, wpe, layers, norm_weight, norm_bias, head, keys_values, *options
        )

    @classmethod
    def of(cls, model: "GPT2", prompt: Tensor) -> "_Weights | None":
        if prompt.shape[0] > MOST_SEQUENCES or autocast_dtype(prompt.device.type):
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
        supported = len(layers) == each * config.n_layer and config.n_embd // config.n_head <= 256
        alike = all(
            type(t) is torch.nn.Parameter
            and t.dtype == found.wte.dtype
            and t.device == prompt.device
            and t.is_contiguous()
            for t in tensors
        )
        return found if supported and alike else None


def _parameters(block: Any) -> list[Tensor]:
    attention, mlp = block.attn, block.mlp
    modules = block.ln_1, attention.c_attn, attention.c_proj, block.ln_2, mlp.c_fc, mlp.c_proj
    parameters, mlp_proj_bias = parameters_of(*modules)
    return [t for t in (*parameters, mlp_proj_bias) if t is not None]


def _is_plain(model: "GPT2") -> bool:
    """Return whether no module was replaced, hooked or changed, and no dropout is active."""
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
        not uses_dropout(block, Block, transformer.drop)
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
    tokens: Tensor
    arrived: torch.cuda.Event


class _Graphs:
    """Two CUDA graphs: of one decoding step, and of ``STEPS`` decoding steps.

    The graphs use a separate random generator, which gets the state of the caller's generator at each launch, so that
    one capture works for any generator.
    """

    FEWEST = 4
    """The fewest steps for which a capture takes less time than it saves."""
    STEPS = 8
    """The number of steps in the longer graph, which has fewer gaps between launches than a graph of one step."""

    def __init__(self, buffers: _Buffers, weights: _Weights, draw: Draw) -> None:
        self.key = self.key_of(weights, draw)
        self._buffers = buffers
        self._vocabulary = weights.vocab_size
        self._draw = draw._replace(generator=torch.Generator(buffers.sequences.device) if draw.temperature else None)
        self._offset = self._offset_per_step()
        self._graphs = {1: self._capture(1, weights)}
        self._copies = torch.cuda.Stream(buffers.sequences.device)

    @staticmethod
    def key_of(weights: _Weights, draw: Draw) -> tuple[Any, ...]:
        wte, wpe, layers, norm_weight, norm_bias, head, *options = weights
        tensors = [t for t in (wte, wpe, *layers, norm_weight, norm_bias, head) if t is not None]
        return *options, draw[:3], *((t.data_ptr(), t.dtype, t.shape) for t in tensors)

    def run(self, state: _State, weights: _Weights, length: int, count: int) -> Iterator[Tensor]:
        """Yield the tokens of ``count`` steps.

        The host launches a graph before it reads the tokens of the previous graph. If the caller stops early, the
        random generator is set back to its state after the last step that was read.
        """
        generator = state.draw.generator or torch.cuda.default_generators[state.sequences.device.index]
        start = generator.get_offset() if self._offset else 0
        launched = taken = 0
        chunks: collections.deque[_Chunk] = collections.deque()
        try:
            while taken < count:
                while launched < count and len(chunks) < 2:
                    # The first tokens are computed by the short graph, so that they arrive early.
                    size = 1 if launched < self.STEPS or count - launched < self.STEPS else self.STEPS
                    self._launch(size, weights, generator)
                    chunks.append(self._fetch(state, length - state.prompt + launched, size))
                    launched += size
                tokens, arrived = chunks.popleft()
                arrived.synchronize()
                for column in tokens.unbind(1):
                    if bool((column < 0).any()):
                        raise _not_finite()
                    taken += 1
                    yield column
        finally:
            if self._offset and taken < launched:
                generator.set_offset(start + taken * self._offset)

    def _launch(self, size: int, weights: _Weights, generator: torch.Generator) -> None:
        if size not in self._graphs:
            self._graphs[size] = self._capture(size, weights)
        if self._draw.generator is not None:
            self._draw.generator.set_state(generator.get_state())
        self._graphs[size].replay()
        if self._offset:
            generator.set_offset(generator.get_offset() + size * self._offset)

    def _fetch(self, state: _State, begin: int, size: int) -> _Chunk:
        """Copy new tokens to the host on another CUDA stream, so that the next graph can start before the copy ends."""
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            from_device = state.new_tokens(begin, size)
            tokens = torch.empty(from_device.shape, dtype=from_device.dtype, device="cpu", pin_memory=True)
            tokens.copy_(from_device, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        return _Chunk(tokens, arrived)

    def _noise(self) -> Tensor | None:
        sequences = self._buffers.sequences
        return self._draw.noise(sequences.shape[0], self._vocabulary, sequences.device)

    def _offset_per_step(self) -> int:
        if self._draw.generator is None:
            return 0
        before = self._draw.generator.get_offset()
        self._noise()
        return self._draw.generator.get_offset() - before

    def _step(self, noise: Tensor | None, weights: _Weights) -> None:
        logits = weights.decode(*self._buffers)[:, : self._vocabulary]
        self._draw(logits, noise, self._buffers.sequences, self._buffers.lengths)

    def _capture(self, steps: int, weights: _Weights) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        if self._draw.generator is not None:
            graph.register_generator_state(self._draw.generator)
        device = self._buffers.sequences.device
        stream, second_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Another thread may make calls that are not allowed in a capture.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                noises = [self._noise()]
                # The noise of the other steps is drawn in parallel with the first step.
                second_stream.wait_stream(stream)
                with torch.cuda.stream(second_stream):
                    noises += [self._noise() for _ in range(1, steps)]
                self._step(noises[0], weights)
                stream.wait_stream(second_stream)
                for noise in noises[1:]:
                    self._step(noise, weights)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph


class _Kept:
    """Buffers, and graphs captured with them, which the next generation with the same model can reuse."""

    _of_models: ClassVar["weakref.WeakKeyDictionary[GPT2, _Kept]"] = weakref.WeakKeyDictionary()

    def __init__(self, key: tuple[Any, ...] | None, buffers: _Buffers) -> None:
        self.key = key
        self.buffers = buffers
        self.graphs: _Graphs | None = None

    @classmethod
    def take(cls, model: "GPT2", prompt: Tensor, count: int) -> "_Kept":
        """Take the buffers and graphs that are kept for the model if they fit, or make new buffers.

        Until ``put_back`` is called, another generation cannot take these buffers.
        """
        block_size, columns = model.config.block_size, prompt.shape[1] + count
        kept = cls._of_models.pop(model, None)
        if not prompt.is_cuda or prompt.shape[0] > MOST_SEQUENCES or columns > block_size + 1:
            return cls(None, _Buffers.new(model, prompt, columns))
        # Buffers for the longest sequences are kept if they need no more memory than the model's parameters.
        dtype = model.lm_head.weight.dtype
        nbytes = 2 * model.config.n_layer * prompt.shape[0] * block_size * model.config.n_embd * dtype.itemsize
        if count < _Graphs.FEWEST or nbytes > sum(p.nbytes for p in model.parameters()):
            return cls(None, _Buffers.new(model, prompt, columns))
        # The CUDA stream is part of the key, because work on another stream may still use the buffers.
        key = prompt.shape[0], prompt.device, dtype, torch.cuda.current_stream(prompt.device).cuda_stream
        if kept is not None and kept.key == key:
            return kept
        return cls(key, _Buffers.new(model, prompt, block_size + 1))

    def graphs_of(self, weights: _Weights, draw: Draw) -> _Graphs | None:
        found = self.graphs
        return found if found is not None and found.key == _Graphs.key_of(weights, draw) else None

    def put_back(self, model: "GPT2") -> None:
        if self.key is not None and self.graphs is not None:
            self._of_models[model] = self
