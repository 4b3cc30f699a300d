"""Training steps captured as CUDA graphs."""

from gptkernels.graphs.capture import GraphedStep, StepNumbers, StepResult, graphed_step

__all__ = ["GraphedStep", "StepNumbers", "StepResult", "graphed_step"]
