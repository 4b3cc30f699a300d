"""The methods of nanoGPT's `GPT` that scripts for nanoGPT call."""

import dataclasses
from typing import Any

import torch

from gptkernels._device import device_name
from gptkernels._device import peak_flops as peak_of
from gptkernels.models.config import GPT2Config
from gptkernels.models.transformer import Transformer
from gptkernels.optim import AdamW


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Make two parameter groups: matrices and embeddings, with weight decay, and biases and norms, without it."""
    decayed: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # In a tensor-parallel model a bias may have several dimensions.
            is_matrix = parameter.dim() >= 2 and not name.endswith("bias")
            (decayed if is_matrix else others).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


class NanoGPT(torch.nn.Module):
    """The methods of :class:`GPT2` that count parameters and flops, make an optimizer, or shorten ``block_size``."""

    config: GPT2Config
    transformer: Transformer
    lm_head: torch.nn.Linear

    def num_parameters(self) -> int:
        """Return the number of parameters, without the padding of the vocabulary."""
        padding = (self.config.padded_vocab_size - self.config.vocab_size) * self.config.n_embd
        return sum(parameter.numel() for parameter in self.parameters()) - padding

    def flops_per_token(self, length: int | None = None) -> int:
        """Return the floating-point operations per token of a training step, as counted in PaLM's appendix B.

        They are 6 for each parameter except the position embedding's, plus 12 * C * T for each layer's attention.
        ``length`` is T; None is ``block_size``.
        """
        config = self.config
        length = config.block_size if length is None else length
        embeddings = config.block_size * config.n_embd  # wte is also the LM head's matrix
        return 6 * (self.num_parameters() - embeddings) + 12 * config.n_layer * config.n_embd * length

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float, betas: tuple[float, float], device_type: str | None = None
    ) -> AdamW:
        """Make this package's AdamW, with weight decay for the matrices and none for biases and norms.

        ``device_type`` is ignored; the parameters' device decides.
        """
        return AdamW(parameter_groups(self, weight_decay), lr=learning_rate, betas=betas)

    @torch.no_grad()
    def crop_block_size(self, block_size: int) -> None:
        """Keep only the first ``block_size`` positions. Make optimizers afterwards, because ``wpe.weight`` is replaced.

        A ``block_size`` below 1 or above the present one raises a ValueError.
        """
        if not 1 <= block_size <= self.config.block_size:
            raise ValueError(f"GPT2: block_size must be from 1 to {self.config.block_size}, got {block_size}")
        wpe = self.transformer.wpe
        wpe.weight = torch.nn.Parameter(wpe.weight[:block_size].clone(), wpe.weight.requires_grad)
        wpe.num_embeddings = block_size
        self.config = dataclasses.replace(self.config, block_size=block_size)

    def get_num_params(self, non_embedding: bool = True) -> int:
        """Return the number of parameters, without the padding of the vocabulary.

        ``non_embedding`` leaves out the position embedding; the token embedding, which is the LM head too, is counted.
        """
        positions = self.config.block_size * self.config.n_embd if non_embedding else 0
        return self.num_parameters() - positions

    def estimate_mfu(self, fwdbwd_per_iter: float, dt: float, peak_flops: float | None = None) -> float:
        """Return the model's flops per second, as :meth:`flops_per_token` counts, divided by the device's peak.

        Args:
            fwdbwd_per_iter: the number of sequences of ``block_size`` tokens in a step.
            dt: the duration of the step in seconds.
            peak_flops: the peak in flops per second. None is the dense bfloat16 peak of the parameters' device; nanoGPT
                always assumes an A100's 312e12.

        Raises:
            ValueError: if the device's peak is unknown, or a number is not above 0.
        """
        device = self.lm_head.weight.device
        peak = peak_of(device) if peak_flops is None else peak_flops
        if peak is None:
            raise ValueError(f"GPT2: the peak of {device_name(device)} is not known: give peak_flops")
        for name, value in (("fwdbwd_per_iter", fwdbwd_per_iter), ("dt", dt), ("peak_flops", peak)):
            if not value > 0:
                raise ValueError(f"GPT2: {name} must be above 0, got {value}")
        return self.flops_per_token() * self.config.block_size * fwdbwd_per_iter / dt / peak
