"""Variants of a training step, with equal weights: our model eager or as a CUDA graph, torch's eager or compiled."""

import contextlib
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

import gptkernels
from benchmarks.train_step.torch_gpt2 import GPT2 as TorchGPT2
from gptkernels.models import GPT2
from gptkernels.optim import AdamW

VARIANTS = {
    "ours": "gptkernels, eager",
    "ours-graph": "gptkernels.graphed_step",
    "ours-recompute-gelu-graph": "gptkernels.graphed_step, GELUs recomputed in the backward",
    "ours-recompute-blocks-graph": "gptkernels.graphed_step, layers recomputed in the backward",
    "ours-fp8-graph": "gptkernels.graphed_step, float8 matmuls in the layers",
    "ours-fp8-head-graph": "the same, and float8 gradients of the LM head",
    "ours-fp8-logits-graph": "the same, and float8 logits",
    "torch-eager": "plain torch: cuDNN attention, fused AdamW",
    "torch-compile": "torch-eager under torch.compile",
    "torch-compile-reduce-overhead": 'torch-eager under torch.compile(mode="reduce-overhead")',
}
PRECISIONS = {
    "bf16": "bfloat16 parameters with float32 masters",
    "autocast": "float32 parameters, bfloat16 autocast",
    "tf32": "float32 parameters, TF32 matmuls",
}
LR, BETAS, WEIGHT_DECAY, MAX_NORM = 6e-4, (0.9, 0.95), 0.1, 1.0

Step = Callable[[Tensor, Tensor], Tensor]


def make(variant: str, precision: str, config, weights: dict[str, Tensor], device) -> Step:
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    if variant.startswith("ours"):
        model = GPT2(dataclasses.replace(config, **fp8_options(variant)), device, dtype)
        model.transformer.recompute_blocks = "recompute-blocks" in variant
        for block in model.transformer.h:
            block.mlp.recompute_gelu = "recompute-gelu" in variant
    else:
        model = TorchGPT2(config).to(device, dtype)
    model.load_state_dict(weights)

    def context():
        enabled = precision == "autocast"
        return torch.autocast(device.type, torch.bfloat16) if enabled else contextlib.nullcontext()

    return (_ours if variant.startswith("ours") else _torchs)(variant, model, context)


def fp8_options(variant: str) -> dict[str, bool]:
    logits = "fp8-logits" in variant
    return {"fp8": "fp8" in variant, "fp8_head": logits or "fp8-head" in variant, "fp8_logits": logits}


def groups(model):
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def _ours(variant, model, context) -> Step:
    optimizer = AdamW(groups(model), lr=LR, betas=BETAS, master_weights=True, max_grad_norm=MAX_NORM)

    def loss(tokens, targets):
        with context():
            return model(tokens, targets, return_logits=False)[1]

    step = gptkernels.graphed_step(loss, optimizer, capture=variant.endswith("graph"))
    return lambda *batch: step(batch).loss


def _torchs(variant, model, context) -> Step:
    update = torchs_update(model)
    modes = {"torch-compile": "default", "torch-compile-reduce-overhead": "reduce-overhead"}
    call = model if variant == "torch-eager" else torch.compile(model, mode=modes[variant], dynamic=False)

    def step(tokens, targets):
        if variant == "torch-compile-reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        with context():
            loss = call(tokens.to(_device(model), non_blocking=True), targets.to(_device(model), non_blocking=True))
        loss.backward()
        loss = loss.detach().float().clone()  # the next replay of a CUDA graph overwrites it
        update()
        return loss

    return step


def _device(model):
    return next(model.parameters()).device


def torchs_update(model) -> Callable[[], None]:
    """For 16-bit parameters, AdamW updates float32 masters, which are then copied to the parameters."""
    parameters = list(model.parameters())
    low = parameters[0].dtype != torch.float32
    masters = {p: p.detach().float().requires_grad_() if low else p for p in parameters}
    wide = [{**group, "params": [masters[p] for p in group["params"]]} for group in groups(model)]
    optimizer = torch.optim.AdamW(wide, lr=LR, betas=BETAS, fused=_device(model).type == "cuda")
    if low:
        for master in masters.values():
            master.grad = torch.empty_like(master)

    @torch.no_grad()
    def update():
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        if low:
            torch._foreach_copy_([master.grad for master in masters.values()], [p.grad for p in parameters])
        optimizer.step()
        if low:
            torch._foreach_copy_(parameters, list(masters.values()))
        for p in parameters:
            p.grad = None

    return update
