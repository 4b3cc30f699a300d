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
    params, grads = lists[:2]
    steps = [torch.ones((), device=device) for _ in shapes]
    lr = torch.tensor(1e-4, device=device)
    options = {"lr": lr, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    shape = f"{len(shapes)} tensors, {sum(t.numel() for t in params) / 1e6:.1f}M"

    def torchs():
        torch._fused_adamw_(*lists, [], steps, amsgrad=False, maximize=False, **options)

    def torchs_clipped():
        norm = torch.nn.utils.get_total_norm(grads)
        torch._foreach_mul_(grads, (1e-2 / (norm + 1e-6)).clamp(max=1.0))
        torchs()

    def ours(*lists, **more):
        ops.adamw_(*lists, steps, **options, **more)

    element = nbytes(*params)  # of every tensor once
    yield Case("adamw_", shape, lambda: ours(*lists), {"torch fused": torchs}, 7 * element)
    yield Case(
        "global_norm, clip, adamw_",
        shape,
        lambda: ours(*lists, grad_norm=ops.global_norm(grads), max_grad_norm=1e-2),
        {"torch fused": torchs_clipped},
        8 * element,
    )
    if dtype in (torch.bfloat16, torch.float16):
        masters, *moments = ([t.float() for t in params] for _ in range(3))
        yield Case(
            "adamw_, float32 masters and moments",
            shape,
            lambda: ours(params, grads, *moments, master_params=masters),
            bytes=2 * element + 6 * nbytes(*masters),
        )
