"""Trains Hugging Face's GPT-2 with a Trainer on the bytes of a text.

``gptkernels.swap`` makes the model call this package's kernels.

python examples/huggingface/train.py [--no-swap] [--text FILE] [--steps N] [--output FOLDER]
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import gptkernels

LENGTH = 64


class Windows(torch.utils.data.Dataset):
    """Windows of LENGTH bytes of a text."""

    def __init__(self, text: bytes) -> None:
        self._tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self._tokens) // LENGTH

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        window = self._tokens[i * LENGTH : (i + 1) * LENGTH]
        return {"input_ids": window, "labels": window}


def main() -> None:
    """Train, and save the model to the folder ``--output``, from which ``from_pretrained`` can load it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="default: a file of Python's own")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", default="runs/huggingface")
    parser.add_argument("--swap", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()

    torch.manual_seed(1337)
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=256, n_positions=LENGTH, **tokens))
    if args.swap:
        gptkernels.swap(model)  # before the model is passed to the Trainer
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            bf16=True,
            logging_steps=max(args.steps // 10, 1),
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
        ),
        train_dataset=Windows(args.text.read_bytes()),
    )
    trainer.train()
    trainer.save_model()
    if args.swap:
        print(model.gptkernels_report)


if __name__ == "__main__":
    main()
