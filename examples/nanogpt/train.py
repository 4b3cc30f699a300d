"""Trains the GPT-2 of model.py on the bytes of a text.

``gptkernels.swap`` makes the model call this package's kernels.

python examples/nanogpt/train.py [--no-swap] [--text FILE] [--steps N] [--device cuda]
"""

import argparse
import time
from pathlib import Path

import torch
from model import GPT, Config

import gptkernels


def main() -> None:
    """Train, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="default: a file of Python's own")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--swap", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(1337)
    model = GPT(Config()).to(args.device)
    if args.swap:
        gptkernels.swap(model)  # after the model is moved to its device, and before torch.compile and DDP
        print(model.gptkernels_report)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    step_model = torch.compile(model) if args.compile else model

    tokens = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
    length, begin = model.config.block_size, time.time()
    generator = torch.Generator().manual_seed(0)  # so that the batches do not depend on the numbers drawn for dropout
    for step in range(args.steps):
        starts = torch.randint(len(tokens) - length, (args.batch_size,), generator=generator)
        batch = torch.stack([tokens[start : start + length + 1] for start in starts]).to(args.device)
        with torch.autocast(args.device, torch.bfloat16):
            _, loss = step_model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step == args.steps - 1:
            seen = (step + 1) * args.batch_size * length
            print(f"step {step}: loss {loss.item():.4f}, {seen / (time.time() - begin):,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
