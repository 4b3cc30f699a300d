"""The baselines, called peers in the code."""

import importlib.util
import warnings
from functools import partial

import torch

from benchmarks.harness.case import as_tuple

PEERS = {
    "torch": "torch's own kernels, eager",
    "compile": "the formula in torch's operators, compiled by torch.compile",
    "liger": "Liger-Kernel (Triton)",
    "quack": "quack (CuTe DSL)",
    "cudnn": "cuDNN's attention, through torch",
    "flex": "flex_attention under torch.compile",
    "fa3": "FlashAttention-3",
}
PACKAGES = {"liger": "liger_kernel", "quack": "quack", "fa3": "flash_attn_interface"}  # CUDA only


def absent(device) -> dict[str, str]:
    if device.type == "cpu":
        return dict.fromkeys(["cudnn", *PACKAGES], "it has no CPU kernels")
    needed = {**PACKAGES, "compile": "triton", "flex": "triton"}
    return {peer: f"no package {name}" for peer, name in needed.items() if importlib.util.find_spec(name) is None}


def compiled(function):
    made = []

    def call(*inputs):
        if not made:
            torch._dynamo.reset()  # otherwise the shapes of earlier cases make this function dynamic, or reach a limit
            torch._functorch.config.donated_buffer = False  # the backward runs several times for one forward
            made.append(torch.compile(function, fullgraph=True, dynamic=False))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # advice for the formula's author
                return made[0](*inputs)
        return made[0](*inputs)

    return call


def training(function, *inputs):
    """Make a call of the function that saves what its backward needs."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    return lambda: function(*leaves)


def backward(function, inputs, douts):
    graph = []

    def run():
        if not graph:
            leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
            graph.append((as_tuple(function(*leaves)), [t for t in leaves if t.requires_grad]))
        outs, leaves = graph[0]
        return torch.autograd.grad(outs, leaves, as_tuple(douts), retain_graph=True)

    return run


def of_forward(formula, inputs, eager=None, saves=False):
    call = training if saves else partial
    return {"torch": partial(eager or formula, *inputs), "compile": call(compiled(formula), *inputs)}


def of_backward(formula, inputs, douts, eager=None):
    return {"torch": backward(eager or formula, inputs, douts), "compile": backward(compiled(formula), inputs, douts)}


def loss_and_gradients(function, targets, *inputs):
    leaves = [t.detach().requires_grad_() for t in inputs]
    loss = function(*leaves, targets)
    return loss.detach(), *torch.autograd.grad(loss, leaves)
