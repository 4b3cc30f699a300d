"""A training step: the gradients of its batches, and the update."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from gptkernels.graphs import graphed_step
from gptkernels.optim import AdamW, gradient_norm
from gptkernels.trainer.outliers import OutlierDetector, Skipping
from gptkernels.trainer.processes import Processes


class Step:
    """Makes an update without waiting for the device; on CUDA it replays a CUDA graph if possible.

    Args:
        loss: computes the loss of a batch of tokens and targets, both (B, T) and on this process's device.
        max_scores: the z-scores of the loss and of the gradient's norm above which the update is skipped; 0 never
            skips.
        capture: False runs every step eagerly.
        no_sync: makes a context in which the backward of `loss` does not average the gradients over the processes.
        recover: resets the model after an interrupted forward or backward.

    Attributes:
        outliers: the `OutlierDetector`. If updates may be skipped, it is on the device and each step updates it;
            otherwise it is on the host and the caller updates it.
    """

    def __init__(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: AdamW,
        processes: Processes,
        max_scores: tuple[float, float],
        capture: bool,
        no_sync: Callable[[], AbstractContextManager[object]] | None = None,
        recover: Callable[[], object] | None = None,
    ) -> None:
        self._loss = loss
        self._optimizer = optimizer
        self._processes = processes
        self._recover = recover
        self._skipping = Skipping(*max_scores, processes.device) if any(max_scores) else None
        self.outliers = OutlierDetector(processes.device if self._skipping else "cpu")
        if self._skipping:
            # A captured graph uses the addresses of these three tensors, so every step must write them in place.
            self._total, self._scores = (torch.zeros(shape, device=processes.device) for shape in ((), (2,)))
            optimizer.found_inf = torch.zeros((), device=processes.device)
        decide = self._decide_on_update if self._skipping else None
        self._step = graphed_step(
            self._noted_loss,
            optimizer,
            capture=capture,
            no_sync=no_sync,
            captured_before_update=decide,
            after_capture=self._recover_together,
        )

    @property
    def is_captured(self) -> bool:
        return self._step.captures > 0 and self._step.eager_because is None

    def close(self) -> None:
        """Delete the CUDA graphs. NCCL waits for them when its process group is destroyed."""
        self._step.reset()

    def __call__(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Update the parameters with the mean gradient of the batches, or skip the update.

        Return a tensor (2,) on the device: this process's loss and the norm of the averaged gradients. If updates may
        be skipped, the tensor is (5,): the z-scores of the loss and of the norm follow, and a 1 if this update was
        skipped, else a 0.
        """
        self._batches = len(batches)
        if self._skipping:
            self._total.zero_()
        result = self._step(*batches)
        assert result.grad_norm is not None
        numbers = [result.loss, result.grad_norm]
        if self._skipping:
            assert self._optimizer.found_inf is not None
            numbers += [*self._scores, self._optimizer.found_inf]
        return torch.stack(numbers)

    def _recover_together(self, failed: bool) -> bool:
        """Return whether a capture has failed in a process, after which the models of all processes are reset."""
        failed = bool(self._processes.largest(int(failed)))
        if failed and self._recover is not None:
            self._recover()
        return failed

    def _noted_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = self._loss(tokens, targets)
        if self._skipping:
            self._total += loss.detach()
        return loss

    @torch.no_grad()
    def _decide_on_update(self) -> None:
        assert self._skipping is not None
        assert self._optimizer.found_inf is not None
        gradients = [p.grad for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        loss = self._processes.average(self._total / self._batches)
        norm = gradient_norm(gradients, self._optimizer.gathers_norm)
        scores = self.outliers.scores(torch.stack([loss, norm]))
        self._scores.copy_(scores)
        self._optimizer.found_inf.copy_(self._skipping.found(scores))
