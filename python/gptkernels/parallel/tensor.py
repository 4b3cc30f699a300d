"""Tensor and sequence parallelism for GPT-2, with this package's kernels and torch's DTensors and process groups.

`tensor_parallel` divides a model in place. Its parameters become DTensors, so optimizers, gradient clipping, FSDP2 and
distributed checkpoints support them. P is the number of processes, and the other letters are those of ``GPT2``.

| parameter | shape | divided dimension |
|---|---|---|
| ``attn.c_attn.weight``, ``attn.c_attn.bias`` | (3, NH, HS, C), (3, NH, HS) | NH |
| ``attn.c_proj.weight`` | (C, NH, HS) | NH |
| ``mlp.c_fc.weight``, ``mlp.c_fc.bias`` | (4C, C), (4C) | 4C |
| ``mlp.c_proj.weight`` | (C, 4C) | 4C |
| ``wte.weight``, which is ``lm_head.weight`` | (Vp, C) | Vp |
| all others | | none |

Two of the matrices get a dimension for the heads, so that a process has the queries, keys and values of whole heads.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import Module

from gptkernels import nn
from gptkernels._unmodified import are_unmodified, is_unmodified
from gptkernels.block.fused import draw, parameters_of
from gptkernels.block.node import Plan
from gptkernels.block.tensors import BlockParameters
from gptkernels.models import GPT2, GPT2Config
from gptkernels.models.recompute import checkpointed, uses_dropout
from gptkernels.models.transformer import Block, Transformer
from gptkernels.parallel import vocabulary
from gptkernels.parallel._block import Dropouts, HeadDropout, RowDropout, ShardedBlock
from gptkernels.parallel._collectives import Gather, all_reduce_many
from gptkernels.rules import ops
from gptkernels.rules._autocast import autocast_dtype


def tensor_parallel(model: GPT2, mesh: DeviceMesh) -> GPT2:
    """Divide a GPT2's heads, hidden units and vocabulary among the processes of a mesh, in place.

    Every process calls this with an equal model, and then calls the model with the same tokens and targets, (B, T),
    where P divides B*T. Outside of matmuls and attention a process computes B*T / P rows (sequence parallelism). The
    loss and the logits are those of the whole model. For dropout, the P processes need the same random seed; the masks
    are those of the whole model. Make optimizers afterwards.

    Args:
        model: a GPT2 with a tied LM head, whose modules are neither replaced nor hooked, on any device, also the meta
            device.
        mesh: a mesh of one dimension, such as ``init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))["tp"]``.

    Returns:
        The model, which is now of a subclass of GPT2. ``fully_shard`` may be applied to it and its layers, with another
        dimension of the mesh and :func:`shard_placement`. :func:`whole_state_dict` returns the whole parameters.

    Raises:
        ValueError: if the mesh has several dimensions, the model uses float8, its LM head is not tied, a module was
            replaced or hooked, or P processes cannot divide the heads, 4C or Vp so that each has a part. The model is
            then unchanged.
    """
    if mesh.ndim != 1:
        raise ValueError(f"tensor_parallel: mesh must have 1 dimension, got {mesh.ndim}")
    if model.config.fp8 or model.config.fp8_head:
        raise ValueError("tensor_parallel: a model with fp8 or fp8_head is not supported")
    if not model._is_tied():
        raise ValueError("tensor_parallel: the LM head must be tied to the token embedding")
    changed = _changed_part(model)
    if changed is not None:
        raise ValueError(f"tensor_parallel: {changed} was replaced or hooked")
    parameters = [*model.named_parameters()]
    parts = [_divide(name, parameter.detach(), model.config, mesh) for name, parameter in parameters]
    for (name, parameter), part in zip(parameters, parts, strict=True):
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, torch.nn.Parameter(part, parameter.requires_grad))
    model.lm_head.weight = model.transformer.wte.weight
    group: Any = mesh.get_group()
    for block in model.transformer.h:
        block.__class__ = TensorParallelBlock
        block.group = group
    model.__class__ = TensorParallelGPT2
    model.group = group
    model.register_load_state_dict_pre_hook(_divide_state_dict)
    return model


def whole_state_dict(model: GPT2) -> dict[str, Tensor]:
    """Return copies of the whole parameters on every process, as ``GPT2.load_state_dict`` accepts them.

    All processes must call this. It gathers the parameters of models divided by :func:`tensor_parallel` or FSDP2.
    """
    found = {}
    for name, t in model.state_dict().items():
        if name != "lm_head.weight":
            found[name] = plain_view(name, t.full_tensor() if isinstance(t, DTensor) else t).clone()
    return found | {"lm_head.weight": found["transformer.wte.weight"]}


def plain_view(name: str, t: Tensor) -> Tensor:
    """View a whole parameter of a divided model, or its optimizer state, in the shape that it has in a plain GPT2."""
    return t.view(_plain_shape(name, t.shape))


def shard_placement(parameter: torch.nn.Parameter) -> Shard | None:
    """Return the placement of a parameter, for ``fully_shard``'s argument ``shard_placement_fn``.

    For c_attn's weight (3, NH, HS, C) it is the last dimension, because the first has only 3 elements; the number of
    processes must divide C. For all others it is None, which is the first dimension.
    """
    return Shard(3) if parameter.dim() == 4 else None


# ---- parameters ------------------------------------------------------------------------------------------------------

_DIVIDED_DIMENSIONS = {
    "attn.c_attn.weight": 1,
    "attn.c_attn.bias": 1,
    "attn.c_proj.weight": 1,
    "mlp.c_fc.weight": 0,
    "mlp.c_fc.bias": 0,
    "mlp.c_proj.weight": 1,
    "transformer.wte.weight": 0,
    "lm_head.weight": 0,
}


def _changed_part(model: GPT2) -> str | None:
    transformer = model.transformer
    kinds: list[tuple[str, torch.nn.Module, type[torch.nn.Module]]] = [
        ("wte", transformer.wte, nn.Embedding), ("wpe", transformer.wpe, nn.Embedding),
        ("drop", transformer.drop, nn.Dropout), ("ln_f", transformer.ln_f, nn.LayerNorm),
        ("lm_head", model.lm_head, nn.Linear), ("the transformer", transformer, Transformer),
        ("the model", model, GPT2),
    ]  # fmt: skip
    for i, block in enumerate(transformer.h):
        kinds.append((f"layer {i}", block, Block))
        kinds += [(f"a part of layer {i}", *part) for part in _parts(cast(Block, block))]
    return next((name for name, module, kind in kinds if not is_unmodified(module, kind)), None)


def _parts(block: Block) -> tuple[tuple[torch.nn.Module, type[torch.nn.Module]], ...]:
    return (
        (block.ln_1, nn.LayerNorm), (block.attn, nn.CausalSelfAttention), (block.attn.c_attn, nn.Linear),
        (block.attn.c_proj, nn.Linear), (block.ln_2, nn.LayerNorm), (block.mlp, nn.MLP), (block.mlp.c_fc, nn.Linear),
        (block.mlp.c_proj, nn.Linear), (block.resid_dropout, nn.Dropout),
    )  # fmt: skip


def _divide(name: str, whole: Tensor, config: GPT2Config, mesh: DeviceMesh) -> DTensor:
    """Return this process's part of a whole parameter, as a DTensor of the shape in this module's docstring."""
    heads = config.n_head, config.n_embd // config.n_head
    by_heads = {"c_attn.weight": (3, *heads, -1), "c_attn.bias": (3, *heads), "attn.c_proj.weight": (-1, *heads)}
    whole = whole.reshape(next((shape for key, shape in by_heads.items() if name.endswith(key)), whole.shape))
    dimension = next((d for key, d in _DIVIDED_DIMENSIONS.items() if name.endswith(key)), None)
    if dimension is None:
        return DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    parts = whole.chunk(mesh.size(), dimension)
    if len(parts) < mesh.size():
        raise ValueError(
            f"tensor_parallel: {mesh.size()} processes cannot divide dimension {dimension} of {name}, "
            f"{tuple(whole.shape)}, so that each has a part"
        )
    part = parts[mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)
    strides = whole.contiguous().stride()
    return DTensor.from_local(part, mesh, [Shard(dimension)], run_check=False, shape=whole.shape, stride=strides)


def _divide_state_dict(model: "TensorParallelGPT2", state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace whole parameters of a state dict by this process's parts."""
    for name, parameter in model.state_dict().items():
        given = state_dict.get(prefix + name)
        if isinstance(given, Tensor) and not isinstance(given, DTensor) and isinstance(parameter, DTensor):
            if given.shape != (wanted := _plain_shape(name, parameter.shape)):
                raise ValueError(f"GPT2: {name} must have shape {tuple(wanted)}, got {tuple(given.shape)}")
            part = distribute_tensor(
                given.detach().view(parameter.shape), parameter.device_mesh, parameter.placements, src_data_rank=None
            )
            state_dict[prefix + name] = torch.nn.Parameter(part, given.requires_grad)
    if prefix + "transformer.wte.weight" in state_dict:  # one parameter, also with assign=True
        state_dict[prefix + "lm_head.weight"] = state_dict[prefix + "transformer.wte.weight"]


def _plain_shape(name: str, shape: torch.Size) -> torch.Size:
    if name.endswith("attn.c_attn.weight") and len(shape) == 4:
        return torch.Size((math.prod(shape[:3]), shape[3]))
    if name.endswith("attn.c_attn.bias") and len(shape) == 3:
        return torch.Size((shape.numel(),))
    if name.endswith("attn.c_proj.weight") and len(shape) == 3:
        return torch.Size((shape[0], math.prod(shape[1:])))
    return shape


class _Local(torch.autograd.Function):
    """DTensor parameters -> this process's parts.

    The gradients of parameters that are not divided are sums over this process's rows. The backward adds them over the
    processes, by one all-reduce for all of them.
    """

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *parameters: DTensor):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        ctx.group, ctx.parameters = group, [(p.device_mesh, p.placements, p.shape, p.stride()) for p in parameters]
        parts = [p.to_local() for p in parameters]
        parts = [part.view_as(part) for part in parts]
        ctx.mark_non_differentiable(*[part for part, p in zip(parts, parameters, strict=True) if not p.requires_grad])
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):  # type: ignore[no-untyped-def]
        found: list[Any] = list(grads)
        partial = [i for i, p in enumerate(ctx.parameters) if p[1][0].is_replicate() and found[i] is not None]
        for i, total in zip(partial, all_reduce_many([found[i] for i in partial], ctx.group), strict=True):
            found[i] = total
        return None, *map(_as_gradient, found, ctx.parameters)


def _as_gradient(part: Tensor | None, parameter: tuple[Any, ...]) -> DTensor | None:
    if part is None:
        return None
    mesh, placements, shape, stride = parameter
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def _local(group: ProcessGroup, *parameters: Tensor | None) -> list[Any]:
    parts = iter(_Local.apply(group, *(p for p in parameters if p is not None)))
    return [None if p is None else next(parts) for p in parameters]


# ---- the model -------------------------------------------------------------------------------------------------------


def _draw(p: float, group: ProcessGroup, part: Tensor) -> RowDropout:
    return RowDropout(*draw(p, part), first_index=group.rank() * part.numel())


class TensorParallelBlock(Block):
    """A layer of a GPT2 that :func:`tensor_parallel` has divided."""

    group: ProcessGroup

    def forward(self, stream: Tensor, pending: Any = None, length: int = 0) -> Any:  # type: ignore[override]
        """Compute this process's rows of the layer, without its last residual addition.

        Args:
            stream: (n, C), the residual stream.
            pending: the previous layer's last addition to the stream: values (n, C), bias (C), dropout.
            length: T.

        Returns:
            The stream (n, C), and the pending addition.
        """
        if not are_unmodified(*_parts(self)):
            raise RuntimeError("GPT2: a part of a layer was replaced or hooked after tensor_parallel")
        group, attn, mlp = self.group, self.attn, self.mlp
        parameters, mlp_proj_bias = parameters_of(self.ln_1, attn.c_attn, attn.c_proj, self.ln_2, mlp.c_fc, mlp.c_proj)
        *parts, mlp_proj_bias = _local(group, *parameters, mlp_proj_bias)
        p = BlockParameters._make(parts)
        heads = p.attn_proj_weight.shape[1]
        first_head = group.rank() * -(-attn.n_head // group.size())
        p = p._replace(
            qkv_weight=p.qkv_weight.flatten(0, 2),
            qkv_bias=None if p.qkv_bias is None else p.qkv_bias.flatten(),
            attn_proj_weight=p.attn_proj_weight.flatten(1),
        )
        low = autocast_dtype(stream.device.type) or stream.dtype
        plan = Plan(
            (self.ln_1.eps, self.ln_2.eps), heads, None, mlp.activation != "gelu", False, low,
            recompute_gelu=mlp.recompute_gelu,
        )  # fmt: skip
        values, bias, dropout = pending or (None, None, RowDropout())
        attention_p, residual_p = (attn.dropout, self.resid_dropout.p) if self.training else (0.0, 0.0)
        if attn.context_group is not None and (attention_p or residual_p):
            raise ValueError("GPT2: dropout is not supported with context parallelism")
        dropouts = Dropouts(
            dropout,
            HeadDropout(*draw(attention_p, stream), first_head=first_head, total_heads=attn.n_head),
            _draw(residual_p, group, stream),
        )
        stream, values = ShardedBlock.apply(plan, group, attn.context_group, length, dropouts, stream, values, bias, *p)
        if mlp_proj_bias is not None:
            mlp_proj_bias = mlp_proj_bias.clone()  # FSDP frees the memory of the layer's parameters after this call
        return stream, (values, mlp_proj_bias, _draw(residual_p, group, stream))


class TensorParallelGPT2(GPT2):
    """A GPT2 that :func:`tensor_parallel` has divided."""

    group: ProcessGroup

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, return_logits: bool = True, ignore_index: int = -100
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute the logits and the loss of the whole model, as :meth:`GPT2.forward` does.

        Raises:
            ValueError: also if the number of processes does not divide B*T.
        """
        self._check(tokens, targets)
        group = self.group
        if tokens.numel() % group.size():
            raise ValueError(
                f"GPT2: the number of tokens must be a multiple of the {group.size()} processes, got "
                f"{tuple(tokens.shape)}"
            )
        head = cast(DTensor, self.lm_head.weight)
        weight = head.to_local()
        hidden = self._hidden(tokens, weight)
        flat = None if targets is None else targets.reshape(-1)
        options: Any = {**self._vocabulary(), "ignore_index": ignore_index}
        divided = self.context_group is not None
        options["reduction"] = "sum" if divided else "mean"
        if flat is not None and not return_logits:
            loss = vocabulary.linear_cross_entropy(hidden, weight, flat, group, sequence_parallel=True, **options)
            return None, self._mean(loss, flat, ignore_index) if divided else loss
        low = autocast_dtype(hidden.device.type)
        part = ops.linear.default(Gather.apply(hidden if low is None else hidden.to(low), group), weight, None)
        padded = DTensor.from_local(
            part, head.device_mesh, [Shard(1)], run_check=False,
            shape=torch.Size((tokens.numel(), head.shape[0])), stride=(head.shape[0], 1),
        ).full_tensor()  # fmt: skip
        logits = padded.view(*tokens.shape, -1)[..., : self.config.vocab_size]
        if flat is None:
            return logits, None
        loss = vocabulary.cross_entropy(part, flat, group, **options)
        return logits, self._mean(loss, flat, ignore_index) if divided else loss

    def _vocabulary(self) -> dict[str, int]:
        return {"vocab_size": self.config.vocab_size, "padded_vocab_size": self.config.padded_vocab_size}

    def _hidden(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Return this process's rows of the final norm's output, (n, C)."""
        group, transformer = self.group, self.transformer
        positions = transformer.positions(tokens, cast(DTensor, transformer.wpe.weight).to_local())
        stream = vocabulary.embedding(
            tokens, weight, group, positions=positions, sequence_parallel=True, **self._vocabulary()
        )
        dropout = _draw(transformer.drop.p if self.training else 0.0, group, stream)
        if dropout.p:
            stream = ops.dropout.default(stream, *dropout)
        pending: Any = None
        recompute = transformer.recompute_blocks and torch.is_grad_enabled()
        for block in transformer.h:
            if recompute:
                draws = uses_dropout(block, TensorParallelBlock)
                stream, pending = checkpointed(Module.__call__, block, stream, pending, tokens.shape[1], draws=draws)
            else:
                stream, pending = block(stream, pending, tokens.shape[1])
        norm = transformer.ln_f
        values, bias, dropout = pending
        norm_weight, norm_bias = _local(group, norm.weight, norm.bias)
        return ops.residual_layernorm.default(values, stream, norm_weight, norm_bias, norm.eps, bias, *dropout)[0]

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
