from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.harness import exact
from benchmarks.harness.case import Case, nbytes
from benchmarks.harness.peers import of_forward
from gptkernels.rules.fp8 import new_history

ops = torch.ops.gptkernels
SIZES = {"bfloat16": [(65536, 768, 2304), (65536, 768, 768), (65536, 768, 3072), (65536, 3072, 768)]}
CPU_SIZES = [(1024, 768, 768)]
TINY = (16, 16, 64)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def quantised(x, scale):
    q = (x.float() / scale).to(E4M3)
    return q, q.t().contiguous()


def read(q, scale):
    return q.double() * scale


def exact_matmul(a, scale_a, b, scale_b):
    return exact.outputs(F.linear, [read(a, scale_a)], [read(b, scale_b)])


def first(out):
    return out[:1]


def cases(device, dtype, rows, inner, outer):
    x, dout = (torch.randn(rows, width, device=device, dtype=dtype) for width in (inner, outer))
    weight = torch.randn(outer, inner, device=device, dtype=dtype)
    history = new_history(device)
    q, q_t, scale = ops.fp8_quantize(x, history, E4M3, True)
    w, w_t, w_scale = ops.fp8_quantize(weight, None, E4M3, True)
    g, g_t, g_scale = ops.fp8_quantize(dout, None, E5M2, True)

    yield Case(
        "fp8_quantize, and transposed",
        f"{rows}x{inner}",
        lambda: ops.fp8_quantize(x, history, E4M3, True),
        lambda: exact.outputs(lambda x: read((x / scale).to(E4M3), scale), [x]),
        bytes=nbytes(x, q, q_t),
        flops=x.numel(),
        peers=of_forward(quantised, [x, scale]),
        look=lambda out: (read(out[0], scale),),
    )

    residual, norm_weight, norm_bias = torch.randn_like(x), *torch.randn(2, inner, device=device, dtype=dtype)
    norm_history = new_history(device)
    norm = partial(ops.fp8_layernorm, x, residual, norm_weight, norm_bias, norm_history, True)
    norm_scale = norm()[2]

    def separate_kernels():
        out = ops.residual_layernorm(x, residual, norm_weight, norm_bias)[0]
        return read(ops.fp8_quantize(out, norm_history.clone(), E4M3)[0], norm_scale)

    yield Case(
        "fp8_layernorm, and transposed",
        f"{rows}x{inner}",
        norm,
        lambda: [(0, ..., separate_kernels())],
        bytes=nbytes(x, residual, residual, q, q_t),
        flops=x.numel(),
        look=lambda out: (read(out[0], norm_scale),),
    )

    shape, flops = f"{rows}x{inner}x{outer}", 2 * rows * inner * outer
    for name, a, b, scale_a, scale_b, fast in [
        ("forward", q, w, scale, w_scale, True),
        ("of dx", g, w_t, g_scale, w_scale, True),
        ("of dweight", g_t, q_t, g_scale, scale, False),
    ]:
        eager = partial(torch._scaled_mm, a, b.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast)
        yield Case(
            f"fp8_matmul {name}",
            shape,
            partial(ops.fp8_matmul, a, b, scale_a, scale_b, None, dtype, fast),
            partial(exact_matmul, a, scale_a, b, scale_b),
            bytes=nbytes(a, b) + len(a) * len(b) * x.element_size(),
            flops=flops,
            peers={"torch": eager},
        )

    bias = torch.zeros(outer, device=device, dtype=dtype)
    yield Case(
        "fp8_linear fwd",
        shape,
        lambda: ops.fp8_linear(x, weight, bias, history, None, [True, True]),
        partial(exact_matmul, q, scale, w, w_scale),
        bytes=nbytes(x, weight, q, q_t, w, w_t, dout),
        flops=flops,
        look=first,
    )
    if outer == 4 * inner:
        yield from mlp_cases(x, weight)


def mlp_cases(x, fc):
    rows, inner, outer = len(x), *fc.t().shape
    dtype, device = x.dtype, x.device
    fc, proj = fc * inner**-0.5, torch.randn(inner, outer, device=device, dtype=dtype) * outer**-0.5
    biases = [torch.zeros(n, device=device, dtype=dtype) for n in (outer, inner)]
    dout = torch.randn_like(x)
    histories = [new_history(device) for _ in range(4)]

    def forward():
        return ops.fp8_mlp(x, fc, biases[0], proj, biases[1], *histories, [True] * 4)

    def backward():
        return ops.fp8_mlp_backward(dout, *saved, *histories[2:], [True] * 5)

    saved = forward()[1:]
    pre, _, fc_t, _, proj_t, _, fc_scale, _, proj_scale = saved
    grads = backward()
    g, _, g_scale = ops.fp8_quantize(dout, None, E5M2)
    post_scale, dpre_scale = (
        ops.fp8_quantize(x, h.clone(), f)[2] for h, f in zip(histories[1:3], (E4M3, E5M2), strict=True)
    )

    def rounded(t, scale, fp8):
        return read((t.to(dtype).float() / scale).to(fp8), scale)

    def second(pre, proj):
        return F.linear(rounded(F.gelu(pre, approximate="tanh"), post_scale, E4M3), proj)

    def dx(g, pre, fc, proj):
        (dpre,) = torch.autograd.grad(
            F.gelu(pre.requires_grad_(), approximate="tanh"), pre, (g @ proj).to(dtype).double()
        )
        return rounded(dpre, dpre_scale, E5M2) @ fc

    shape, flops = f"{rows}x{inner}x{outer}", 2 * rows * inner * outer
    fc_values, proj_values = read(fc_t.t(), fc_scale), read(proj_t.t(), proj_scale)
    yield Case(
        "fp8_mlp fwd",
        shape,
        forward,
        lambda: exact.outputs(second, [pre], [proj_values]),
        bytes=nbytes(x, x, fc, proj, *saved[:5]),
        flops=2 * flops,
        look=first,
    )
    yield Case(
        "fp8_mlp bwd",
        shape,
        backward,
        lambda: exact.outputs(dx, [read(g, g_scale), pre], [fc_values, proj_values]),
        bytes=nbytes(dout, *saved, *grads),
        flops=4 * flops,
        look=first,
    )
