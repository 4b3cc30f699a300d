"""Table entries of the norm of a list of tensors, and of AdamW's step."""

import math

import torch

from gptkernels.testing.cases.table import Call, invoke, operator, ops
from gptkernels.testing.draw import FLOATING


def shapes(draw, most):
    count = draw.size("tensors", most, 1)
    return [
        tuple(draw.size(f"shape{i}.{d}", 60, real=int(2 ** (21 / dims))) for d in range(dims))
        for i in range(count)
        for dims in [draw.choose(f"shape{i}.dims", (1, 0, 2, 3))]
    ]


@operator(
    finite_differences=False,
    sizes={
        "tensors": 2,
        "shape0.dims": 2,
        "shape0.0": [2, 7, 64],
        "shape0.1": [3, 33, 768],
        "shape1.dims": 1,
        "shape1.0": [4, 5, 1000],
    },
    functions={"global_norm": (lambda *tensors: ops.global_norm(tensors), [(2, 3), (4,)])},
)
def global_norm(draw):
    same = draw.choose("same dtype", (True, False))
    args = {}
    for i, shape in enumerate(shapes(draw, 20)):
        dtype = draw.dtype() if same else draw.choose(f"dtype{i}", FLOATING)
        args[f"tensors{i}"] = draw.tensor(f"tensors{i}", shape, dtype, huge=1e30, denormal=dtype != torch.float64)

    def exact(*tensors):
        return torch.linalg.vector_norm(torch.cat([t.double().flatten() for t in tensors]))

    def torchs(*tensors):
        """The tensors are scaled by a power of 2 that keeps their squares in float32's range."""
        largest = torch.stack([t.detach().double().abs().amax() for t in tensors if t.numel()] or [draw.number(0)])
        exponent = torch.frexp(largest.amax()).exponent.clamp(-126, 126)
        scale = torch.where(largest.isfinite().all(), (-exponent).double().exp2(), 1.0).float()
        norms = [torch.linalg.vector_norm(t.float() * scale) for t in tensors]
        return torch.linalg.vector_norm(torch.stack(norms)) / scale

    # A float64 tensor's gradient is only as exact as the float32 norm, and cannot satisfy the rule for float64.
    doubles = tuple(name for name, t in args.items() if t.dtype == torch.float64)
    return Call(
        "global_norm(tensors)",
        lambda *tensors: ops.global_norm(list(tensors)),
        torchs,
        exact,
        args,
        doubles,
        invocations=lambda: [invoke(ops.global_norm, list(args.values()))],
    )


@operator(
    finite_differences=False,
    sizes={"tensors": 1, "shape0.dims": 2, "shape0.0": [2, 7, 64], "shape0.1": [3, 33, 768], "step": 2, "eps": 1e-8},
    variants={
        "": {},
        "masters": {"masters": True, "state in float32": torch.float32, "grad_scale": 256.0, "max_grad_norm": 1.0},
    },
)
def adamw_(draw):
    dtype = draw.dtype()
    low = dtype in (torch.bfloat16, torch.float16)
    masters = low and draw.chance("masters", 0.3)
    grad_dtype = draw.choose("gradients in float32", (dtype, torch.float32))
    state_dtype = draw.choose("state in float32", (dtype, torch.float32))
    made = shapes(draw, 6)
    lr = draw.choose("lr", (1e-2, 0.0, 0.3))
    o = {
        "beta1": draw.choose("beta1", (0.9, 0.0, 0.99)),
        "beta2": draw.choose("beta2", (0.95, 0.0, 0.999)),
        # torch rounds eps to float16, where 1e-8 is 0
        "eps": 1e-3 if dtype == torch.float16 else draw.choose("eps", (1e-8, 1e-3)),
        "weight_decay": draw.choose("weight_decay", (0.1, 0.0)),
        "maximize": draw.chance("maximize", 0.2),
    }
    step = float(draw.choose("step", (1, 2, 10, 100_000)))
    scale = draw.choose("grad_scale", (None, 1.0, 256.0, 0.37))
    max_norm = draw.choose("max_grad_norm", (None, 1.0))
    found_inf = draw.choose("found_inf", (None, 0.0, 1.0), (8, 1, 1))
    args = {}
    for i, shape in enumerate(made):
        wide = torch.float32 if masters else dtype
        args[f"params{i}"] = draw.tensor(f"params{i}", shape, dtype, special="none").contiguous()
        args[f"grads{i}"] = draw.tensor(f"grads{i}", shape, grad_dtype, special="nan")
        args[f"exp_avgs{i}"] = draw.tensor(f"exp_avgs{i}", shape, state_dtype, special="none").contiguous()
        squares = draw.tensor(f"exp_avg_sqs{i}", shape, state_dtype, special="none").contiguous()
        args[f"exp_avg_sqs{i}"] = squares.abs() + 1e-2
        if masters:
            drawn = draw.tensor(f"masters{i}", shape, wide, special="none").contiguous()
            near = args[f"params{i}"].float() * (1 + 2**-13)
            args[f"masters{i}"] = torch.where(drawn > 0, drawn, near)
    parts = 5 if masters else 4
    exact_scale = 1.0 if scale is None else torch.tensor(scale, dtype=torch.float32).item()
    norm = 3.0

    def split(tensors):
        return [list(tensors[i::parts]) for i in range(parts)]

    def invocation(lists):
        return invoke(
            ops.adamw_,
            *lists[:4],
            [draw.number(step) for _ in made],
            lr=torch.tensor(lr, dtype=torch.float64),
            grad_scale=None if scale is None else draw.number(scale),
            found_inf=None if found_inf is None else draw.number(found_inf),
            master_params=lists[4] if masters else None,
            grad_norm=None if max_norm is None else draw.number(norm),
            max_grad_norm=max_norm,
            **o,
        )

    def ours(*tensors):
        lists = [[t.clone() for t in part] for part in split(tensors)]
        _, args, options = invocation(lists)
        ops.adamw_(*args, **options)
        return tuple(t for i, part in enumerate(lists) if i != 1 for t in part)

    def formula(*tensors):
        lists = [[t.clone() for t in part] for part in split(tensors)]
        doubles = all(t.dtype == torch.float64 for t in tensors)
        params, grads, exp_avgs, exp_avg_sqs = lists[:4]
        # clip_grad_norm_ computes its coefficient in float32, whatever the gradients' dtype.
        clip = 1.0 if max_norm is None else min((1 / (torch.tensor(norm) + 1e-6) * max_norm).item(), 1.0)
        factor = clip / exact_scale
        if found_inf:
            return tuple(t for i, part in enumerate(lists) if i != 1 for t in part)
        if masters:
            pairs = zip(lists[4], params, strict=True)
            params = lists[4] = [torch.where(m.to(dtype) == p, m, p.to(m.dtype)) for m, p in pairs]
        arithmetic = torch.float64 if doubles else torch.promote_types(params[0].dtype, torch.float32)
        for i in range(len(params)):
            p, g, m, v = (t[i].to(arithmetic) for t in (params, grads, exp_avgs, exp_avg_sqs))
            g = g * (-factor if o["maximize"] else factor)
            m = m.lerp(g, 1 - o["beta1"])
            v = v * o["beta2"] + (1 - o["beta2"]) * g * g
            denominator = v.sqrt() / math.sqrt(1 - o["beta2"] ** step) + o["eps"]
            p = p * (1 - lr * o["weight_decay"]) - lr / (1 - o["beta1"] ** step) * m / denominator
            for part, value in ((params, p), (exp_avgs, m), (exp_avg_sqs, v)):
                part[i] = value.to(part[i].dtype)
            if masters:
                lists[0][i] = p.to(lists[0][i].dtype)
        return tuple(t for i, part in enumerate(lists) if i != 1 for t in part)

    options = {**o, "lr": lr, "step": step, "grad_scale": scale, "found_inf": found_inf, "max_grad_norm": max_norm}
    return Call(
        f"adamw_({len(made)} tensors, {options})",
        ours,
        formula,
        formula,
        args,
        fixed=tuple(args),
        invocations=lambda: [invocation(split([t.clone() for t in args.values()]))],
    )
