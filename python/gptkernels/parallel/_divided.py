"""Divides the parameters, and computes a process's rows, of each kind of model that ``tensor_parallel`` accepts.

A model is divided by giving it and its layers classes that derive from ``DividedModel`` or ``DividedBlock`` and from
their own class. The modules have the names of GPT-2: transformer.wte, h.0.ln_1, attn.c_attn, mlp.c_proj, and so on.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import Module

from gptkernels import _dtensor
from gptkernels.block.fused import parameters_of
from gptkernels.block.node import Dropout, Plan
from gptkernels.block.tensors import BlockParameters
from gptkernels.models.recompute import checkpointed
from gptkernels.parallel import vocabulary
from gptkernels.parallel._block import Dropouts, HeadDropout, ShardedBlock, add_and_norm
from gptkernels.parallel._collectives import Gather, all_reduce_many
from gptkernels.parallel._dropout import RowDropout, drop_rows, place
from gptkernels.rules import ops
from gptkernels.rules._autocast import autocast_dtype

# ---- parameters ------------------------------------------------------------------------------------------------------

# The dimension that is divided, of weights (out, in), and the number of dimensions that it becomes in a divided model:
# 1, 2 for (NH, HS), or 3 for (3, NH, HS).
_DIVIDED = {
    "attn.c_attn.weight": (0, 3),
    "attn.c_attn.bias": (0, 3),
    "attn.c_proj.weight": (1, 2),
    "mlp.c_fc.weight": (0, 1),
    "mlp.c_fc.bias": (0, 1),
    "mlp.c_proj.weight": (1, 1),
    "transformer.wte.weight": (0, 1),
    "lm_head.weight": (0, 1),
}
_EMBEDDINGS = ("transformer.wte.weight", "lm_head.weight")


class Shapes(NamedTuple):
    """The shapes of a model's parameters."""

    heads: int
    transposed: bool  # the weights of the layers are (in, out)
    vocabulary: int  # rows of the plain embedding
    rows: int  # rows of the divided embedding, of which those from ``vocabulary`` on are 0

    def _find(self, name: str) -> tuple[int, int] | None:
        found = next((value for key, value in _DIVIDED.items() if name.endswith(key)), None)
        if found is None or not (self.transposed and name.endswith("weight")) or name.endswith(_EMBEDDINGS):
            return found
        return 1 - found[0], found[1]

    def divided_view(self, name: str, t: Tensor) -> tuple[Tensor, int | None]:
        """Return a plain parameter in the shape that it has in a divided model, and the dimension that is divided."""
        found = self._find(name)
        if found is None:
            return t, None
        dimension, count = found
        if name.endswith(_EMBEDDINGS) and self.rows > self.vocabulary:
            t = F.pad(t, (0, 0, 0, self.rows - self.vocabulary))
        return t.unflatten(dimension, (3, self.heads, -1)[-count:]), dimension + (count == 3)

    def plain_view(self, name: str, t: Tensor) -> Tensor:
        found = self._find(name)
        if found is None:
            return t
        t = t.flatten(found[0], sum(found) - 1)
        return t[: self.vocabulary] if name.endswith(_EMBEDDINGS) else t


def divide(name: str, whole: Tensor, shapes: Shapes, mesh: DeviceMesh) -> DTensor:
    """Return this process's part of a plain model's parameter."""
    whole, dimension = shapes.divided_view(name, whole)
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


def divide_state_dict(model: "DividedModel", state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace whole parameters of a state dict by this process's parts."""
    for name, parameter in model.state_dict().items():
        given = state_dict.get(prefix + name)
        if isinstance(given, Tensor) and not isinstance(given, DTensor) and isinstance(parameter, DTensor):
            wanted = model.shapes.plain_view(name, torch.empty(parameter.shape, device="meta")).shape
            if given.shape != wanted:
                raise ValueError(f"tensor_parallel: {name} must have shape {tuple(wanted)}, got {tuple(given.shape)}")
            whole = model.shapes.divided_view(name, given.detach())[0]
            part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            state_dict[prefix + name] = torch.nn.Parameter(part, given.requires_grad)
    if prefix + "transformer.wte.weight" in state_dict:  # one parameter, also with assign=True
        state_dict[prefix + "lm_head.weight"] = state_dict[prefix + "transformer.wte.weight"]


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


# ---- models ----------------------------------------------------------------------------------------------------------


def _of_rows(module: Any, dropout: Dropout, rows: Tensor, length: int) -> RowDropout:
    """Return the part of a dropout of the whole tensor that belongs to this process's rows.

    ``length`` is the number of tokens of a sequence.
    """
    return place(dropout, rows, module.group.rank() * len(rows), length, module.context_group)


class DividedBlock(Module):
    """A layer of a divided model."""

    group: ProcessGroup
    ln_1: Any
    attn: Any
    ln_2: Any
    mlp: Any

    @property
    def context_group(self) -> ProcessGroup | None:
        return getattr(self.attn, "context_group", None)

    def _plan(self, low: torch.dtype) -> Plan | None:
        """Return the options of the whole layer, or None if one of its parts was replaced or hooked."""
        raise NotImplementedError

    def _probabilities(self) -> Sequence[float]:
        """Return the probabilities of dropout in attention, in attention's output and in the MLP's output."""
        raise NotImplementedError

    def forward(self, stream: Tensor, pending: Any, length: int, dropouts: Sequence[Dropout]) -> Any:
        """Compute this process's rows of the layer, without its last residual addition.

        Args:
            stream: (n, C), the residual stream.
            pending: the previous layer's last addition to the stream: values (n, C), bias (C), dropout.
            length: T.
            dropouts: in attention, of attention's output and of the MLP's output.

        Returns:
            The stream (n, C), and the pending addition.
        """
        group, attn, mlp = self.group, self.attn, self.mlp
        plan = self._plan(autocast_dtype(stream.device.type) or stream.dtype)
        if plan is None:
            raise RuntimeError("tensor_parallel: a part of a layer was replaced or hooked")
        parameters, mlp_proj_bias = parameters_of(self.ln_1, attn.c_attn, attn.c_proj, self.ln_2, mlp.c_fc, mlp.c_proj)
        *parts, mlp_proj_bias = _local(group, *parameters, mlp_proj_bias)
        p = BlockParameters._make(parts)
        if plan.transposed:
            p = p._replace(
                qkv_weight=p.qkv_weight.flatten(1).t(), attn_proj_weight=p.attn_proj_weight.flatten(0, 1).t(),
                fc_weight=p.fc_weight.t(), mlp_proj_weight=p.mlp_proj_weight.t(),
            )  # fmt: skip
        else:
            p = p._replace(qkv_weight=p.qkv_weight.flatten(0, 2), attn_proj_weight=p.attn_proj_weight.flatten(1))
        p = p._replace(qkv_bias=None if p.qkv_bias is None else p.qkv_bias.flatten())
        of_attention, of_attention_output, of_mlp = dropouts
        values, bias, of_values = pending or (None, None, RowDropout())
        first_head = group.rank() * -(-plan.heads // group.size())
        divided = Dropouts(
            of_values,
            HeadDropout(*of_attention, first_head, plan.heads),
            _of_rows(self, of_attention_output, stream, length),
        )
        head_size = stream.shape[1] // plan.heads
        plan = plan._replace(heads=len(p.qkv_weight) // (3 * head_size), transposed=False)
        stream, values = ShardedBlock.apply(plan, group, self.context_group, length, divided, stream, values, bias, *p)
        if mlp_proj_bias is not None:
            mlp_proj_bias = mlp_proj_bias.clone()  # FSDP frees the memory of the layer's parameters after this call
        return stream, (values, mlp_proj_bias, _of_rows(self, of_mlp, stream, length))


class DividedModel(Module):
    """A divided language model."""

    group: ProcessGroup
    context_group: ProcessGroup | None = None
    shapes: Shapes
    transformer: Any
    lm_head: Any

    def _changed(self) -> str | None:
        """Return the name of a module outside the layers that was replaced or hooked, or None."""
        raise NotImplementedError

    def _recomputes(self, block: DividedBlock) -> bool:
        """Return whether the backward computes a layer again, of which only the inputs are saved."""
        raise NotImplementedError

    def _float8(self) -> dict[str, bool]:
        """Return the arguments fp8 and fp8_logits of ``vocabulary.linear_cross_entropy`` that are not False."""
        return {}

    def _logits_and_loss(
        self, tokens: Tensor, targets: Tensor | None, positions: Tensor, vocab_size: int,
        draw: Callable[[float], Dropout], return_logits: bool, ignore_index: int, reduction: str,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """Compute the logits (B, T, V) and the mean or sum of the losses of the whole model.

        Args:
            tokens: (B, T).
            targets: (B, T), or None for no loss.
            positions: (T or more, C), the position embeddings.
            vocab_size: V.
            draw: draws the numbers of a dropout of the whole model from its probability.
            return_logits: False, if targets are given, for no logits.
            ignore_index: a row with this target has a loss of 0.
            reduction: "mean" or "sum".
        """
        if (changed := self._changed()) is not None:
            raise RuntimeError(f"tensor_parallel: {changed} was replaced or hooked")
        group, head = self.group, self.lm_head.weight
        if tokens.numel() % group.size():
            raise ValueError(
                f"tensor_parallel: the number of tokens must be a multiple of the {group.size()} processes, got "
                f"{tuple(tokens.shape)}"
            )
        weight = head.to_local()
        options: dict[str, Any] = {"vocab_size": vocab_size, "padded_vocab_size": head.shape[0]}
        stream = vocabulary.embedding(tokens, weight, group, positions=positions, sequence_parallel=True, **options)
        hidden = self._hidden(stream, tokens.shape[1], draw)
        flat = None if targets is None else targets.reshape(-1)
        options |= {"ignore_index": ignore_index, "reduction": reduction}
        if flat is not None and not return_logits:
            options |= self._float8()
            return None, vocabulary.linear_cross_entropy(hidden, weight, flat, group, sequence_parallel=True, **options)
        low = autocast_dtype(hidden.device.type)
        part = ops.linear.default(Gather.apply(hidden if low is None else hidden.to(low), group), weight, None)
        padded = DTensor.from_local(
            part, head.device_mesh, [Shard(1)], run_check=False,
            shape=torch.Size((tokens.numel(), head.shape[0])), stride=(head.shape[0], 1),
        ).full_tensor()  # fmt: skip
        logits = padded.view(*tokens.shape, -1)[..., :vocab_size]
        return logits, None if flat is None else vocabulary.cross_entropy(part, flat, group, **options)

    def _hidden(self, stream: Tensor, length: int, draw: Callable[[float], Dropout]) -> Tensor:
        """Return this process's rows of the final norm's output, (n, C)."""
        group, transformer = self.group, self.transformer
        dropout = draw(transformer.drop.p if transformer.drop.training else 0.0)
        stream = drop_rows(stream, _of_rows(self, dropout, stream, length))
        pending: Any = None
        for block in transformer.h:
            args = block, stream, pending, length, [draw(p) for p in block._probabilities()]
            if self._recomputes(block) and torch.is_grad_enabled():
                stream, pending = checkpointed(Module.__call__, *args, draws=False)
            else:  # the class of a Hugging Face block has its own __call__, for its checkpointing
                stream, pending = Module.__call__(*args)
        values, bias, dropout = pending
        norm = transformer.ln_f
        norm_weight, norm_bias = _local(group, norm.weight, norm.bias)
        return add_and_norm(values, stream, norm_weight, norm_bias, norm.eps, bias, dropout)[0]  # type: ignore[no-any-return]


def whole_state_dict(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return copies of the whole parameters on every process, as a plain model's ``load_state_dict`` accepts them.

    All processes must call this. It gathers the parameters of models divided by :func:`tensor_parallel` or FSDP2.
    """
    found: dict[str, Tensor] = {}
    copies: dict[Tensor, Tensor] = {}  # Tied parameters have one copy.
    for name, t in model.state_dict(keep_vars=True).items():
        if t not in copies:
            copies[t] = plain_view(model, name, _dtensor.whole(t).detach()).clone()
        found[name] = copies[t]
    return found


def plain_view(model: torch.nn.Module, name: str, t: Tensor) -> Tensor:
    """View a whole parameter of a divided model, or its optimizer state, in the shape that it has in a plain model."""
    return model.shapes.plain_view(name, t) if isinstance(model, DividedModel) else t
