"""The peers, and how they are called."""

import importlib.util
import warnings

import torch

from benchmarks.harness.case import as_tuple

PEERS = {
    "torch": "torch's own kernels, eager",
    "compile": "torch.compile: what Inductor makes of the formula",
    "liger": "Liger-Kernel (Triton)",
    "quack": "quack (CuTe DSL)",
    "cudnn": "cuDNN's attention, through torch",
    "flex": "flex_attention under torch.compile",
    "fa3": "FlashAttention-3",
}
PACKAGES = {
    "compile": "triton",
    "liger": "liger_kernel",
    "quack": "quack",
    "flex": "triton",
    "fa3": "flash_attn_interface",
}
IN_TORCH = ("compile", "flex")  # on the CPU they generate C++ instead of Triton


def absent(device) -> dict[str, str]:
    """The peers that cannot run here, with the reason."""
    reasons = {} if device.type == "cuda" else {"cudnn": "it has no CPU kernels"}
    for peer, package in PACKAGES.items():
        if peer in IN_TORCH and device.type == "cpu":
            continue
        if device.type == "cpu":
            reasons[peer] = "it has no CPU kernels"
        elif importlib.util.find_spec(package) is None:
            reasons[peer] = f"no package {package}"
    return reasons


def compiled(function):
    """The function under torch.compile, specialised to one case's shapes; it is compiled at the first call."""
    made = []

    def call(*inputs):
        if not made:
            torch._dynamo.reset()  # shapes of other cases would make this one dynamic, or reach a limit
            torch._functorch.config.donated_buffer = False  # the backward runs several times for one forward
            made.append(torch.compile(function, fullgraph=True, dynamic=False))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # advice for the formula's author
                return made[0](*inputs)
        return made[0](*inputs)

    return call


def training(function, *inputs):
    """A forward as in training, with inputs that require gradients: it saves what its backward needs, as ours does."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    return lambda: function(*leaves)


def backward(function, inputs, douts):
    """A variant that runs autograd's backward; its forward runs once and is not timed."""
    graph = []

    def run():
        if not graph:
            leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
            graph.append((as_tuple(function(*leaves)), [t for t in leaves if t.requires_grad]))
        outs, leaves = graph[0]
        return torch.autograd.grad(outs, leaves, as_tuple(douts), retain_graph=True)

    return run
