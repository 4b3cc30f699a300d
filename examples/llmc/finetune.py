"""Trains a model of llm.c further, on token files of llm.c, and writes it in llm.c's format.

A GPT-2 of llm.c in float32 or bfloat16 becomes a PyTorch model without a conversion script, and its result is a file
for ``train_gpt2cu -e``. ``gptkernels train --init-from`` does the same with a learning rate schedule and checkpoints.

python examples/llmc/finetune.py gpt2_124M.bin tiny_shakespeare_train.bin tuned.bin [--steps N] [--device cuda]
"""

import argparse

import torch

import gptkernels
from gptkernels.data import TokenFile
from gptkernels.models import GPT2


def main() -> None:
    """Train, print the losses, and write the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="llm.c's model, .bin")
    parser.add_argument("tokens", help="llm.c's token file, .bin")
    parser.add_argument("output", help="the trained model, .bin")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    model = GPT2.from_checkpoint(args.model, device=args.device)
    optimizer = gptkernels.optim.AdamW(
        model.parameters(), lr=args.learning_rate, max_grad_norm=1.0, master_weights=True
    )
    step = gptkernels.graphed_step(lambda x, y: model(x, y, return_logits=False)[1], optimizer)
    tokens, length = TokenFile(args.tokens), model.config.block_size  # the file is memory-mapped
    for i in range(args.steps):
        starts = torch.randint(len(tokens) - length, (args.batch_size,)).tolist()
        batch = torch.stack([torch.from_numpy(tokens[start : start + length + 1]) for start in starts]).to(args.device)
        result = step((batch[:, :-1], batch[:, 1:]))
        if i % 10 == 0 or i == args.steps - 1:
            print(f"step {i}: loss {result.read().loss:.4f}")
    model.save_checkpoint(args.output)  # in the dtype of the given model


if __name__ == "__main__":
    main()
