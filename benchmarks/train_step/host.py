"""Measures the host's time for the parts of our and of plain torch's training step, and for single operators."""

import statistics
import time
from itertools import pairwise

import torch

from benchmarks.harness.report import markdown
from benchmarks.harness.timing import host_times, synchronize
from benchmarks.train_step.torch_gpt2 import GPT2 as TorchGPT2
from benchmarks.train_step.variants import groups, torchs_update
from gptkernels.models import GPT2
from gptkernels.optim import AdamW
from gptkernels.rules import ops

LENGTH = 64  # tokens; with a single sequence of this length the device is faster than the host
ROUNDS, WARM_UP = 60, 15
PARTS = ("forward", "backward", "update")


def measured(config, weights, device):
    """The times of a step's parts are in ms, those of single operators and of a whole layer in us."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    length = min(LENGTH, config.block_size)
    model, plain = GPT2(config, device, dtype), TorchGPT2(config).to(device, dtype)
    for either in (model, plain):
        either.load_state_dict(weights)
    return {"step": _parts(model, plain, length, device), "calls": _calls(model, length, dtype, device)}


def _parts(model, plain, length, device):
    optimizer = AdamW(groups(model), master_weights=True, max_grad_norm=1.0)
    tokens = torch.zeros(1, length, dtype=torch.int64, device=device)

    def update():
        optimizer.step()
        optimizer.zero_grad()

    ours = lambda: model(tokens, tokens, return_logits=False)[1], update
    variants = {
        "ours": (*ours, True),
        "ours, backward in the caller's thread": (*ours, False),
        "torch-eager": (lambda: plain(tokens, tokens), torchs_update(plain), True),
    }
    rounds = [{name: _round(*of, device) for name, of in variants.items()} for _ in range(ROUNDS)][WARM_UP:]
    times = {name: zip(*(one[name] for one in rounds), strict=True) for name in variants}
    return {name: dict(zip(PARTS, map(statistics.median, parts), strict=True)) for name, parts in times.items()}


def _round(loss, update, threads, device):
    start = time.perf_counter()
    result = loss()
    computed = time.perf_counter()
    with torch.autograd.set_multithreading_enabled(threads):
        result.backward()
    differentiated = time.perf_counter()
    update()
    marks = start, computed, differentiated, time.perf_counter()
    synchronize(device)
    return [1e3 * (b - a) for a, b in pairwise(marks)]


def _calls(model, length, dtype, device):
    config, block = model.config, model.transformer.h[0]

    def tensor(*shape):
        return torch.randn(*shape, dtype=dtype, device=device).requires_grad_()

    x, residual, qkv = (tensor(1, length, n * config.n_embd) for n in (1, 1, 3))
    norm, attn, mlp = block.ln_1, block.attn, block.mlp
    calls = {
        "residual_layernorm": lambda: ops.residual_layernorm.default(
            x, residual, norm.weight, norm.bias, 1e-5, attn.c_proj.bias
        )[0],
        "linear": lambda: ops.linear.default(x, attn.c_attn.weight, attn.c_attn.bias),
        "attention": lambda: ops.attention.default(qkv, config.n_head)[0],
        "mlp": lambda: ops.mlp.default(x, mlp.c_fc.weight, mlp.c_fc.bias, mlp.c_proj.weight, mlp.c_proj.bias)[0],
        "a whole layer": lambda: block(x),
    }

    def with_backward(call):
        dout = torch.ones_like(call())
        return lambda: call().backward(dout)

    return {
        name: [1e6 * time.median for time in host_times([call, with_backward(call)], device, repeats=7)]
        for name, call in calls.items()
    }


def tables(found) -> list[str]:
    steps = {name: {**parts, "in all": sum(parts.values())} for name, parts in found["step"].items()}
    rows = [[part, *(f"{of[part]:.2f}" for of in steps.values())] for part in (*PARTS, "in all")]
    calls = [[name, *(f"{value:.1f}" for value in values)] for name, values in found["calls"].items()]
    return [
        markdown(["", *(f"{name}, ms" for name in steps)], rows, texts=1),
        markdown(["", "forward, us", "with backward, us"], calls, texts=1),
    ]
