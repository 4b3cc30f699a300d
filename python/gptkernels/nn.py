"""Modules that run this package's kernels, for use in place of ``torch.nn``'s modules of the same names.

Constructors, state_dict keys, reprs and initialisation are torch's. ``MLP`` and ``CausalSelfAttention`` are nanoGPT's
modules. An option that no kernel supports raises a ValueError when the module is made.
"""

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gptkernels import functional
from gptkernels._unmodified import is_unmodified
from gptkernels.rules.attention import unpack
from gptkernels.rules.fp8 import ALIGNMENT, new_history

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "GELU", "MLP", "CausalSelfAttention", "CrossEntropyLoss", "Dropout", "Embedding", "KeyValueCache", "LayerNorm",
    "Linear", "Softmax",
]  # fmt: skip


class LayerNorm(torch.nn.LayerNorm):
    """:class:`torch.nn.LayerNorm` with this package's kernel."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``(..., *normalized_shape)``."""
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class GELU(torch.nn.GELU):
    """:class:`torch.nn.GELU` with this package's kernel."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply GELU to each element."""
        return functional.gelu(input, self.approximate)


class Softmax(torch.nn.Softmax):
    """:class:`torch.nn.Softmax` with this package's kernel."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply softmax along ``dim``."""
        return functional.softmax(input, self.dim, _stacklevel=5)


class Dropout(torch.nn.Dropout):
    """:class:`torch.nn.Dropout` with this package's kernel, which does not support ``inplace``.

    Attributes:
        context_group: the process group over which the sequences are divided; None, the default, if they are not. The
            input is then (B, T / R, C), this rank's tokens (:func:`gptkernels.parallel.split_sequence`).
    """

    context_group: "ProcessGroup | None" = None

    @functools.wraps(torch.nn.Dropout.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        functional.refuse("Dropout", inplace=self.inplace)

    def forward(self, input: Tensor) -> Tensor:
        """Drop elements in training mode; return ``input`` unchanged in evaluation mode."""
        if self.context_group is not None and self.training and self.p:
            from gptkernels.parallel import context  # imports this module

            return context.dropout(input, self.p, self.context_group)
        return functional.dropout(input, self.p, self.training, self.inplace)


class Linear(torch.nn.Linear):
    """:class:`torch.nn.Linear` with an option ``fp8``.

    If ``fp8`` is true, training uses float8 matmuls (``docs/fp8.md``): the input and the weight are in e4m3, the
    output's gradient is in e5m2. The scales of the input and of the gradient come from the amax of the last 16 calls.
    These two amax histories are buffers, and are reset if a loaded state dict lacks them. In evaluation mode, and under
    ``torch.no_grad()``, the option has no effect.

    Args:
        in_features, out_features: multiples of 16 for ``fp8``; a ValueError otherwise.
        bias: whether the layer has a bias.
        device, dtype: of the parameters.
        fp8: use float8 matmuls in training.
    """

    HISTORIES = ("fp8_history", "fp8_dout_history")
    fp8: bool = False
    fp8_history: Tensor
    fp8_dout_history: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        fp8: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        if not fp8:
            return
        for name, features in (("in_features", in_features), ("out_features", out_features)):
            if features % ALIGNMENT:
                raise ValueError(f"Linear: {name} must be a multiple of {ALIGNMENT} for fp8, got {features}")
        self.fp8 = True
        self.register_buffer("fp8_history", new_history(device))
        self.register_buffer("fp8_dout_history", new_history(device))
        self.register_load_state_dict_pre_hook(_keep_own_histories)

    def reset_parameters(self) -> None:
        """Initialise as torch does, and reset the amax histories."""
        super().reset_parameters()
        for history in self.buffers():
            history.zero_()

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        return self.product(input, self.bias)

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """Compute :meth:`forward` with ``bias`` instead of the module's bias; None adds no bias."""
        if self.multiplies_fp8():
            return functional.fp8_linear(input, self.weight, bias, self.fp8_history, self.fp8_dout_history)
        return functional.linear(input, self.weight, bias)

    def multiplies_fp8(self) -> bool:
        """Return whether a call uses float8 matmuls: ``fp8`` is set, and the module trains with gradients enabled."""
        return self.fp8 and self.training and torch.is_grad_enabled()

    def extra_repr(self) -> str:
        """Return torch's options, and ``fp8`` if it is set."""
        return super().extra_repr() + (", fp8=True" if self.fp8 else "")


def _keep_own_histories(module: torch.nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for name in Linear.HISTORIES:
        if prefix + name not in state_dict:
            state_dict[prefix + name] = torch.zeros_like(getattr(module, name))


class Embedding(torch.nn.Embedding):
    """:class:`torch.nn.Embedding`, without padding_idx, max_norm, scale_grad_by_freq and sparse.

    With ``vocab_size`` V, the last rows of the weight are padding, and a token from V on is an error; -1, the default,
    accepts all ``num_embeddings`` tokens.
    """

    vocab_size: int = -1

    @functools.wraps(torch.nn.Embedding.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        unsupported = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
        functional.refuse("Embedding", **{name: getattr(self, name) for name in unsupported})

    def forward(self, input: Tensor) -> Tensor:
        """Look up (...) int64 or int32 -> (..., embedding_dim)."""
        options = self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        return functional.embedding(input, self.weight, *options, vocab_size=self.vocab_size)


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """:class:`torch.nn.CrossEntropyLoss` with this package's kernel, without class weights and label smoothing."""

    @functools.wraps(torch.nn.CrossEntropyLoss.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        functional.refuse("CrossEntropyLoss", weight=self.weight, label_smoothing=self.label_smoothing or None)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss of logits (V), (N, V) or (N, V, d1, ...) for targets (), (N) or (N, d1, ...)."""
        options: dict[str, Any] = {"reduction": self.reduction, "label_smoothing": self.label_smoothing}
        return functional.cross_entropy(input, target, self.weight, ignore_index=self.ignore_index, **options)


class MLP(torch.nn.Module):
    """GPT-2's feed-forward layer: two linear layers with GELU between them.

    A call runs one operator, unless the GELU is exact, or a linear layer was replaced, hooked or parametrised.

    Args:
        n_embd: C, the number of channels. The hidden layer has 4C channels.
        bias: whether the two linear layers have biases.
        device, dtype: of the parameters.
        activation: "gelu_tanh", or "gelu" for the exact GELU.
        fp8: the option ``fp8`` of the two linear layers (:class:`Linear`).

    Attributes:
        recompute_gelu: save only the GELU's input for the backward, which recomputes the GELU's output (..., 4C). This
            option has no effect if a call runs several operators or float8 matmuls.

    Raises:
        ValueError: if ``activation`` is unknown, or with ``fp8`` n_embd is not a multiple of 16.
    """

    recompute_gelu: bool = False

    def __init__(
        self,
        n_embd: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        activation: str = "gelu_tanh",
        fp8: bool = False,
    ) -> None:
        super().__init__()
        if activation not in ("gelu_tanh", "gelu"):
            raise ValueError(f"MLP: activation must be 'gelu_tanh' or 'gelu', got {activation!r}")
        self.activation = activation
        self.c_fc = Linear(n_embd, 4 * n_embd, bias, device, dtype, fp8)
        self.c_proj = Linear(4 * n_embd, n_embd, bias, device, dtype, fp8)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        proj = self.c_proj
        return self._compute(x, proj.bias) if is_unmodified(proj, Linear) else proj(self._hidden(x))

    def without_bias(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute :meth:`forward` without the bias of the second linear layer; return the result and this bias.

        If the second linear layer was modified, the result includes the bias, and None is returned instead of the bias.
        """
        proj = self.c_proj
        return (self._compute(x, None), proj.bias) if is_unmodified(proj, Linear) else (proj(self._hidden(x)), None)

    def _hidden(self, x: Tensor) -> Tensor:
        return functional.gelu(self.c_fc(x), "tanh" if self.activation == "gelu_tanh" else "none")

    def _compute(self, x: Tensor, proj_bias: Tensor | None) -> Tensor:
        fc, proj = self.c_fc, self.c_proj
        if self.activation == "gelu_tanh" and is_unmodified(fc, Linear):
            eights = fc.multiplies_fp8(), proj.multiplies_fp8()
            if all(eights):
                histories = fc.fp8_history, proj.fp8_history, fc.fp8_dout_history, proj.fp8_dout_history
                return functional.fp8_mlp(x, fc.weight, fc.bias, proj.weight, proj_bias, *histories)
            if not any(eights):
                return functional.mlp(x, fc.weight, fc.bias, proj.weight, proj_bias, self.recompute_gelu)
        return proj.product(self._hidden(x), proj_bias)

    def extra_repr(self) -> str:
        """Return the activation if it is not the default."""
        return f"activation={self.activation!r}" if self.activation != "gelu_tanh" else ""


class KeyValueCache:
    """The keys and values of at most ``capacity`` earlier tokens of a layer, for decoding.

    ``memory`` is (2, B, NH, capacity, HS). If it is None or does not fit the first tokens, new memory is allocated.
    """

    def __init__(self, capacity: int, memory: Tensor | None = None) -> None:
        self.capacity = capacity
        self.length = 0
        self._memory = memory
        self._keys_values = torch.empty(0)

    def attend(self, qkv: Tensor, num_heads: int, dropout_p: float = 0.0) -> Tensor:
        """Append the keys and values of ``qkv`` (B, T, 3C), and compute the attention of its T tokens: (B, T, C).

        Each token sees itself and all earlier tokens, including those of earlier calls. T may differ between calls.

        Raises:
            ValueError: if there are more tokens than the capacity, or B is not the batch size of the earlier tokens.
        """
        B, T, C3 = qkv.shape
        begin, end = self.length, self.length + T
        if end > self.capacity:
            raise ValueError(f"KeyValueCache: {begin} + {T} tokens are more than its capacity {self.capacity}")
        # The views are (B, NH, T, HS). In the cache, unlike in qkv, the keys of each head are contiguous.
        query, *key_value = unpack(qkv, num_heads)
        if not begin:
            shape = (2, B, num_heads, self.capacity, query.shape[-1])
            given = self._memory
            usable = given is not None and given.shape == shape and given.dtype == qkv.dtype
            self._keys_values = given if usable else qkv.new_empty(shape)  # type: ignore[assignment]
        elif self._keys_values.shape[1] != B:
            raise ValueError(f"KeyValueCache: it holds {self._keys_values.shape[1]} sequences, got {B}")
        for i in (0, 1):
            self._keys_values[i, :, :, begin:end] = key_value[i]
        self.length = end
        if not begin:
            return functional.causal_attention(qkv, num_heads, dropout_p=dropout_p)
        causal = T > 1  # a single query is the newest token, which sees every key
        keys, values = self._keys_values[:, :, :, :end]
        out = functional.scaled_dot_product_attention(
            query, keys, values, None, dropout_p, causal, query_offset=begin if causal else 0
        )
        return out.transpose(1, 2).reshape(B, T, C3 // 3)


class CausalSelfAttention(torch.nn.Module):
    """Multi-head causal self-attention.

    Args:
        n_embd: C.
        n_head: NH, which divides C.
        bias: whether the two linear layers have biases.
        device, dtype: of the parameters.
        dropout: the probability with which an attention weight is dropped in training.
        fp8: the option ``fp8`` of the two linear layers (:class:`Linear`).

    Attributes:
        context_group: the process group over which the sequences are divided; None, the default, if they are not. The
            input then has this rank's tokens (:func:`gptkernels.parallel.split_sequence`).

    Raises:
        ValueError: if ``n_head`` does not divide ``n_embd``, ``dropout`` is not from 0 to 1, or with ``fp8`` n_embd is
            not a multiple of 16.
    """

    context_group: "ProcessGroup | None" = None

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        dropout: float = 0.0,
        fp8: bool = False,
    ) -> None:
        super().__init__()
        if n_embd % n_head:
            raise ValueError(f"CausalSelfAttention: n_embd must be a multiple of n_head, got {n_embd} and {n_head}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"CausalSelfAttention: dropout must be from 0 to 1, got {dropout}")
        self.n_head = n_head
        self.dropout = dropout
        self.c_attn = Linear(n_embd, 3 * n_embd, bias, device, dtype, fp8)
        self.c_proj = Linear(n_embd, n_embd, bias, device, dtype, fp8)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """(B, T, C) -> (B, T, C). With a cache, x are the tokens that follow the cached ones."""
        return self.c_proj(self._attend(x, cache))

    def without_bias(self, x: Tensor, cache: KeyValueCache | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute :meth:`forward` without the bias of ``c_proj``; return the result and this bias.

        If ``c_proj`` was modified, the result includes the bias, and None is returned instead of the bias.
        """
        attended, proj = self._attend(x, cache), self.c_proj
        if is_unmodified(proj, Linear):
            return proj.product(attended, None), proj.bias
        return proj(attended), None

    def _attend(self, x: Tensor, cache: KeyValueCache | None) -> Tensor:
        qkv = self.c_attn(x)
        dropout_p = self.dropout if self.training else 0.0
        if self.context_group is not None:
            return self._attend_across(self.context_group, qkv, cache, dropout_p)
        if cache is None:
            return functional.causal_attention(qkv, self.n_head, dropout_p=dropout_p)
        return cache.attend(qkv, self.n_head, dropout_p)

    def _attend_across(
        self, group: "ProcessGroup", qkv: Tensor, cache: KeyValueCache | None, dropout_p: float
    ) -> Tensor:
        from gptkernels.parallel.context import context_parallel_attention  # imports this module

        if cache is not None:
            raise ValueError("CausalSelfAttention: context parallelism does not support a cache of keys and values")
        query, key, value = unpack(qkv, self.n_head)
        out = context_parallel_attention(query, key, value, group, dropout_p=dropout_p)
        return out.transpose(1, 2).flatten(2)

    def extra_repr(self) -> str:
        """Return the number of heads, and the dropout probability if it is not 0."""
        return f"n_head={self.n_head}" + (f", dropout={self.dropout}" if self.dropout else "")
