"""The variants to measure: third-party models, with their sizes and the ways to swap and compile them."""

import dataclasses
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # published.py there has nanoGPT's and llm.c's models

MODELS = {"huggingface": "Hugging Face", "nanogpt": "nanoGPT", "llmc": "llm.c"}
MODES = {"eager": None, "compiled": "default", "graphs": "reduce-overhead"}
LOGITS = {"no": True, "yes": True, "no-logits": False, "detached": "detached"}
SIZES = {"gpt2": (12, 12, 768), "tiny": (2, 2, 64)}


@dataclasses.dataclass(frozen=True)
class Variant:
    model: str
    mode: str
    batch: int
    dropout: float
    swapped: str = "no"
    size: str = "gpt2"
    length: int = 1024

    @classmethod
    def of(cls, row):
        return cls(**{field.name: row[field.name] for field in dataclasses.fields(cls)})

    def __str__(self):
        mode = {"graphs": "compiled with `reduce-overhead`"}.get(self.mode, self.mode)
        return f"{MODELS[self.model]}, {mode}, B={self.batch}, dropout {self.dropout:g}"


def variant_of(row, **options) -> Variant:
    try:
        model, mode, batch, dropout = row.split("/")
        if model in MODELS and mode in MODES:
            return Variant(model, mode, int(batch), float(dropout), **options)
    except ValueError:
        pass
    raise ValueError(f"a row is MODEL/MODE/BATCH/DROPOUT, of {', '.join(MODELS)} and {', '.join(MODES)}, not {row!r}")


def made(variant, device):
    layers, heads, channels = SIZES[variant.size]
    torch.manual_seed(0)
    if variant.model == "huggingface":
        from transformers import GPT2Config, GPT2LMHeadModel

        p = variant.dropout
        config = GPT2Config(
            n_layer=layers, n_head=heads, n_embd=channels, n_positions=variant.length,
            resid_pdrop=p, embd_pdrop=p, attn_pdrop=p, use_cache=False,
        )  # fmt: skip
        model = GPT2LMHeadModel(config).to(device)
        return model, lambda model, tokens: model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss
    import published

    kind = {"nanogpt": published.GPT, "llmc": published.LlmcGPT}[variant.model]
    vocabulary = 50304 if variant.model == "nanogpt" else 50257
    config = published.Config(variant.length, vocabulary, layers, heads, channels, variant.dropout)
    return kind(config).to(device), lambda model, tokens: model(tokens[:, :-1], tokens[:, 1:].contiguous())[1]


def batches(variant, device):
    generator = torch.Generator().manual_seed(0)
    while True:
        jumps = torch.randint(50257, (variant.batch, variant.length + 1), generator=generator)
        rare = torch.rand(jumps.shape, generator=generator) < 0.1
        yield torch.where(rare, jumps, 17).cumsum(1).remainder(50257).to(device)


class Trainer:
    """A step has bfloat16 autocast, clipping and torch's fused AdamW."""

    def __init__(self, variant, device):
        self.device = device
        self.model, self._loss_of = made(variant, device)
        if variant.swapped != "no":
            import gptkernels

            gptkernels.swap(self.model, return_logits=LOGITS[variant.swapped])
        mode = MODES[variant.mode]
        self._call = torch.compile(self.model, mode=mode) if mode else self.model
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)

    def step(self, tokens):
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self._loss_of(self._call, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone()  # the next replay of a graph overwrites it
