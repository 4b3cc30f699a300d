"""Trains LoRA adapters of a Hugging Face GPT-2 with PEFT.

``gptkernels.swap`` makes attention, norms, embeddings, GELU, the loss and the linear layers in PEFT's modules call this
package's kernels.

python examples/peft/train.py [--text FILE] [--steps N] [--output FOLDER]
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import gptkernels

LENGTH = 64


def main() -> None:
    """Train the adapters, print the losses, and save the adapters to the folder ``--output``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="default: a file of Python's own")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", default="runs/peft")
    args = parser.parse_args()

    torch.manual_seed(1337)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    # For GPT-2's own weights: GPT2LMHeadModel.from_pretrained("gpt2"), and tokens of its tokenizer instead of bytes.
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=256, n_positions=LENGTH, **tokens))
    lora = LoraConfig(r=8, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora).to(device)
    gptkernels.swap(model, return_logits=False)  # training does not store the logits
    print(model.gptkernels_report.line())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    windows = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long().unfold(0, LENGTH, LENGTH)
    for step in range(args.steps):
        batch = windows[torch.randint(len(windows), (16,))].to(device)
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {loss.item():.4f}")
    model.save_pretrained(args.output)  # the adapters only, in PEFT's format


if __name__ == "__main__":
    main()
