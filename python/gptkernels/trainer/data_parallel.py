"""The model of a run in several processes, which divide the batches, the layers, the sequences or the parameters."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gptkernels.models import GPT2
from gptkernels.parallel._divided import whole_state_dict
from gptkernels.parallel.context import DROPOUT_TOKENS, context_parallel, whole_sequences
from gptkernels.parallel.ordered import reduce_scatter_in_order
from gptkernels.parallel.tensor import TensorParallelGPT2, shard_placement, tensor_parallel
from gptkernels.trainer.config import TrainConfig
from gptkernels.trainer.processes import Processes
from gptkernels.trainer.run_model import RunModel, Value, move

BUCKET_MIB = 256
"""The gradients of GPT-2 124M in bfloat16 are one bucket. Two H200s exchange them in less time than the backward's
kernels lose if they share the GPU with exchanges (docs/scaling.md)."""


class Replicas(RunModel):
    """A whole model in each process, by torch's `DistributedDataParallel` (DDP).

    DDP averages the gradients in buckets, each as soon as the backward has computed it. The gradients are views of the
    buckets.
    """

    def __init__(self, model: GPT2, config: TrainConfig, processes: Processes) -> None:
        super().__init__(model)
        assert processes.data_mesh is not None
        self._processes = processes
        dtype = model.lm_head.weight.dtype
        self._dtype = getattr(torch, config.reduce_dtype) if config.reduce_dtype else dtype
        self._stream = torch.cuda.Stream() if processes.device.type == "cuda" else None
        with warnings.catch_warnings():  # torch 2.13 deprecates the option, and has no other one for all versions
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            ddp = DistributedDataParallel(
                model, broadcast_buffers=False, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MIB,
                process_group=processes.data_mesh.get_group(),
            )  # fmt: skip
        if config.deterministic_layout or self._dtype != dtype:
            ddp.register_comm_hook(None, self._average)
        self.module, self.no_sync = ddp, ddp.no_sync
        self.recover = lambda: ddp._update_process_group(ddp.process_group)  # resets DDP's reducer

    def run(self, function: Callable[[GPT2], Value]) -> Value:
        with whole_sequences(self.model):
            return function(self.model)

    def _average(self, _: object, bucket: distributed.GradBucket) -> Future[Tensor]:
        """Average a bucket in the order of the ranks or in another dtype. CUDA runs it on a separate stream."""
        gradients = bucket.buffer()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            gradients.copy_(self._processes.average(gradients.to(self._dtype)))
            future: Future[Tensor] = Future(devices=[gradients.device] if gradients.is_cuda else [])
            future.set_result(gradients)
        return future


class Shards(RunModel):
    """A part of each parameter, its gradient and its optimizer state in each process, by torch's `fully_shard` (FSDP2).

    A layer's whole parameters are gathered before its forward, and its gradients are averaged as soon as the backward
    has computed them. With `--shard grads` the parameters stay whole until the backward has used them.
    """

    is_sharded = True
    can_be_captured = torch.__version__ >= "2.11"  # Graphs of earlier versions read pinned memory that FSDP2 reuses.

    def __init__(self, model: GPT2, config: TrainConfig, processes: Processes) -> None:
        dtype = None if config.reduce_dtype is None else getattr(torch, config.reduce_dtype)
        options: dict[str, Any] = {
            "mesh": processes.data_mesh,
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=dtype),
            # None keeps only the root's parameters, the embeddings and the final norm, until the backward.
            "reshard_after_forward": None if config.shard == "params" else False,
            "shard_placement_fn": shard_placement,
        }
        for block in model.transformer.h:
            fully_shard(block, **options)
        fsdp: Any = fully_shard(model, **options)
        if config.deterministic_layout:
            if not hasattr(fsdp, "set_custom_reduce_scatter"):
                raise ValueError(f"--deterministic-layout with --shard needs a newer torch than {torch.__version__}")
            for part in (*model.transformer.h, fsdp):
                part.set_custom_reduce_scatter(_ReduceScatterInOrder())
        move(model, processes.device)
        fsdp._run = lambda function: function(model)
        register_fsdp_forward_method(fsdp, "_run")  # FSDP2 gathers parameters only in a forward method of the model
        self._fsdp = fsdp
        super().__init__(model)
        self._keeps_parameters = config.shard == "grads"
        self.no_sync = self._accumulate
        self.recover = self._forget_iteration

    def run(self, function: Callable[[GPT2], Value]) -> Value:
        if isinstance(self.model, TensorParallelGPT2):
            return function(whole_model(self.model))
        with whole_sequences(self.model):
            return self._fsdp._run(function)  # type: ignore[no-any-return]

    def release(self) -> None:
        for module in self._fsdp.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @contextmanager
    def _accumulate(self) -> Iterator[None]:
        self._synchronise(False)
        try:
            yield
        finally:
            self._synchronise(True)

    def _synchronise(self, is_last: bool) -> None:
        self._fsdp.set_requires_gradient_sync(is_last)
        self._fsdp.set_reshard_after_backward(is_last or not self._keeps_parameters)

    def _forget_iteration(self) -> None:
        """Reset FSDP2. It must not wait for the events of a failed capture, as its own function (torch 2.13) does."""
        root: Any = self._fsdp._get_fsdp_state()
        communication = ("all_gather_state", "reduce_scatter_state", "reduce_scatter_states", "post_forward_order")
        _clear(root._comm_ctx, *communication, "_last_post_reduce_events")
        for state in root._state_ctx.all_states:
            group = state._fsdp_param_group
            state._training_state = group._training_state = TrainingState.IDLE
            _clear(group, "_all_gather_result", "_post_reduce_event", "_all_reduce_state", "_post_forward_indices")
            group._to_sharded()
            for parameter in group.fsdp_params:
                parameter._unsharded_param.grad = parameter.unsharded_accumulated_grad = None
        root._state_ctx.iter_forward_root = None
        root._state_ctx.post_backward_final_callback_queued = False


def _clear(target: object, *attributes: str) -> None:
    for attribute in attributes:
        value = getattr(target, attribute, None)
        if isinstance(value, list | dict):
            value.clear()
        elif value is not None:
            setattr(target, attribute, None)


class _ReduceScatterInOrder:
    """FSDP2's exchange of gradients (torch's protocol ``ReduceScatter``), with sums in the order of the ranks."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: distributed.ProcessGroup, op: Any, **_: Any
    ) -> None:
        reduce_scatter_in_order(output_tensor, input_tensor, group)
        if op == distributed.ReduceOp.AVG:
            output_tensor /= group.size()


class DividedLayers(RunModel):
    """A part of each layer in each process, by `tensor_parallel`, and one batch for all processes."""

    is_sharded = True
    no_sync = nullcontext  # the processes exchange all that they need in the forward and the backward

    def run(self, function: Callable[[GPT2], Value]) -> Value:
        return function(whole_model(self.model))


def whole_model(model: GPT2) -> GPT2:
    """Gather a divided model in each process."""
    with torch.device("meta"):
        whole = GPT2(model.config)
    whole.load_state_dict(whole_state_dict(model), assign=True)
    return whole.train(model.training)


def distribute(model: GPT2, config: TrainConfig, processes: Processes) -> RunModel:
    """Move the model to its device, and divide the work or the parameters among the processes.

    A model on the meta device becomes one whose parameters have no values yet.
    """
    mesh = processes.mesh
    assert mesh is not None
    dp, cp, tp = mesh.shape
    if tp > 1 or cp > 1:
        _check_layout(config, dp, cp, tp)
    if tp > 1 and dp * cp > 1:  # DTensors are gathered by two collectives, of which torch warns in each process
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if tp > 1:
        model = tensor_parallel(model, mesh["tp"])
    if cp > 1:
        context_parallel(model, mesh["cp"])
    divided: RunModel
    if dp * cp == 1:
        divided = DividedLayers(move(model, processes.device))
    elif config.shard == "none":
        divided = Replicas(move(model, processes.device), config, processes)
    else:
        divided = Shards(model, config, processes)  # moves each layer to the device when the previous ones are sharded
    divided.context_group = mesh["cp"].get_group() if cp > 1 else None
    return divided


def _check_layout(config: TrainConfig, dp: int, cp: int, tp: int) -> None:
    if config.compile:
        raise ValueError(f"--parallel is {config.parallel}: --compile is only for tp=1 and cp=1")
    if config.deterministic_layout and cp > 1:
        raise ValueError(f"--parallel is {config.parallel}: --deterministic-layout is only for cp=1")
    multiple = cp * (DROPOUT_TOKENS if config.dropout else 2)
    if cp > 1 and config.sequence_length % multiple:
        raise ValueError(
            f"--parallel is {config.parallel}: --sequence-length must be a multiple of {multiple}, is "
            f"{config.sequence_length}"
        )
    if config.batch_tokens // cp % tp:
        raise ValueError(
            f"--parallel is {config.parallel}: --batch-size times --sequence-length must be a multiple of {cp * tp}, "
            f"is {config.batch_tokens}"
        )
    if dp * cp == 1 and (config.shard != "none" or config.reduce_dtype):
        raise ValueError(f"--parallel is {config.parallel}: --shard and --reduce-dtype are for dp or cp above 1")
    if tp > 1 and dp * cp > 1 and config.shard == "none":
        raise ValueError(f"--parallel is {config.parallel}: tp with dp or cp needs --shard grads or params")
