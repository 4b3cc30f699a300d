"""Divides a Hugging Face GPT2LMHeadModel that ``gptkernels.swap`` has swapped, for ``tensor_parallel``."""

import functools
import importlib
import sys
from typing import Any

import torch
from torch import Tensor, distributed

from gptkernels.block.node import Plan
from gptkernels.parallel._divided import DividedBlock, DividedModel, Shapes, whole_state_dict
from gptkernels.swapping import huggingface
from gptkernels.swapping.block_modules import parts_inside, parts_of, probability
from gptkernels.swapping.checks import dropout_of, untouched
from gptkernels.swapping.classes import kind_of
from gptkernels.swapping.dropout import Draws
from gptkernels.swapping.layers import eps_of, gelu_form


def why_not(model: Any) -> str | None:
    if kind_of(model) != huggingface.LANGUAGE_MODEL:
        return (
            "the model must be a GPT2, or a Hugging Face GPT2LMHeadModel that gptkernels.swap has swapped, got "
            f"{type(model).__name__}"
        )
    transformer, changed = model.transformer, _changed(model)
    for name, module, kind in (
        ("the transformer", transformer, huggingface.TRANSFORMER), ("the model", model, huggingface.LANGUAGE_MODEL)
    ):  # fmt: skip
        if not untouched(module, kind):
            changed = name
    for i, block in enumerate(transformer.h):
        if parts_of(block, huggingface.KINDS) is None or block.attn.num_heads != model.config.n_head:
            changed = f"a part of layer {i}"
    if changed is not None:
        return f"{changed} was replaced or hooked"
    if model.lm_head.bias is not None:
        return "the LM head must have no bias"
    tokens = torch.empty(1, 1, dtype=torch.int64, device="meta")
    reason = huggingface.why_not_model(transformer, {"input_ids": tokens})
    return None if reason is None else f"not supported: {reason}"


def _changed(model: Any) -> str | None:
    transformer = model.transformer
    if dropout_of(transformer.drop) is None:
        return "drop"
    # Gradient checkpointing hooks wte, so that its output requires gradients. Here its weight has this effect.
    hook = getattr(model, "_require_grads_hook", None)
    if transformer.wte._forward_hooks.keys() != {hook and hook.id} and not untouched(transformer.wte, "Embedding"):
        return "wte"
    parts = [
        ("wpe", transformer.wpe, "Embedding"), ("ln_f", transformer.ln_f, "LayerNorm"),
        ("lm_head", model.lm_head, "Linear"),
    ]  # fmt: skip
    return next((name for name, module, kind in parts if not untouched(module, kind)), None)


def shapes(model: Any, processes: int) -> Shapes:
    """Pad the vocabulary, because matmuls on tensor cores need rows of logits that are aligned to 128 bytes."""
    vocabulary = len(model.lm_head.weight)
    return Shapes(model.config.n_head, True, vocabulary, vocabulary + -vocabulary % (64 * processes))


@functools.cache
def block_class(kind: Any) -> Any:
    return _derive(kind, _Block)


def _derive(kind: Any, divided: type, **namespace: Any) -> Any:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind)(kind.__name__, (divided, kind), names | namespace)


class _Block(DividedBlock):
    def _plan(self, low: torch.dtype) -> Plan | None:
        parts = parts_inside(self, huggingface.KINDS[1:])
        if parts is None:
            return None
        return Plan(
            (eps_of(parts.ln_1), eps_of(parts.ln_2)), self.attn.num_heads, huggingface.scale_of(self.attn),
            gelu_form(parts.act) == "tanh", True, low,
        )  # fmt: skip

    def _probabilities(self) -> tuple[float, float, float]:
        attn = self.attn
        return probability(attn.attn_dropout), probability(attn.resid_dropout), probability(self.mlp.dropout)


class _Model(DividedModel):
    config: Any
    _tp_size: Any
    gptkernels_report: Any
    loss_function: Any
    _changed = _changed

    def _recomputes(self, block: Any) -> bool:
        return block.training and block.gradient_checkpointing  # type: ignore[no-any-return]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Tie the LM head again, because tied DTensors become separate ones on another device or in another dtype."""
        super()._apply(*args, **kwargs)
        self.lm_head.weight = self.transformer.wte.weight
        return self

    def save_pretrained(
        self, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **options: Any
    ) -> None:
        """Write the whole model. All processes must call this, and the first one writes."""
        state_dict = whole_state_dict(self) if state_dict is None else state_dict
        is_main_process = is_main_process and distributed.get_rank() == 0
        super().save_pretrained(save_directory, is_main_process, state_dict, **options)  # type: ignore[misc]


def set_trainers_attributes(model: Any) -> None:
    """Set the attributes by which the Trainer of transformers recognises a tensor-parallel model.

    Before 5.19 the Trainer calls `save_pretrained` in one process only, where its collectives would hang. Without the
    attributes it wraps the model in DistributedDataParallel, which raises an error.
    """
    from packaging.version import Version  # a requirement of transformers

    if Version(sys.modules["transformers"].__version__) < Version("5.19"):
        return
    model._tp_size, model._is_distributed_loading_by_transformers = model.group.size(), True
    kind: Any = importlib.import_module("transformers.distributed.configuration_utils").DistributedConfig
    model.config.distributed_config = kind(tp_size=model.group.size())


_TAKEN = (
    "input_ids", "labels", "shift_labels", "ignore_index", "num_items_in_batch", "attention_mask", "return_dict"
)  # fmt: skip


def _why_not_call(model: Any, options: dict[str, Any]) -> str | None:
    for name, value in options.items():
        if name not in _TAKEN and (isinstance(value, Tensor) or value):  # None, False and 0 are defaults
            return name
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(model.config, name, False):
            return f"the configuration's {name}"
    tokens, mask = options.get("input_ids"), options.get("attention_mask")
    if tokens is None or tokens.dim() != 2:
        return "input_ids that are not (B, T)"
    if mask is not None and (mask.dim() != 2 or not bool(mask.all())):
        return "an attention_mask that is not (B, T) or has zeros"
    if options.get("labels") is not None and model.loss_function is not huggingface.causal_lm_loss:
        return "another loss_function: compute the loss from the logits"
    return None


@functools.cache
def model_class(kind: Any) -> Any:
    complete = huggingface.completer(kind)

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = complete(args, kwargs)
        if (reason := _why_not_call(self, options)) is not None:
            raise ValueError(f"{kind.__name__}: a tensor-parallel model does not support {reason}")
        labels, targets, divisor = (options.get(name) for name in ("labels", "shift_labels", "num_items_in_batch"))
        ignore_index = options.get("ignore_index", -100)
        if labels is None or targets is None:
            targets = (
                None if labels is None else huggingface.shifted(labels.to(options["input_ids"].device), ignore_index)
            )
        return_logits = self.gptkernels_report.return_logits if self.training else True
        tokens, transformer = options["input_ids"], self.transformer
        logits, loss = self._logits_and_loss(
            tokens, targets, transformer.wpe.weight.to_local(), self.shapes.vocabulary,
            Draws(3 * len(transformer.h) + 1, tokens), return_logits, ignore_index,
            "mean" if divisor is None else "sum",
        )  # fmt: skip
        if loss is not None:
            loss = (loss if divisor is None else loss / divisor).float()
            if return_logits == "detached":
                logits = logits.detach()
        outputs = sys.modules["transformers.modeling_outputs"]
        made = outputs.CausalLMOutputWithCrossAttentions(loss=loss, logits=logits)
        return made if huggingface.wants_dict(self, options) else made.to_tuple()

    return _derive(kind, _Model, forward=forward)
