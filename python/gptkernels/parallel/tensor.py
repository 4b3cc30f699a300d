"""Tensor and sequence parallelism for GPT-2, with this package's kernels and torch's DTensors and process groups.

`tensor_parallel` divides a model in place. Its parameters become DTensors, so optimizers, gradient clipping, FSDP2 and
distributed checkpoints support them. P is the number of processes, and the other letters are those of ``GPT2``.

| parameter | shape | of a swapped Hugging Face GPT-2 | divided dimension |
|---|---|---|---|
| ``attn.c_attn.weight`` | (3, NH, HS, C) | (C, 3, NH, HS) | NH |
| ``attn.c_attn.bias`` | (3, NH, HS) | (3, NH, HS) | NH |
| ``attn.c_proj.weight`` | (C, NH, HS) | (NH, HS, C) | NH |
| ``mlp.c_fc.weight`` | (4C, C) | (C, 4C) | 4C |
| ``mlp.c_fc.bias`` | (4C) | (4C) | 4C |
| ``mlp.c_proj.weight`` | (C, 4C) | (4C, C) | 4C |
| ``wte.weight``, which is ``lm_head.weight`` | (Vp, C) | (Vp, C) | Vp |
| all others | | | none |

Three of them get a dimension for the heads, so that a process has the queries, keys and values of whole heads. The V
rows of Hugging Face's embedding are padded with zeros to Vp, a multiple of 64 * P.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from gptkernels import nn
from gptkernels._unmodified import are_unmodified, is_unmodified
from gptkernels.block.fused import draw
from gptkernels.block.node import Plan
from gptkernels.models import GPT2
from gptkernels.models.transformer import Block, Transformer
from gptkernels.parallel import _huggingface
from gptkernels.parallel._divided import DividedBlock, DividedModel, Shapes, divide, divide_state_dict
from gptkernels.rules.fp8 import ALIGNMENT

Model = TypeVar("Model", bound=torch.nn.Module)
_Kind = tuple[str, torch.nn.Module, type[torch.nn.Module]]  # a module's name, the module, and its unmodified class


def tensor_parallel(model: Model, mesh: DeviceMesh) -> Model:
    """Divide a model's heads, hidden units and vocabulary among the processes of a mesh, in place.

    Every process calls this with an equal model, and then calls the model with the same tokens and targets, (B, T),
    where P divides B*T. Outside of matmuls and attention a process computes B*T / P rows (sequence parallelism). The
    loss and the logits are those of the whole model. For dropout, the P processes need the same random seed; the masks
    are those of the whole model. Make optimizers afterwards.

    A Hugging Face GPT2LMHeadModel returns no ``past_key_values``. An ``attention_mask`` must consist of ones, and the
    host waits for it.

    Args:
        model: a GPT2, or a Hugging Face GPT2LMHeadModel that :func:`gptkernels.swap` has swapped, with a tied LM head,
            whose modules are neither replaced nor hooked, on any device, also the meta device.
        mesh: a mesh of one dimension, such as ``init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))["tp"]``.

    Returns:
        The model, which is now of a subclass of its class. ``fully_shard`` may be applied to it and its layers, with
        another dimension of the mesh and :func:`shard_placement`. :func:`whole_state_dict` returns the whole
        parameters.

    Raises:
        ValueError: if the mesh has several dimensions, the model is of another class, has float8 layers, its LM head is
            not tied, a module was replaced or hooked, an option is not supported, or P processes cannot divide the
            heads, 4C or Vp so that each has a part, which for fp8_head is a multiple of 16 rows of Vp. The model is
            then unchanged.
    """
    if mesh.ndim != 1:
        raise ValueError(f"tensor_parallel: mesh must have 1 dimension, got {mesh.ndim}")
    given: Any = model
    reason = _why_not(given, mesh.size()) if isinstance(given, GPT2) else _huggingface.why_not(given)
    if reason is not None:
        raise ValueError(f"tensor_parallel: {reason}")
    if given.lm_head.weight is not given.transformer.wte.weight:
        raise ValueError("tensor_parallel: the LM head must be tied to the token embedding")
    is_ours, rows = isinstance(given, GPT2), len(given.lm_head.weight)
    shapes = Shapes(given.config.n_head, False, rows, rows) if is_ours else _huggingface.shapes(given, mesh.size())
    parameters = [*given.named_parameters()]
    parts = [divide(name, parameter.detach(), shapes, mesh) for name, parameter in parameters]
    for (name, parameter), part in zip(parameters, parts, strict=True):
        module, _, attribute = name.rpartition(".")
        setattr(given.get_submodule(module), attribute, torch.nn.Parameter(part, parameter.requires_grad))
    given.lm_head.weight = given.transformer.wte.weight
    for block in given.transformer.h:
        block.__class__ = TensorParallelBlock if is_ours else _huggingface.block_class(block.__class__)
        block.group = mesh.get_group()
    given.__class__ = TensorParallelGPT2 if is_ours else _huggingface.model_class(given.__class__)
    given.group, given.shapes = mesh.get_group(), shapes
    if not is_ours:
        _huggingface.set_trainers_attributes(given)
    given.register_load_state_dict_pre_hook(divide_state_dict)
    return model


def shard_placement(parameter: torch.nn.Parameter) -> Shard | None:
    """Return the placement of a parameter, for ``fully_shard``'s argument ``shard_placement_fn``.

    For weights whose last dimensions are (NH, HS, C) it is the last one, because the first has few elements; the number
    of processes must divide C. For all others it is None, which is the first dimension.
    """
    heads = Shard(parameter.dim() - 3)
    return Shard(parameter.dim() - 1) if isinstance(parameter, DTensor) and parameter.placements == (heads,) else None


def _why_not(model: GPT2, processes: int) -> str | None:
    if model.config.fp8:
        return "a model with fp8 is not supported"
    rows = -(-model.config.padded_vocab_size // processes)
    if model.config.fp8_head and rows % ALIGNMENT:
        return (
            f"for fp8_head each process must have a multiple of {ALIGNMENT} rows of the vocabulary, got {rows} of "
            f"{model.config.padded_vocab_size}"
        )
    changed = _changed_part(model)
    return None if changed is None else f"{changed} was replaced or hooked"


def _changed_part(model: GPT2) -> str | None:
    kinds: list[_Kind] = [
        *_outside_layers(model), ("the transformer", model.transformer, Transformer), ("the model", model, GPT2)
    ]  # fmt: skip
    for i, block in enumerate(model.transformer.h):
        kinds.append((f"layer {i}", block, Block))
        kinds += [(f"a part of layer {i}", *part) for part in _parts(cast(Block, block))]
    return _first_changed(kinds)


def _first_changed(kinds: Sequence[_Kind]) -> str | None:
    return next((name for name, module, kind in kinds if not is_unmodified(module, kind)), None)


def _outside_layers(model: GPT2) -> tuple[_Kind, ...]:
    transformer = model.transformer
    return (
        ("wte", transformer.wte, nn.Embedding), ("wpe", transformer.wpe, nn.Embedding),
        ("drop", transformer.drop, nn.Dropout), ("ln_f", transformer.ln_f, nn.LayerNorm),
        ("lm_head", model.lm_head, nn.Linear),
    )  # fmt: skip


def _parts(block: Block) -> tuple[tuple[torch.nn.Module, type[torch.nn.Module]], ...]:
    return (
        (block.ln_1, nn.LayerNorm), (block.attn, nn.CausalSelfAttention), (block.attn.c_attn, nn.Linear),
        (block.attn.c_proj, nn.Linear), (block.ln_2, nn.LayerNorm), (block.mlp, nn.MLP), (block.mlp.c_fc, nn.Linear),
        (block.mlp.c_proj, nn.Linear), (block.resid_dropout, nn.Dropout),
    )  # fmt: skip


class TensorParallelBlock(DividedBlock, Block):  # type: ignore[misc]
    """A layer of a GPT2 that :func:`tensor_parallel` has divided."""

    def _plan(self, low: torch.dtype) -> Plan | None:
        if not are_unmodified(*_parts(self)):
            return None
        attn, mlp = self.attn, self.mlp
        return Plan(
            (self.ln_1.eps, self.ln_2.eps), attn.n_head, None, mlp.activation != "gelu", False, low,
            recompute_gelu=mlp.recompute_gelu,
        )  # fmt: skip

    def _probabilities(self) -> tuple[float, float, float]:
        attention = self.attn.dropout if self.attn.training else 0.0
        residual = self.resid_dropout.p if self.resid_dropout.training else 0.0
        return attention, residual, residual


class TensorParallelGPT2(DividedModel, GPT2):  # type: ignore[misc]
    """A GPT2 that :func:`tensor_parallel` has divided."""

    def _changed(self) -> str | None:
        return _first_changed(_outside_layers(self))

    def _recomputes(self, block: DividedBlock) -> bool:
        return self.transformer.recompute_blocks

    def _float8(self) -> dict[str, bool]:
        return {"fp8": self.config.fp8_head and self.training, "fp8_logits": self.config.fp8_logits}

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, return_logits: bool = True, ignore_index: int = -100
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute the logits and the loss of the whole model, as :meth:`GPT2.forward` does.

        Raises:
            ValueError: also if the number of processes does not divide B*T.
        """
        self._check(tokens, targets)
        positions = self.transformer.positions(tokens, cast(DTensor, self.transformer.wpe.weight).to_local())
        divided = self.context_group is not None
        logits, loss = self._logits_and_loss(
            tokens, targets, positions, self.config.vocab_size, partial(draw, like=tokens), return_logits, ignore_index,
            "sum" if divided else "mean",
        )  # fmt: skip
        if divided and loss is not None and targets is not None:
            loss = self._mean(loss, targets, ignore_index)
        return logits, loss

    def stream(self, *args: Any, **kwargs: Any) -> Any:
        """Raise a NotImplementedError."""
        raise NotImplementedError(_WHOLE)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Raise a NotImplementedError."""
        raise NotImplementedError(_WHOLE)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Raise a NotImplementedError."""
        raise NotImplementedError(_WHOLE)


_WHOLE = "GPT2: a tensor-parallel model does not generate or write files; load whole_state_dict(model) into a GPT2"
