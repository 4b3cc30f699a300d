"""Trains a model of one variant with one seed, and records its curve of losses."""

import time
from collections.abc import Callable

import torch

import gptkernels
from benchmarks.harness.machine import describe
from benchmarks.train_step.variants import fp8_options
from gptkernels.data import DataLoader, TokenFiles
from gptkernels.models import GPT2, GPT2Config
from gptkernels.models.nanogpt import parameter_groups
from gptkernels.optim import AdamW
from gptkernels.trainer.schedule import Schedule

VARIANTS = {
    "bf16": "bfloat16",
    "bf16-reversed": "bfloat16, the sequences of a batch in reverse order",
    "fp8": "float8 matmuls in the layers",
    "fp8-head": "float8 matmuls in the layers and the head's gradients",
    "fp8-logits": "float8 matmuls in the layers, the head's gradients and its logits",
}
CONTROL = "bf16-reversed"  # only rounding errors make its losses differ from bf16's losses
BETAS, WEIGHT_DECAY, MAX_NORM, FINAL_FRACTION = (0.9, 0.95), 0.1, 1.0, 0.1
KEEP_EVERY = 25  # steps


def train(variant: str, settings: dict, files: dict, device: torch.device, keep: Callable[[dict], object]) -> dict:
    """Train one variant. The initial weights, batches and learning rates depend only on the settings and the files."""
    curve = {"variant": variant, "settings": settings, "machine": describe(device)}
    curve |= {"losses": [], "seconds": 0.0, "validation": None}
    model = _model(variant, settings, device)
    groups = parameter_groups(model, WEIGHT_DECAY)
    optimizer = AdamW(groups, betas=BETAS, master_weights=True, max_grad_norm=MAX_NORM, lr=0.0)
    rate, peak = settings["schedule"], settings["learning_rate"]
    schedule = Schedule(rate, peak, FINAL_FRACTION * peak, settings["warm_up"], settings["steps"])
    data = _loader(files["train"], settings, device, shuffle=True)

    def loss_of(tokens, targets):
        return model(tokens, targets, return_logits=False)[1]

    step = gptkernels.graphed_step(loss_of, optimizer)
    begin, waiting = time.perf_counter(), None

    def note(result):
        curve["losses"].append(result.read().loss)
        curve["seconds"] = time.perf_counter() - begin
        if len(curve["losses"]) % KEEP_EVERY == 0:
            keep(curve)

    for i in range(settings["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(i)
        result = step(_in_order(data.next_batch(), variant))
        if waiting:
            note(waiting)
        waiting = result
    if waiting:
        note(waiting)
    curve["validation"] = _validation(model, files["val"], settings, device)
    keep(curve)
    return curve


def _model(variant, settings, device):
    torch.manual_seed(settings["seed"])
    names = {"block_size": "length", "vocab_size": "vocabulary", "n_layer": "layers", "n_embd": "width"}
    sizes = {name: settings[setting] for name, setting in names.items()}
    config = GPT2Config(**sizes, n_head=max(1, settings["width"] // 64), **fp8_options(variant))
    return GPT2(config).to(device, torch.bfloat16)


def _in_order(batch, variant):
    """Reverse the order of the control's sequences, so that its gradients sum the same terms in another order."""
    return [part.flip(0) for part in batch] if variant == CONTROL else batch


def _loader(paths, settings, device, *, shuffle):
    sizes = (settings[name] for name in ("batch", "length", "vocabulary"))
    options = {"seed": settings["seed"], "shuffle": shuffle, "pin_memory": device.type == "cuda"}
    return DataLoader(TokenFiles(paths), *sizes, **options)


@torch.no_grad()
def _validation(model, paths, settings, device):
    data = _loader(paths, settings, device, shuffle=False)
    count = min(data.batches_per_epoch, settings["val_batches"])
    if not count:
        return None
    model.eval()
    total = torch.zeros((), device=device)
    for _ in range(count):
        tokens, targets = (part.to(device, non_blocking=True) for part in data.next_batch())
        total += model(tokens, targets, return_logits=False)[1]
    model.train()
    return (total / count).item()
