"""Trains this package's GPT-2 on the bytes of a text with a plain PyTorch loop.

On a GPU a whole step is one CUDA graph, so that its time does not depend on the host; on the CPU it runs eagerly.

python examples/pytorch/train.py [--text FILE] [--steps N] [--device cuda]
"""

import argparse
from pathlib import Path

import torch

import gptkernels
from gptkernels.models import GPT2, GPT2Config


def main() -> None:
    """Train, print the losses, and continue a prompt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="default: a file of Python's own")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(1337)
    config = GPT2Config(block_size=64, vocab_size=256, n_layer=2, n_head=4, n_embd=64)
    model = GPT2(config, device=args.device)
    optimizer = gptkernels.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, max_grad_norm=1.0)
    step = gptkernels.graphed_step(
        lambda inputs, targets: model(inputs, targets, return_logits=False)[1],  # the logits are not stored
        optimizer,
    )
    tokens = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
    for i in range(args.steps):
        starts = torch.randint(len(tokens) - config.block_size, (16, 1))
        batch = tokens[starts + torch.arange(config.block_size + 1)].to(args.device)
        result = step((batch[:, :-1], batch[:, 1:]))
        if i % 10 == 0 or i == args.steps - 1:
            loss, norm = result.read()  # waits for the step
            print(f"step {i}: loss {loss:.4f}, norm {norm:.3f}")
    prompt = torch.tensor([list(b"def ")], device=args.device)
    print(bytes(model.generate(prompt, 32)[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
