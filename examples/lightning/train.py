"""Trains Hugging Face's GPT-2 in a LightningModule.

``gptkernels.swap`` makes the model call this package's kernels; the module and the Trainer do not change.

python examples/lightning/train.py [--text FILE] [--steps N] [--devices N]
"""

import argparse
from pathlib import Path

import lightning
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import gptkernels

LENGTH = 64


class LanguageModel(lightning.LightningModule):
    """A GPT-2 of bytes."""

    def __init__(self) -> None:
        super().__init__()
        tokens = {"bos_token_id": 0, "eos_token_id": 0}
        config = GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=256, n_positions=LENGTH, **tokens)
        self.model = gptkernels.swap(GPT2LMHeadModel(config), return_logits=False)  # training does not store the logits

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss of tokens (B, T)."""
        loss = self.model(input_ids=batch, labels=batch).loss
        if self.global_step % 10 == 0:
            self.print(f"step {self.global_step}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    """Train, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="default: a file of Python's own")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()

    lightning.seed_everything(1337)
    windows = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long().unfold(0, LENGTH, LENGTH)
    trainer = lightning.Trainer(
        max_steps=args.steps,
        devices=args.devices,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LanguageModel(), torch.utils.data.DataLoader(windows, batch_size=16, shuffle=True))


if __name__ == "__main__":
    main()
