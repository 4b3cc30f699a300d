"""Compiles a byte-level GPT-2, and packages it for generate.cpp, which runs it without Python.

python examples/cpp/export.py runs/tiny model.pt2 [--device cuda]
"""

import argparse

import torch
from torch import Tensor

import gptkernels  # noqa: F401  registers the operators
from gptkernels.models import GPT2
from gptkernels.trainer.model import model_file


class NextToken(torch.nn.Module):
    """Computes the logits (V) of the next token from the tokens (1, T) before it."""

    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits. T may have any value from 2 to the model's block size."""
        return self.model(tokens)[0][0, -1]


def main() -> None:
    """Export the model, compile it, and write the package."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="the folder of a run, or a model (.bin, .safetensors)")
    parser.add_argument("package", help="what to write: a .pt2 file")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    model = GPT2.from_checkpoint(model_file(args.checkpoint), args.device).eval()
    example = torch.randint(model.config.vocab_size, (1, 8), device=args.device)
    length = torch.export.Dim("T", min=2, max=model.config.block_size)
    with torch.no_grad():
        program = torch.export.export(NextToken(model), (example,), dynamic_shapes=({1: length},))
        torch._inductor.aoti_compile_and_package(program, package_path=args.package)


if __name__ == "__main__":
    main()
