"""Replacements of the modules of Hugging Face's GPT-2 (transformers 4.57 and 5.x).

Kernels compute a call at the highest level that supports it: ``GPT2Model``, each block, each attention, each MLP. An
unsupported call runs the original code, which calls the submodules.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptkernels import functional
from gptkernels._unmodified import is_exporting
from gptkernels.block.fused import FusedBlock, Pending, add, cast_all
from gptkernels.block.node import Dtypes, dtypes_of
from gptkernels.rules.attention import unpack
from gptkernels.swapping.block_modules import Parts, fused_block, parts_of, probability
from gptkernels.swapping.checks import (
    attention_is_replaced,
    count,
    dropout_of,
    has_librarys_forward,
    untouched,
    why_not,
)
from gptkernels.swapping.classes import Namespace, replacement
from gptkernels.swapping.dropout import Draws, drop
from gptkernels.swapping.head import head_and_loss
from gptkernels.swapping.layers import weight_of
from gptkernels.swapping.transformer import add_and_norm, attend, feed_forward, layer, mlp, pending_of, project

IGNORED = ("return_dict", "num_items_in_batch", "cache_position")
SUPPORTED = ("sdpa", "gptkernels")  # implementations of attention that return no probabilities
TRANSFORMER, LANGUAGE_MODEL = "Hugging Face GPT2Model", "Hugging Face GPT2LMHeadModel"
KINDS = BLOCK, ATTENTION, MLP = "Hugging Face GPT2Block", "Hugging Face GPT2Attention", "Hugging Face GPT2MLP"


def library() -> Any:
    return sys.modules.get("transformers.models.gpt2.modeling_gpt2")


def decide(module: torch.nn.Module) -> tuple[Any, ...] | None:
    theirs = library()
    if theirs is None:
        return None
    if _has_forward_of(module, theirs.Conv1D):
        return "Linear", True
    activations = sys.modules["transformers.activations"]
    for name, form in (("NewGELUActivation", "tanh"), ("GELUActivation", "none"), ("FastGELUActivation", "tanh")):
        if type(module) is getattr(activations, name, None) and has_librarys_forward(type(module)):
            return "GELU", form
    for name in ("GELUTanh", "PytorchGELUTanh"):
        if type(module) is getattr(activations, name, None):
            return "GELU", "tanh"
    for name in ("GPT2MLP", "GPT2Attention", "GPT2Block", "GPT2Model", "GPT2LMHeadModel"):
        if _has_forward_of(module, getattr(theirs, name)):
            return (f"Hugging Face {name}",)
    return None


def _has_forward_of(module: torch.nn.Module, kind: Any) -> bool:
    return isinstance(module, kind) and type(module).forward is kind.forward and has_librarys_forward(kind)


def _sdpa_is_theirs() -> bool:
    """Return whether the function registered as "sdpa" is transformers' own, and the one that it calls is torch's.

    While compiling, the first is not checked.
    """
    if attention_is_replaced():
        return False
    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    theirs = sys.modules["transformers.integrations.sdpa_attention"].sdpa_attention_forward
    return torch.compiler.is_compiling() or functions["sdpa"] is theirs


# ---- the MLP ---------------------------------------------------------------------------------------------------------


@replacement(MLP)
def mlp_module(original: Any) -> Namespace:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if (reason := why_not(hidden_states)) is not None:
            count(self, reason)
            return original.forward(self, hidden_states)
        return drop(mlp(hidden_states, self.c_fc, self.act, self.c_proj), self.dropout, Draws(1, hidden_states))

    return {"forward": forward}


def _mlp(draws: Draws) -> Callable[[Any, Tensor], Pending]:
    return lambda module, x: feed_forward(module, x, MLP, lambda m: m.act, draws)


def _only_matmul_reads(mlp: Any) -> bool:
    return untouched(mlp, MLP) and untouched(mlp.c_fc, "Linear")


# ---- attention -------------------------------------------------------------------------------------------------------


@replacement(ATTENTION)
def attention(original: Any) -> Namespace:
    complete = completer(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = complete(args, kwargs)
        hidden = options["hidden_states"]
        if (reason := _why_not_attention(self, hidden, options)) is not None:
            count(self, reason)
            return original.forward(self, *args, **kwargs)
        dropout_p, draws = dropout_of(self.attn_dropout) or 0.0, Draws(2, hidden)
        qkv = project(hidden, self.c_attn)
        mask, cache = options.get("attention_mask"), options.get("past_key_values")
        if mask is None and cache is None:
            out = attend(qkv, self.num_heads, scale_of(self), draws(dropout_p))
        else:
            query, key, value = unpack(qkv, self.num_heads)
            if cache is not None:
                position = options.get("cache_position")  # transformers 4.57: where a static cache writes
                told = () if position is None else ({"cache_position": position},)
                key, value = cache.update(key, value, self.layer_idx, *told)
            # As in transformers, without a mask a single query sees all keys, and query i of several sees keys 0..i.
            causal = mask is None and query.shape[2] > 1
            mask = mask if mask is None else mask[..., : key.shape[2]]
            out = functional.scaled_dot_product_attention(
                query, key, value, mask, dropout_p, causal, scale=scale_of(self)
            )
            out = out.transpose(1, 2).flatten(2)
        return drop(project(out, self.c_proj), self.resid_dropout, draws), None

    return {"forward": forward}


def _why_not_attention(self: Any, hidden: Tensor, options: dict[str, Any]) -> str | None:
    if self.is_cross_attention or options.get("encoder_hidden_states") is not None:
        return "cross-attention"
    if options.get("output_attentions") or options.get("head_mask") is not None:
        return "output_attentions or head_mask"
    if self.config._attn_implementation not in SUPPORTED or not _sdpa_is_theirs():
        return f"attn_implementation is {self.config._attn_implementation!r}"
    if options.get("is_causal") is False:
        return "is_causal=False"
    cache = options.get("past_key_values")
    if cache is not None and not _is_plain_cache(cache) and type(cache).__name__ != "StaticCache":
        return f"the cache is a {type(cache).__name__}"
    if dropout_of(self.attn_dropout) is None:
        return "attn_dropout was replaced or hooked"
    mask = options.get("attention_mask")
    if mask is not None and (mask.dim() != 4 or not (mask.dtype == torch.bool or mask.is_floating_point())):
        return "attention_mask is not (B, 1 or NH, Tq, Tk)"
    return why_not(hidden)


def scale_of(attention: Any) -> float | None:
    """Return the scale of attention's scores, or None for the default, 1 / sqrt(HS).

    Transformers 4.57 divides the scale by the layer's number only in its eager attention.
    """
    if hasattr(attention, "scaling"):
        return float(attention.scaling)
    if attention.config._attn_implementation != "eager":
        return None
    scale = float(attention.head_dim**-0.5) if attention.scale_attn_weights else 1.0
    return scale / (attention.layer_idx + 1) if attention.scale_attn_by_inverse_layer_idx else scale


def _is_plain_cache(cache: Any) -> bool:
    utils = sys.modules["transformers.cache_utils"]
    return type(cache) is utils.DynamicCache and all(type(one) is utils.DynamicLayer for one in cache.layers)


# ---- a block ---------------------------------------------------------------------------------------------------------


@replacement(BLOCK)
def block(original: Any) -> Namespace:
    complete = completer(original)
    gives_a_tuple = "output_attentions" in inspect.signature(original.forward).parameters  # 4.57

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = complete(args, kwargs)
        hidden = options.pop("hidden_states")
        reason = why_not(hidden)
        if options.get("encoder_hidden_states") is not None:
            reason = "cross-attention"
        if reason is not None:
            count(self, reason)
            return original.forward(self, *args, **kwargs)
        options.pop("encoder_hidden_states", None), options.pop("encoder_attention_mask", None)
        weights, draws = None, Draws(1, hidden)

        def attend(attention: Any, normed: Tensor) -> Pending:
            nonlocal weights
            out, weights = attention(normed, **options)
            return Pending(out)

        narrow = False, _only_matmul_reads(self.mlp)
        hidden = add(*layer(hidden, None, self, attend, _mlp(draws), narrow))
        if not gives_a_tuple:
            return hidden
        return (hidden, weights) if options.get("output_attentions") else (hidden,)

    return {"forward": forward}


# ---- the model -------------------------------------------------------------------------------------------------------


@replacement(TRANSFORMER)
def model(original: Any) -> Namespace:
    """One kernel computes a layer's last addition and the norm that follows it."""
    complete = completer(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = complete(args, kwargs)
        found = why_not_model(self, options) or _blocks(self)
        if isinstance(found, str):
            count(self, found)
            return original.forward(self, *args, **kwargs)
        use_cache = options.get("use_cache")
        use_cache = self.config.use_cache if use_cache is None else use_cache
        cache = options.get("past_key_values")
        start = 0 if cache is None else cache.get_seq_length()
        if cache is None and use_cache:
            cache = sys.modules["transformers.cache_utils"].DynamicCache(config=self.config)
        tokens = options.get("input_ids")
        hidden = _embed(self, options, start)
        draws = Draws(3 * len(self.h) + 1, hidden)
        hidden = drop(hidden, self.drop, draws)
        masks = _masks(options.get("attention_mask"), start, start + hidden.shape[1])
        # In a compiled graph that returns a cache, keys and values have gradients, often zeros, and a gradient of qkv
        # would make the node's backward run its layer again.
        supported = start == 0 and all(mask is None for mask in masks)
        dtypes = dtypes_of(hidden, compiled=cache is None) if supported else None
        blocks = cast_all([_fused(parts, dtypes, hidden) for _, parts in found], hidden)
        pending: Pending | None = None
        for i, ((one, _), fused) in enumerate(zip(found, blocks, strict=True)):
            if fused is None or not fused.supports(hidden, pending):
                narrow = untouched(one.attn.c_attn, "Linear"), _only_matmul_reads(one.mlp)
                attention = functools.partial(_attend, masks, cache, i, draws)
                hidden, pending = layer(hidden, pending, one, attention, _mlp(draws), narrow)
            else:
                hidden, pending, qkv = fused.run(hidden, pending, draws)
                if cache is not None:
                    _, key, value = unpack(qkv, one.attn.num_heads)
                    _cached(cache, key, value, i)
        hidden = add_and_norm(hidden, pending, self.ln_f)[0]
        if tokens is not None and tokens.dim() != 2:
            hidden = hidden.view(-1, *tokens.shape[1:], hidden.shape[-1])
        outputs = sys.modules["transformers.modeling_outputs"].BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden, past_key_values=cache if use_cache else None
        )
        return outputs if wants_dict(self, options) else outputs.to_tuple()

    return {"forward": forward}


def why_not_model(self: Any, options: dict[str, Any]) -> str | None:
    config = self.config
    for name, value in options.items():
        if value is not None and value is not False and name not in _KNOWN:
            return f"the option {name}"
    for name in ("output_attentions", "output_hidden_states"):
        if options.get(name) or (options.get(name) is None and getattr(config, name, False)):
            return name
    if config.add_cross_attention or getattr(self, "model_parallel", False) or not getattr(config, "is_causal", True):
        return "cross-attention, model parallelism or is_causal=False in the configuration"
    implementation = config._attn_implementation
    if not _sdpa_is_theirs():
        return "another function is registered as sdpa, or F.scaled_dot_product_attention was replaced"
    if implementation not in (*SUPPORTED, "eager") or (implementation == "eager" and config.reorder_and_upcast_attn):
        return f"attn_implementation is {implementation!r}" + (
            " and reorder_and_upcast_attn is set" if implementation == "eager" else ""
        )
    tokens: Any = options.get("input_ids")
    embeds: Any = options.get("inputs_embeds")
    mask: Any = options.get("attention_mask")
    if (tokens is None) == (embeds is None):
        return "not one of input_ids and inputs_embeds"
    rare = mask is not None or options.get("position_ids") is not None
    if tokens is not None and (tokens.dim() < 2 or (tokens.dim() > 2 and rare)):
        return "input_ids is not (B, T)"
    cache = options.get("past_key_values")
    if cache is not None and not _is_plain_cache(cache):
        return f"the cache is a {type(cache).__name__}"
    if mask is None and cache is None and options.get("position_ids") is not None:
        return "position_ids without attention_mask, which may mean packed sequences"
    shape = embeds.shape[:2] if tokens is None else tokens.shape
    if mask is not None:
        start = 0 if cache is None else cache.get_seq_length()
        if mask.dim() != 2 or mask.shape[0] != shape[0] or mask.shape[1] != start + shape[1]:
            return "attention_mask is not (B, T)"
        # In transformers' eager attention a query whose keys are all masked sees all keys, future ones too.
        if implementation == "eager" and (torch.compiler.is_compiling() or not bool(mask.all())):
            return "attention_mask with attn_implementation='eager'"
    return why_not(self.wpe.weight if embeds is None else embeds)


def _blocks(self: Any) -> list[tuple[Any, Parts | None]] | str:
    """Return each transformer block with its ``Parts``, or the reason why the original forward must run.

    The ``Parts`` of a transformer block that cannot be one node are None.
    """
    if self.training and self.gradient_checkpointing:
        return "gradient checkpointing"
    found: list[tuple[Any, Parts | None]] = []
    for one in self.h:
        parts = parts_of(one, KINDS)
        if parts is None:
            if not untouched(one, BLOCK) or not untouched(one.attn, ATTENTION):
                return "a block or its attention was replaced, hooked or wrapped"
            if dropout_of(one.attn.attn_dropout) is None:
                return "attn_dropout was replaced or hooked"
        if one.training and getattr(one, "gradient_checkpointing", False):
            return "gradient checkpointing"
        found.append((one, parts))
    return found


def _fused(parts: Parts | None, dtypes: Dtypes | None, hidden: Tensor) -> FusedBlock | None:
    if parts is None or dtypes is None:
        return None
    attn = parts.attn
    return fused_block(parts, dtypes, hidden, attn.num_heads, scale_of(attn), probability(parts.attn_dropout))


_KNOWN = (
    *IGNORED,
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache"),
    *("output_attentions", "output_hidden_states"),
)


def _embed(self: Any, options: dict[str, Any], start: int) -> Tensor:
    tokens: Any = options.get("input_ids")
    embeds: Any = options.get("inputs_embeds")
    positions: Any = options.get("position_ids")
    if tokens is not None:
        self.warn_if_padding_and_no_attention_mask(tokens, options.get("attention_mask"))
        tokens = tokens.view(-1, tokens.shape[-1])
        separate = positions is not None or is_exporting()
        if not separate and untouched(self.wte, "Embedding") and untouched(self.wpe, "Embedding"):
            table = self.wpe.weight[start:] if start else self.wpe.weight
            return torch.ops.gptkernels.encoder(tokens, self.wte.weight, table)  # type: ignore[no-any-return]
        embeds = self.wte(tokens)
    if positions is None:
        positions = torch.arange(start, start + embeds.shape[1], device=embeds.device).unsqueeze(0)
    return embeds + self.wpe(positions)  # type: ignore[no-any-return]


Masks = tuple[Tensor | None, Tensor | None, Tensor | None]  # attn_mask, key_begin and key_end of the attention op


def _masks(attention_mask: Tensor | None, start: int, keys: int) -> Masks:
    """Convert a mask (B, Tk) of the keys, 0 for padding, to the attention op's arguments.

    Except in compiled code, the host reads the mask, and drops a mask of ones, as transformers does. With cached keys,
    a mask that leaves one range of keys in each row becomes that range, outside which decoding reads nothing. Without
    cached keys it stays a mask, because the kernels for sm_90a support masks but not ranges.
    """
    if attention_mask is None:
        return None, None, None
    seen = attention_mask.bool()
    if not torch.compiler.is_compiling() and not attention_mask.is_meta:
        if bool(seen.all()):
            return None, None, None
        if start:
            positions = torch.arange(keys, device=seen.device)
            begin = seen.int().argmax(1)
            end = begin + seen.sum(1)
            if bool((seen == ((positions >= begin[:, None]) & (positions < end[:, None]))).all()):
                return None, begin.int(), end.int()
    return seen[:, None, None], None, None


def _attend(masks: Masks, cache: Any, index: int, draws: Draws, self: Any, x: Tensor) -> Pending:
    qkv = project(x, self.c_attn)
    dropout_p = dropout_of(self.attn_dropout) or 0.0
    scale = scale_of(self)
    attn_mask, begin, end = masks
    start = 0
    query = key = value = None
    if cache is not None:
        start = cache.get_seq_length(index)
        query, key, value = unpack(qkv, self.num_heads)
        key, value = _cached(cache, key, value, index)
    if start == 0 and attn_mask is None and begin is None:
        out = attend(qkv, self.num_heads, scale, draws(dropout_p))
    else:
        if query is None:
            query, key, value = unpack(qkv, self.num_heads)
        causal = query.shape[2] > 1  # a single query is the newest token, which sees every key
        out = functional.scaled_dot_product_attention(
            *(query, key, value, attn_mask, dropout_p, causal),  # type: ignore[arg-type]
            scale=scale,
            query_offset=start if causal else 0,
            key_begin=begin,
            key_end=end,
        )
        out = out.transpose(1, 2).flatten(2)
    return pending_of(project(out, self.c_proj, bias=False), self.c_proj, self.resid_dropout, draws)


def _cached(cache: Any, key: Tensor, value: Tensor, index: int) -> tuple[Tensor, Tensor]:
    """Add keys and values to a layer of the cache, and return all keys and values of this layer.

    An empty layer stores the views of qkv without a copy.
    """
    if index < len(cache.layers) and not cache.layers[index].is_initialized:
        one = cache.layers[index]
        one.dtype, one.device, one.is_initialized = key.dtype, key.device, True
        one.keys, one.values = key, value
        return key, value
    return cache.update(key, value, index)  # type: ignore[no-any-return]


# ---- the language model's head and loss ------------------------------------------------------------------------------


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute transformers' ``ForCausalLMLoss`` with the fused classifier, which reads 16-bit logits without a cast.

    ``labels`` (B, T) are shifted here: labels[:, t] is the target of position t - 1. ``num_items_in_batch`` divides the
    sum of the losses; None stands for the number of targets that are not ignored.
    """
    targets = shifted(labels, ignore_index) if shift_labels is None else shift_labels
    targets = targets.reshape(-1).to(logits.device)
    losses, _ = torch.ops.gptkernels.fused_classifier(
        logits.reshape(-1, vocab_size), targets, ignore_index=ignore_index
    )
    divisor = (targets != ignore_index).sum() if num_items_in_batch is None else _on(num_items_in_batch, logits)
    return (losses.sum() / divisor).float()


def _on(number: Any, like: Tensor) -> Any:
    return number.to(like.device) if isinstance(number, Tensor) else number


def shifted(labels: Any, ignore_index: int) -> Tensor:
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


@replacement(LANGUAGE_MODEL)
def language_model(original: Any) -> Namespace:
    """``loss_function`` computes this package's loss unless the user has replaced it."""
    complete = completer(original)
    theirs = sys.modules["transformers.loss.loss_utils"].ForCausalLMLoss
    mapping = sys.modules["transformers.loss.loss_utils"].LOSS_MAPPING
    loss_function = inspect.getattr_static(original, "loss_function")
    if loss_function is not inspect.getattr_static(
        sys.modules["transformers.modeling_utils"].PreTrainedModel, "loss_function"
    ):
        return {"forward": original.forward}
    get_original_loss = loss_function.fget

    def get_loss(self: Any) -> Callable[..., Any]:
        if "_loss_function" not in self.__dict__ and mapping.get(getattr(self, "loss_type", None), theirs) is theirs:
            return causal_lm_loss  # calling the original would issue a warning, which torch.compile cannot trace
        return get_original_loss(self)  # type: ignore[no-any-return]

    def set_loss(self: Any, value: Callable[..., Any]) -> None:
        original.loss_function.fset(self, value)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = complete(args, kwargs)
        if options.get("labels") is None:
            return original.forward(self, *args, **kwargs)
        if (reason := _why_not_head(self, options)) is not None:
            count(self, reason)
            return original.forward(self, *args, **kwargs)
        labels = options.pop("labels")
        options.pop("logits_to_keep", None)
        ignore_index, shift_labels = options.pop("ignore_index", -100), options.pop("shift_labels", None)
        as_dict = wants_dict(self, options)
        num_items = options.pop("num_items_in_batch", None)
        outputs = self.transformer(options.pop("input_ids", None), **{**options, "return_dict": True})
        targets = shifted(labels, ignore_index) if shift_labels is None else shift_labels
        hidden = outputs.last_hidden_state
        logits, loss = head_and_loss(
            hidden,
            weight_of(self.lm_head),
            targets.to(hidden.device),
            ignore_index,
            _on(num_items, hidden),
            return_logits=self.gptkernels_report.return_logits if self.training else True,
        )
        made = sys.modules["transformers.modeling_outputs"].CausalLMOutputWithCrossAttentions(
            loss=loss.float(),
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
        )
        return made if as_dict else made.to_tuple()

    return {"forward": forward, "loss_function": property(get_loss, set_loss)}


def _why_not_head(self: Any, options: dict[str, Any]) -> str | None:
    if is_exporting():
        return "torch.export takes the head as a module"
    if self.loss_function is not causal_lm_loss:
        return "loss_function was replaced"
    if not untouched(self.lm_head, "Linear") or self.lm_head.bias is not None:
        return "lm_head was replaced, hooked or wrapped"
    keep = options.get("logits_to_keep", 0)
    if not (isinstance(keep, int) and keep == 0):
        return "logits_to_keep"
    if self.lm_head.weight.shape[0] != self.config.vocab_size or getattr(self, "model_parallel", False):
        return "the head's rows are not vocab_size, or model parallelism"
    return why_not(self.lm_head.weight)


def wants_dict(self: Any, options: dict[str, Any]) -> bool:
    wanted = options.get("return_dict")
    return bool(getattr(self.config, "return_dict", True) if wanted is None else wanted)


def completer(original: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    names = [*inspect.signature(original.forward).parameters][1:]

    def complete(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(names, args, strict=False)), **kwargs}

    return complete
