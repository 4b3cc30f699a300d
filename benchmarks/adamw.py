import torch

from benchmarks.case import Case, nbytes

ops = torch.ops.gptkernels


def gpt2_shapes(layers=12, channels=768, vocabulary=50304, positions=1024):
    """GPT-2's 148 parameters."""
    block = [(channels,)] * 2 + [(3 * channels, channels), (3 * channels,), (channels, channels), (channels,)]
    block += [(channels,)] * 2 + [(4 * channels, channels), (4 * channels,), (channels, 4 * channels), (channels,)]
    return [(vocabulary, channels), (positions, channels), *(block * layers), (channels,), (channels,)]


def cases(device, dtype, small):
    shapes = gpt2_shapes(1, 8, 16, 8) if small else gpt2_shapes(*(() if device.type == "cuda" else (2, 128, 256, 128)))
    lists = [[torch.rand(s, device=device, dtype=dtype) for s in shapes] for _ in range(4)]
    steps = [torch.ones((), device=device) for _ in shapes]
    lr = torch.tensor(1e-4, device=device)
    options = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    elements = sum(t.numel() for t in lists[0])

    def torchs():
        torch._fused_adamw_(*lists, [], steps, lr=lr, amsgrad=False, maximize=False, **options)

    yield Case(
        "adamw_",
        f"{len(shapes)} tensors, {elements / 1e6:.1f}M",
        lambda: ops.adamw_(*lists, steps, lr=lr, **options),
        {"torch fused": torchs},
        bytes=7 * nbytes(*lists[0]),
    )
