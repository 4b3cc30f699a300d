"""The variants: ours and torch's, eager, compiled and with CUDA graphs, all with the same initial weights."""

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
    "ours-recompute-gelu-graph": "gptkernels.graphed_step, GELUs computed again in the backward",
    "ours-recompute-blocks-graph": "gptkernels.graphed_step, layers computed again in the backward",
    "ours-fp8-graph": "gptkernels.graphed_step, float8 products in the layers",
    "ours-fp8-head-graph": "the same, and in the gradients of the head",
    "ours-fp8-logits-graph": "the same, and for its logits",
    "torch-eager": "plain torch: cuDNN attention, fused AdamW",
    "torch-compile": "the same, torch.compile",
    "torch-compile-reduce-overhead": 'the same, torch.compile(mode="reduce-overhead")',
}
PRECISIONS = {
    "bf16": "bfloat16 parameters with float32 masters",
    "autocast": "float32 parameters, bfloat16 autocast",
    "tf32": "float32 parameters, TF32 products",
}
LR, BETAS, WEIGHT_DECAY, MAX_NORM = 6e-4, (0.9, 0.95), 0.1, 1.0

Step = Callable[[Tensor, Tensor], Tensor]


def make(variant: str, precision: str, config, weights: dict[str, Tensor], device) -> Step:
    """Make a step on (tokens, targets) that returns the loss before its update, on the device."""
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
    """The options of GPT2Config for a variant with fp8, fp8-head or fp8-logits; each includes the previous ones."""
    logits = "fp8-logits" in variant
    return {"fp8": "fp8" in variant, "fp8_head": logits or "fp8-head" in variant, "fp8_logits": logits}


def groups(model):
    """Parameter groups with weight decay only for matrices."""
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
    """Clip and update with fused AdamW; for 16-bit parameters on float32 masters, which torch's optimizer lacks."""
    fused = _device(model).type == "cuda"
    parameters = list(model.parameters())
    if parameters[0].dtype == torch.float32:
        optimizer = torch.optim.AdamW(groups(model), lr=LR, betas=BETAS, fused=fused)

        def update():
            torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

        return update
    masters = {p: p.detach().float().requires_grad_() for p in parameters}
    own = [{**group, "params": [masters[p] for p in group["params"]]} for group in groups(model)]
    optimizer = torch.optim.AdamW(own, lr=LR, betas=BETAS, fused=fused)
    wide = list(masters.values())
    for master in wide:
        master.grad = torch.empty_like(master)

    @torch.no_grad()
    def update_masters():
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        torch._foreach_copy_([master.grad for master in wide], [p.grad for p in parameters])
        optimizer.step()
        torch._foreach_copy_(parameters, wide)
        for p in parameters:
            p.grad = None

    return update_masters
