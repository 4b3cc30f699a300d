import torch
from torch.optim.adamw import adamw

from benchmarks.harness.case import Case, nbytes
from benchmarks.harness.peers import compiled

ops = torch.ops.gptkernels
# (layers, channels, vocabulary, positions) of GPT-2 124M, whose parameters are 148 tensors.
SIZES = {"bfloat16": [(12, 768, 50304, 1024)], "float32": [(12, 768, 50304, 1024)]}
CPU_SIZES = [(2, 128, 256, 128)]
TINY = (1, 8, 16, 8)
MAX_NORM = 1.0
# A small learning rate would not change bfloat16 parameters, so that a step that does nothing would pass.
OPTIONS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
LR = 0.1


def parameter_shapes(layers, channels, vocabulary, positions):
    block = [(channels,)] * 2 + [(3 * channels, channels), (3 * channels,), (channels, channels), (channels,)]
    block += [(channels,)] * 2 + [(4 * channels, channels), (4 * channels,), (channels, 4 * channels), (channels,)]
    return [(vocabulary, channels), (positions, channels), *(block * layers), (channels,), (channels,)]


def label(tensors):
    return f"{len(tensors)} tensors, {sum(t.numel() for t in tensors) / 1e6:.3g}M"


class State:
    def __init__(self, shapes, device, dtype):
        self.low = dtype.itemsize == 2
        wide = torch.float32 if self.low else dtype
        self.masters = [torch.rand(shape, device=device, dtype=wide) for shape in shapes]
        self.params = [t.to(dtype) for t in self.masters] if self.low else self.masters
        self.grads = [torch.rand(shape, device=device, dtype=dtype) for shape in shapes]
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad
        self.wide_grads = [torch.empty_like(t) for t in self.masters] if self.low else self.grads
        self.moments = [[torch.rand(shape, device=device, dtype=wide) for shape in shapes] for _ in range(2)]
        self.steps = [torch.ones((), device=device) for _ in shapes]
        self.counts = [torch.zeros((), device=device) for _ in shapes]
        self.lr = torch.tensor(LR, device=device)
        self.torchs_options = {"lr": self.lr, "amsgrad": False, "maximize": False, **OPTIONS}
        self.written = [*self.masters, *self.moments[0], *self.moments[1], *(self.params if self.low else ())]
        self.start = [t.clone() for t in [*self.written, *self.grads]]
        self.bytes = nbytes(*self.grads) + 2 * nbytes(*self.written)

    def reset(self):
        for t, start in zip([*self.written, *self.grads], self.start, strict=True):
            t.copy_(start)
        for count in self.counts:
            count.zero_()

    def ours(self, **options):
        masters = self.masters if self.low else None
        ops.adamw_(
            self.params, self.grads, *self.moments, self.steps, lr=self.lr, master_params=masters, **OPTIONS, **options
        )

    def torchs(self):
        """Torch's fused kernel has no master weights, so in 16 bits a step also casts gradients and parameters."""
        if self.low:
            torch._foreach_copy_(self.wide_grads, self.grads)
        torch._fused_adamw_(self.masters, self.wide_grads, *self.moments, [], self.steps, **self.torchs_options)
        self.narrow()

    def formula(self):
        """Under torch.compile, Inductor fuses this code and the conversions of dtypes into a few large kernels."""
        grads = [grad.float() for grad in self.grads] if self.low else self.grads
        options = {"foreach": True, "capturable": True, **self.torchs_options}
        adamw(self.masters, grads, *self.moments, [], self.counts, **options)
        self.narrow()

    def narrow(self):
        if self.low:
            torch._foreach_copy_(self.params, self.masters)

    def ours_clipped(self):
        self.ours(grad_norm=ops.global_norm(self.grads), max_grad_norm=MAX_NORM)

    def torchs_clipped(self):
        torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        self.torchs()

    def exact(self, clip):
        count = len(self.masters)
        masters, firsts, seconds = (self.start[i * count :][:count] for i in range(3))
        grads = self.start[-count:]
        norm = sum(g.double().square().sum() for g in grads).sqrt().item()
        divisor = max(1.0, norm / MAX_NORM) if clip else 1.0
        for i, tensors in enumerate(zip(masters, grads, firsts, seconds, strict=True)):
            master, grad, first, second = (t.double() for t in tensors)
            grad = grad / divisor
            first = first + (1 - OPTIONS["beta1"]) * (grad - first)
            second = OPTIONS["beta2"] * second + (1 - OPTIONS["beta2"]) * grad**2
            root = (second / (1 - OPTIONS["beta2"])).sqrt() + OPTIONS["eps"]
            master = master * (1 - LR * OPTIONS["weight_decay"]) - LR * first / (1 - OPTIONS["beta1"]) / root
            for j, value in enumerate((master, first, second, master)[: 4 if self.low else 3]):
                yield i + j * count, ..., value


def cases(device, dtype, *model):
    state = State(parameter_shapes(*model), device, dtype)
    elements = sum(t.numel() for t in state.params)
    common = {"shape": label(state.params), "look": lambda _: tuple(state.written), "reset": state.reset}
    yield Case(
        "adamw_",
        ours=state.ours,
        exact=lambda: state.exact(clip=False),
        bytes=state.bytes,
        flops=16 * elements,
        peers={"torch": state.torchs, "compile": compiled(state.formula)},
        **common,
    )
    yield Case(
        "global_norm, clip, adamw_",
        ours=state.ours_clipped,
        exact=lambda: state.exact(clip=True),
        bytes=state.bytes + nbytes(*state.grads),
        flops=19 * elements,
        peers={"torch": state.torchs_clipped},
        **common,
    )
