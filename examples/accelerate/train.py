"""Trains Hugging Face's GPT-2 in a loop of accelerate, on any number of processes.

``gptkernels.swap`` makes the model call this package's kernels; the loop does not change.

accelerate launch examples/accelerate/train.py [--text FILE] [--steps N]
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

import gptkernels

LENGTH = 64


def main() -> None:
    """Train, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="default: a file of Python's own")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    torch.manual_seed(1337)
    accelerator = Accelerator(mixed_precision="bf16")
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=256, n_positions=LENGTH, **tokens))
    model.to(accelerator.device)
    gptkernels.swap(model, return_logits=False)  # before prepare; training does not store the logits
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    windows = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long().unfold(0, LENGTH, LENGTH)
    batches = torch.utils.data.DataLoader(windows, batch_size=16, shuffle=True, drop_last=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

    step = 0
    while step < args.steps:
        for batch in batches:
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0 or step == args.steps - 1:
                accelerator.print(f"step {step}: loss {loss.item():.4f}")
            step += 1
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
