from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.harness import exact
from benchmarks.harness.case import Case, nbytes
from benchmarks.harness.peers import compiled
from gptkernels.ops.fp8 import new_history

ops = torch.ops.gptkernels
SIZES = {"bfloat16": [(65536, 768, 2304), (65536, 768, 768), (65536, 768, 3072), (65536, 3072, 768)]}
CPU_SIZES = [(1024, 768, 768)]
TINY = (16, 16, 32)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def quantised(x, scale, dtype):
    """By torch: both copies."""
    q = (x.float() / scale).to(dtype)
    return q, q.t().contiguous()


def read(q, scale):
    """What the float8 numbers say."""
    return q.double() * scale


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
        peers={
            "torch": partial(quantised, x, scale, E4M3),
            "compile": partial(compiled(quantised), x, scale, E4M3),
        },
        look=lambda out: (read(out[0], scale),),
    )

    def product(name, a, b, scale_a, scale_b, fast):
        def formula(a, b):
            return a @ b.T

        def torchs():
            return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast)

        return Case(
            f"fp8_matmul {name}",
            f"{rows}x{inner}x{outer}",
            lambda: ops.fp8_matmul(a, b, scale_a, scale_b, None, dtype, fast),
            lambda: exact.outputs(formula, [read(a, scale_a)], [read(b, scale_b)]),
            bytes=nbytes(a, b) + a.shape[0] * b.shape[0] * x.element_size(),
            flops=2 * rows * inner * outer,
            peers={"torch": torchs},
        )

    yield product("forward", q, w, scale, w_scale, True)
    yield product("of dx", g, w_t, g_scale, w_scale, False)
    yield product("of dweight", g_t, q_t, g_scale, scale, False)

    bias = torch.zeros(outer, device=device, dtype=dtype)
    save = [True, True]
    yield Case(
        "fp8_linear fwd",
        f"{rows}x{inner}x{outer}",
        lambda: ops.fp8_linear(x, weight, bias, history, None, save),
        lambda: exact.outputs(F.linear, [read(q, scale)], [read(w, w_scale)]),
        bytes=nbytes(x, weight, q, q_t, w, w_t) + nbytes(dout),
        flops=2 * rows * inner * outer,
        peers={},
        look=lambda out: out[:1],
    )
