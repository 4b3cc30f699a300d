"""GPT-2 (Radford et al., 2019). This package's kernels compute the whole training step.

Shapes: B batch, T tokens, C channels, V vocabulary, Vp padded vocabulary, L layers, NH heads. Parameters have nanoGPT's
and Hugging Face's names; matrices are (out, in).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd import forward_ad
from torch.nn import init
from torch.overrides import TorchFunctionMode

from gptkernels import _dtensor, functional, nn
from gptkernels._unmodified import is_unmodified
from gptkernels.models.config import GPT2Config
from gptkernels.models.decoding import Draw, TokenStream, steps
from gptkernels.models.files import Files
from gptkernels.models.nanogpt import NanoGPT
from gptkernels.models.transformer import Transformer, whole_length
from gptkernels.rules import ops
from gptkernels.rules.encoder import tied_encoder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class GPT2(Files, NanoGPT):
    """GPT-2 with an LM head that is tied to the token embedding.

    The embedding has Vp rows, of which the last Vp - V are 0 and unused. A state dict whose embedding has V or more
    rows can be loaded, with or without ``lm_head.weight``.

    Attributes:
        context_group: the process group over which :func:`gptkernels.parallel.context_parallel` has divided the
            sequences; None, the default, if they are not divided.
    """

    context_group: "ProcessGroup | None" = None

    def __init__(self, config: GPT2Config, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        with _WithoutDraws():
            self.transformer = Transformer(config, device, dtype)
            self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False, device=device, dtype=dtype)
        self.lm_head.weight = self.transformer.wte.weight
        self.register_load_state_dict_pre_hook(_fit_vocabulary)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the parameters as in GPT-2, and reset the amax histories.

        Matrices are drawn from N(0, 0.02^2), the two ``c_proj`` of each layer from N(0, 0.02^2 / (2L)). Biases and the
        embeddings' padding are 0, and the norms' weights are 1.

        One number of torch's generator for the CPU determines all weights, whatever their device. In another dtype they
        have the same values, rounded. Of a DTensor each process draws only its own part; all processes must have set
        the same seed. On the meta device nothing is drawn.
        """
        if self.lm_head.weight.is_meta:
            return
        with unset_fake_temporarily():
            seed = int(torch.randint(2**63 - 1, (), device="cpu"))
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        streams = itertools.count()
        for name, parameter in self.named_parameters():
            part, first = _dtensor.held(parameter), _dtensor.first_indices(parameter)
            if parameter.dim() >= 2 and not name.endswith("bias"):
                std = residual_std if name.endswith("c_proj.weight") else 0.02
                _draw(part, parameter.shape, first, (0.0, std, seed, next(streams)))
                if name.endswith(("wte.weight", "lm_head.weight")):
                    part[max(self.config.vocab_size - first[0], 0) :].zero_()
            else:
                part.fill_(1.0 if name.endswith("weight") else 0.0)
        for history in self.buffers():
            history.zero_()

    def _is_tied(self) -> bool:
        weight = getattr(self.lm_head, "weight", None)
        return weight is not None and weight is getattr(self.transformer.wte, "weight", None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GPT2":
        """Tie the LM head again, because tied parameters become separate ones when they leave the meta device."""
        tied = self._is_tied()
        super()._apply(fn, recurse)
        if tied:
            self.lm_head.weight = self.transformer.wte.weight
        return self

    # ---- the forward pass --------------------------------------------------------------------------------------------

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, return_logits: bool = True, ignore_index: int = -100
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute the logits of every position, and their mean cross-entropy with ``targets``.

        Args:
            tokens: (B, T), int64 or int32, T at most ``block_size``.
            targets: (B, T), int64 or int32; None for no loss.
            return_logits: False, if targets are given, computes the loss in chunks of rows and stores only one chunk's
                logits, unless ``lm_head`` was replaced or hooked.
            ignore_index: the entry of ``targets`` for a position without a target; nanoGPT and llm.c use -1.

        Returns:
            The logits (B, T, V), a view of the padded (B, T, Vp), or None; the loss, 0-dim float32 (float64 for
            float64), or None.

        Raises:
            ValueError: if tokens is not 2-dimensional or too long, or targets has another shape.
            TypeError: if tokens or targets has another dtype.
        """
        self._check(tokens, targets)
        if targets is not None and not return_logits and is_unmodified(self.lm_head, nn.Linear):
            hidden, weight = self._hidden_and_head(tokens)
            divided = self.context_group is not None
            options: dict[str, Any] = {"ignore_index": ignore_index, "vocab_size": self.config.vocab_size}
            options["reduction"] = "sum" if divided else "mean"
            if self.config.fp8_head and self.training and torch.is_grad_enabled():
                options["fp8_logits"] = self.config.fp8_logits
                loss = functional.fp8_linear_cross_entropy(hidden, weight, targets, **options)
            else:
                loss = functional.linear_cross_entropy(hidden, weight, targets, **options)
            return None, self._mean(loss, targets, ignore_index) if divided else loss
        hidden = self.transformer(tokens)
        padded = self.lm_head(hidden)
        logits = padded[..., : self.config.vocab_size]
        if targets is None:
            return logits, None
        flat = targets.reshape(-1)
        rows = padded.reshape(-1, padded.shape[-1])
        losses, _ = ops.fused_classifier.default(rows, flat, self.config.vocab_size, ignore_index)
        return logits if return_logits else None, self._mean(losses.sum(), flat, ignore_index)

    def _mean(self, loss: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        """Divide a sum of losses by the number of targets; with context parallelism, by the mean number per rank."""
        count, group = (targets != ignore_index).sum(), self.context_group
        if group is None:
            return loss / count
        from gptkernels.parallel._collectives import all_reduce  # imports this module

        return loss * group.size() / all_reduce(count, group)

    def _hidden_and_head(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the transformer's output and the LM head's weight.

        If the LM head is tied, ``TiedEncoder`` adds the weight's two gradients without an extra pass.
        """
        transformer, weight = self.transformer, self.lm_head.weight
        if (
            not (is_unmodified(transformer, Transformer) and transformer.embeds_in_one())
            or weight is not transformer.wte.weight
            or not (torch.is_grad_enabled() and weight.requires_grad)
            or torch.compiler.is_compiling()
            or torch._C._are_functorch_transforms_active()
            or forward_ad._current_level >= 0
        ):
            return transformer(tokens), weight
        positions = transformer.positions(tokens, transformer.wpe.weight)
        stream, weight = tied_encoder(tokens, weight, positions, transformer.vocab_size)
        return transformer.after_embedding(stream), weight

    def _check(self, tokens: Tensor, targets: Tensor | None = None) -> None:
        for name, t in (("tokens", tokens), ("targets", targets)):
            if t is not None and t.dtype not in (torch.int64, torch.int32):
                raise TypeError(f"GPT2: {name} must be int64 or int32, got {t.dtype}")
        if tokens.dim() != 2:
            raise ValueError(f"GPT2: tokens must have shape (B, T), got {tuple(tokens.shape)}")
        length = whole_length(tokens, self.context_group)
        if length > self.config.block_size:
            raise ValueError(f"GPT2: {length} tokens are more than block_size {self.config.block_size}")
        if targets is not None and targets.shape != tokens.shape:
            raise ValueError(
                f"GPT2: targets must have the shape of tokens, {tuple(tokens.shape)}, got {tuple(targets.shape)}"
            )

    # ---- generation --------------------------------------------------------------------------------------------------

    @overload
    def generate(
        self, tokens: Tensor, max_new_tokens: int, temperature: float = ..., top_k: int | None = ...,
        generator: torch.Generator | None = ..., top_p: float | None = ...,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def generate(
        self, tokens: Sequence[Tensor], max_new_tokens: int, temperature: float = ..., top_k: int | None = ...,
        generator: torch.Generator | None = ..., top_p: float | None = ...,
    ) -> list[Tensor]: ...  # fmt: skip

    def generate(
        self,
        tokens: Tensor | Sequence[Tensor],
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        top_p: float | None = None,
    ) -> Tensor | list[Tensor]:
        """Append ``max_new_tokens`` tokens to ``tokens``. :meth:`stream` describes the arguments and errors.

        Returns:
            (B, T + max_new_tokens), of tokens' dtype; for a list of prompts, a list of (T_i + max_new_tokens,).
        """
        new = [*self.stream(tokens, max_new_tokens, temperature, top_k, generator, top_p).steps]
        if isinstance(tokens, Tensor):
            return torch.cat([tokens, torch.stack(new, 1).to(tokens)], dim=1) if new else tokens.clone()
        added = torch.stack(new, 1).to(tokens[0]) if new else tokens[0].new_empty(len(tokens), 0)
        return [torch.cat(pair) for pair in zip(tokens, added, strict=True)]

    def stream(
        self,
        tokens: Tensor | Sequence[Tensor],
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        top_p: float | None = None,
    ) -> TokenStream:
        """Generate the tokens that follow ``tokens``. Yields a (B,) tensor for each step, as soon as it is computed.

        Keys and values of earlier tokens are cached. Beyond ``block_size`` tokens the oldest token is dropped, which
        changes every position, so that each step computes all ``block_size`` tokens. For at most 8 sequences, one
        operator computes the logits of each cached step, unless a module was replaced or hooked, or autocast is on. On
        CUDA, most of these steps are replayed as a CUDA graph.

        Args:
            tokens: (B, T), int64 or int32, T at least 1, of which the last ``block_size`` tokens are used. Or a list of
                prompts of different lengths, (T_i,) each, which run as one batch.
            max_new_tokens: the number of steps.
            temperature: the divisor of the logits; 0 always takes the likeliest token.
            top_k: draw from the k likeliest tokens only; None draws from all.
            generator: a random generator on the model's device, for reproducible draws; None is torch's default.
            top_p: of the tokens that top_k leaves, draw only from the smallest set of likeliest tokens whose total
                probability reaches this share; None draws from all.

        Raises:
            ValueError: tokens is empty or not 2-dimensional (a prompt in a list: not 1-dimensional), max_new_tokens or
                temperature is negative, top_k is below 1, or top_p is not above 0 and at most 1.
            TypeError: tokens has another dtype.
            FloatingPointError: the logits of a step are NaN or infinite.
        """
        if self.context_group is not None:
            raise RuntimeError("GPT2: a model with context parallelism cannot generate")
        window, lengths = self._windows(tokens)
        self._check(window)
        if min(lengths, default=1) == 0:
            raise ValueError("GPT2: generation starts from at least one token, got none")
        if max_new_tokens < 0:
            raise ValueError(f"GPT2: max_new_tokens must be at least 0, got {max_new_tokens}")
        draw = Draw(temperature, top_k, top_p, generator)
        draw.check()
        return TokenStream(steps(self, window, lengths, max_new_tokens, draw), window)

    def _windows(self, tokens: Tensor | Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        if isinstance(tokens, Tensor):
            window = tokens[:, -self.config.block_size :] if tokens.dim() == 2 else tokens
            return window, [window.shape[-1]] * window.shape[0] if window.dim() == 2 else []
        if not tokens or any(prompt.dim() != 1 for prompt in tokens):
            raise ValueError("GPT2: a list of prompts must have at least one, each of shape (T_i,)")
        windows = [prompt[-self.config.block_size :] for prompt in tokens]
        return torch.nn.utils.rnn.pad_sequence(windows, batch_first=True), [len(window) for window in windows]


class _WithoutDraws(TorchFunctionMode):
    """Keeps torch's layers from drawing their weights, which the model draws itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return None if func in (init.kaiming_uniform_, init.normal_, init.uniform_) else func(*args, **(kwargs or {}))


def _draw(part: Tensor, shape: Sequence[int], first: Sequence[int], options: tuple[Any, ...], index: int = 0) -> None:
    """Draw the part of a tensor of ``shape`` that begins at the indices ``first``, by the flat indices of its elements.

    ``index`` is the flat index of the tensor's first element.
    """
    if len(shape) > 2 and part.shape[2:] == shape[2:]:
        inner = math.prod(shape[2:])
        part, shape, first = part.view(part.shape[0], -1), (shape[0], shape[1] * inner), (first[0], first[1] * inner)
    if len(shape) == 2:
        ops.normal_.default(part, *options, index + first[0] * shape[1] + first[1], shape[1])
        return
    for i, slice in enumerate(part, first[0]):
        _draw(slice, shape[1:], first[1:], options, index + i * math.prod(shape[1:]))


def _fit_vocabulary(model: GPT2, state_dict: dict[str, Tensor], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Pad or cut a state dict's embedding to the model's Vp rows, and add it as the LM head if there is none.

    With ``assign=True`` a tied embedding and LM head stay one parameter. A model without fp8 ignores amax histories.
    """
    if not model.config.fp8:
        for name in [name for name in state_dict if name.endswith(nn.Linear.HISTORIES)]:
            del state_dict[name]
    wte, head = prefix + "transformer.wte.weight", prefix + "lm_head.weight"
    V, Vp = model.config.vocab_size, model.config.padded_vocab_size
    if wte in state_dict and head not in state_dict:
        state_dict[head] = state_dict[wte]
    for name in (wte, head):
        weight = state_dict.get(name)
        if weight is not None and weight.dim() == 2 and weight.shape[0] != Vp and weight.shape[0] >= V:
            state_dict[name] = torch.cat([weight[:V], weight.new_zeros(Vp - V, weight.shape[1])])
    if metadata.get("assign_to_params_buffers") and head in state_dict and model._is_tied():
        state_dict[wte] = state_dict[head] = torch.nn.Parameter(state_dict[head])
