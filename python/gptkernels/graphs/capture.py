"""Captures a whole training step as a CUDA graph: forward, backward, gradient norm, clipping and AdamW."""

import contextlib
import gc
import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from gptkernels import _dtensor
from gptkernels.graphs.staging import Signature, Staging, signature
from gptkernels.optim import AdamW

__all__ = ["GraphedStep", "StepNumbers", "StepResult", "graphed_step"]

_log = logging.getLogger("gptkernels.graphs")

# Eager steps before a capture: the first initialises kernels and state, the last is checked for synchronisation.
_WARM_UP = 2
_WARM_UP_REDUCING = 12  # DistributedDataParallel measures ten steps, for which it waits for the device until the next

Batch = Sequence[Tensor]


class StepNumbers(NamedTuple):
    """The loss of a step and the norm of its gradients before clipping; the norm is None if it is not computed."""

    loss: float
    grad_norm: float | None


class StepResult:
    """The results of a step, on the device. The device also copies them to the host, for :meth:`read`.

    ``loss`` is 0-dim float32 (float64 for float64): the mean of the micro-batches' losses before the update.
    ``grad_norm`` has the same dtype. It is the norm of all gradients before clipping, or None if the optimizer's
    ``max_grad_norm`` is not set.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.loss = numbers[0]
        self.grad_norm = numbers[1] if len(numbers) > 1 else None
        self._numbers = numbers
        self._arrived: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> StepNumbers:
        """Wait for the step and return its numbers.

        To keep the device busy, launch the next step before reading the numbers of this step.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        loss, *norm = self._numbers.tolist()
        return StepNumbers(loss, norm[0] if norm else None)


def graphed_step(
    loss: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    before_update: Callable[[], object] | None = None,
    capture: bool = True,
    no_sync: Callable[[], AbstractContextManager[object]] | None = None,
    captured_before_update: Callable[[], object] | None = None,
    after_capture: Callable[[bool], bool] | None = None,
) -> "GraphedStep":
    """Make a training step that is captured as a CUDA graph, and then replayed with little host work.

    ::

        def loss(tokens, targets):
            return model(tokens, targets, return_logits=False)[1]

        step = gptkernels.graphed_step(loss, optimizer)
        for batch in batches:
            result = step(batch)  # launches the step without waiting
            ...
            print(result.read())  # better one step later

    ``step(batch, batch, batch)`` is one update with the mean of the three losses. The results, including dropout's
    masks, are bitwise those of the eager step.

    Before each capture for new shapes of the batches, two steps run eagerly, or 12 steps with ``no_sync``. Python code
    in ``loss`` and in hooks of the model runs only in these steps and the capture. A graph is captured on the current
    CUDA stream, unless it is the default stream.

    Learning rates may change at every step. The step is captured again if one of these changes: the shapes or the
    number of batches, an option of a param group, ``requires_grad`` of a parameter, autocast, or the memory of a
    parameter or of the optimizer's state. After other changes of what ``loss`` computes, such as ``model.eval()``, call
    :meth:`GraphedStep.reset`.

    The step runs eagerly, and the log of ``gptkernels.graphs`` says why, if the parameters are not on one CUDA device,
    or are neither plain tensors nor DTensors; ``optimizer`` is not :class:`gptkernels.optim.AdamW`, or has step hooks;
    there are several processes and neither ``no_sync`` nor ``before_update``; or the loss or a hook synchronises with
    the device, or cannot be captured. For a model of :func:`gptkernels.parallel.tensor_parallel`, whose backward
    exchanges all that is needed, ``no_sync`` is ``contextlib.nullcontext``. A model of FSDP2 (``fully_shard``) can be
    captured with torch 2.11 or later; earlier versions reuse the pinned memory that its graph reads. Its parameters
    must be sharded between steps: after an evaluation, call ``reshard`` of each FSDP module.

    Args:
        loss: ``loss(*batch)`` returns a 0-dim tensor. ``loss``, or the caller of the step, may enter
            ``torch.autocast``.
        optimizer: the optimizer of the trained parameters. Their gradients are None before and after each step.
        before_update: called between the last backward and the update, outside the graphs. It may change the gradients
            in ``.grad`` in place, for example average them over processes.
        capture: False for a step that always runs eagerly.
        no_sync: makes the context of every micro-batch except the last, in which its backward must not reduce the
            gradients over processes, such as ``no_sync`` of a :class:`torch.nn.parallel.DistributedDataParallel` model
            that ``loss`` calls. The model must be made on the CUDA stream on which the steps are captured. For FSDP2
            the context calls ``set_requires_gradient_sync``.
        captured_before_update: as ``before_update``, but part of the graph, so that it must not wait for the device.
        after_capture: ``after_capture(failed)`` is called after each capture, and returns whether this step and later
            ones run eagerly. Several processes must agree on it. Before it returns True, it must reset the state that
            an interrupted forward or backward leaves in the model, such as that of DistributedDataParallel.

    Raises:
        TypeError: if a batch is not a sequence of tensors.
        ValueError: if no batch is given.
    """
    return GraphedStep(loss, optimizer, before_update, capture, no_sync, captured_before_update, after_capture)


class GraphedStep:
    """The training step that :func:`graphed_step` returns.

    ``eager_because`` is the reason why steps are not captured, or None. ``captures`` counts the captures so far.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        before_update: Callable[[], object] | None,
        capture: bool,
        no_sync: Callable[[], AbstractContextManager[object]] | None,
        captured_before_update: Callable[[], object] | None,
        after_capture: Callable[[bool], bool] | None,
    ) -> None:
        self._loss = loss
        self._optimizer = optimizer
        self._before_update = before_update
        self._no_sync = no_sync
        self._captured_before_update = captured_before_update
        self._after_capture = after_capture
        self._warm_up = _WARM_UP if no_sync is None else _WARM_UP_REDUCING
        self._device = _parameters(optimizer)[0].device
        self.captures = 0
        self.eager_because: str | None = None if capture else "capture is False"
        if capture and (why := _why_not(loss, optimizer, before_update is not None or no_sync is not None)):
            self._fall_back(why)
        self.reset()
        _reset_when_loaded(self, optimizer)

    def reset(self) -> None:
        """Discard the captured graphs; the next steps run eagerly and are captured again."""
        self._eager_steps: dict[tuple[Signature, ...], int] = {}
        self._programs: dict[tuple[Signature, ...], _Program] = {}
        self._inputs: dict[Signature, Staging] = {}
        self._rates: list[_Rate] = []
        self._setting: object = None
        self._state: object = None
        self._pool: Any = None
        self._waits_at: str | None = None

    def __call__(self, *batches: Batch) -> StepResult:
        """Launch one update of the parameters; return the loss and the gradients' norm without waiting for them.

        Each argument is a micro-batch: a tuple or list of tensors on the host or on the parameters' device.
        """
        signatures = _signatures(batches)
        if self.eager_because is None and self._may_replay(signatures):
            try:
                return self._replay(batches, signatures)
            except _CannotCapture as error:
                self._fall_back(str(error))
        return StepResult(self._run_eagerly(batches))

    def _may_replay(self, signatures: tuple[Signature, ...]) -> bool:
        setting = _setting(self._optimizer)
        if setting != self._setting or self._state is not self._optimizer.state:
            self.reset()
            self._setting, self._state = setting, self._optimizer.state
        return self._eager_steps.get(signatures, 0) >= self._warm_up

    def _fall_back(self, why: str) -> None:
        self.eager_because = why
        _log.log(logging.INFO if why == _ON_CPU else logging.WARNING, "the training step runs eagerly: %s", why)

    # ---- eager -------------------------------------------------------------------------------------------------------

    def _run_eagerly(self, batches: Sequence[Batch]) -> Tensor:
        """Run a step without a graph. In the last one before a capture, note whether the loss waits for the device."""
        signatures = _signatures(batches)
        count = self._eager_steps[signatures] = self._eager_steps.get(signatures, 0) + 1
        watch = self.eager_because is None and count == self._warm_up
        with _Watch() if watch else contextlib.nullcontext() as found:
            batches = [[t.to(self._device, non_blocking=True) for t in batch] for batch in batches]
            total = None
            for i, batch in enumerate(batches, 1):
                total = self._micro_step(batch, len(batches), i == len(batches), total)
        assert total is not None
        if self._before_update is not None:
            self._before_update()
        numbers = self._update(total)
        if found is not None:
            self._waits_at = found.place
        return numbers

    def _micro_step(self, batch: Batch, count: int, is_last: bool, total: Tensor | None = None) -> Tensor:
        if total is None:
            self._drop_gradients()
        torch.clear_autocast_cache()  # drops casts from before the parameters' update, or from outside the graph
        with contextlib.nullcontext() if is_last or self._no_sync is None else self._no_sync():
            loss = self._loss(*batch)
            if count > 1:
                loss = loss / count
            with torch.autograd.set_multithreading_enabled(False):  # passing work to another thread takes 0.5 ms
                loss.backward()  # type: ignore[no-untyped-call]
        torch.clear_autocast_cache()
        loss = loss.detach()
        return loss if total is None else total.add_(loss)

    def _update(self, total: Tensor) -> Tensor:
        if self._captured_before_update is not None:
            self._captured_before_update()
        self._optimizer.step()
        self._drop_gradients()
        norm = getattr(self._optimizer, "grad_norm", None)
        parts = [total] if norm is None else [total, norm.to(total.device)]
        dtype = torch.promote_types(total.dtype, torch.float32)
        return torch.stack([part.to(dtype) for part in parts])

    def _drop_gradients(self) -> None:
        for parameter in _parameters(self._optimizer):
            parameter.grad = None

    # ---- captured ----------------------------------------------------------------------------------------------------

    def _replay(self, batches: Sequence[Batch], signatures: tuple[Signature, ...]) -> StepResult:
        program = self._programs.get(signatures)
        if program is None:
            program = self._programs[signatures] = self._capture(signatures)
        for rate in self._rates:
            rate.follow()
        for graph, batch, kind in zip(program.micro_steps, batches, signatures, strict=True):
            self._inputs[kind].put(batch)
            graph.replay()
        if self._before_update is not None:
            program.show_gradients(self._optimizer)
            self._before_update()
            self._drop_gradients()
        if program.update is not None:
            program.update.replay()
        result = StepResult(program.numbers.clone())
        self._optimizer.grad_norm = result.grad_norm  # type: ignore[attr-defined]
        return result

    def _capture(self, signatures: tuple[Signature, ...]) -> "_Program":
        """Capture the graphs of a step: only one if the step has one batch and no ``before_update``.

        Otherwise there is a graph for the first batch, one for each shape of the other batches, and one for the update.
        With ``no_sync`` the last of several batches has a graph of its own. The graphs can share the memory of
        intermediate results, because they never run at the same time.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._rates = [_Rate(group, self._device) for group in self._optimizer.param_groups]
        for kind in signatures:
            if kind not in self._inputs:
                self._inputs[kind] = Staging(kind, self._device)
        program = _Program()
        count = len(signatures)
        first = self._inputs[signatures[0]].static
        try:
            if self._waits_at is not None:
                raise RuntimeError(f"the loss or a hook waits for the device, at {self._waits_at}")
            if count == 1 and self._before_update is None:
                graph, program.numbers = self._graph(lambda: self._captured_update(self._micro_step(first, 1, True)))
                program.micro_steps = [graph]
            else:
                graph, total = self._graph(lambda: self._micro_step(first, count, count == 1))
                program.micro_steps = [graph]
                program.gradients = [p.grad for p in _parameters(self._optimizer)]
                others: dict[object, torch.cuda.CUDAGraph] = {}
                for i, kind in enumerate(signatures[1:], 2):
                    reduces = self._no_sync is not None and i == count
                    if (kind, reduces) not in others:
                        batch = self._inputs[kind].static
                        others[kind, reduces], _ = self._graph(self._micro_step, batch, count, i == count, total)
                    program.micro_steps.append(others[kind, reduces])
                    if reduces:  # DistributedDataParallel replaces the gradients by views of its buckets
                        program.gradients = [p.grad for p in _parameters(self._optimizer)]
                program.check_gradients(self._optimizer)
                program.update, program.numbers = self._graph(self._captured_update, total)
        except Exception as error:
            self._programs.clear()
            self._drop_gradients()
            _end_capture_of_random_numbers(self._device)
            if self._after_capture is not None:
                self._after_capture(True)
            raise _CannotCapture(f"it cannot be captured: {_first_line(error)}") from error
        if self._after_capture is not None and self._after_capture(False):
            self._programs.clear()
            raise _CannotCapture("another process cannot capture it")
        self.captures += 1
        return program

    def _graph(self, function: Callable[..., Any], *args: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Capture a function. Return the graph, and the function's result, which each replay overwrites."""
        graph = torch.cuda.CUDAGraph()
        # Another thread may make calls that are not allowed in a capture, for example to pin a data loader's memory.
        stream = torch.cuda.current_stream(self._device)
        capture = torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=None if stream == torch.cuda.default_stream(self._device) else stream,
            capture_error_mode="thread_local",
        )
        collects = gc.isenabled()
        gc.disable()  # garbage may include pinned memory and other graphs, which a capture does not allow to free
        try:
            with capture:
                result = function(*args)
        finally:
            if collects:
                gc.enable()
        # Torch writes the generator's seed and offset to the device when a capture begins, on the capture's CUDA
        # stream, and when a replay begins, on the replay's CUDA stream. So a replay must wait for the capture's stream.
        assert capture.capture_stream is not None
        torch.cuda.current_stream(self._device).wait_stream(capture.capture_stream)
        return graph, result

    def _captured_update(self, total: Tensor) -> Tensor:
        groups = self._optimizer.param_groups
        given = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, self._rates, strict=True):
                group["lr"] = rate.on_device
            return self._update(total)
        finally:
            for group, rate in zip(groups, given, strict=True):
                group["lr"] = rate


class _CannotCapture(Exception):
    """The step cannot be captured; the message is the reason."""


class _Program:
    """The graphs of a step for batches of certain shapes.

    ``micro_steps`` has one graph for each batch; batches after the first that have equal shapes share a graph.
    ``update`` is None if the only micro-step includes the update. ``gradients`` has the tensors that the micro-steps
    write and the update reads.
    """

    micro_steps: list[torch.cuda.CUDAGraph]
    update: torch.cuda.CUDAGraph | None = None
    numbers: Tensor
    gradients: list[Tensor | None]

    def show_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, gradient in zip(_parameters(optimizer), self.gradients, strict=True):
            parameter.grad = gradient

    def check_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, gradient in zip(_parameters(optimizer), self.gradients, strict=True):
            if parameter.grad is not gradient:
                raise RuntimeError("a gradient was replaced, not added to")


class _Rate:
    """A param group's learning rate on the device, in float64, so that updates are the same as with a Python float."""

    def __init__(self, group: dict[str, Any], device: torch.device) -> None:
        self._group = group
        self._value: float | None = None
        self.on_device = torch.zeros((), dtype=torch.float64, device=device)

    def follow(self) -> None:
        rate = self._group["lr"]
        if isinstance(rate, Tensor) and not rate.is_cpu:
            self._value = None
            self.on_device.copy_(rate)
        elif (value := float(rate)) != self._value:
            self._value = value
            self.on_device.fill_(value)


class _Watch:
    """A context that records in ``place``, from torch's warnings, where the host last waited for the device."""

    place: str | None = None

    def __enter__(self) -> "_Watch":
        self._mode = torch.cuda.get_sync_debug_mode()
        self._catch = warnings.catch_warnings(record=True)
        self._caught: list[Any] = self._catch.__enter__()  # type: ignore[assignment]
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *exception: object) -> None:
        torch.cuda.set_sync_debug_mode(self._mode)
        self._catch.__exit__(*exception)  # type: ignore[arg-type]
        for warning in self._caught:
            text = str(warning.message)
            if "called a synchronizing" in text:
                self.place = f"{warning.filename}:{warning.lineno}"
            elif "ynchronization debug mode" not in text:  # the warning that this mode is a prototype
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


_ON_CPU = "the parameters are on the CPU"


def _why_not(loss: Callable[..., Tensor], optimizer: torch.optim.Optimizer, exchanges_gradients: bool) -> str | None:
    parameters = _parameters(optimizer)
    if all(parameter.is_cpu for parameter in parameters):
        return _ON_CPU
    if not isinstance(optimizer, AdamW):
        return f"the optimizer is {type(optimizer).__module__}.{type(optimizer).__qualname__}, not gptkernels.optim's"
    if any(type(_dtensor.held(p)) not in _dtensor.PLAIN or not p.is_cuda for p in parameters):
        return "a parameter is neither a plain CUDA tensor nor a DTensor on CUDA"
    if len({parameter.device for parameter in parameters}) > 1:
        return "the parameters are on several devices"
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    if any(hooks) or torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks:
        return "the optimizer has step hooks"
    distributed = torch.distributed
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    if several and not exchanges_gradients:
        return "there are several processes, and neither no_sync nor before_update says how they exchange gradients"
    return None


def _signatures(batches: Sequence[Batch]) -> tuple[Signature, ...]:
    if not batches:
        raise ValueError("graphed_step: a step takes at least one batch")
    for batch in batches:
        if not isinstance(batch, tuple | list) or not all(isinstance(t, Tensor) for t in batch):
            raise TypeError(f"graphed_step: a batch must be a tuple or list of tensors, got {type(batch).__name__}")
    return tuple(signature(batch) for batch in batches)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _setting(optimizer: torch.optim.Optimizer) -> object:
    groups = [
        [(_dtensor.held(p).data_ptr(), p.requires_grad) for p in group["params"]]
        + [value for name, value in group.items() if name not in ("params", "lr", "initial_lr")]
        for group in optimizer.param_groups
    ]
    cuda = torch.backends.cuda.matmul
    return (
        groups,
        getattr(optimizer, "max_grad_norm", None),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        cuda.allow_tf32,
        cuda.allow_bf16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
    )


def _reset_when_loaded(step: GraphedStep, optimizer: torch.optim.Optimizer) -> None:
    """Reset the step after ``load_state_dict``, because its graphs would use the optimizer's former state."""
    reference = weakref.ref(step)

    def reset(_: object) -> None:
        if (found := reference()) is not None:
            found.reset()

    optimizer.register_load_state_dict_post_hook(reset)


def _end_capture_of_random_numbers(device: torch.device) -> None:
    """Replace the state of torch's generator, which after a failed capture still records draws for the graph."""
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())


def _first_line(error: BaseException) -> str:
    """Return the original error's first line, because errors at the end of the capture only follow from it."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
